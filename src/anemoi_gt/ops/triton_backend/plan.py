"""A call as a plan: kernel launches and tensor operations, in order, on buffers.

A plan is built from sizes, dtypes and options only and holds no tensors, so one plan serves every
call with these sizes. Its steps refer to `Buffer`s: parts of the inputs, of the results, and of
scratch memory, which is one allocation in which buffers that are not alive at the same time share
bytes. A kernel takes addresses, a tensor operation takes views, which are made once per run.
Related results, such as all tensors saved for a backward pass, are parts of one result
(`MemoryLayout`).

    builder = PlanBuilder(specs)             shape and dtype of each input tensor, None if absent
    out = builder.empty(shape, dtype)        memory that a step writes
    builder.launch(launch, x=builder.inputs[0], out=out)
    plan = builder.finish([out])             all other buffers are scratch
    (tensor,) = plan.run(tensors)
"""

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import on_device
from anemoi_gt.kernels.launch import ALIGNMENT, Launch, current_stream, fast_launch_device
from anemoi_gt.ops.triton_backend.replays import Replays
from anemoi_gt.ops.triton_backend.tiles import TUNING, Tuning
from anemoi_gt.torch_compat import product_settings

FEWEST_REPLAYED = 3  # steps of a run; replaying fewer takes as long as launching them
# in names of kernels
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
SCRATCH_ALIGNMENT = 512  # bytes; PyTorch's allocator places tensors at such multiples too


@dataclass(frozen=True)
class Buffer:
    """Part of a storage, viewed as a strided tensor."""

    storage: int  # index of the storage in its builder
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: torch.dtype
    offset: int = 0  # elements before the first one

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie one after another, in order."""
        steps = zip(self.shape, self.stride, contiguous_stride(self.shape), strict=True)
        return all(size == 1 or step == contiguous for size, step, contiguous in steps)

    def slice(self, dim: int, start: int, stop: int) -> "Buffer":
        """Return the elements from `start` to `stop` along a dimension."""
        dim %= len(self.shape)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.stride[dim])

    # In this class `slice` names the method above.
    def rows(self, which: builtins.slice) -> "Buffer":
        """Return a range of the first dimension."""
        return self.slice(0, which.start, which.stop)

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Buffer":
        """Return the same elements with one dimension split into `sizes`."""
        dim %= len(self.shape)
        strides = tuple(step * self.stride[dim] for step in contiguous_stride(sizes))
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        return replace(
            self, shape=shape, stride=(*self.stride[:dim], *strides, *self.stride[dim + 1 :])
        )

    def transposed(self) -> "Buffer":
        """Return the transpose of a matrix."""
        return replace(self, shape=self.shape[::-1], stride=self.stride[::-1])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


@dataclass(frozen=True)
class MemoryLayout:
    """Tensors one after another in one storage, each at an offset divisible by 512 bytes."""

    num_bytes: int
    tensors: Mapping[str, tuple[int, tuple[int, ...], torch.dtype]]  # first byte, shape, dtype

    @classmethod
    def of(cls, specs: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> "MemoryLayout":
        """Lay out tensors of these shapes and dtypes."""
        tensors = {}
        num_bytes = 0
        for name, (shape, dtype) in specs.items():
            tensors[name] = (num_bytes, tuple(shape), dtype)
            num_bytes += -(-prod(shape) * dtype.itemsize // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return cls(num_bytes, tensors)

    def buffers(self, storage: Buffer) -> dict[str, Buffer]:
        """Return the tensors in a storage [num_bytes]."""
        buffers = {}
        for name, (first, shape, dtype) in self.tensors.items():
            stride = contiguous_stride(shape)
            buffers[name] = Buffer(storage.storage, shape, stride, dtype, first // dtype.itemsize)
        return buffers


class KernelStep(NamedTuple):
    """Launch of a kernel on buffers, in the order of the kernel's arguments."""

    launch: Launch
    buffers: tuple[Buffer | None, ...]


