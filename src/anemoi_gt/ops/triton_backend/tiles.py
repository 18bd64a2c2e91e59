"""How much of the problem one program holds on chip. The only place that chooses tile shapes.

Shapes follow from sizes and from what the device is, never from a clock, so a program gives the same bits on every run. For
each kernel there is a rule, what sweeps over warps, edges in flight, pairs and nodes gave on one H200 (bf16, H = 16, C = 32 and 64,
D = 11 with a bias, the encoder, processor and decoder of N320 with icosphere 6, where no other graph is named): all heads in a program;
one warp where a row is reduced, more where it is only summed; several nodes a program where a node has one or two edges. For
kernels that gather rows, each tile of a rule is within 2% of the best that was measured, and `anemoi_gt.ops.triton_backend.tile_score` predicts times of
all tiles, which `explain` tells: on other shapes, dtypes and devices than those of the sweeps, a tile that is predicted to be much
faster may be. The prediction alone does not find the tiles that were measured best, so it decides only where the rule's tile
would spill. Contractions are predicted at the speed of the memory whatever their tile, so their rules stand too.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product

from anemoi_gt.ops.triton_backend.tile_score import (
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
MANY_DEGREE = 16  # mean degree from which edges left over from a round do not count
FLIGHT = 6144  # bytes of rows in flight that the registers of a warp have room for
FEWER = 4  # least part of the heads that fit a program: rows of few heads are read at a fraction of the speed
MOST_WARPS = 8  # of a program
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

    Measured, with one warp and pairs: encoder 0.770, processor 0.239 ms at C = 64 with three edges in flight (one: 1.005, 0.268),
    decoder 1.553 with one (three: 1.625). At C = 32 processor 0.138, decoder 0.919 with three (one: 0.157, 0.946), encoder 0.411 with
    four and without pairs (with: 0.435; three with: 0.453).
    """
    group, padded = _row(shape)
    warps = _warps(group * padded, 1)
    in_flight = shape.degree >= BUSY_DEGREE or group * padded < ROW_ELEMENTS
    unroll = _unroll(shape, group * padded / warps) if in_flight else 1
    rule = RowTile(group, padded, unroll, warps, pairs=shape.pairs_possible and unroll < 4)
    return settle(FORWARD, shape, rule, row_tiles(shape, (1,)), device)


@lru_cache(KEPT)
def destination_choice(shape: Shape, device: Device = H200) -> Choice:
    """Tile of the backward pass over destinations.

    Measured, with one warp and pairs: encoder 0.794 ms at C = 64 with three edges in flight, 0.420 at C = 32 with four (one edge:
    0.986, 0.566); processor 0.245, 0.135 with three (one: 0.290, 0.164); decoder 1.576, 0.880 with one (three: 1.574, 0.938).
    """
    group, padded = _row(shape)
    warps = _warps(group * padded, 1)
    unroll = _unroll(shape, group * padded / warps) if shape.degree >= BUSY_DEGREE else 1
    rule = RowTile(group, padded, unroll, warps, pairs=shape.pairs_possible)
    return settle(DESTINATIONS, shape, rule, row_tiles(shape, (1,)), device)


