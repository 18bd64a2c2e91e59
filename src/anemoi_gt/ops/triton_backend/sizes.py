"""The sizes of a call, which decide its kernels, tiles and memory."""

from collections.abc import Callable
from typing import Generic, NamedTuple

import torch

from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.operator import Spec
from anemoi_gt.ops.tensors import AttentionOperands, Held, IndexTensors, Operand
from anemoi_gt.ops.triton_backend.tiles import TUNING, Shape, attribute_columns

# rows may be read as packed 16-bit pairs
PACKED_DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


class Kept(NamedTuple, Generic[Held]):
    """What a forward pass keeps for the backward pass."""

    inv_denominator: Held  # [B, N_dst, H]; with hubs, segments follow the nodes
    exp_scores: Held  # [B, E, H]
    projected: Held | None = None  # [B, N_dst, H, columns]; None without raw attributes


class Sizes(NamedTuple):
    """All that a plan depends on; equal sizes have equal plans."""

    batch: int
    num_dst: int
    num_src: int
    num_edges: int
    heads: int
    channels: int
    edge_dim: int  # 0 without raw attributes
    bias: int  # 1 with a bias, else 0
    embedded: bool  # edge_attr is [E, H, C]
    shares_attributes: bool  # several batch entries read one set of edge attributes
    dtype: torch.dtype
    needs_int64: bool  # an offset may pass 2^31
    scale: float
    dropout_p: float
    fixed_in_degree: int = 0  # in-edges of every destination; 0: they differ, or are not known
    dst_segment: int = 0  # edges of a segment of a hub among the destinations; 0: there is none
    src_segment: int = 0
    # as dst_segment, but 0 only where the structure excludes hubs: shapes do not depend on E
    inverse_segment: int = 0
    row_stride: int = 0  # elements between two nodes in query, key, value and all gradients of rows

    @property
    def attributes(self) -> int:
        """Columns of W, the bias among them; 0 without raw attributes."""
        return self.edge_dim + self.bias

    @property
    def columns(self) -> int:
        """Columns of intermediates: `attributes`, padded to at least 16 for matrix products."""
        return attribute_columns(self.attributes)

    @property
    def attr_stride(self) -> int:
        """Edges between the attributes of two batch entries: E, or 0 where they share them."""
        return 0 if self.batch == 1 or self.shares_attributes else self.num_edges

    @property
    def pairs_possible(self) -> bool:
        """True if a row can be read as packed pairs: two 16-bit elements in 32 bits."""
        return self.dtype in PACKED_DTYPES and self.channels % 2 == 0

    @property
    def destinations(self) -> int:
        """Destinations of the whole batch."""
        return self.batch * self.num_dst

    def spans(self, segment: int) -> int:
        """Return the number of spans of `segment` edges of a batch entry; 0 without segments."""
        return -(-self.num_edges // segment) if segment else 0

    def degree(self, num_nodes: int) -> float:
        """Return the mean number of edges of `num_nodes` nodes of a batch entry."""
        return self.num_edges / max(num_nodes, 1)

    @property
    def over_destinations(self) -> Shape:
        """The work of kernels that walk the edges of destinations, and gather rows of sources."""
        degree = self.degree(self.num_dst)
        return Shape(
            self.heads,
            self.channels,
            self.attributes,
            degree,
            self.dtype.itemsize,
            self.pairs_possible,
        )

    @property
    def over_sources(self) -> Shape:
        """The work of the kernel over sources, which gathers destination rows one by one."""
        return Shape(self.heads, self.channels, 0, self.degree(self.num_src), self.dtype.itemsize)

    def kept(self, lse_shape: tuple[int, ...]) -> Kept[Spec]:
        """Return shapes and dtypes of what the forward pass keeps."""
        inverse_shape = lse_shape
        if self.inverse_segment:
            num_rows = self.batch * (self.num_dst + self.spans(self.inverse_segment))
            inverse_shape = (num_rows, self.heads)
        projected = None
        if self.edge_dim:
            projected = ((*lse_shape, self.columns), scratch_dtype(self.dtype))
        exp_shape = (self.batch, self.num_edges, self.heads)
        return Kept((inverse_shape, torch.float32), (exp_shape, torch.float32), projected)


def sizes_of(
    operands: AttentionOperands[Operand],
    index: IndexTensors[Operand],
    scale: float = 1.0,
    dropout_p: float = 0.0,
    row_stride: int = 0,
    *,
    holds: Callable[[bool], bool] = bool,
    int32_limit: int = TUNING.int32_limit,
) -> Sizes:
    """Read the sizes of a call from its operands [.., N, H, C] and index tensors.

    Parameters
    ----------
    row_stride : int
        Elements between two nodes in query, key, value and the gradients of rows; 0: they are
        contiguous.
    holds : callable
        Evaluates a condition on sizes; with symbolic sizes, True only if it holds for every
        admissible value.
    int32_limit : int
        See `Tuning`.
    """
    query, key, _, edge_attr, edge_weight, edge_bias = operands
    num_dst, heads, channels = query.shape[-3:]
    num_src = key.shape[-3]
    num_edges = index.row.shape[0]
    batch = query.shape[0] if len(query.shape) == 4 else 1
    # D never changes: a constant
    edge_dim = 0 if edge_weight is None else int(edge_weight.shape[1])
    embedded = edge_attr is not None and edge_weight is None
    dst_segment = segment_of(index.dst_hubs, num_edges, holds)
    src_segment = segment_of(index.src_hubs, num_edges, holds)
    row_stride = row_stride or heads * channels

    columns = attribute_columns(edge_dim + int(edge_bias is not None))
    per_edge = max(heads * (channels if embedded else 2), columns)
    per_node = max(heads * max(channels, columns), row_stride)
    largest = [batch * num_edges * per_edge, batch * num_dst * per_node, batch * num_src * per_node]
    for segment in (dst_segment, src_segment):
        if segment:
            largest.append(batch * -(-num_edges // segment) * per_node)
    degree = index.fixed_in_degree
    return Sizes(
        batch=batch,
        num_dst=num_dst,
        num_src=num_src,
        num_edges=num_edges,
        heads=heads,
        channels=channels,
        edge_dim=edge_dim,
        bias=int(edge_bias is not None),
        embedded=embedded,
        shares_attributes=edge_attr is not None and batch != 1 and edge_attr.shape[0] == 1,
        dtype=query.dtype,
        needs_int64=not all(holds(elements < int32_limit) for elements in largest),
        scale=scale,
        dropout_p=dropout_p,
        fixed_in_degree=0 if degree is None else degree.shape[0],
        dst_segment=dst_segment,
        src_segment=src_segment,
        inverse_segment=0 if index.dst_hubs is None else index.dst_hubs.shape[0] // 2,
        row_stride=row_stride,
    )


def segment_of(hubs: Operand | None, num_edges: int, holds: Callable[[bool], bool] = bool) -> int:
    """Return the edges of a hub segment, half the hub limit; 0 for graphs without hubs."""
    if hubs is None:
        return 0
    segment = hubs.shape[0] // 2
    return 0 if holds(num_edges <= 2 * segment) else segment
