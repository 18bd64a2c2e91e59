"""One call of edge attention as its launches read it, and the sizes that decide how its kernels are launched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend.tiles import ContractionTile, RowTile, Shape, attribute_columns

PACKED_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}  # whose rows may be read as packed 16-bit pairs


class IndexTensors(NamedTuple):
    """The index tensors of a `GraphStructure`, by its names; the reverse structure only where it is read."""

    colptr: Tensor  # [N_dst + 1]
    row: Tensor  # [E]
    perm: Tensor | None = None  # [E]
    global_edge_id: Tensor | None = None  # [E] int64
    dst_schedule: Tensor | None = None  # [N_dst]
    fixed_in_degree: Tensor | None = None  # [K, 0]
    rowptr: Tensor | None = None  # [N_src + 1]
    col: Tensor | None = None  # [E]
    csr_to_csc: Tensor | None = None  # [E]
    dst_hubs: Tensor | None = None  # [257, 0]: the number of edges from which a node is a hub
    src_hubs: Tensor | None = None

    @classmethod
    def of(cls, graph: GraphStructure) -> "IndexTensors":
        """Return those of a graph."""
        return cls(*(getattr(graph, name) for name in cls._fields))


class Options(NamedTuple):
    """Options of a call beside its tensors of nodes and edges."""

    seed: Tensor | None = None  # [1] int64, where something is dropped
    scale: float = 1.0
    dropout_p: float = 0.0
    embedded_first: bool = False  # whether edge_attr was raw, and is embedded before the call; `explain` reports it


class Sizes(NamedTuple):
    """All that a launch depends on, but tensors: equal sizes, equal launches."""

    batch: int
    num_dst: int
    num_src: int
    num_edges: int
    heads: int
    channels: int
    edge_dim: int  # 0 without raw attributes
    bias: int  # 1 with a bias, else 0
    embedded: bool  # whether edge_attr is [E, H, C]
    attr_stride: int  # edges between the attributes of two batch entries: E, or 0 when they share them
    dtype: torch.dtype
    needs_int64: bool  # whether an offset passes 2^31
    scale: float
    dropout_p: float
    fixed_in_degree: int = 0  # in-edges of every destination; 0: they differ or are not known
    dst_segment: int = 0  # edges of a segment of a hub among the destinations; 0: there is none
    src_segment: int = 0
    gradient_stride: int = 0  # elements between two nodes in grad_out, dquery, dkey and dvalue

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
        """True if a row can be read as packed pairs: two 16-bit elements in 32 bits."""
        return self.dtype in PACKED_DTYPES and self.channels % 2 == 0

    @property
    def destinations(self) -> int:
        """Destinations of the whole batch."""
        return self.batch * self.num_dst

    def blocks(self, segment: int) -> int:
        """Return the number of blocks of `segment` edges of a batch entry; 0 without segments."""
        return -(-self.num_edges // segment) if segment else 0

    def degree(self, num_nodes: int) -> float:
        """Return the mean number of edges of `num_nodes` nodes of a batch entry."""
        return self.num_edges / max(num_nodes, 1)

    @property
    def over_destinations(self) -> Shape:
        """The work of kernels that walk the edges of destinations, and gather rows of sources."""
        degree = self.degree(self.num_dst)
        return Shape(self.heads, self.channels, self.attributes, degree, self.dtype.itemsize, self.pairs_possible)

    @property
    def over_sources(self) -> Shape:
        """The work of the kernel that walks the edges of sources, and gathers rows of destinations one by one."""
        return Shape(self.heads, self.channels, 0, self.degree(self.num_src), self.dtype.itemsize)


@dataclass(frozen=True)
class Problem:
    """One call: contiguous operands, index tensors, options. Without B in query nothing has it: one batch entry."""

    operands: AttentionOperands
    index: IndexTensors
    options: Options
    gradient_stride: int = 0  # elements between two rows of grad_out, dquery, dkey and dvalue; 0: they are contiguous

    @cached_property
    def sizes(self) -> Sizes:
        """Read once from the operands."""
        query, key, _, edge_attr, edge_weight, edge_bias = self.operands
        batch, (num_dst, heads, channels), num_edges = self.batch, query.shape[-3:], self.index.row.shape[0]
        degree, options = self.index.fixed_in_degree, self.options
        return Sizes(
            batch, num_dst, key.shape[-3], num_edges, heads, channels,
            edge_dim=0 if edge_weight is None else edge_weight.shape[1],
            bias=int(edge_bias is not None),
            embedded=self.embedded,
            attr_stride=0 if edge_attr is None or batch == 1 or self.shares_attributes else num_edges,
            dtype=query.dtype,
            needs_int64=self.needs_int64(),
            scale=options.scale,
            dropout_p=options.dropout_p,
            fixed_in_degree=0 if degree is None else degree.shape[0],
            dst_segment=self.segments[0],
            src_segment=self.segments[1],
            gradient_stride=self.gradient_stride or heads * channels,
        )  # fmt: skip

    @cached_property
    def segments(self) -> tuple[int, int]:
        """Edges of a segment of hubs, of destinations and of sources; 0 where there are none."""
        if self.index.dst_hubs is None and self.index.src_hubs is None:
            return 0, 0
        found = map(self.segments_of, (self.index.dst_hubs, self.index.src_hubs))
        return tuple(0 if self.is_at_most(self.index.row.shape[0], 2 * segment) else segment for segment in found)

    @property
    def inverse_shape(self) -> tuple[int, ...]:
        """Shape of inv_denominator: that of lse, with hubs [B * N_dst + B * blocks, H], behind nodes their segments."""
        shape, segment = self.operands.query.shape[:-1], self.segments_of(self.index.dst_hubs)
        if self.index.dst_hubs is None:
            return tuple(shape)
        return self.batch * (shape[-2] - (-self.index.row.shape[0] // segment)), shape[-1]

    def segments_of(self, hubs: Tensor | None) -> int:
        """Return the edges of a segment of hubs: half of what makes a hub; 0 without hubs."""
        return 0 if hubs is None else hubs.shape[0] // 2

    def is_at_most(self, size: int, bound: int) -> bool:
        """Return whether a size is at most `bound`."""
        return size <= bound

    @property
    def batch(self) -> int:
        """Size of the batch dimension."""
        query = self.operands.query
        return query.shape[0] if query.dim() == 4 else 1

    @property
    def shares_attributes(self) -> bool:
        """True if several batch entries read one set of edge attributes."""
        edge_attr = self.operands.edge_attr
        return edge_attr is not None and self.batch != 1 and edge_attr.shape[0] == 1

    @property
    def embedded(self) -> bool:
        """True if edge_attr is embedded, [E, H, C]."""
        return self.operands.edge_attr is not None and self.operands.edge_weight is None

    @property
    def destination_tensors(self) -> dict[str, Tensor | None]:
        """Tensors that all row kernels over destinations read."""
        query, key, value, edge_attr, *_ = self.operands
        names = ("colptr", "row", "perm", "global_edge_id", "dst_schedule")
        index = {name: getattr(self.index, name) for name in names}
        return {"query": query, "key": key, "value": value, "edge_attr": edge_attr, **index, "seed": self.options.seed}

    def needs_int64(self) -> bool:
        """Return whether an offset passes 2^31."""
        return max(self.largest_offsets()) >= 2**31

    def largest_offsets(self) -> tuple[int, ...]:
        """Return the numbers of elements of the largest tensors over edges, destinations and sources."""
        query, key, _, _, edge_weight, edge_bias = self.operands
        num_dst, heads, channels = query.shape[-3:]
        edge_dim = 0 if edge_weight is None else edge_weight.shape[1]
        columns = attribute_columns(edge_dim + int(edge_bias is not None))
        per_edge, per_node = max(heads * (channels if self.embedded else 2), columns), heads * max(channels, columns)
        per_node = max(per_node, self.gradient_stride)
        batch, num_edges = self.batch, self.index.row.shape[0]
        offsets = batch * num_edges * per_edge, batch * num_dst * per_node, batch * key.shape[-3] * per_node
        blocks = (-(-num_edges // segment) for segment in self.segments if segment)
        return *offsets, *(batch * number * per_node for number in blocks)

    def launch(self, launch_of: Callable, *how: RowTile | ContractionTile | int | None) -> Callable[..., None]:
        """Return what launches a kernel on tensors by name: `launch_of` these sizes, with a tile or the chosen one."""
        return launch_of(self.sizes, *how)
