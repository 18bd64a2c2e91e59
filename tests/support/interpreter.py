"""Patches that make Triton's interpreter round as GPUs do, and that make it faster.

It truncates float32 to bfloat16 (Triton 3.4 to 3.8), where GPUs round to the nearest element, and sums
of truncated values have errors of one sign.

It spends most of its time on work that it repeats:

* It searches `triton.language` for functions to replace, when a kernel starts and at every call of
  a helper.
* It computes every sum and product of integers again in 64 bits, for an assertion that it omits.
* It builds its table of dtypes for each value.
* It checks and wraps the shape of each value, although a kernel has only a few shapes.
* Before each operation it copies both operands to their common shape, which NumPy does by itself.
* It passes each operation through six functions that look at types, although most operands match.
"""

import inspect
import operator
from dataclasses import replace
from functools import cache, partial

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

FLOATS = {"fp32": "float32", "fp64": "float64"}
# Triton's names of dtypes whose operations need no cast, and where `triton.language` has them
NAMES = FLOATS | {"int32": "int32", "int64": "int64"}
ARITHMETIC = {"__add__": np.add, "__sub__": np.subtract, "__mul__": np.multiply}
COMPARISONS = {"__lt__": np.less, "__le__": np.less_equal, "__gt__": np.greater}
COMPARISONS |= {"__ge__": np.greater_equal, "__eq__": np.equal}


def round_to_nearest() -> None:
    """Cast float32 to the nearest bfloat16, of two equally near ones to the even one."""
    builder = interpreter.InterpreterBuilder
    cast = builder.cast_impl

    def cast_to_nearest(self, src, dst_type):
        if (src.dtype.scalar, dst_type.scalar) != (core.float32, core.bfloat16):
            return cast(self, src, dst_type)
        bits = np.ascontiguousarray(src.data).view(np.uint32).reshape(src.data.shape)
        nearest = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        quiet_nan = (bits >> 16) | 0x40  # rounding could carry into the exponent
        nearest = np.where(np.isnan(src.data), quiet_nan, nearest).astype(np.uint16)
        return interpreter.TensorHandle(nearest, core.bfloat16)

    builder.cast_impl = cast_to_nearest


def patch_interpreter() -> None:
    """Apply all patches, in a process that tests start."""
    round_to_nearest()
    speed_up_interpreter()


def speed_up_interpreter() -> None:
    """Replace functions once, omit the arithmetic of unused assertions, cache tables and shapes."""
    if "scope" not in inspect.signature(interpreter._patch_builtin).parameters:
        return  # before Triton 3.6 the interpreter has other internals, and is as slow as it is
    patch_once()
    keep_shapes()
    keep_operands()
    check_sizes_by_name()
    unwrap_values_first()
    interpreter._patch_builtin = exchange_known
    builder = interpreter.interpreter_builder
    assert not builder.options.debug  # otherwise overflows would raise
    builder.options = replace(builder.options, sanitize_overflow=False)
    look_up = interpreter._get_np_dtype
    known = {}

    def get_np_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = look_up(dtype)
        return known[dtype.name]

    interpreter._get_np_dtype = get_np_dtype


@cache
def builtins_of(owner) -> dict:
    """Return the innermost function that the interpreter calls for each function of Triton, by name."""
    direct = {}
    for name, builtin in inspect.getmembers(owner):
        if core.is_builtin(builtin):
            function = getattr(builtin, "__wrapped__", builtin)
            # A partial function, which is faster, does not bind the value whose method it is.
            bind = as_method if inspect.isclass(owner) else partial
            direct[name] = bind(function, _semantic=interpreter.interpreter_semantic)
    if owner is core.tensor:
        for name, compute in (ARITHMETIC | COMPARISONS).items():
            direct[name] = computed_at_once(direct[name], compute, name in COMPARISONS)
        direct["__getitem__"] = expanded_at_once(direct["__getitem__"])
    return direct