class TensorStep(NamedTuple):
    """Call of a function on tensors, which writes into some of them."""

    function: Callable[..., object]
    buffers: tuple[Buffer, ...]
    has_out: bool  # the last buffer is the argument `out`


class PlanBuilder:
    """Collect the steps of a call; `finish` assigns their memory.

    Parameters
    ----------
    inputs : sequence of (shape, dtype) or None
        The input tensors, which are contiguous; None where there is none.
    tuning : Tuning
        Chunk sizes and limits.
    """

    def __init__(
        self,
        inputs: Sequence[tuple[Sequence[int], torch.dtype] | None],
        tuning: Tuning = TUNING,
    ):
        self.tuning = tuning
        self.storages: list[Buffer | None] = []  # each as a whole
        self.steps: list[KernelStep | TensorStep] = []
        self.inputs: list[Buffer | None] = []
        for spec in inputs:
            if spec is None:
                self.storages.append(None)
                self.inputs.append(None)
            else:
                self.inputs.append(self.empty(*spec))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """Return contiguous memory that a later step writes."""
        storage = Buffer(len(self.storages), tuple(shape), contiguous_stride(shape), dtype)
        self.storages.append(storage)
        return storage

    def empty_like(self, buffer: Buffer, dtype: torch.dtype | None = None) -> Buffer:
        """Return contiguous memory with the shape of `buffer`, in its dtype or another."""
        return self.empty(buffer.shape, buffer.dtype if dtype is None else dtype)

    def empty_tensors(self, layout: MemoryLayout, *, together: bool) -> dict[str, Buffer]:
        """Return memory for the tensors of a layout: one storage, or one each, like scratch."""
        if together:
            return layout.buffers(self.empty((layout.num_bytes,), torch.uint8))
        tensors = layout.tensors.items()
        return {name: self.empty(shape, dtype) for name, (_, shape, dtype) in tensors}

    def whole(self, buffer: Buffer) -> Buffer:
        """Return the storage that a buffer is part of."""
        storage = self.storages[buffer.storage]
        assert storage is not None  # only an absent input is None, and it has no buffer
        return storage

    def launch(self, launch: Launch, **buffers: Buffer | None) -> None:
        """Add a kernel launch on buffers, by argument name; None to leave one out."""
        self.steps.append(KernelStep(launch, tuple(buffers[name] for name in launch.tensors)))

    def compute(self, function: Callable[..., object], *buffers: Buffer) -> None:
        """Add a call of `function`, which writes to one of the tensors; its result is discarded."""
        self.steps.append(TensorStep(function, buffers, has_out=False))

    def compute_into(self, out: Buffer, function: Callable[..., object], *buffers: Buffer) -> None:
        """Add a call of a PyTorch `function` on tensors, with `out=`."""
        self.steps.append(TensorStep(function, (*buffers, out), has_out=True))

    def finish(self, results: Sequence[Buffer | None], *, replay: bool = False) -> "Plan":
        """Return the plan that computes `results`, whole storages; all other memory is scratch.

        With `replay`, its runs are replayed where that is faster.
        """
        num_inputs = len(self.inputs)
        returned = [result.storage for result in results if result is not None]
        bases = {storage: storage for storage in range(num_inputs)}
        bases |= {storage: num_inputs + index for index, storage in enumerate(returned)}
        scratch_base = num_inputs + len(returned)
        offsets, scratch_bytes = _place_scratch(self.storages, self.steps, bases)

        def locate(buffer: Buffer) -> Location:
            base = bases.get(buffer.storage, scratch_base)
            is_whole = base != scratch_base and buffer == self.storages[buffer.storage]
            return Location(base, offsets.get(buffer.storage, 0), buffer, is_whole)

        viewed: dict[Buffer, int] = {}  # in the order of `Plan.viewed`
        steps: list[BoundKernel | BoundFunction] = []
        for step in self.steps:
            if isinstance(step, TensorStep):
                views_of_step = [viewed.setdefault(buffer, len(viewed)) for buffer in step.buffers]
                out = views_of_step.pop() if step.has_out else None
                steps.append(BoundFunction(step.function, tuple(views_of_step), out))
            elif 0 not in step.launch.grid:
                locations = [None if buffer is None else locate(buffer) for buffer in step.buffers]
                steps.append(BoundKernel.of(step.launch, locations, absent=scratch_base + 1))
        views = tuple(locate(buffer) for buffer in viewed)
        # on AMD's GPUs it was never tried
        replay = replay and len(steps) >= FEWEST_REPLAYED and torch.version.hip is None
        replays = Replays() if replay else None
        return Plan(tuple(steps), tuple(results), views, scratch_bytes, replays)


