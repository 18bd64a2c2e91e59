"""Kernels that one call of the `triton` backend launches: names, tiles and bytes. Nothing is launched here.

The launches are those of `launch`, in the order of `op`; a test compares them with what a call really launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.operands import Needs
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.problem import Sizes

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TILE = {  # compile-time constants that make up a tile, and their names in a plan
    "NODES": "nodes", "TILES": "tiles", "HEADS": "heads", "CHANNELS": "channels", "UNROLL": "unroll", "K": "edges",
    "PACKED": "packed", "num_warps": "num_warps", "num_stages": "num_stages",
}  # fmt: skip


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch. `bytes` counts each tensor that the kernel reads or writes once."""

    name: str  # as a profiler shows it
    tile: dict[str, int]  # of one program, as it was compiled
    bytes: int


def forward_kernels(sizes: Sizes) -> Iterator[PlannedLaunch]:
    """Yield the launches of a forward pass."""
    count = ByteCounts(sizes)
    if sizes.edge_dim:
        yield _launch(sizes, launch.project_launch(sizes), count.row + count.sums + count.weight)
    moved = 2 * count.row + 2 * count.source + 2 * count.statistic + count.scores + count.edges
    moved += 2 * count.sums + count.attributes + count.embedded
    moved += 0 if launch.has_fixed_degree(sizes) else count.scores
    segment = launch.dst_segment(sizes)
    yield _launch(sizes, launch.forward_launch(sizes), moved + count.segments(segment, 1))
    if segment:
        part = count.segments(segment, sizes.channels + 2) + count.sums_of_segments(segment)
        moved = count.source + 2 * count.scores + count.edges + count.attributes + count.embedded
        yield _launch(sizes, launch.hub_launch(sizes), moved + part)
        widths = (sizes.channels, sizes.columns if sizes.edge_dim else 0)
        joined = launch.join_launch(sizes, segment, sizes.num_dst, *widths)
        yield _launch(sizes, joined, part + count.row + count.sums + 2 * count.statistic)
    if sizes.edge_dim:
        yield _launch(sizes, launch.embed_launch(sizes), 2 * count.row + count.sums + count.weight)


def backward_kernels(sizes: Sizes, needs: Needs) -> Iterator[PlannedLaunch]:
    """Yield the launches of a backward pass."""
    count, raw = ByteCounts(sizes), bool(sizes.edge_dim)
    if raw:
        yield _launch(sizes, launch.project_launch(sizes), count.row + count.sums + count.weight)
    moved = (1 + needs.query) * count.row + 2 * count.source + count.statistic + count.scores + count.p_ds
    moved += count.edges + count.sums + count.attributes + count.embedded
    if sizes.embedded:
        moved += count.row + needs.edge_attr * count.embedded_gradient
    if launch.has_fixed_degree(sizes):
        moved += 2 * count.sums + needs.edge_attr * (count.sums + count.attributes_gradient)
    else:
        moved += (1 + raw) * count.scores
    segment = launch.dst_segment(sizes)
    yield _launch(sizes, launch.destination_launch(sizes), moved + count.segments(segment, 2))
    if segment:
        yield from _hub_kernels(sizes, count, needs)
    if raw and (needs.query or needs.edge_attr or needs.edge_weight or needs.edge_bias):
        if not launch.has_fixed_degree(sizes):
            yield from _attribute_kernels(sizes, count, needs)
        yield from _weight_kernels(sizes, count, needs)
    if needs.key or needs.value:
        moved = (needs.key + needs.value) * (count.row + count.source) + count.p_ds + 2 * count.edges
        part = (needs.key + needs.value) * count.segments(sizes.src_segment, sizes.channels)
        yield _launch(sizes, launch.source_launch(sizes), moved + part)
        if sizes.src_segment:
            widths = (sizes.channels, sizes.channels if needs.key and needs.value else 0)
            joined = launch.join_launch(sizes, sizes.src_segment, sizes.num_src, *widths)
            yield _launch(sizes, joined, part + (needs.key + needs.value) * count.source)


def _launch(sizes: Sizes, bound: Launch, moved: int) -> PlannedLaunch:
    tile = {name: bound.constants[constant] for constant, name in TILE.items() if constant in bound.constants}
    if "packed" in tile:
        tile["packed"] = int(tile["packed"] is not None)
    return PlannedLaunch(bound.name(NAMES[sizes.dtype]), tile, moved)