def expanded_at_once(method):
    """Return a method of a value that leaves to `method` only indices of other dimensions than of size 1."""

    def expand(value, index):
        if type(index) is not tuple or not value.type.is_block() or index.count(None) == 0:
            return method(value, index)
        data = value.handle.data[index]
        return core.tensor(
            interpreter.TensorHandle(data, value.dtype),
            core.block_type(value.dtype, list(data.shape)),
        )

    return expand


def computed_at_once(method, compute, gives_bool):
    """Return a method of a value that leaves to `method` only operands whose dtypes or shapes do not match."""
    numbers = {}

    def operate(lhs, rhs):
        kind = lhs.type
        name = lhs.dtype.name
        if type(rhs) is core.tensor:
            other = rhs.type
            if other is not kind and other.is_block():
                if kind.is_block() and kind.lengths != other.lengths:
                    return method(lhs, rhs)
                kind = other
            number = rhs.handle.data
            if rhs.dtype.name != name or name not in NAMES:
                if not (compute is np.add and need_no_cast(lhs, rhs, (True,))):
                    return method(lhs, rhs)
                handle = interpreter.interpreter_builder.create_addptr(lhs.handle, rhs.handle)
                return core.tensor(handle, kind.with_element_ty(lhs.dtype))
        elif takes_dtype(rhs, lhs):
            key = (rhs, name)
            if key not in numbers:
                numbers[key] = np.array([rhs], NAMES[name])
            number = numbers[key]
        else:
            return method(lhs, rhs)
        handle = interpreter.TensorHandle(compute(lhs.handle.data, number), lhs.dtype)
        return core.tensor(handle, kind.with_element_ty(core.int1) if gives_bool else kind)

    return operate


def as_method(function, **fixed):
    """Return a method that calls a function with fixed options."""
    return lambda *arguments, **options: function(*arguments, **options, **fixed)


def exchange_known(owner, builder, scope) -> None:
    """Replace the functions of a module or class, which are searched for once."""
    for name, function in builtins_of(owner).items():
        scope.set_attr(owner, name, function)


def keep_shapes() -> None:
    """Check and wrap each shape once, and share it between the values and types that have it."""
    make_type = core.block_type.__init__
    make_value = core.tensor.__init__
    known = {}
    scalar = core.tensor(None, core.int32)

    def make_known_type(block, element_ty, shape):
        key = tuple(map(operator.index, shape))
        if key not in known:
            make_type(block, element_ty, shape)
            value = core.tensor.__new__(core.tensor)
            make_value(value, None, block)
            known[key] = block.shape, block.numel, value
        block.element_ty = element_ty
        block.shape, block.numel, block.value = known[key]
        block.name = f"<{key}, {element_ty.name}>"
        block.lengths = key

    types = {}

    def known_with_element_type(block, element_ty):
        key = element_ty.name, block.lengths
        if key not in types:
            types[key] = core.block_type(element_ty, block.lengths)
        return types[key]

    def make_known_value(value, handle, type):
        like = type.value if type.is_block() else scalar
        value.handle = handle
        value.type = type
        value.dtype = type.scalar
        value.shape = like.shape
        value.numel = like.numel

    core.block_type.__init__ = make_known_type
    core.block_type.with_element_ty = known_with_element_type
    core.tensor.__init__ = make_known_value


