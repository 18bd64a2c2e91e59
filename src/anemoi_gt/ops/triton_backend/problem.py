"""The operands of one call of edge attention, and the sizes that decide how its kernels are launched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.ops.triton_backend.tiles import ContractionTile, RowTile, Shape, attribute_columns


class Sizes(NamedTuple):
    """All that a launch depends on, but tensors: equal sizes, equal launches."""

    samples: int
    num_dst: int
    num_src: int
    num_edges: int
    heads: int
    channels: int
    edge_dim: int  # 0 without raw attributes
    bias: int  # 1 with a bias, else 0
    embedded: bool  # whether edge_attr is [E, H, C]
    attr_stride: int  # edges between the attributes of two samples: E, or 0 when they share them
    dtype: torch.dtype
    wide: bool  # whether an offset passes 2^31
    scale: float
    dropout_p: float
    fixed_in_degree: int = 0  # in-edges of every destination; 0: not the same, or not known

    @property
    def attributes(self) -> int:
        """Columns of W, the bias among them; 0 without raw attributes."""
        return self.edge_dim + self.bias

    @property
    def columns(self) -> int:
        """Columns of what passes between kernels: `attributes` padded, at least the 16 of a matrix product."""
        return attribute_columns(self.attributes)

    @property
    def pairs_possible(self) -> bool:
        """Whether a row can be read as pairs: two numbers of bfloat16 in 32 bits."""
        return self.dtype == torch.bfloat16 and self.channels % 2 == 0

    @property
    def destinations(self) -> int:
        """Destinations of all samples."""
        return self.samples * self.num_dst

    def degree(self, num_nodes: int) -> float:
        """Mean number of edges of `num_nodes` nodes of a sample."""
        return self.num_edges / max(num_nodes, 1)

    @property
    def over_destinations(self) -> Shape:
        """What the kernels that walk the edges of destinations, and gather rows of sources, are asked to do."""
        degree = self.degree(self.num_dst)
        return Shape(self.heads, self.channels, self.attributes, degree, self.dtype.itemsize, self.pairs_possible)

    @property
    def over_sources(self) -> Shape:
        """What the kernel that walks the edges of sources, and gathers rows of destinations one by one, is asked to do."""
        return Shape(self.heads, self.channels, 0, self.degree(self.num_src), self.dtype.itemsize)


@dataclass(frozen=True)
class Problem:
    """Contiguous operands of one call. Where query has no B there is one sample, and nothing has a B."""

    query: Tensor  # [B, N_dst, H, C]
    key: Tensor  # [B, N_src, H, C]
    value: Tensor  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] or [1 or B, E, H, C]
    edge_weight: Tensor | None  # [H * C, D]
    edge_bias: Tensor | None  # [H * C]
    colptr: Tensor
    row: Tensor
    perm: Tensor | None
    global_edge_id: Tensor | None
    order: Tensor | None
    seed: Tensor | None
    scale: float
    dropout_p: float
    fixed_in_degree: int = 0

    @cached_property
    def sizes(self) -> Sizes:
        """Read once from the operands."""
        num_dst, heads, channels = self.query.shape[-3:]
        num_edges = self.row.shape[0]
        return Sizes(
            self.samples, num_dst, self.key.shape[-3], num_edges, heads, channels,
            edge_dim=0 if self.edge_weight is None else self.edge_weight.shape[1],
            bias=int(self.edge_bias is not None),
            embedded=self.embedded,
            attr_stride=0 if self.edge_attr is None or self.samples == 1 or self.shares_attributes else num_edges,
            dtype=self.query.dtype,
            wide=self.wide(),
            scale=self.scale,
            dropout_p=self.dropout_p,
            fixed_in_degree=self.fixed_in_degree,
        )  # fmt: skip

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.query.shape[0] if self.query.dim() == 4 else 1

    @property
    def shares_attributes(self) -> bool:
        """Whether several samples read one set of edge attributes."""
        return self.edge_attr is not None and self.samples != 1 and self.edge_attr.shape[0] == 1

    @property
    def embedded(self) -> bool:
        """Whether edge_attr is [E, H, C]."""
        return self.edge_attr is not None and self.edge_weight is None

    @property
    def structure(self) -> dict[str, Tensor | None]:
        """Index tensors that the row kernels over destinations share."""
        return {
            "colptr": self.colptr, "row": self.row, "perm": self.perm,
            "global_edge_id": self.global_edge_id, "order": self.order, "seed": self.seed,
        }  # fmt: skip

    def wide(self) -> bool:
        """Whether an offset passes 2^31, so that 64-bit arithmetic is needed."""
        return max(self.largest_offsets()) >= 2**31

    def largest_offsets(self) -> tuple[int, ...]:
        """Numbers of the largest tensors over edges, destinations and sources."""
        num_dst, heads, channels = self.query.shape[-3:]
        edge_dim = 0 if self.edge_weight is None else self.edge_weight.shape[1]
        columns = attribute_columns(edge_dim + (self.edge_bias is not None))
        per_edge = max(heads * (channels if self.embedded else 2), columns)
        numbers = (
            (self.row.shape[0], per_edge),
            *((n, heads * max(channels, columns)) for n in (num_dst, self.key.shape[-3])),
        )
        return tuple(self.samples * rows * width for rows, width in numbers)

    def launch(self, launch_of: Callable, tile: RowTile | ContractionTile | None) -> Callable[..., None]:
        """Return what launches a kernel on tensors by name: `launch_of` these sizes, with this tile or the one that suits them."""
        return launch_of(self.sizes, tile)