def _hub_kernels(sizes: Sizes, count: "ByteCounts", needs: Needs) -> Iterator[PlannedLaunch]:
    """The second half of the pass over the segments of hubs, and the sum of their parts of dq."""
    segment = launch.dst_segment(sizes)
    part = needs.query * count.segments(segment, sizes.channels)
    moved = needs.query * (count.source + count.edges) + count.statistic + 2 * count.scores + count.p_ds
    if sizes.embedded:
        moved += needs.query * count.embedded + needs.edge_attr * (2 * count.row + count.embedded_gradient)
    moved += count.segments(segment, 2) + part
    yield _launch(sizes, launch.hub_destination_launch(sizes), moved)
    if needs.query:
        yield _launch(sizes, launch.join_launch(sizes, segment, sizes.num_dst, sizes.channels), part + count.row)


def _attribute_kernels(sizes: Sizes, count: "ByteCounts", needs: Needs) -> Iterator[PlannedLaunch]:
    """The kernel that sums attributes over the edges of each destination, and the sum of its parts of hubs."""
    moved = count.p_ds + count.attributes + 2 * count.sums + count.edges
    if needs.edge_attr:
        moved += 2 * count.sums + count.attributes_gradient
    part = 2 * count.sums_of_segments(sizes.dst_segment)
    yield _launch(sizes, launch.attribute_launch(sizes), moved + part)
    if sizes.dst_segment:
        joined = launch.join_launch(sizes, sizes.dst_segment, sizes.num_dst, sizes.columns, sizes.columns)
        yield _launch(sizes, joined, part + 2 * count.sums)


def _weight_kernels(sizes: Sizes, count: "ByteCounts", needs: Needs) -> Iterator[PlannedLaunch]:
    """Kernels that read the sums over attributes."""
    if needs.query:
        yield _launch(sizes, launch.embed_launch(sizes), 2 * count.row + count.sums + count.weight)
    if needs.edge_weight or needs.edge_bias:
        bound, partials = launch.weight_launch(sizes)
        moved = 2 * count.row + 2 * count.sums + 4 * partials * sizes.heads * sizes.channels * sizes.attributes
        yield _launch(sizes, bound, moved)


class ByteCounts:
    """Bytes of the tensors of a call; 0 for absent ones."""

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        size, heads, edges = sizes.dtype.itemsize, sizes.heads, sizes.batch * sizes.num_edges
        scratch, raw = scratch_dtype(sizes.dtype).itemsize, bool(sizes.edge_dim)
        row = size * heads * sizes.channels
        self.row = row * sizes.destinations  # query, out and their gradients
        self.source = row * sizes.batch * sizes.num_src  # key, value and their gradients
        self.statistic = 4 * heads * sizes.destinations  # lse, inverse denominator
        self.scores = 4 * heads * edges  # scores, exp_scores
        self.p_ds = 2 * scratch * heads * edges
        self.sums = raw * scratch * heads * sizes.columns * sizes.destinations  # u, g, A, B
        self.weight = size * heads * sizes.channels * sizes.attributes
        self.edges = 4 * sizes.num_edges  # row, col or a map; pointers of nodes are left out
        shared = sizes.batch > 1 and not sizes.attr_stride  # then gradients are float32 per batch entry, to be summed
        sets, growth = (1, 4 / size) if shared else (sizes.batch, 1)
        self.attributes = raw * size * sizes.edge_dim * sets * sizes.num_edges
        self.embedded = sizes.embedded * row * sets * sizes.num_edges
        self.attributes_gradient = int(growth * self.attributes / sets) * sizes.batch
        self.embedded_gradient = int(growth * self.embedded / sets) * sizes.batch

    def segments(self, segment: int, width: int) -> int:
        """Return the bytes of `width` elements of each head and segment, float32; 0 without segments."""
        return 4 * width * self._sizes.heads * self._sizes.batch * self._sizes.blocks(segment)

    def sums_of_segments(self, segment: int) -> int:
        """Return the bytes of the sums over attributes of each segment; 0 without segments or raw attributes."""
        return self.segments(segment, self._sizes.columns) if self._sizes.edge_dim else 0
