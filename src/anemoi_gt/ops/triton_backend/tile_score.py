"""How long a kernel would take with a tile: the only place that predicts times. No tensors, no clock.

Of a node with d edges, H heads of C channels in s bytes, and a tile of `heads` heads, w warps, U edges in flight, with

    x = heads C / (lanes w)             numbers of a row that a thread holds
    P                                   programs of a processor: as many as registers, warps and slots allow
    I = fixed + fixed_number x + d (per_edge + per_number x) + attributes       instructions of a warp
    steps = (d - left) / U + left       rounds of a loop that takes U edges at a time, and what is left one by one;
                                        left is d mod U where d is a whole number, else its mean, (U - 1) / 2
    fetches = 1 + (readers - 1) F / (F + 110 MB),       F = P processors d rows chunk

three things bound the time, and the longest counts most (a norm of order 2.7):

    issue       H / heads  w I / (schedulers clock processors)
    latency     H / heads  (1600 / nodes + sweeps steps 750 + 3.2 I) / (P clock processors)         cycles
    memory      (sweeps rows s H C d fetches / readers (1 + 128 / chunk) + 2 s H C + edge bytes) / bandwidth

where chunk = heads C s bytes lie together, a row has `readers` edges, and comes from memory `fetches` times: the more bytes of rows
F are asked for at the same time, the later the next reader of a row finds it gone. More programs hide more latency and miss more.

Where the numbers are from. Instructions and registers are fits to what ptxas makes of 216 kernels for sm_90 (1, 2, 4 warps; 1, 2, 3,
4 edges; numbers and pairs; C = 32, 64; bf16, D = 11): 6% off in the root mean square, at most 18%; registers at most 24 off, 8 in 94%.
128 bytes: rows of one head, 128 bytes, are read at half the speed. Numbers of 32 bits are assumed to take half as many instructions
again. The 750 cycles of a round, 3.2 of an instruction that the next one waits for, 1600 of a start, the 110 MB and the 2.7 are the
best fit to 282 times in benchmarks/results/row_tiles_h200.json, those of tiles that can be chosen, from which the prediction is 10%
off (root mean square; at most 36%, more than 25% in 5). What it cannot see is in which order ptxas loads and computes: with two
edges in flight and 32 numbers a thread, the backward pass over destinations takes 36 and 48% longer than is predicted.
Of the tiles that were measured, predictions by themselves would take one within 2% of the best in 11 of the 18 cases of the
sweeps, and one up to 16% slower in the others. So `settle` keeps the rule that the sweeps gave, against which no other tile is
predicted to gain 7%; where a prediction of more than that stands against it, on shapes that were not swept, `benchmarks/tiles.py`
can decide.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

LOAD = 750  # cycles of a round: an index, and the row where it points
DEPENDENCY = 3.2  # cycles of an instruction that the next one waits for
START = 1600  # cycles until a program is under way
CACHE = 110e6  # bytes of rows in flight at which half of the readers of a row come too late to find it in a cache
APART = 128  # bytes that could have been fetched where a chunk begins or ends
ROWS_NORM, CONTRACTIONS_NORM = 2.7, 6  # the higher, the less the shorter bounds count
TILE_REGISTERS = 255  # of a thread; more are spilled to memory
SLOTS = 32  # programs of a processor at most
PRODUCT = 16  # smallest inner size of a matrix product
BUSY_DEGREE = 4  # mean degree from which the edges of one node keep a program busy


class Device(NamedTuple):
    """What decides about tiles of a GPU; the default is an H200."""

    processors: int = 132
    registers: int = 65536  # of a processor, 32 bits each
    warps: int = 64  # of a processor
    lanes: int = 32  # threads of a warp
    shared: int = 232448  # bytes that a program may have
    clock: float = 1.755e9
    bandwidth: float = 4.27e12  # bytes per second of a copy


H200 = Device()
SCHEDULERS = 4  # of a processor


class Shape(NamedTuple):
    """What a kernel that gathers rows is asked to do, by the node."""

    heads: int
    channels: int
    attributes: int  # columns of W, the bias among them; 0 without raw attributes
    degree: float  # mean number of edges of a node whose edges a program walks
    readers: float  # mean number of edges that read a row
    itemsize: int  # bytes of a number
    pairs_possible: bool = False  # whether the kernel can read two numbers of a row as one of 32 bits


@dataclass(frozen=True)
class RowTile:
    """Shape of one program of a kernel that walks edges and gathers rows of heads x channels."""

    heads: int  # heads of a program, a power of two
    channels: int  # channels padded to a power of two
    unroll: int  # edges whose rows are in flight together
    num_warps: int
    nodes: int = 1  # nodes that a program takes one after the other
    pairs: bool = False  # whether rows are read as pairs of bfloat16


@dataclass(frozen=True)
class ContractionTile:
    """Shape of one program of a kernel that contracts over the attributes."""

    nodes: int  # nodes of a tile
    tiles: int  # tiles that a program takes one after the other, with the weight read once
    channels: int
    attributes: int  # attributes padded to a power of two, at least 16 for a matrix product
    num_warps: int
    num_stages: int  # tiles in flight


Tile = RowTile | ContractionTile


class Work(NamedTuple):
    """What a kernel does at a node, at each of its edges, and at each number of a row that a thread holds."""

    fixed: float  # instructions of a warp at a node
    fixed_number: float
    per_edge: float  # instructions of a warp at an edge
    per_number: tuple[float, float]  # of a row that is read by numbers, by pairs
    attribute: tuple[float, float]  # instructions of a warp for the attributes of an edge: always, for each number of u
    attribute_product: tuple[float, float]  # the same of a product of 16 edges
    sweeps: int  # times that it walks the edges, waiting for rows at each
    rows: int  # rows that it gathers at an edge of a sweep
    registers: tuple[float, float, float]  # of a thread: always, for each number, for each 16-bit number in flight
    edge_bytes: int  # of [E, H] arrays that it reads and writes, for each head


FORWARD = Work(380, 11.3, 38, (7.8, 6.7), (30, 14.6), (50, 29.5), 2, 1, (22, 1.6, 0.5), 10)
DESTINATIONS = Work(210, 4.7, 59, (8.3, 7.0), (19, 9.2), (13, 11.0), 2, 1, (32.5, 1.0, 0.65), 18)
SOURCES = Work(100, 4.0, 12, (7.0, 7.0), (0, 0), (0, 0), 1, 2, (20, 2.7, 0.25), 4)


class Scored(NamedTuple):
    """A tile and the seconds that its kernel is predicted to take at a node, the whole device at work; inf: it cannot run."""

    tile: Tile
    seconds: float


class Choice(NamedTuple):
    """The tile that is taken, and the others, best first."""

    chosen: Scored
    others: tuple[Scored, ...]


def registers(work: Work, shape: Shape, tile: RowTile, device: Device) -> int:
    """Registers of a thread, in the steps in which they are given out."""
    held = tile.heads * tile.channels / (device.lanes * tile.num_warps)
    always, number, flight = work.registers
    return -int(-(always + number * held + flight * held * tile.unroll * shape.itemsize / 2) // 8) * 8


def programs(work: Work, shape: Shape, tile: RowTile, device: Device) -> int:
    """Programs of a processor that run at the same time; 0: it cannot run without spilling."""
    each = registers(work, shape, tile, device)
    if each > TILE_REGISTERS:
        return 0
    return min(SLOTS, device.warps // tile.num_warps, device.registers // (each * device.lanes * tile.num_warps))


def steps(degree: float, unroll: int) -> float:
    """Rounds of a loop that takes `unroll` edges at a time, and edges that are left one by one.

    A mean degree that is a whole number is taken for the degree of every node; else any number of edges is left as often as another.
    """
    left = degree % unroll if degree == int(degree) else min(degree, (unroll - 1) / 2)
    return (degree - left) / unroll + left


def predict(work: Work, shape: Shape, tile: RowTile, device: Device) -> float:
    """Seconds at a node, the whole device at work; inf where a program would spill registers.

    Parameters
    ----------
    work : Work
        Of the kernel.
    shape : Shape
    tile : RowTile
    device : Device
    """
    parallel = programs(work, shape, tile, device)
    if parallel == 0:
        return inf
    degree, groups = shape.degree, -(-shape.heads // tile.heads)
    instructions = _instructions(work, shape, tile, device)
    latency = START / tile.nodes + work.sweeps * steps(degree, tile.unroll) * LOAD + DEPENDENCY * instructions
    row, chunk = (shape.itemsize * heads * shape.channels for heads in (shape.heads, min(shape.heads, tile.heads)))
    in_flight = parallel * device.processors * degree * work.rows * chunk
    readers = max(shape.readers, 1.0)
    fetches = 1 + (readers - 1) * in_flight / (in_flight + CACHE)
    gathered = work.sweeps * work.rows * row * degree * fetches / readers * (1 + APART / chunk)
    moved = gathered + 2 * row + degree * shape.heads * work.edge_bytes
    cycles = device.clock * device.processors
    bounds = (
        groups * tile.num_warps * instructions / (SCHEDULERS * cycles),
        groups * latency / (parallel * cycles),
        moved / device.bandwidth,
    )
    return _together(bounds, ROWS_NORM)


def _instructions(work: Work, shape: Shape, tile: RowTile, device: Device) -> float:
    """Instructions of a warp at a node."""
    held = tile.heads * tile.channels / (device.lanes * tile.num_warps)
    wide = shape.itemsize / 2  # loads of 32-bit numbers are twice as many
    number = work.per_number[tile.pairs] * (1 + wide) / 2
    instructions = work.fixed + work.fixed_number * held + shape.degree * (work.per_edge + number * held)
    if shape.attributes:
        times, cost = shape.degree, work.attribute
        if shape.degree >= BUSY_DEGREE:
            times, cost = -(-shape.degree // PRODUCT), work.attribute_product
        columns = tile.heads * max(PRODUCT, shape.attributes)
        instructions += times * (cost[0] + cost[1] * max(1.0, columns / (device.lanes * tile.num_warps)))
    return instructions


def settle(work: Work, shape: Shape, rule: RowTile, candidates: Iterable[RowTile], device: Device) -> Choice:
    """Take the rule's tile, and rank the others behind it; where it cannot run, the best of them.

    Ties are broken by the order of the candidates, so equal arguments give equal tiles.
    """
    own = Scored(rule, predict(work, shape, rule, device))
    ranked = [Scored(tile, predict(work, shape, tile, device)) for tile in candidates if tile != rule]
    ranked.sort(key=lambda scored: scored.seconds)
    if ranked and own.seconds == inf > ranked[0].seconds:
        return Choice(ranked[0], (*ranked[1:], own))
    return Choice(own, tuple(ranked))


def rank_contractions(
    shape: Shape,
    traffic: tuple[int, int],
    rule: ContractionTile,
    candidates: Iterable[ContractionTile],
    device: Device,
) -> Choice:
    """Take `rule`, and rank the others behind it.

    Of a node, of which `traffic` = (rows, sums) says how many rows [H, C] and arrays [H, columns] come in or go out:

        memory      rows s H C + sums s H columns, over the bandwidth
        access      three times these bytes, which pass the shared memory, and the weight, one number a thread, shared out among
                    the nodes of a program; 128 bytes a cycle and processor
        latency     (start + 500 (1 + tiles / stages)) / (nodes tiles P clock processors), for each head

    Measured at C = 64 (decoder): 95% of the cycles of the load-store unit and 91% of the memory's speed for `project`. So all
    tiles of some size are predicted alike. Where rows are short they are not: at C = 32 sweeps found 0.40 to 0.55 ms for `embed`, which
    this does not see, and the rule is not overruled.
    """
    own, *ranked = (
        Scored(tile, _predict_contraction(shape, traffic, tile, device))
        for tile in (rule, *(tile for tile in candidates if tile != rule))
    )
    return Choice(own, tuple(sorted(ranked, key=lambda scored: scored.seconds)))


def _predict_contraction(shape: Shape, traffic: tuple[int, int], tile: ContractionTile, device: Device) -> float:
    """Seconds at a node; inf where the tiles in flight do not fit the shared memory."""
    rows, sums = traffic
    each = shape.itemsize * (rows * shape.channels + sums * tile.attributes)  # bytes of a head
    shared = tile.num_stages * tile.nodes * (tile.channels + tile.attributes) * 4
    if shared > device.shared:
        return inf
    parallel = max(1, min(SLOTS, device.warps // tile.num_warps, device.shared // max(shared, 1)))
    together = tile.nodes * tile.tiles
    weight = shape.channels * shape.attributes * 4  # a warp loads lanes numbers at once, whatever their size
    cycles = device.clock * device.processors
    latency = START + LOAD * (1 + tile.tiles / tile.num_stages)
    bounds = (
        each / device.bandwidth,
        (3 * each + weight / together) / (128 * cycles),
        latency / (together * parallel * cycles),
    )
    return shape.heads * _together(bounds, CONTRACTIONS_NORM)


def _together(bounds: tuple[float, ...], norm: float) -> float:
    """What several bounds make: the longest, and more where others come close."""
    longest = max(bounds)
    return longest * sum((bound / longest) ** norm for bound in bounds) ** (1 / norm)
