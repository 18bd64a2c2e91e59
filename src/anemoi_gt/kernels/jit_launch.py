"""Launching a kernel, keeping what Triton compiled for it, and what a profiler shows of it.

`kernel[grid](...)` binds names and asks every argument what to compile for, at every call: 50 us for 30 arguments, many
times what the driver needs. A `Launch` does that when it meets something new, and from then on hands the addresses to
the compiled kernel itself. Sizes must not change what is compiled: a kernel names them in `do_not_specialize`.
"""

from collections.abc import Callable, Mapping
from functools import cache, reduce
from math import prod
from operator import or_
from types import SimpleNamespace
from weakref import WeakKeyDictionary

ALIGNMENT = 16  # bytes; Triton compiles pointers that are multiples of it apart from others
_COMPILED: WeakKeyDictionary = (
    WeakKeyDictionary()
)  # kernel: {widths, constants: {device, dtypes: repeat_launch of it}}; no tensors


def row_kernel_name(base: str, tensor: str) -> Callable[..., str]:
    """Return the `repr` of a kernel: `base` with the dtype of argument `tensor` and the sizes it is compiled for."""

    def name(specialization) -> str:
        dtype = str(specialization.signature[tensor]).lstrip("*")
        sizes = {key.lower(): specialization.constants.get(key) for key in ("H", "C", "D")}
        return "_".join([base, dtype, *(f"{key}{size}" for key, size in sizes.items() if size is not None)])

    return name


def launch_facts(grid, kernel, args) -> dict:
    """Return launch metadata: the name, the bytes of all rows [H, C] read or written, and the flops on them."""
    size, elements = args["query"].element_size(), prod(args["query"].shape[:-3]) * args["H"] * args["C"]
    nodes = args["num_src"] if "csr_to_csc" in args else args["num_dst"]  # two rows in or out at each
    edges = args["num_edges"]  # two rows gathered for each, and with embedded features its own beside either
    rows = 2 * (edges * (2 if args.get("EMBEDDED") else 1) + nodes)
    return {"name": kernel.name, "bytes": rows * elements * size, f"flops{8 * size}": 4 * edges * elements}


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
        Constexpr arguments, and options of the launch such as num_warps; what the kernel does not take is ignored.
    """

    def __init__(self, kernel, grid: tuple[int, ...], scalars: dict, constants: dict):
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.scalars, self.constants = scalars, constants
        values = scalars | constants
        first = next(place for place, name in enumerate(kernel.arg_names) if name in values)
        self.tensors = kernel.arg_names[:first]
        self.values = [values[name] for name in kernel.arg_names[first:]]
        widths = tuple(scalar.bit_length() < 32 for scalar in scalars.values() if isinstance(scalar, int))
        self._compiled = _COMPILED.setdefault(kernel, {}).setdefault((widths, *constants.items()), {})

    def name(self, dtypes: Mapping[str, str]) -> str:
        """Return the name in a profile of a launch on tensors of these dtypes, such as "bf16"; nothing is compiled."""
        make = getattr(self.kernel, "repr", None) or self.kernel.kwargs["repr"]  # the latter under the interpreter
        return make(SimpleNamespace(signature=dtypes, constants=self.constants))

    def __call__(self, **tensors) -> None:
        """Launch on tensors by name, contiguous and on the current device; None stands for one that is absent."""
        if 0 in self.grid:
            return
        ordered = [tensors[name] for name in self.tensors]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in ordered]
        key = None
        if reduce(or_, addresses, 0) % ALIGNMENT == 0 and (device := repeating_device()) is not None:
            key = (device, *[None if tensor is None else tensor.dtype for tensor in ordered])
            if key in self._compiled:
                run, stream_of, *kept = self._compiled[key]
                return run(*self.grid, stream_of(device), *kept, None, None, None, *addresses, *self.values)
        named = dict(zip(self.tensors, ordered, strict=True))
        compiled = self.kernel[self.grid](**named, **self.scalars, **self.constants)
        if key is not None and (repeat := repeat_launch(compiled)) is not None:
            self._compiled[key] = repeat

    def compiled_for(self, ordered: list) -> tuple | None:
        """Return the `repeat_launch` of what was launched on tensors like these, in order; None if there is none."""
        dtypes = [None if tensor is None else tensor.dtype for tensor in ordered]
        return self._compiled.get((repeating_device(), *dtypes))


def repeating_device() -> int | None:
    """Return the current device where launches may be repeated past Triton's binder, else None.

    They may not while a profiler has asked Triton to be told of launches: it is told of tensors, not of addresses. Nor
    in a Triton without the private parts that this and `repeat_launch` use; then `kernel[grid](...)` serves each time.
    """
    try:
        runtime, driver = _triton()
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            return None
        return driver.active.get_current_device()
    except (ImportError, AttributeError, RuntimeError):  # RuntimeError: no driver, as under the interpreter
        return None


@cache
def _triton() -> tuple:
    """Return what says whether Triton is to tell of launches, and what knows its driver."""
    from triton import knobs
    from triton.runtime import driver

    return knobs.runtime, driver


def repeat_launch(compiled) -> tuple | None:
    """Return what launches a compiled kernel again, or None: the call, the stream of a device, what the call takes.

    None for AMD too, where what is compiled depends on the size of a tensor's memory.
    """
    try:
        if compiled.metadata.target.backend != "cuda":
            return None
        stream_of = _triton()[1].active.get_current_stream
        return compiled.run, stream_of, compiled.function, compiled.packed_metadata
    except (ImportError, AttributeError):
        return None