class Location(NamedTuple):
    """A buffer, and where its storage begins in a run: at byte `first_byte` of a base."""

    base: int  # an input, a result, or the scratch allocation
    first_byte: int
    buffer: Buffer
    is_whole: bool  # the tensor at `base` is the buffer

    @property
    def offset_bytes(self) -> int:
        """Bytes from the beginning of the base."""
        return self.first_byte + self.buffer.offset * self.buffer.dtype.itemsize


class BoundKernel(NamedTuple):
    """A launch with the locations of its arguments."""

    launch: Launch
    locations: tuple[Location | None, ...]
    addresses: tuple[tuple[int, int], ...]  # base and byte offset of each argument
    alignment: tuple[bool, ...]  # of each argument, if every base is aligned
    compiled: dict  # compiled kernels for these dtypes, by device and alignment

    @classmethod
    def of(cls, launch: Launch, locations: list[Location | None], absent: int) -> "BoundKernel":
        """Bind a launch to locations; `absent` is the base with address 0."""
        addresses = []
        dtypes = []
        for location in locations:
            addresses.append(
                (absent, 0) if location is None else (location.base, location.offset_bytes)
            )
            dtypes.append(None if location is None else location.buffer.dtype)
        alignment = tuple(offset % ALIGNMENT == 0 for _, offset in addresses)
        compiled = launch.compiled_for(tuple(dtypes))
        return cls(launch, tuple(locations), tuple(addresses), alignment, compiled)


class BoundFunction(NamedTuple):
    """A tensor operation with the indices of its views in the plan."""

    function: Callable[..., object]
    views: tuple[int, ...]
    out: int | None  # the view that is the argument `out`