@lru_cache(KEPT)
def source_choice(shape: Shape, device: Device = H200) -> Choice:
    """Tile of the backward pass over sources; `shape.attributes` is 0, for they are not its work.

    Measured: decoder 1.023 ms at C = 64, 0.525 at C = 32 with four warps (two: 1.382, 0.617), processor 0.178 with four (two: 0.229),
    at C = 32 0.098 with two (four: 0.122); four edges in flight where a thread holds 8 numbers of a row, two where it holds 4.
    Encoder, whose sources have 1.6 edges: 0.689, 0.358 with four sources and one edge (one source: 0.853, 0.447).
    """
    group, padded = _row(shape)
    elements = group * padded
    if shape.degree < BUSY_DEGREE:
        rule = RowTile(group, padded, 1, _warps(elements, elements // 512), 4)
        return settle(SOURCES, shape, rule, row_tiles(shape, (1, 2, 4)), device)
    wanted = min(4, elements // 128) if shape.degree >= MANY_DEGREE else elements // 256
    warps = _warps(elements, wanted)
    rule = RowTile(group, padded, 4 if elements // warps >= 256 else 2, warps)
    return settle(SOURCES, shape, rule, row_tiles(shape, (1,)), device)


def row_tiles(shape: Shape, nodes: tuple[int, ...]) -> Iterator[RowTile]:
    """Yield the tiles that a kernel which gathers rows can have, with these numbers of nodes a program."""
    most, padded = _row(shape)
    pairs = (False, True) if shape.pairs_possible else (False,)
    groups = (most, most // 2, most // FEWER)
    for heads, warps, unroll, number, paired in product(groups, (1, 2, 4, 8), (1, 2, 3, 4), nodes, pairs):
        if FEWEST_NUMBERS * 32 * warps <= heads * padded <= MOST_NUMBERS * 32 * warps:
            yield RowTile(heads, padded, unroll, warps, number, paired)


def _unroll(shape: Shape, elements: float) -> int:
    """Edges in flight, so many that a warp which holds `elements` numbers of a row has registers for them.

    Three divide the 6 edges of most nodes of a mesh, of which four leave two that are taken one by one.
    """
    wanted = 4 if shape.degree >= MANY_DEGREE else 3
    return max(1, min(wanted, int(FLIGHT // (elements * shape.itemsize))))


def equal_tile(shape: Shape, degree: int) -> RowTile | None:
    """Tile of the kernels for one small degree, with all heads and all edges of a destination in one program; None: not for them.

    A thread holds at most 32 numbers of a row, of 2 `degree` rows, which for 4 edges are 168 registers without spills.
    """
    heads, padded = next_power_of_two(shape.heads), next_power_of_two(shape.channels)
    widest = heads * max(padded, attribute_columns(shape.attributes) if shape.attributes else 1)
    if not 1 <= degree <= BUSY_DEGREE or widest > MOST_WARPS * ROW_ELEMENTS:
        return None
    return RowTile(heads, padded, degree, max(1, widest // ROW_ELEMENTS))


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


def project_tile(channels: int, attributes: int) -> ContractionTile:
    """Tile of `project`; it fits the shared memory, as those of the other contractions do.

    Measured: decoder 0.318 ms at C = 64, 0.224 at C = 32, within 5% of the best.
    """
    columns = attribute_columns(attributes)
    padded = max(PRODUCT, min(next_power_of_two(channels), 64, 4096 // columns))
    stages = 3 if channels <= padded else 1  # all parts of a row are in flight together
    if padded >= 64 and columns <= 32:
        return ContractionTile(64, 2, padded, columns, num_warps=4, num_stages=stages)
    nodes = 32 if columns <= 128 else 16
    return ContractionTile(nodes, 4, padded, columns, num_warps=2 if columns <= 32 else 4, num_stages=stages)


def embed_tile(channels: int, attributes: int) -> ContractionTile:
    """Tile of `embed`.

    Measured: decoder 0.616, encoder 0.049 ms at C = 64 (with the tile of `project`: 0.635, 0.056); 0.388 and 0.032 at C = 32 with
    64 nodes and 8 warps (4 warps: 0.509, 0.036; 128 nodes, 8 warps: 0.510, 0.033; 128 nodes, 4 warps: 0.441, 0.032).
    """
    tile = project_tile(channels, attributes)
    if tile.attributes > 32 or channels > tile.channels:
        return tile
    if tile.channels >= 64:
        return replace(tile, tiles=1, num_stages=1)
    return replace(tile, nodes=64, tiles=1, num_warps=8, num_stages=1)


def weight_tile(channels: int, attributes: int) -> ContractionTile:
    """Tile of the gradient of W, of which a program takes many.

    Measured with heads as the fast axis and 33 programs a head: decoder 0.641, encoder 0.055 ms at C = 64 (64 programs, heads the slow
    axis: 0.828, 0.066). At C = 32 with two warps 0.523, 0.041 (four: 0.549, 0.041; 128 nodes, two: 0.465, 0.050, which costs 16
    layers of a processor what it spares a decoder).
    """
    tile = project_tile(channels, attributes)
    if tile.attributes > 32 or channels > tile.channels:
        return tile
    if tile.channels >= 64:
        return replace(tile, nodes=64, num_warps=4, num_stages=2)
    return replace(tile, nodes=64, num_warps=2, num_stages=4)


CONTRACTIONS = {
    "project": (project_tile, (1, 1)),
    "embed": (embed_tile, (2, 1)),
    "weight": (weight_tile, (2, 2)),
}  # rows, sums


def contraction_choice(shape: Shape, kernel: str, device: Device = H200) -> Choice:
    """Tile of a contraction, "project", "embed" or "weight", and what is predicted of it and of others."""
    rule_of, traffic = CONTRACTIONS[kernel]
    rule = rule_of(shape.channels, shape.attributes)
    return rank_contractions(shape, traffic, rule, contraction_tiles(rule), device)


def contraction_tiles(rule: ContractionTile) -> Iterator[ContractionTile]:
    """Yield the tiles that a contraction can have beside that of its rule, whose parts of a row they share."""
    stages = sorted({1, rule.num_stages})
    for nodes, tiles, warps, stage in product((16, 32, 64, 128), (1, 2, 4, 8), (2, 4, 8), stages):
        yield ContractionTile(nodes, tiles, rule.channels, rule.attributes, warps, stage)
