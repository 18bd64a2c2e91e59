"""A call as a plan: kernel launches and tensor operations in order, over a few buffers.

A plan is made from sizes, dtypes and options alone, and holds no tensor, so one plan runs every
call of these sizes. Its steps name `Buffer`s: parts of the inputs, of the results, and of scratch
memory, which is one allocation in which buffers that are not alive at the same time share bytes. A
kernel takes addresses, a tensor operation takes views, which are cut once per run.

    builder = PlanBuilder(specs)             shape and dtype of each input tensor, None if absent
    out = builder.empty(shape, dtype)        memory that a step writes
    builder.launch(launch, x=builder.inputs[0], out=out)
    plan = builder.finish([out])             what is not a result is scratch
    (tensor,) = plan.run(tensors)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.kernels.jit_launch import ALIGNMENT, Launch, current_stream, repeating_device

SCRATCH_ALIGNMENT = 512  # bytes; PyTorch's allocator places tensors at such multiples too


@dataclass(frozen=True)
class Buffer:
    """Part of a block of memory, read as a strided tensor."""

    block: int  # number of the block in its builder
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements
    dtype: torch.dtype
    offset: int = 0  # elements before the first one

    @property
    def is_contiguous(self) -> bool:
        """True if the elements lie one after another, in order."""
        return self.stride == contiguous_stride(self.shape)

    def slice(self, dim: int, start: int, stop: int) -> "Buffer":
        """Return the elements from `start` to `stop` along a dimension."""
        dim %= len(self.shape)
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.stride[dim])

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> "Buffer":
        """Return the same elements with one dimension split into `sizes`."""
        dim %= len(self.shape)
        strides = tuple(step * self.stride[dim] for step in contiguous_stride(sizes))
        shape = (*self.shape[:dim], *sizes, *self.shape[dim + 1 :])
        return replace(
            self, shape=shape, stride=(*self.stride[:dim], *strides, *self.stride[dim + 1 :])
        )

    def transposed(self) -> "Buffer":
        """Return a matrix with its two dimensions exchanged."""
        return replace(self, shape=self.shape[::-1], stride=self.stride[::-1])


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


class KernelStep(NamedTuple):
    """Launch of a kernel on buffers, in the order of the kernel's arguments."""

    launch: Launch
    buffers: tuple[Buffer | None, ...]


class TensorStep(NamedTuple):
    """Call of a function on tensors, which writes into some of them."""

    function: Callable[..., object]
    buffers: tuple[Buffer | None, ...]


class PlanBuilder:
    """Collect the steps of a call; `finish` places their memory.

    Parameters
    ----------
    inputs : sequence of (shape, dtype) or None
        The input tensors, which are contiguous; None for an absent one.
    """

    def __init__(self, inputs: Sequence[tuple[Sequence[int], torch.dtype] | None]):
        self.blocks: list[Buffer | None] = []  # each block as a whole
        self.steps: list[KernelStep | TensorStep] = []
        self.inputs: list[Buffer | None] = []
        for spec in inputs:
            if spec is None:
                self.blocks.append(None)
                self.inputs.append(None)
            else:
                self.inputs.append(self.empty(*spec))

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Buffer:
        """Return contiguous memory that a later step writes."""
        block = Buffer(len(self.blocks), tuple(shape), contiguous_stride(shape), dtype)
        self.blocks.append(block)
        return block

    def empty_like(self, buffer: Buffer, dtype: torch.dtype | None = None) -> Buffer:
        """Return contiguous memory of the shape of `buffer`, in its dtype or another."""
        return self.empty(buffer.shape, buffer.dtype if dtype is None else dtype)

    def launch(self, launch: Launch, **buffers: Buffer | None) -> None:
        """Launch a kernel on buffers by argument name; all must be passed, None for absent ones."""
        self.steps.append(KernelStep(launch, tuple(buffers[name] for name in launch.tensors)))

    def compute(self, function: Callable[..., object], *buffers: Buffer | None) -> None:
        """Call `function` on tensors; what it returns is dropped, so it writes into one of them."""
        self.steps.append(TensorStep(function, buffers))

    def finish(self, results: Sequence[Buffer | None]) -> "Plan":
        """Return the plan for `results`, whole buffers of `empty`; other memory is scratch."""
        num_inputs = len(self.inputs)
        returned = [result.block for result in results if result is not None]
        bases = {block: block for block in range(num_inputs)}
        bases |= {block: num_inputs + index for index, block in enumerate(returned)}
        scratch_base = num_inputs + len(returned)
        offsets, scratch_bytes = _place_scratch(self.blocks, self.steps, bases)
        places: dict[Buffer, Place] = {}
        steps = []
        for step in self.steps:
            if isinstance(step, KernelStep) and 0 in step.launch.grid:
                continue
            step_places = []
            for buffer in step.buffers:
                if buffer is not None and buffer not in places:
                    base = bases.get(buffer.block, scratch_base)
                    block_bytes = offsets.get(buffer.block, 0)
                    is_whole = base != scratch_base and buffer == self.blocks[buffer.block]
                    places[buffer] = Place(len(places), base, block_bytes, buffer, is_whole)
                step_places.append(None if buffer is None else places[buffer])
            steps.append(_bind(step, step_places, scratch_base + 1))
        return Plan(tuple(steps), tuple(results), num_inputs, scratch_bytes, len(places))


class Place(NamedTuple):
    """A buffer and where its block lies in a run: base `base`, from byte `block_bytes` on."""

    number: int  # among the buffers of the plan
    base: int  # an input, a result, or the scratch allocation
    block_bytes: int
    buffer: Buffer
    is_whole: bool  # the tensor at `base` is the buffer

    @property
    def offset_bytes(self) -> int:
        """Bytes from the beginning of the base."""
        return self.block_bytes + self.buffer.offset * self.buffer.dtype.itemsize


