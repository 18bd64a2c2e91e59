"""How much of the problem one program holds on chip. The only place that chooses tile shapes.

Shapes follow from sizes alone, never from a clock, so a program gives the same bits on every run. The rules are what sweeps
over heads, nodes, warps and unrolling gave on one H200 (bf16, H = 16, C = 32 and 64, the encoder, processor and decoder of
N320 with icosphere 6, where no other graph is named): one node a program and all heads in it; few warps where a row is reduced, more where it is only
summed; several nodes a program where a node has one or two edges.
"""

from dataclasses import dataclass

ROW_ELEMENTS = 1024  # heads x channels that a program holds: 32 numbers for each thread of a warp
MOST_ATTRIBUTES = 256  # columns of W for which a program's arrays fit the registers and the shared memory of every GPU
PRODUCT = 16  # smallest inner size of a matrix product
BUSY_DEGREE = 4  # mean degree from which the edges of one node keep a program busy


@dataclass(frozen=True)
class RowTile:
    """Shape of one program of a kernel that walks edges and gathers rows of heads x channels."""

    heads: int  # heads of a program, a power of two
    channels: int  # channels padded to a power of two
    unroll: int  # edges whose rows are in flight together
    num_warps: int
    nodes: int = 1  # nodes that a program takes one after the other


@dataclass(frozen=True)
class ContractionTile:
    """Shape of one program of a kernel that contracts over the attributes."""

    nodes: int  # nodes of a tile
    tiles: int  # tiles that a program takes one after the other, with the weight read once
    channels: int
    attributes: int  # attributes padded to a power of two, at least 16 for a matrix product
    num_warps: int
    num_stages: int  # tiles in flight


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is not below `n` >= 1."""
    return 1 << (n - 1).bit_length()


def _row(heads: int, channels: int, attributes: int) -> tuple[int, int]:
    """Heads of a program and padded channels, so that neither array of it passes ROW_ELEMENTS."""
    padded = next_power_of_two(channels)
    widest = max(padded, attribute_columns(attributes) if attributes else 1)
    return min(next_power_of_two(heads), max(1, ROW_ELEMENTS // widest)), padded


def forward_tile(heads: int, channels: int, degree: float, attributes: int) -> RowTile:
    """Tile of the forward pass over destinations of so many in-edges on average.

    Measured: encoder 0.91, processor 0.27, decoder 1.55 ms at C = 64 with one warp and one edge in flight (two warps 1.01,
    0.29, 1.66); at C = 32 two edges in flight give 0.50, 0.16 where degrees are high (one: 0.52, 0.17), decoder 0.97.
    """
    group, padded = _row(heads, channels, attributes)
    unroll = 2 if group * padded < ROW_ELEMENTS and degree >= BUSY_DEGREE else 1
    return RowTile(group, padded, unroll, _warps(group * padded, 1))


def destination_tile(heads: int, channels: int, degree: float, attributes: int) -> RowTile:
    """Tile of the backward pass over destinations.

    Measured: encoder 1.05, processor 0.32 ms at C = 64 with two warps and two edges in flight (one and one: 1.12, 0.33),
    decoder 1.68 with one and one; at C = 32 encoder 0.64, processor 0.19, decoder 0.98 with one and one.
    """
    group, padded = _row(heads, channels, attributes)
    pair = 2 if group * padded >= ROW_ELEMENTS and degree >= BUSY_DEGREE else 1
    return RowTile(group, padded, pair, _warps(group * padded, pair))


def source_tile(heads: int, channels: int, degree: float) -> RowTile:
    """Tile of the backward pass over sources of so many out-edges on average.

    Measured: decoder 0.73, processor 0.18 ms with one source, four edges in flight; encoder, whose sources have 1.6 edges,
    0.58 with four sources and two edges.
    """
    group, padded = _row(heads, channels, 0)
    nodes, unroll = (1, 4) if degree >= BUSY_DEGREE else (4, 2)
    return RowTile(group, padded, unroll, _warps(group * padded, group * padded // 256), nodes)


def attribute_columns(attributes: int) -> int:
    """Columns of the arrays of a node's attributes: a power of two, at least the 16 of a matrix product."""
    return max(PRODUCT, next_power_of_two(max(1, attributes)))


def attribute_edges(degree: float) -> int:
    """Edges of a tile of attributes in the passes over destinations: 1, or the inner size of a matrix product.

    Measured: a product takes the forward of the processor from 0.35 to 0.28 ms, that of the decoder from 1.55 to 1.71.
    """
    return PRODUCT if degree >= BUSY_DEGREE else 1


def attribute_heads(heads: int) -> int:
    """Heads of a program of the backward pass over attributes: all, and at least the inner size of a matrix product."""
    return max(PRODUCT, next_power_of_two(heads))


def attribute_warps(heads: int, attributes: int) -> int:
    """Warps of the backward pass over attributes, which holds four arrays [heads, attributes]."""
    return _warps(attribute_heads(heads) * attribute_columns(attributes), 1)


def _warps(elements: int, wanted: int) -> int:
    """At least `wanted`, and so many that a thread holds at most 32 numbers of a row; at most 8."""
    return max(1, min(8, max(wanted, elements // ROW_ELEMENTS)))


def contraction_tile(channels: int, attributes: int) -> ContractionTile:
    """Tile of a product of rows of `channels` with a weight of `attributes` columns; it fits the shared memory.

    Measured, decoder at C = 64, both calls: project 0.64, embed 1.27, weight 0.77 ms (0.65, 1.30, 0.79 with 32 nodes); at
    C = 32 0.46, 1.12, 0.65 with 32 nodes (0.45, 1.15, 0.69).
    """
    columns = attribute_columns(attributes)
    padded = max(PRODUCT, min(next_power_of_two(channels), 64, 4096 // columns))
    stages = 3 if channels <= padded else 1  # all parts of a row are in flight together
    if padded >= 64 and columns <= 32:
        return ContractionTile(64, 2, padded, columns, num_warps=4, num_stages=stages)
    nodes = 32 if columns <= 128 else 16
    return ContractionTile(nodes, 4, padded, columns, num_warps=2 if columns <= 32 else 4, num_stages=stages)