@dataclass(frozen=True)
class Plan:
    """The steps of a call with their memory placed; see `PlanBuilder`."""

    steps: tuple[BoundKernel | BoundFunction, ...]
    results: tuple[Buffer | None, ...]
    viewed: tuple[Location, ...]  # what tensor operations read and write
    scratch_bytes: int
    replays: Replays | None  # None: each run is launched

    def kernels(self) -> list[str]:
        """Return the names of the kernels, in order."""
        names = []
        for step in self.steps:
            if isinstance(step, BoundKernel):
                dtypes = {}
                for name, location in zip(step.launch.tensors, step.locations, strict=True):
                    if location is not None:
                        dtypes[name] = DTYPE_NAMES.get(location.buffer.dtype)
                names.append(step.launch.name(dtypes))
        return names

    def run(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the steps on contiguous inputs, on their device, and return the results."""
        for tensor in inputs:
            if tensor is not None:
                device = tensor.device
                break
        with on_device(device):
            bases: list[Tensor | None] = list(inputs)
            results: list[Tensor | None] = []
            for buffer in self.results:
                result = None
                if buffer is not None:
                    # takes half the host time of new_empty (torch 2.11)
                    result = torch.empty_strided(
                        buffer.shape, buffer.stride, dtype=buffer.dtype, device=device
                    )
                    bases.append(result)
                results.append(result)
            scratch = None
            if self.scratch_bytes:
                scratch = torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device)
            bases.append(scratch)
            addresses = [0 if tensor is None else tensor.data_ptr() for tensor in bases]
            gpu = fast_launch_device()
            launch = partial(self._launch, bases, addresses, gpu)
            replays = self.replays
            settings = None
            # the default stream, which nobody can capture at the same time
            if replays is not None and gpu is not None and current_stream(gpu) == 0:
                settings = product_settings()
            if replays is None or settings is None:
                launch()
            else:
                replays.run((gpu, settings, *addresses), launch)
            return results

    def _launch(self, bases: list[Tensor | None], addresses: list[int], gpu: int | None) -> None:
        """Run the steps, on the current stream."""
        bits = 0
        for address in addresses:
            bits |= address
        are_aligned = bits % ALIGNMENT == 0  # a power of two
        addresses = [*addresses, 0]  # of what is absent
        # read again: while a run is captured, another stream is current
        stream = None if gpu is None else current_stream(gpu)
        typed: dict[tuple[int, torch.dtype], Tensor] = {}
        views = [_view(location, bases, typed) for location in self.viewed]

        for step in self.steps:
            if isinstance(step, BoundFunction):
                tensors = [views[number] for number in step.views]
                if step.out is None:
                    step.function(*tensors)
                else:
                    step.function(*tensors, out=views[step.out])
                continue
            compiled = None
            if gpu is not None:
                arguments = [addresses[base] + offset for base, offset in step.addresses]
                alignment = step.alignment
                if not are_aligned:
                    # Triton compiles a kernel for each pattern of aligned pointers. A chunk of
                    # an input, such as the edges of a mapper chunk, may begin at any address.
                    alignment = tuple([argument % ALIGNMENT == 0 for argument in arguments])
                compiled = step.compiled.get((gpu, alignment))
            if compiled is None:
                step.launch.on(
                    [None if p is None else _view(p, bases, typed) for p in step.locations]
                )
                continue
            compiled.launch(
                *step.launch.grid,
                stream,
                *compiled.function_and_metadata,
                None,
                None,
                None,
                *arguments,
                *step.launch.values,
            )


def _view(location: Location, bases: list, typed: dict[tuple[int, torch.dtype], Tensor]) -> Tensor:
    """Return the tensor of a buffer; `typed` caches bases viewed as another dtype."""
    base = bases[location.base]
    if location.is_whole:
        return base
    buffer = location.buffer
    if base.dtype != buffer.dtype:
        key = (location.base, buffer.dtype)
        if key not in typed:
            typed[key] = base.view(buffer.dtype)
        base = typed[key]
    offset = base.storage_offset() + location.offset_bytes // buffer.dtype.itemsize
    return base.as_strided(buffer.shape, buffer.stride, offset)


def _place_scratch(
    storages: list, steps: list, placed: dict[int, int]
) -> tuple[dict[int, int], int]:
    """Return the byte offset of every scratch storage, and the bytes of the scratch allocation.

    Storages that are alive during a common step get distinct bytes. They are placed from largest to
    smallest, each at the lowest free offset, which keeps the total near the largest sum of storages
    alive at once.
    """
    lifetimes: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for buffer in step.buffers:
            if buffer is not None and buffer.storage not in placed:
                lifetime = lifetimes.setdefault(buffer.storage, [number, number])
                lifetime[1] = number
    sizes = {}
    for storage in lifetimes:
        num_bytes = prod(storages[storage].shape) * storages[storage].dtype.itemsize
        sizes[storage] = -(-num_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    offsets: dict[int, int] = {}
    total = 0
    for storage in sorted(lifetimes, key=lambda storage: (-sizes[storage], storage)):
        first, last = lifetimes[storage]
        neighbours = []
        for other, offset in offsets.items():
            if lifetimes[other][0] <= last and first <= lifetimes[other][1]:
                neighbours.append((offset, offset + sizes[other]))
        offset = 0
        for begin, end in sorted(neighbours):
            if offset + sizes[storage] <= begin:
                break
            offset = max(offset, end)
        offsets[storage] = offset
        total = max(total, offset + sizes[storage])
    if lifetimes:
        total = max(total, SCRATCH_ALIGNMENT)  # views of empty buffers need memory to view
    return offsets, total
