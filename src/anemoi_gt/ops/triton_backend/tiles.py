"""All tuning parameters: the tile of each kernel, and the chunk sizes of plans.

Tiles follow from problem sizes only and are never autotuned, so equal sizes give the same bits on
every run and device. Each entry says where it was measured; benchmarks/NOTES.md, "Tiles", has the
times and the alternatives by the names of this module. On other shapes, `benchmarks/tiles.py`
searches. "N320" stands for its encoder, processor and decoder with icosphere 6, in bf16 with 16
heads of 32 and 64 channels, 11 attributes and a bias.

Sweeps over warps, unroll, packed pairs and nodes selected: all heads in one program; one warp for
reductions across a row, more for plain accumulation; several nodes per program if nodes have one or
two edges. Each tile of the row kernels, except `residual_norm_tile`, is within 2% of the fastest
that was measured.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

# minimum M, N and K of `tl.dot` in these kernels; smaller sizes are padded
PRODUCT = 16
# warps of a program
MAX_WARPS = 8
# choices of each kernel that are cached
CACHED_TILES = 128


class Tuning(NamedTuple):
    """Chunk sizes and limits of plans; tests reduce them, so that every loop has several steps."""

    # rows whose hidden features and modulation exist at a time. H200, decoder of N320 (row 39)
    chunk: int = 131072
    # programs that share sums over nodes, or the sum of dW of all heads; fixed, so that the order
    # of summation does not depend on the device. Four for each of the 132 SMs of an H100.
    # H200, 40,962 and 271,040 nodes
    programs: int = 528
    # elements of segments' results that a program of `join` reads per step.
    # H200, a hub with a sixth of 1,200,000 edges (row 32h)
    joined: int = 1024
    # segments whose statistics a program of `join` reads per step. Not measured
    statistics: int = 512
    # tensors of edge attention with fewer elements have 32-bit offsets
    int32_limit: int = 2**31


TUNING = Tuning()


# ---------------------------------------------------------------------------- edge attention

# mean degree from which the edges of one node keep a program busy. H200, N320
BUSY_DEGREE = 4
# mean degree from which the remainder of an unrolled loop does not count. H200, N320
MANY_DEGREE = 16
# heads x channels that a program holds: 32 elements in each thread of a warp
ROW_ELEMENTS = 1024
# columns of W for which a program's arrays fit the registers and the shared memory of every GPU
MAX_ATTRIBUTES = 256
# bytes of rows in flight for which a warp has registers
FLIGHT_BYTES = 6144
# columns that a program of `join` reads per step: one 32-byte sector
JOINED_COLUMNS = 8
# partial sums of dW that a program of `weight_sum` adds per step. Not measured
PARTS = 16
# elements of dW that it adds per step. Not measured
SUMMED = 256


class Shape(NamedTuple):
    """Sizes that decide the tile of a kernel which gathers rows."""

    heads: int
    channels: int
    attributes: int  # columns of W, the bias among them; 0 without raw attributes
    degree: float  # mean number of edges of a node whose edges a program walks
    itemsize: int  # bytes of an element
    # the kernel can read two 16-bit elements of a row as one of 32 bits
    pairs_possible: bool = False


@dataclass(frozen=True)
class RowTile:
    """Shape of one program of a kernel that walks edges and gathers rows of heads x channels."""

    heads: int  # heads of a program, a power of two
    channels: int  # channels padded to a power of two
    unroll: int  # edges whose rows are in flight together
    num_warps: int
    nodes: int = 1  # nodes that a program takes one after the other
    pairs: bool = False  # rows are read as packed 16-bit pairs


@dataclass(frozen=True)
class ContractionTile:
    """Shape of one program of a kernel that contracts over the attributes."""

    nodes: int  # nodes of a tile
    tiles: int  # tiles that a program takes one after the other, with the weight read once
    channels: int
    attributes: int  # attributes padded to a power of two, at least 16 for a matrix instruction
    num_warps: int
    num_stages: int  # tiles in flight


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n` >= 1."""
    return 1 << (n - 1).bit_length()