class BoundKernel(NamedTuple):
    """A launch with the places of its arguments."""

    launch: Launch
    places: tuple[Place | None, ...]
    addresses: tuple[tuple[int, int], ...]  # base and byte offset of each argument
    compiled: (
        dict | None
    )  # what Triton compiled for these dtypes, by device; None where offsets are not aligned


class BoundFunction(NamedTuple):
    """A tensor operation with the places of its arguments."""

    function: Callable[..., object]
    places: tuple[Place | None, ...]


def _bind(
    step: KernelStep | TensorStep, places: list[Place | None], absent: int
) -> "BoundKernel | BoundFunction":
    """Return a step with its memory; `absent` is the base with address 0."""
    if isinstance(step, TensorStep):
        return BoundFunction(step.function, tuple(places))
    addresses = []
    dtypes = []
    for place in places:
        addresses.append((absent, 0) if place is None else (place.base, place.offset_bytes))
        dtypes.append(None if place is None else place.buffer.dtype)
    is_aligned = all(offset % ALIGNMENT == 0 for _, offset in addresses)
    compiled = step.launch.compiled_for(tuple(dtypes)) if is_aligned else None
    return BoundKernel(step.launch, tuple(places), tuple(addresses), compiled)


@dataclass(frozen=True)
class Plan:
    """The steps of a call with their memory placed; see `PlanBuilder`."""

    steps: tuple[BoundKernel | BoundFunction, ...]
    results: tuple[Buffer | None, ...]
    num_inputs: int
    scratch_bytes: int
    num_places: int

    def run(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Run the steps on input tensors on the current device; return results as planned."""
        device = next(tensor.device for tensor in inputs if tensor is not None)
        bases: list[Tensor | None] = list(inputs)
        results: list[Tensor | None] = []
        for buffer in self.results:
            result = None
            if (
                buffer is not None
            ):  # empty_strided takes half the host's time of new_empty (torch 2.11)
                result = torch.empty_strided(
                    buffer.shape, buffer.stride, dtype=buffer.dtype, device=device
                )
                bases.append(result)
            results.append(result)
        if self.scratch_bytes:
            bases.append(torch.empty(self.scratch_bytes, dtype=torch.uint8, device=device))
        else:
            bases.append(None)
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in bases]
        addresses.append(0)
        gpu = repeating_device()
        if gpu is not None and any(address % ALIGNMENT for address in addresses):
            # compiled code assumes aligned addresses; Triton's own launch looks at each of them
            gpu = None
        stream = None if gpu is None else current_stream(gpu)

        views: list[Tensor | None] = [None] * self.num_places
        typed_scratch: dict[torch.dtype, Tensor] = {}

        def tensor_at(place: Place | None) -> Tensor | None:
            if place is None:
                return None
            if views[place.number] is None:
                views[place.number] = _view(
                    place, bases, typed_scratch, is_scratch=place.base == len(bases) - 1
                )
            return views[place.number]

        for step in self.steps:
            if isinstance(step, BoundFunction):
                step.function(*[tensor_at(place) for place in step.places])
                continue
            repeat = None if gpu is None or step.compiled is None else step.compiled.get(gpu)
            if repeat is None:
                step.launch.on([tensor_at(place) for place in step.places])
                continue
            arguments = [addresses[base] + offset for base, offset in step.addresses]
            repeat.launch(
                *step.launch.grid,
                stream,
                *repeat.kept,
                None,
                None,
                None,
                *arguments,
                *step.launch.values,
            )
        return results


def _view(
    place: Place, bases: list, typed_scratch: dict[torch.dtype, Tensor], is_scratch: bool
) -> Tensor:
    """Return the tensor of a buffer."""
    base = bases[place.base]
    if place.is_whole:
        return base
    buffer = place.buffer
    if not is_scratch:
        return base.as_strided(buffer.shape, buffer.stride, base.storage_offset() + buffer.offset)
    if buffer.dtype not in typed_scratch:
        typed_scratch[buffer.dtype] = base.view(buffer.dtype)
    return typed_scratch[buffer.dtype].as_strided(
        buffer.shape, buffer.stride, place.offset_bytes // buffer.dtype.itemsize
    )


def _place_scratch(blocks: list, steps: list, placed: dict[int, int]) -> tuple[dict[int, int], int]:
    """Return the byte offset of every scratch block, and the bytes of the scratch allocation.

    Blocks that are alive during a common step get distinct bytes. The largest is placed first, each
    at the lowest offset that is free, which keeps the total near the largest sum of blocks alive at
    once.
    """
    lifetimes: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for buffer in step.buffers:
            if buffer is not None and buffer.block not in placed:
                lifetime = lifetimes.setdefault(buffer.block, [number, number])
                lifetime[1] = number
    sizes = {}
    for block in lifetimes:
        num_bytes = prod(blocks[block].shape) * blocks[block].dtype.itemsize
        sizes[block] = -(-num_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
    offsets: dict[int, int] = {}
    total = 0
    for block in sorted(lifetimes, key=lambda block: (-sizes[block], block)):
        first, last = lifetimes[block]
        neighbours = []
        for other, offset in offsets.items():
            if lifetimes[other][0] <= last and first <= lifetimes[other][1]:
                neighbours.append((offset, offset + sizes[other]))
        offset = 0
        for begin, end in sorted(neighbours):
            if offset + sizes[block] <= begin:
                break
            offset = max(offset, end)
        offsets[block] = offset
        total = max(total, offset + sizes[block])
    if lifetimes:
        total = max(total, SCRATCH_ALIGNMENT)  # views of empty buffers need memory to view
    return offsets, total
