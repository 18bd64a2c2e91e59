"""How much of the problem one program holds on chip. The only place that chooses tile shapes.

Shapes follow from sizes alone, never from a clock, so a program gives the same bits on every run. The rules are what a sweep
over heads, nodes, warps and unrolling gave on one H200 (bf16, H = 16, C = 32 and 64, the encoder, processor and decoder of
O320 with icosphere 6): one node a program and all heads in it; few warps where a row is reduced, more where it is only
summed; several nodes a program where a node has one or two edges.
"""

from dataclasses import dataclass

ROW_ELEMENTS = 1024  # heads x channels that a program holds: 32 numbers for each thread of a warp
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

    Measured: encoder 0.70, processor 0.30 ms with two warps at C = 64 (0.77, 0.31 with one); decoder 1.23 with one. Before the
    scores had an array of their own; with it two warps give 0.89 and 0.35 (benchmarks/NOTES.md, 5).
    """
    group, padded = _row(heads, channels, attributes)
    warps = 2 if group * padded >= ROW_ELEMENTS and degree >= BUSY_DEGREE else 1
    return RowTile(group, padded, 1, _warps(group * padded, warps))


def destination_tile(heads: int, channels: int, degree: float, attributes: int) -> RowTile:
    """Tile of the backward pass over destinations.

    Measured: encoder 0.83, processor 0.36 ms with two edges in flight at C = 64 (0.95, 0.40 with one); at C = 32 one edge.
    """
    group, padded = _row(heads, channels, attributes)
    unroll = 2 if group * padded >= ROW_ELEMENTS and degree >= BUSY_DEGREE else 1
    return RowTile(group, padded, unroll, _warps(group * padded, 1))


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
    return max(16, next_power_of_two(max(1, attributes)))


def attribute_warps(heads: int, attributes: int) -> int:
    """Warps of the backward pass over attributes, which holds four arrays [heads, attributes]."""
    return _warps(next_power_of_two(heads) * attribute_columns(attributes), 1)


def _warps(elements: int, wanted: int) -> int:
    """At least `wanted`, and so many that a thread holds at most 32 numbers of a row; at most 8."""
    return max(1, min(8, max(wanted, elements // ROW_ELEMENTS)))


def contraction_tile(channels: int, attributes: int) -> ContractionTile:
    """Tile of a product of rows of `channels` with a weight of `attributes` columns; it fits the shared memory.

    Measured, decoder at C = 64: project 0.27, embed 0.51 ms (0.59, 0.66 with the weight read for every tile).
    """
    columns = attribute_columns(attributes)
    padded = max(16, min(next_power_of_two(channels), 64, 4096 // columns))
    return ContractionTile(nodes=32, tiles=4, channels=padded, attributes=columns, num_warps=2 if columns <= 32 else 4)