def held_by_program(shape: Shape) -> tuple[int, int]:
    """Return heads per program and padded channels, so that arrays fit ROW_ELEMENTS."""
    padded = next_power_of_two(shape.channels)
    widest = max(padded, attribute_columns(shape.attributes) if shape.attributes else 1)
    return min(next_power_of_two(shape.heads), max(1, ROW_ELEMENTS // widest)), padded


def _warps(elements: int, wanted: int) -> int:
    """At least `wanted`, and enough for at most 32 elements of a row in a thread; at most 8."""
    return max(1, min(MAX_WARPS, max(wanted, elements // ROW_ELEMENTS)))


def _unroll(shape: Shape, elements: float) -> int:
    """Edges in flight for which a warp that holds `elements` of a row has registers.

    Three divide the 6 edges of most nodes of a mesh; four would leave a remainder of two.
    """
    wanted = 4 if shape.degree >= MANY_DEGREE else 3
    return max(1, min(wanted, int(FLIGHT_BYTES // (elements * shape.itemsize))))


@lru_cache(CACHED_TILES)
def forward_tile(shape: Shape) -> RowTile:
    """Return the tile of the forward pass over destinations.

    H200, N320: "Tiles".
    """
    group, padded = held_by_program(shape)
    warps = _warps(group * padded, 1)
    in_flight = shape.degree >= BUSY_DEGREE or group * padded < ROW_ELEMENTS
    unroll = _unroll(shape, group * padded / warps) if in_flight else 1
    return RowTile(group, padded, unroll, warps, pairs=shape.pairs_possible and unroll < 4)


@lru_cache(CACHED_TILES)
def destination_tile(shape: Shape) -> RowTile:
    """Return the tile of the backward pass over destinations.

    H200, N320: "Tiles".
    """
    group, padded = held_by_program(shape)
    warps = _warps(group * padded, 1)
    unroll = _unroll(shape, group * padded / warps) if shape.degree >= BUSY_DEGREE else 1
    return RowTile(group, padded, unroll, warps, pairs=shape.pairs_possible)


@lru_cache(CACHED_TILES)
def source_tile(shape: Shape) -> RowTile:
    """Return the tile of the backward pass over sources, whose `shape.attributes` is 0.

    Unroll 4 where a thread holds 8 elements of a row, 2 where it holds 4. H200, N320: "Tiles".
    """
    group, padded = held_by_program(shape)
    elements = group * padded
    if shape.degree < BUSY_DEGREE:
        return RowTile(group, padded, 1, _warps(elements, elements // 512), nodes=4)
    wanted = min(4, elements // 128) if shape.degree >= MANY_DEGREE else elements // 256
    warps = _warps(elements, wanted)
    return RowTile(group, padded, 4 if elements // warps >= 256 else 2, warps)


def fixed_degree_tile(shape: Shape, degree: int) -> RowTile | None:
    """Return the tile of the fixed-degree kernels, or None if they do not support the shape.

    A program holds all heads and all edges of a destination. A thread holds at most 32 elements of
    each of 2 `degree` rows: with 4 edges, 168 registers and no spills. H200, decoder of N320:
    "Tiles".
    """
    heads = next_power_of_two(shape.heads)
    padded = next_power_of_two(shape.channels)
    widest = heads * max(padded, attribute_columns(shape.attributes) if shape.attributes else 1)
    if not 1 <= degree <= BUSY_DEGREE or widest > MAX_WARPS * ROW_ELEMENTS:
        return None
    return RowTile(heads, padded, degree, max(1, widest // ROW_ELEMENTS))


def attribute_columns(attributes: int) -> int:
    """Return the columns of attribute arrays: a power of two, at least PRODUCT."""
    return max(PRODUCT, next_power_of_two(max(1, attributes)))


def attribute_edges(degree: float) -> int:
    """Return the edges of an attribute tile over destinations: 1, or a matrix instruction's.

    H200, processor and decoder of N320: "Tiles".
    """
    return PRODUCT if degree >= BUSY_DEGREE else 1


def attribute_heads(heads: int) -> int:
    """Return the heads of a program of the backward pass over attributes: all, at least PRODUCT."""
    return max(PRODUCT, next_power_of_two(heads))


def attribute_warps(heads: int, attributes: int) -> int:
    """Return the warps of the backward pass over attributes, for four [heads, attributes]."""
    return _warps(attribute_heads(heads) * attribute_columns(attributes), 1)


def project_tile(channels: int, attributes: int) -> ContractionTile:
    """Return the tile of `project`; it fits the shared memory, like other contractions.

    H200, decoder of N320: "Tiles".
    """
    columns = attribute_columns(attributes)
    padded = max(PRODUCT, min(next_power_of_two(channels), 64, 4096 // columns))
    # several stages only where a row is in flight as a whole
    stages = 3 if channels <= padded else 1
    if padded >= 64 and columns <= 32:
        return ContractionTile(64, 2, padded, columns, num_warps=4, num_stages=stages)
    nodes = 32 if columns <= 128 else 16
    warps = 2 if columns <= 32 else 4
    return ContractionTile(nodes, 4, padded, columns, num_warps=warps, num_stages=stages)


def embed_tile(channels: int, attributes: int) -> ContractionTile:
    """Return the tile of `embed`.

    H200, encoder and decoder of N320: "Tiles".
    """
    tile = project_tile(channels, attributes)
    if tile.attributes > 32 or channels > tile.channels:
        return tile
    if tile.channels >= 64:
        return replace(tile, tiles=1, num_stages=1)
    return replace(tile, nodes=64, tiles=1, num_warps=8, num_stages=1)


def weight_tile(channels: int, attributes: int) -> ContractionTile:
    """Return the tile of the gradient of W; a program takes many.

    H200, encoder and decoder of N320: "Tiles".
    """
    tile = project_tile(channels, attributes)
    if tile.attributes > 32 or channels > tile.channels:
        return tile
    if tile.channels >= 64:
        return replace(tile, nodes=64, num_warps=4, num_stages=2)
    return replace(tile, nodes=64, num_warps=2, num_stages=4)


# ---------------------------------------------------------------------------- sub-layers

# of a sub-layer that is fused; `norm_bwd` spills registers beyond 4096.
# H100, a processor block of N320 with 1024, 1536 and 2048 channels (row 88)
MAX_FUSED_FEATURES = 2048
# elements of a program of `pack`. Not measured
PACK_ELEMENTS = 2048
# elements of a program of `add`. H100, at the rate of a copy (row 81)
ADD_ELEMENTS = 2048
# elements of a tile of `resize`. Not measured
RESIZE_ELEMENTS = 2048
# columns of a tile of `resize`, at most. Not measured
RESIZE_COLUMNS = 256
# elements of a tile of `sum_columns`. H100, 10,240 and 271,040 rows of 1024: "Tiles"
SUM_ELEMENTS = 2048
# columns of a tile of `sum_columns`, at most
SUM_COLUMNS = 512
# rows, columns and warps of a tile of `sum_partial` and `map_total`.
# H100, 528 of 7168 partial sums and a map of 1024 x 1024: "Tiles"
TOTAL_ROWS = 256
TOTAL_COLUMNS = 16
TOTAL_WARPS = 8
# A GEMM over nodes in 16 bits takes a multiple of it, and `add_outer` the rows beyond: cuBLAS may
# leave some of them out (docs/contributing.md).
OUTER_ROWS = 64
# rows and columns of a tile of `add_outer`, at most. H100, ranks of N320 (row 79a)
OUTER_TILE = (64, 128)


class NodeTile(NamedTuple):
    """Shape of one program of a row kernel of the sub-layers.

    It has at least 8 elements for each thread, one load of 16 bytes. With fewer, two threads would
    hold the same element, and no output could alias an input.
    """

    rows: int
    columns: int  # a power of two
    num_warps: int

    @classmethod
    def of_whole_rows(cls, features: int, elements: int, num_warps: int) -> "NodeTile":
        """Return a tile of `elements` in whole rows; a wider row has more warps in proportion."""
        columns = next_power_of_two(features)
        widening = max(1, columns // elements)
        return cls(max(1, elements // columns), columns, min(MAX_WARPS, widening * num_warps))

    @classmethod
    def of_columns(
        cls, features: int, elements: int, most_columns: int, num_warps: int
    ) -> "NodeTile":
        """Return a tile of `elements` in at most so many columns."""
        columns = min(next_power_of_two(features), most_columns)
        return cls(max(1, elements // columns), columns, num_warps)


def norm_forward_tile(features: int) -> NodeTile:
    """Return the tile of `norm_fwd`. H100, at 0.99 of a copy (row 81)."""
    return NodeTile.of_whole_rows(features, 2048, num_warps=2)


def norm_backward_tile(features: int) -> NodeTile:
    """Return the tile of `norm_bwd`. H200, 40,962 and 271,040 rows of 512: "Tiles"."""
    return NodeTile.of_whole_rows(features, 1024, num_warps=2)


def head_norm_tile(channels: int) -> NodeTile:
    """Return the tile of `head_norm_fwd` and `head_norm_bwd`, whose rows are heads of nodes.

    H100, 40,962 and 271,040 nodes with 16 heads of 64: "Tiles".
    """
    return NodeTile.of_whole_rows(channels, 2048, num_warps=4)


def activation_tile(features: int) -> NodeTile:
    """Return the tile of `activation_fwd`, and of `activation_bwd` without a gate.

    H100, at 0.95 of a copy (row 81).
    """
    return NodeTile.of_columns(features, 2048, 512, num_warps=4)


def gate_backward_tile(features: int) -> NodeTile:
    """Return the tile of `activation_bwd` with a gate: half the elements for equal registers.

    Not measured.
    """
    return NodeTile.of_columns(features, 1024, 512, num_warps=4)


def outer_tile(m: int, k: int) -> tuple[int, int]:
    """Return rows and columns of a tile of `add_outer`, whose result is [m, k]."""
    most_m, most_k = OUTER_TILE
    tile_m = min(most_m, max(PRODUCT, next_power_of_two(m)))
    return tile_m, min(most_k, max(PRODUCT, next_power_of_two(k)))


# ---------------------------------------------------------------------------- graph networks

# edges of a program of `edge_ends`. Not measured
ENDS = 1024
# segments of a hub that a program of `join_segment_sums` reads per step. Not measured
JOINED_SEGMENTS = 8


def residual_norm_tile(features: int) -> NodeTile:
    """Return the tile of `residual_norm_bwd`: a warp for each 512 elements.

    Up to 512 features a row is in one warp, so its reductions need no barrier. H100, at 0.6 to 0.8
    of a copy. With twice the elements the kernel is faster and spills with float32 gradients; a
    form without spills gains nothing in a training step on an H200 (row 86n).
    """
    return NodeTile.of_whole_rows(features, 512, num_warps=1)


def residual_norm_programs(features: int, tuning: Tuning) -> int:
    """Return the programs of `residual_norm_bwd`, with as many warps for any features."""
    return max(1, 2 * tuning.programs // residual_norm_tile(features).num_warps)


def segment_sum_tile(features: int) -> NodeTile:
    """Return the tile of `segment_sum`, whose rows are edges of a node.

    H100, edges of N320 by destination and by source, 512 features (row 86a).
    """
    return NodeTile.of_columns(features, 1024, 512, num_warps=1)


def gather_tile(features: int) -> NodeTile:
    """Return the tile of `gather_to_edges`: several edges for each bisection.

    H100, edges of N320, 512 features (row 99).
    """
    return NodeTile.of_columns(features, 8192, 512, num_warps=4)
