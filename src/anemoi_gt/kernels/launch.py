"""Launching a kernel, keeping what Triton compiled for it, and what a profiler shows of it.

`kernel[grid](...)` binds names and recomputes the specialisation key at every call: 50 us for 30
arguments, many times what the driver needs. A `Launch` does that the first time, and keeps what was
compiled: a plan (`ops.triton_backend`) hands later addresses to the compiled kernel itself. Sizes
must not change what is compiled: a kernel names them in `do_not_specialize`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from anemoi_gt.toolchain import with_cache

ALIGNMENT = 16  # bytes; Triton specialises on pointers that are multiples of it
# kernel: {widths, constants, dtypes: {device: CompiledLaunch}}; no tensors
_COMPILED: WeakKeyDictionary = WeakKeyDictionary()


def row_kernel_name(base: str, tensor: str) -> Callable[..., str]:
    """Return a kernel's `repr`: `base` with the dtype of argument `tensor` and its sizes."""

    def name(specialization: Any) -> str:
        dtype = str(specialization.signature[tensor]).lstrip("*")
        sizes = {key.lower(): specialization.constants.get(key) for key in ("H", "C", "D")}
        return "_".join(
            [base, dtype, *(f"{key}{size}" for key, size in sizes.items() if size is not None)]
        )

    return name


def kernel_name(base: str, tensor: str, *constants: str) -> Callable[..., str]:
    """Return the `repr` of a kernel: `base`, the dtype of argument `tensor`, and `constants`."""

    def name(specialization: Any) -> str:
        words = [base, str(specialization.signature[tensor]).lstrip("*")]
        for constant in constants:
            value = specialization.constants[constant]
            if value is True:
                words.append(constant.lower())
            elif isinstance(value, str):
                words.append(value)
            elif value is not False:
                words.append(f"{constant.lower()}{value}")
        return "_".join(words)

    return name


def launch_facts(grid: tuple[int, ...], kernel: Any, args: Mapping[str, Any]) -> dict:
    """Return launch metadata: name, bytes of all rows [H, C] read or written, and their flops."""
    query = args["query"]
    elements = prod(query.shape[:-3]) * args["H"] * args["C"]
    nodes = args["num_dst"]
    if "csr_to_csc" in args:
        nodes = args["num_src"]
    # At each node two rows are read or written. For each edge two rows are gathered, and with
    # embedded features its features are read with either.
    rows_of_edge = 4 if args.get("EMBEDDED") else 2
    rows = rows_of_edge * args["num_edges"] + 2 * nodes
    return {
        "name": kernel.name,
        "bytes": rows * elements * query.element_size(),
        f"flops{8 * query.element_size()}": 4 * args["num_edges"] * elements,
    }


class CompiledLaunch(NamedTuple):
    """A compiled kernel, launched past Triton's binder."""

    # takes grid, stream, function and metadata, hooks, then the arguments of the kernel
    launch: Callable
    function_and_metadata: tuple


class Launch:
    """A kernel with all that a launch of it needs but the tensors.

    Parameters
    ----------
    kernel : the function under `triton.jit`
        Its arguments in order: tensors, scalars, constants.
    grid : tuple of 1 to 3 int
        Nothing is launched where one is 0.
    scalars : dict of int or float
    constants : dict
        Constexpr arguments, and options of the launch such as num_warps; what the kernel does not
        take is ignored.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], scalars: dict, constants: dict):
        self.kernel = kernel
        self.grid = (*grid, 1, 1)[:3]
        self.scalars = scalars
        self.constants = constants
        values = scalars | constants
        first = next(position for position, name in enumerate(kernel.arg_names) if name in values)
        self.tensors = kernel.arg_names[:first]
        self.values = [values[name] for name in kernel.arg_names[first:]]

    def name(self, dtypes: Mapping[str, str | None]) -> str:
        """Return the profile name for tensors of these dtypes, such as "bf16", uncompiled."""
        # InterpretedFunction has no attribute `repr`
        make = getattr(self.kernel, "repr", None) or self.kernel.rewriter.kwargs["repr"]
        return make(SimpleNamespace(signature=dtypes, constants=self.constants))

    def compiled_for(self, dtypes: tuple) -> dict[tuple, CompiledLaunch]:
        """Return the compiled kernels for tensors of these dtypes, by device and alignment.

        The alignment has True for each tensor that begins at a multiple of ALIGNMENT, or is absent.
        `on` adds an entry at its first launch. Triton compiles for the width of each integer too; a
        float is passed as it is.
        """
        widths = tuple(
            scalar.bit_length() < 32 for scalar in self.scalars.values() if isinstance(scalar, int)
        )
        of_kernel = _COMPILED.setdefault(self.kernel, {})
        return of_kernel.setdefault((widths, *self.constants.items(), dtypes), {})

    def __call__(self, **tensors: Any) -> None:
        """Launch on tensors by name, on the current device; None leaves one out."""
        self.on([tensors[name] for name in self.tensors])

    def on(self, ordered: list) -> None:
        """Launch as `__call__` by Triton's own launch, on tensors in the order of the arguments."""
        if 0 in self.grid:
            return
        named = dict(zip(self.tensors, ordered, strict=True))
        launch = self.kernel[self.grid]
        compiled = with_cache(lambda: launch(**named, **self.scalars, **self.constants))
        device = fast_launch_device()
        fast = None if device is None else compiled_launch(compiled)
        if fast is not None:
            dtypes = tuple(None if tensor is None else tensor.dtype for tensor in ordered)
            alignment = tuple(
                tensor is None or tensor.data_ptr() % ALIGNMENT == 0 for tensor in ordered
            )
            self.compiled_for(dtypes)[device, alignment] = fast


def fast_launch_device() -> int | None:
    """Return the current device where launches may go past Triton's binder, else None.

    They may not while a launch hook is installed, as a profiler does: hooks get tensors, not
    addresses. Nor in a Triton without the private parts that this and `compiled_launch` use; then
    `kernel[grid](...)` launches each time.
    """
    # RuntimeError: no driver, as under the interpreter
    try:
        runtime, driver = _triton()
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return None
        return driver.active.get_current_device()
    except (
        ImportError,
        AttributeError,
        RuntimeError,
    ):
        return None


def current_stream(device: int) -> int:
    """Return the stream of a `fast_launch_device` on which PyTorch computes now."""
    return _triton()[1].active.get_current_stream(device)


@cache
def _triton() -> tuple:
    """Return Triton's runtime knobs and driver."""
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, driver


def compiled_launch(compiled: Any) -> CompiledLaunch | None:
    """Return the compiled kernel for `Plan.run`, None if Triton's private parts differ.

    None for AMD too, where what is compiled depends on the size of a tensor's memory.
    """
    try:
        if compiled.metadata.target.backend != "cuda":
            return None
        return CompiledLaunch(compiled.run, (compiled.function, compiled.packed_metadata))
    except AttributeError:
        return None
