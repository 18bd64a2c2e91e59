"""Launching a kernel. The only place that knows how Triton does it, and that keeps what Triton compiled.

`kernel[grid](...)` binds names and asks every argument what to compile for, at every call: 50 us for 30 arguments, many
times what the driver needs. A `Launch` does that when it meets something new, and from then on hands the addresses to
the compiled kernel itself. Sizes must not change what is compiled: a kernel names them in `do_not_specialize`.
"""

from collections import defaultdict
from functools import reduce
from operator import or_
from types import SimpleNamespace
from weakref import WeakKeyDictionary

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

ALIGNMENT = 16  # bytes; Triton compiles pointers that are multiples of it apart from others
_COMPILED = WeakKeyDictionary()  # kernel: {widths and constants: {device and dtypes: compiled kernel}}; holds no tensor


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
        The constexpr arguments, and options of the launch such as num_warps.
    """

    def __init__(self, kernel, grid: tuple[int, ...], scalars: dict, constants: dict):
        self.kernel, self.grid = kernel, (*grid, 1, 1)[:3]
        self.scalars, self.constants = scalars, constants
        values = scalars | constants
        first = next(place for place, name in enumerate(kernel.arg_names) if name in values)
        self._tensors = kernel.arg_names[:first]
        self._values = [values[name] for name in kernel.arg_names[first:]]
        widths = tuple(scalar.bit_length() < 32 for scalar in scalars.values() if isinstance(scalar, int))
        self._compiled = _COMPILED.setdefault(kernel, {}).setdefault((widths, *constants.items()), {})

    def name(self, dtype: str) -> str:
        """What a profiler shows of a launch on tensors of this dtype, such as "bf16"; nothing is compiled for it."""
        make = (
            getattr(self.kernel, "repr", None) or self.kernel.kwargs["repr"]
        )  # the interpreter keeps its options there
        return make(SimpleNamespace(signature=defaultdict(lambda: f"*{dtype}"), constants=self.constants))

    def __call__(self, **tensors) -> None:
        """Launch on tensors by name, contiguous and on the current device; None stands for one that is not there."""
        if 0 in self.grid:
            return
        ordered = [tensors[name] for name in self._tensors]
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in ordered]
        usual = reduce(or_, addresses, 0) % ALIGNMENT == 0 and not _is_watched()
        compiled = self._compiled.get(_types(ordered)) if usual and self._compiled else None
        if compiled is None:
            compiled = self.kernel[self.grid](**tensors, **self.scalars, **self.constants)
            if usual and _is_kept(compiled):
                self._compiled[_types(ordered)] = compiled
            return
        active = driver.active
        stream = active.get_current_stream(active.get_current_device())
        compiled.run(
            *self.grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *addresses, *self._values
        )  # fmt: skip


def _types(tensors: list) -> tuple:
    """What a kernel is compiled for beside constants, of aligned tensors."""
    return (driver.active.get_current_device(), *[None if tensor is None else tensor.dtype for tensor in tensors])


def _is_kept(compiled) -> bool:
    """Whether `_types` decides alone: not of Triton's interpreter, nor for AMD, where the size of a tensor's memory does too."""
    return isinstance(compiled, CompiledKernel) and compiled.metadata.target.backend == "cuda"


def _is_watched() -> bool:
    """Whether a profiler has asked Triton to tell it of every launch; it is told of tensors, not of addresses."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