def keep_operands() -> None:
    """Match operands that need no cast without copies: NumPy repeats their elements in the operation.

    Every function that matches operands computes with both, so that its result has their common
    shape.
    """
    match = TritonSemantic.binary_op_type_checking_impl
    broadcast = TritonSemantic.broadcast_impl_value
    semantic = interpreter.interpreter_semantic

    @cache
    def constant(value, name):
        data = semantic.scalar_constant(value, getattr(core, name)).handle.data
        data.flags.writeable = False
        return data

    def number_like(tensor, value):
        """Return a Python number as a scalar in the dtype of a tensor."""
        handle = interpreter.TensorHandle(constant(value, NAMES[tensor.dtype.name]), tensor.dtype)
        return core.tensor(handle, tensor.dtype)

    def match_known(self, lhs, rhs, *rules, **options):
        casts = rules[2:3] != (False,) and not options
        if casts and takes_dtype(rhs, lhs):
            rhs = number_like(lhs, rhs)
        elif casts and takes_dtype(lhs, rhs):
            lhs = number_like(rhs, lhs)
        elif not need_no_cast(lhs, rhs, rules):
            return match(self, lhs, rhs, *rules, **options)
        return in_common_shape(lhs, rhs)

    def broadcast_unless_same(self, lhs, rhs):
        if lengths_of(lhs) == lengths_of(rhs):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    TritonSemantic.binary_op_type_checking_impl = match_known
    TritonSemantic.broadcast_impl_value = broadcast_unless_same


def takes_dtype(value, tensor) -> bool:
    """Return whether `value` is a Python number that the dtype of a tensor can hold."""
    if type(value) is int and -(2**31) <= value < 2**31:
        return type(tensor) is core.tensor and tensor.dtype.name in NAMES
    return type(value) is float and type(tensor) is core.tensor and tensor.dtype.name in FLOATS


def need_no_cast(lhs, rhs, rules) -> bool:
    """Return whether two tensors are of one dtype, or a pointer and its offsets."""
    if type(lhs) is not core.tensor or type(rhs) is not core.tensor:
        return False
    left, right = lhs.dtype.name, rhs.dtype.name
    if left == right:
        return left in NAMES or left == "int1"
    return rules[:1] == (True,) and lhs.dtype.is_ptr() and right in ("int32", "int64")


def in_common_shape(lhs, rhs):
    """Give two values their common shape, without copying elements."""
    left, right = lengths_of(lhs), lengths_of(rhs)
    if left == right:
        return lhs, rhs
    shape = common_shape(left, right)
    if left != shape:
        lhs = core.tensor(lhs.handle, core.block_type(lhs.dtype, list(shape)))
    if right != shape:
        rhs = core.tensor(rhs.handle, core.block_type(rhs.dtype, list(shape)))
    return lhs, rhs


def lengths_of(value) -> tuple[int, ...]:
    """Return the shape of a value, () for a scalar."""
    return value.type.lengths if value.type.is_block() else ()


@cache
def common_shape(*shapes) -> tuple[int, ...]:
    """Return the shape to which NumPy broadcasts shapes."""
    return np.broadcast_shapes(*shapes)


def check_sizes_by_name() -> None:
    """Look up the maximum element size by the name of the dtype."""
    kind = interpreter.TensorHandle
    known = {}

    def make(handle, data, dtype, attr=None):
        handle.data = data
        handle.dtype = dtype
        handle.attr = {} if attr is None else attr
        if dtype.name not in known:
            is_pointer = isinstance(dtype, core.pointer_type)
            known[dtype.name] = 8 if is_pointer else max(dtype.primitive_bitwidth // 8, 1)
        if data.itemsize > known[dtype.name]:
            handle.__post_init__()

    kind.__init__ = make


def unwrap_values_first() -> None:
    """Return common values unchanged before checking for lists and tuples, which are rare."""
    unwrap = core._unwrap_if_constexpr
    values = (core.tensor, core.dtype, int, float, bool, type(None))

    def unwrap_known(value):
        kind = type(value)
        if kind in values:
            return value
        return value.value if kind is core.constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_known


def patch_once() -> None:
    """Replace the functions of each kernel's module once in this process, which compiles no kernel, and restore none."""
    patch = interpreter._patch_lang
    met = {}

    def patch_unmet(function):
        names = function.__globals__
        if id(names) not in met:
            patch(function)
            met[id(names)] = names  # held, so that no other has its address
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_unmet
