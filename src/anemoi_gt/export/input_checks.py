"""Checks of inputs in C++, compiled into a package.

A package reads its inputs through raw pointers with the sizes and strides of the example, so an
input of another dtype or shape gives arbitrary numbers. AOTInductor can generate checks, but runs
them only where the environment variable AOTI_RUNTIME_CHECK_INPUTS is set, names inputs by their
position, does not compare sizes of two inputs, and refuses contiguous tensors with a dimension of
size 1 (torch 2.13). These checks take their place:

    fields must be float32 [1 to 16, 208, 5], contiguous, on cpu, got float64 [1, 208, 5] on cpu
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import sympy
from torch._inductor import ir
from torch._inductor.codegen.cpp_utils import DEVICE_TO_INT, cexpr
from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
from torch._inductor.virtualized import V
from torch.export import ExportedProgram

PRELUDE = """
// Read by other code of the wrapper, which then asserts sizes and strides again (torch 2.13).
static bool _check_aoti_runtime_check_inputs_env() { return false; }

// An input of the package, and what must hold for it.
struct PackageInput {
  const char* name;
  const char* expected;
  int64_t dim = 0;
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  int32_t dtype = 0;
  int32_t device_type = 0;

  PackageInput(AtenTensorHandle tensor, const char* name, const char* expected)
      : name(name), expected(expected) {
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(tensor, &dim));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(tensor, &sizes));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(tensor, &strides));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor, &dtype));
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor, &device_type));
  }

  bool is_contiguous() const {
    int64_t stride = 1;
    for (int64_t d = dim - 1; d >= 0; --d) {
      if (sizes[d] > 1 && strides[d] != stride) {
        return false;
      }
      stride *= sizes[d];
    }
    return true;
  }

  std::string list(const int64_t* values) const {
    std::string text = "[";
    for (int64_t d = 0; d < dim; ++d) {
      text += (d == 0 ? "" : ", ") + std::to_string(values[d]);
    }
    return text + "]";
  }

  void require(bool holds) const {
    if (holds) {
      return;
    }
    // in the order of c10::ScalarType
    static const char* const dtypes[] = {
        "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64",
        "complex32", "complex64", "complex128", "bool", "qint8", "quint8", "qint32", "bfloat16"};
    const bool has_name = dtype >= 0 && dtype < static_cast<int32_t>(std::size(dtypes));
    std::string text = std::string(name) + " must be " + expected + ", got ";
    text += has_name ? dtypes[dtype] : "another dtype";
    text += " " + list(sizes);
    if (!is_contiguous()) {
      text += " with strides " + list(strides);
    }
    text += device_type == 0 ? " on cpu" : device_type == 1 ? " on cuda" : " on another device";
    throw std::runtime_error(text);
  }
};
"""


@contextmanager
def checked_inputs(program: ExportedProgram) -> Iterator[None]:
    """Compile checks of the inputs of a program into the package that is made in the block."""

    def generate(wrapper: CppWrapperCpu) -> None:
        code = check_code(program, V.graph.graph_inputs)
        # Since torch 2.13, a buffer holds the lines of two wrappers.
        splice = getattr(wrapper.prefix, "splice_aot", wrapper.prefix.splice)
        splice(code)

    original = CppWrapperCpu.generate_input_output_runtime_checks
    CppWrapperCpu.generate_input_output_runtime_checks = generate  # type: ignore[method-assign]
    try:
        yield
    finally:
        CppWrapperCpu.generate_input_output_runtime_checks = original  # type: ignore[method-assign]


def check_code(program: ExportedProgram, inputs: Mapping[str, Any]) -> str:
    """Return the C++ function that a package calls first, for the inputs of Inductor's graph.

    Dynamic sizes are symbols. The first input that has a symbol as a size defines its value, within
    the range of the program; Inductor's own range excludes 0 and 1, of which the example had none.
    """
    names = program.graph_signature.user_inputs
    ranges = {str(symbol): bounds for symbol, bounds in program.range_constraints.items()}
    sizes: list[list[sympy.Expr]] = []
    origins: dict[sympy.Symbol, tuple[int, int]] = {}  # input and dimension that define a symbol
    for n, tensor in enumerate(inputs.values()):
        sizes.append([sympy.sympify(size) for size in tensor.get_size()])
        for d, size in enumerate(sizes[n]):
            if size.is_Symbol:
                origins.setdefault(size, (n, d))

    def describe(size: sympy.Expr, n: int, d: int) -> str:
        if origins.get(size) == (n, d):
            lower, upper = _bounds(ranges, size)
            return f"{lower} or more" if upper is None else f"{lower} to {upper}"
        text = str(size)
        for symbol in size.free_symbols & origins.keys():
            n, d = origins[symbol]
            text = text.replace(str(symbol), f"size {d} of {names[n]}")
        return text

    lines = []
    for n, tensor in enumerate(inputs.values()):
        dtype = str(tensor.get_dtype()).removeprefix("torch.")
        device_type = tensor.get_device().type
        layout = "contiguous" if _is_contiguous(tensor) else f"with strides {tensor.get_stride()}"
        texts = [describe(size, n, d) for d, size in enumerate(sizes[n])]
        expected = f"{dtype} [{', '.join(texts)}], {layout}, on {device_type}"
        lines.append(f'const PackageInput x{n}(input_handles[{n}], "{names[n]}", "{expected}");')
        lines.append(f"x{n}.require(x{n}.dtype == aoti_torch_dtype_{dtype}());")
        lines.append(f"x{n}.require(x{n}.device_type == {DEVICE_TO_INT[device_type]});")
        lines.append(f"x{n}.require(x{n}.dim == {len(sizes[n])});")
    for symbol, (n, d) in origins.items():
        lower, upper = _bounds(ranges, symbol)
        lines.append(f"const int64_t {symbol} = x{n}.sizes[{d}];")
        lines.append(f"x{n}.require({symbol} >= {lower});")
        if upper is not None:
            lines.append(f"x{n}.require({symbol} <= {upper});")
    for n, tensor in enumerate(inputs.values()):
        for d, size in enumerate(sizes[n]):
            if size.free_symbols <= origins.keys():
                lines.append(f"x{n}.require(x{n}.sizes[{d}] == {cexpr(size)});")
        if _is_contiguous(tensor):
            lines.append(f"x{n}.require(x{n}.is_contiguous());")
            continue
        for d, stride in enumerate(map(sympy.sympify, tensor.get_stride())):
            if stride.free_symbols <= origins.keys():
                holds = f"x{n}.sizes[{d}] < 2 || x{n}.strides[{d}] == {cexpr(stride)}"
                lines.append(f"x{n}.require({holds});")
    arguments = "AtenTensorHandle* input_handles, AtenTensorHandle* output_handles"
    signature = f"AOTI_NOINLINE static void __check_inputs_outputs({arguments})"
    return "\n".join([PRELUDE, f"{signature} {{", *lines, "}\n"])


def _is_contiguous(tensor: ir.TensorBox) -> bool:
    """Return whether the strides of an input are those of a contiguous tensor of its sizes."""
    expected = ir.FlexibleLayout.contiguous_strides(tensor.get_size())
    equals = V.graph.sizevars.statically_known_equals
    return all(map(equals, tensor.get_stride(), expected))


def _bounds(ranges: Mapping[str, Any], symbol: sympy.Symbol) -> tuple[int, int | None]:
    """Return the bounds of a dynamic size; the upper one is None if there is none."""
    bounds = ranges.get(str(symbol))
    if bounds is None:
        return 0, None
    # torch's infinity of integers has no conversion to int
    lower = int(bounds.lower) if bounds.lower > 0 else 0
    upper = int(bounds.upper) if bounds.upper < 2**63 - 1 else None
    return lower, upper
