"""Parameters and gradients of a sub-layer in one tensor each.

Parameters are cast to the GEMM dtype once per forward pass, into one packed tensor that
the backward pass reads too. They are not remembered from step to step: version counters do not
tell, since `AdamW(fused=True).step()` and `.data.copy_` leave them as they were (torch 2.13).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.ops.operator import GradientLayout, GradientLeaf, Spec
from anemoi_gt.ops.tensors import Held, Operand, OperandT
from anemoi_gt.ops.triton_backend.plan import Buffer, PlanBuilder, contiguous_stride

PACKED_ALIGNMENT = 8  # elements: 16 bytes of 16-bit elements, which kernels and cuBLAS load at once
GRADIENT_ALIGNMENT = 32  # elements: 128 bytes of float32


def aligned_columns(columns: int, gemm_dtype: torch.dtype) -> int:
    """Return the columns of padded rows: 16-bit elements fill multiples of 16 bytes.

    cuBLAS multiplies other rows several times slower. 1,084,160 x 213 by 213 x 1024 in float16
    takes 6.3 ms on an H100, of which memory accounts for 0.9.
    """
    if gemm_dtype == torch.float32:
        return columns
    return -(-columns // PACKED_ALIGNMENT) * PACKED_ALIGNMENT


class Piece(NamedTuple, Generic[Held]):
    """A parameter to pack: optionally plus `addend` or 1, then cast."""

    shape: tuple[int, ...]
    source: Held | None  # None: zeros
    addend: Held | None = None
    has_one: bool = False


def stacked(*parameters: OperandT | None) -> list[Piece[OperandT]]:
    """Return the pieces of parameters; None is left out."""
    return [Piece(parameter.shape, parameter) for parameter in parameters if parameter is not None]


def _stacked_shape(pieces: Sequence) -> tuple[int, ...]:
    """Return the shape of pieces stacked along their first dimension."""
    return (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])


class PackedWeights(NamedTuple):
    """Layout of parameters in one tensor; parameters of a group are stacked along dim 0."""

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Piece[Operand]]]) -> "PackedWeights":
        """Lay out groups of pieces, which differ only in their first dimension."""
        layout = {}
        num_elements = 0
        for name, pieces in groups.items():
            shape = _stacked_shape(pieces)
            layout[name] = (num_elements, shape)
            num_elements += -(-prod(shape) // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
        return cls(num_elements, layout)

    def views(self, packed: Buffer) -> dict[str, Buffer]:
        """Return each group in `packed` [num_elements]."""
        return _views(self.groups, packed)


def _views(groups: Mapping[str, tuple[int, tuple[int, ...]]], packed: Buffer) -> dict[str, Buffer]:
    views = {}
    for name, (first, shape) in groups.items():
        stride = contiguous_stride(shape)
        views[name] = replace(packed, shape=shape, stride=stride, offset=packed.offset + first)
    return views


@dataclass(frozen=True, eq=False)
class PackedGradient:
    """A gradient among packed gradients, told apart by identity."""

    shape: tuple[int, ...]


class PackedGradients(NamedTuple):
    """Layout of the float32 tensor that holds the gradients of parameters.

    Gradients of a group are stacked along their first dimension, as parameters are by
    `PackedWeights`. Sizes may be symbolic.
    """

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group
    members: tuple[PackedGradient, ...]  # one after another, with padding between groups
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[PackedGradient]]) -> "PackedGradients":
        """Lay out groups of gradients."""
        layout = {}
        members: list[PackedGradient] = []
        first = 0
        for name, group in groups.items():
            shape = _stacked_shape(group)
            padding = -prod(shape) % GRADIENT_ALIGNMENT
            layout[name] = (first, shape)
            members += group
            members.append(PackedGradient((padding,)))
            first += prod(shape) + padding
        sizes = tuple(prod(member.shape) for member in members)
        return cls(first, layout, tuple(members), sizes)

    def allocate(self, builder: PlanBuilder) -> tuple[Buffer, dict[str, Buffer]]:
        """Return a tensor [num_elements] and each group in it."""
        packed = builder.empty((self.num_elements,), torch.float32)
        for first, shape in self.groups.values():
            end = first + prod(shape)
            padding = -end % GRADIENT_ALIGNMENT
            if padding:  # an operator returns the same bits each time
                builder.compute(zero, packed.slice(0, end, end + padding))
        return packed, _views(self.groups, packed)

    def layout(
        self, whole: Sequence[Spec | None], gradients: Sequence, tensors: Sequence, needs: Sequence
    ) -> GradientLayout:
        """Return the layout of a backward pass with the results `whole`, then this tensor.

        Each of `gradients` is a packed one, the number of a whole result, or None; `tensors` and
        `needs` are in the same order.
        """
        numbers = {member: number for number, member in enumerate(self.members)}
        found: list[GradientLeaf | None] = []
        for gradient, tensor, need in zip(gradients, tensors, needs, strict=True):
            if not need or tensor is None or gradient is None:
                found.append(None)
            elif isinstance(gradient, PackedGradient):
                piece = numbers[gradient]
                found.append(GradientLeaf(len(whole), piece, tensor.shape, tensor.dtype))
            else:
                found.append(GradientLeaf(gradient, None, tensor.shape, tensor.dtype))
        results = (*whole, ((self.num_elements,), torch.float32))
        return GradientLayout(results, (*(None for _ in whole), self.sizes), tuple(found))


def zero(out: Tensor) -> None:
    """Write zeros."""
    out.zero_()
