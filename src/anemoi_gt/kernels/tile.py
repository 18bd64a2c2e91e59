"""How much of the problem one program holds on chip. The only place that chooses tile shapes.

Shapes follow from sizes and from what the device is, never from a clock, so a program gives the same bits on every run. For
each kernel there is a rule, what sweeps over heads, nodes, warps and unrolling gave on one H200 (bf16, H = 16, C = 32 and 64, the
encoder, processor and decoder of N320 with icosphere 6, where no other graph is named): one node a program and all heads in it; few
warps where a row is reduced, more where it is only summed; several nodes a program where a node has one or two edges. For kernels that
gather rows, `anemoi_gt.kernels.score` predicts times of all tiles, which `explain` tells: on other shapes, dtypes and devices than those
of the sweeps, a tile that is predicted to be much faster may be. The prediction alone does not find the tiles that were measured best,
so it decides only where the rule's tile would spill. For contractions the sweeps differ by 2%, far less than predictions are worth.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

from anemoi_gt.kernels.score import (
    BUSY_DEGREE,
    DESTINATIONS,
    FORWARD,
    H200,
    PRODUCT,
    SOURCES,
    Choice,
    ContractionTile,
    Device,
    RowTile,
    Shape,
    rank_contractions,
    settle,
)

ROW_ELEMENTS = 1024  # heads x channels that a program holds: 32 numbers for each thread of a warp
MOST_ATTRIBUTES = 256  # columns of W for which a program's arrays fit the registers and the shared memory of every GPU
MOST_NUMBERS, FEWEST_NUMBERS = 32, 4  # of a row that a thread holds
FEWER = 4  # least part of the heads that fit a program: rows of few heads are read at a fraction of the speed
KEPT = 128  # choices of each kernel that are kept


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is not below `n` >= 1."""
    return 1 << (n - 1).bit_length()


def _row(shape: Shape) -> tuple[int, int]:
    """Heads of a program and padded channels, so that neither array of it passes ROW_ELEMENTS."""
    padded = next_power_of_two(shape.channels)
    widest = max(padded, attribute_columns(shape.attributes) if shape.attributes else 1)
    return min(next_power_of_two(shape.heads), max(1, ROW_ELEMENTS // widest)), padded


@lru_cache(KEPT)
def forward_choice(shape: Shape, device: Device = H200) -> Choice:
    """Tile of the forward pass over destinations.

    Measured: encoder 0.91, processor 0.27, decoder 1.55 ms at C = 64 with one warp and one edge in flight (two warps 1.01,
    0.29, 1.66); at C = 32 two edges in flight give 0.50, 0.16 where degrees are high (one: 0.52, 0.17), decoder 0.97.
    """
    group, padded = _row(shape)
    unroll = 2 if group * padded < ROW_ELEMENTS and shape.degree >= BUSY_DEGREE else 1
    rule = RowTile(group, padded, unroll, _warps(group * padded, 1))
    return settle(FORWARD, shape, rule, row_tiles(shape, (1,)), device)


@lru_cache(KEPT)
def destination_choice(shape: Shape, device: Device = H200) -> Choice:
    """Tile of the backward pass over destinations.

    Measured: encoder 1.05, processor 0.32 ms at C = 64 with two warps and two edges in flight (one and one: 1.12, 0.33),
    decoder 1.68 with one and one; at C = 32 encoder 0.64, processor 0.19, decoder 0.98 with one and one.
    """
    group, padded = _row(shape)
    pair = 2 if group * padded >= ROW_ELEMENTS and shape.degree >= BUSY_DEGREE else 1
    rule = RowTile(group, padded, pair, _warps(group * padded, pair))
    return settle(DESTINATIONS, shape, rule, row_tiles(shape, (1,)), device)


@lru_cache(KEPT)
def source_choice(shape: Shape, device: Device = H200) -> Choice:
    """Tile of the backward pass over sources; `shape.attributes` is 0, for they are not its work.

    Measured: decoder 0.73, processor 0.18 ms with one source, four edges in flight; encoder, whose sources have 1.6 edges,
    0.58 with four sources and two edges.
    """
    group, padded = _row(shape)
    nodes, unroll = (1, 4) if shape.degree >= BUSY_DEGREE else (4, 2)
    rule = RowTile(group, padded, unroll, _warps(group * padded, group * padded // 256), nodes)
    return settle(SOURCES, shape, rule, row_tiles(shape, (1, 2, 4) if shape.degree < BUSY_DEGREE else (1,)), device)


def row_tiles(shape: Shape, nodes: tuple[int, ...]) -> Iterator[RowTile]:
    """Yield the tiles that a kernel which gathers rows can have, with these numbers of nodes a program."""
    most, padded = _row(shape)
    for heads, warps, unroll, number in product((most, most // 2, most // FEWER), (1, 2, 4, 8), (1, 2, 4), nodes):
        if FEWEST_NUMBERS * 32 * warps <= heads * padded <= MOST_NUMBERS * 32 * warps:
            yield RowTile(heads, padded, unroll, warps, number)


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


def contraction_choice(shape: Shape, traffic: tuple[int, int], device: Device = H200) -> Choice:
    """`contraction_tile` and what is predicted of it and of others, for a kernel with so many rows and sums a node."""
    rule = contraction_tile(shape.channels, shape.attributes)
    return rank_contractions(shape, traffic, rule, contraction_tiles(rule), device)


def contraction_tiles(rule: ContractionTile) -> Iterator[ContractionTile]:
    """Yield the tiles that a contraction can have beside that of its rule, whose parts of a row they share."""
    stages = sorted({1, rule.num_stages})
    for nodes, tiles, warps, stage in product((16, 32, 64, 128), (1, 2, 4, 8), (2, 4, 8), stages):
        yield ContractionTile(nodes, tiles, rule.channels, rule.attributes, warps, stage)
