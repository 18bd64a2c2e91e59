"""Tile shapes: what one program of each kernel holds on chip.

A heuristic chooses each tile from the sizes of the problem alone, never from a clock, so equal
sizes give the same bits on every run and device. It is what sweeps over warps, unroll, packed pairs
and nodes found fastest on one H200 (bf16, H = 16, C = 32 and 64, D = 11 with a bias; encoder,
processor and decoder of N320 with icosphere 6 where no other graph is named): all heads in one
program; one warp where a row is reduced, more where it is only summed; several nodes a program
where a node has one or two edges. Each tile of the row kernels is within 2% of the fastest that was
measured. On other shapes, `benchmarks/tiles.py` searches.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

PRODUCT = 16  # smallest inner size of a matrix product
BUSY_DEGREE = 4  # mean degree from which the edges of one node keep a program busy
MANY_DEGREE = 16  # mean degree from which the remainder of an unrolled loop does not count
ROW_ELEMENTS = 1024  # heads x channels that a program holds: 32 elements in each thread of a warp
# columns of W for which a program's arrays fit the registers and the shared memory of every GPU
MAX_ATTRIBUTES = 256
FLIGHT_BYTES = 6144  # bytes of rows in flight for which a warp has registers
MAX_WARPS = 8  # of a program
# elements of segments' results that a program reads together, and columns: a sector
JOINED, JOINED_COLUMNS = (
    1024,
    8,
)
STATISTICS = 512  # segments whose statistics a program reads together
PARTS, SUMMED = 16, 256  # partial sums of dW, and elements of it, that a program adds at a time
CACHED_TILES = 128  # choices of each kernel that are cached


class Shape(NamedTuple):
    """Sizes that decide the tile of a kernel which gathers rows."""

    heads: int
    channels: int
    attributes: int  # columns of W, the bias among them; 0 without raw attributes
    degree: float  # mean number of edges of a node whose edges a program walks
    itemsize: int  # bytes of an element
    pairs_possible: bool = (
        False  # the kernel can read two 16-bit elements of a row as one of 32 bits
    )


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
    attributes: int  # attributes padded to a power of two, at least 16 for a matrix product
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

    Measured, with one warp and pairs: encoder 0.770, processor 0.239 ms at C = 64 with unroll 3 (1:
    1.005, 0.268), decoder 1.553 with 1 (3: 1.625). At C = 32 processor 0.138, decoder 0.919 with 3
    (1: 0.157, 0.946), encoder 0.411 with 4 and without pairs (with: 0.435; 3 with: 0.453).
    """
    group, padded = held_by_program(shape)
    warps = _warps(group * padded, 1)
    in_flight = shape.degree >= BUSY_DEGREE or group * padded < ROW_ELEMENTS
    unroll = _unroll(shape, group * padded / warps) if in_flight else 1
    return RowTile(group, padded, unroll, warps, pairs=shape.pairs_possible and unroll < 4)


@lru_cache(CACHED_TILES)
def destination_tile(shape: Shape) -> RowTile:
    """Return the tile of the backward pass over destinations.

    Measured, with one warp and pairs: encoder 0.794 ms at C = 64 with unroll 3, 0.420 at C = 32
    with 4 (1: 0.986, 0.566); processor 0.245, 0.135 with 3 (1: 0.290, 0.164); decoder 1.576, 0.880
    with 1 (3: 1.574, 0.938).
    """
    group, padded = held_by_program(shape)
    warps = _warps(group * padded, 1)
    unroll = _unroll(shape, group * padded / warps) if shape.degree >= BUSY_DEGREE else 1
    return RowTile(group, padded, unroll, warps, pairs=shape.pairs_possible)


@lru_cache(CACHED_TILES)
def source_tile(shape: Shape) -> RowTile:
    """Return the tile of the backward pass over sources, whose `shape.attributes` is 0.

    Measured: decoder 1.023 ms at C = 64, 0.525 at C = 32 with four warps (two: 1.382, 0.617),
    processor 0.178 with four (two: 0.229), at C = 32 0.098 with two (four: 0.122); unroll 4 where a
    thread holds 8 elements of a row, 2 where it holds 4. Encoder, whose sources have 1.6 edges:
    0.689, 0.358 with four sources a program and unroll 1 (one source: 0.853, 0.447).
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

    A program holds all heads and all edges of a destination; a thread at most 32 elements of a row,
    of 2 `degree` rows, which for 4 edges are 168 registers without spills.
    """
    heads, padded = next_power_of_two(shape.heads), next_power_of_two(shape.channels)
    widest = heads * max(padded, attribute_columns(shape.attributes) if shape.attributes else 1)
    if not 1 <= degree <= BUSY_DEGREE or widest > MAX_WARPS * ROW_ELEMENTS:
        return None
    return RowTile(heads, padded, degree, max(1, widest // ROW_ELEMENTS))


def attribute_columns(attributes: int) -> int:
    """Return the columns of attribute arrays: a power of two, at least 16 for matrix products."""
    return max(PRODUCT, next_power_of_two(max(1, attributes)))


def attribute_edges(degree: float) -> int:
    """Return the edges of an attribute tile over destinations: 1, or a matrix product's.

    Measured: with a product, the forward of the processor takes 0.28 ms, down from 0.35, but the
    decoder's 1.71, up from 1.55.
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

    Measured: decoder 0.318 ms at C = 64, 0.224 at C = 32, within 5% of the best.
    """
    columns = attribute_columns(attributes)
    padded = max(PRODUCT, min(next_power_of_two(channels), 64, 4096 // columns))
    stages = 3 if channels <= padded else 1  # a row is in flight as a whole
    if padded >= 64 and columns <= 32:
        return ContractionTile(64, 2, padded, columns, num_warps=4, num_stages=stages)
    nodes = 32 if columns <= 128 else 16
    return ContractionTile(
        nodes, 4, padded, columns, num_warps=2 if columns <= 32 else 4, num_stages=stages
    )


def embed_tile(channels: int, attributes: int) -> ContractionTile:
    """Return the tile of `embed`.

    Measured: decoder 0.616, encoder 0.049 ms at C = 64 (with the tile of `project`: 0.635, 0.056);
    0.388 and 0.032 at C = 32 with 64 nodes and 8 warps (4 warps: 0.509, 0.036; 128 nodes, 8 warps:
    0.510, 0.033; 128 nodes, 4 warps: 0.441, 0.032).
    """
    tile = project_tile(channels, attributes)
    if tile.attributes > 32 or channels > tile.channels:
        return tile
    if tile.channels >= 64:
        return replace(tile, tiles=1, num_stages=1)
    return replace(tile, nodes=64, tiles=1, num_warps=8, num_stages=1)


def weight_tile(channels: int, attributes: int) -> ContractionTile:
    """Return the tile of the gradient of W, of which a program takes many.

    Measured with heads as the fast axis and 33 programs a head: decoder 0.641, encoder 0.055 ms at
    C = 64 (64 programs, heads the slow axis: 0.828, 0.066). At C = 32 with two warps 0.523, 0.041
    (four: 0.549, 0.041; 128 nodes, two: 0.465, 0.050, which costs 16 layers of a processor what it
    saves a decoder).
    """
    tile = project_tile(channels, attributes)
    if tile.attributes > 32 or channels > tile.channels:
        return tile
    if tile.channels >= 64:
        return replace(tile, nodes=64, num_warps=4, num_stages=2)
    return replace(tile, nodes=64, num_warps=2, num_stages=4)
