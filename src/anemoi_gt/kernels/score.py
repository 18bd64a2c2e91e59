"""How long a kernel would take with a tile: the only place that predicts times. No tensors, no clock.

Of a node with d edges, H heads of C channels in s bytes, and a tile of `heads` heads, w warps, U edges in flight, with

    x = heads C / (lanes w)             numbers of a row that a thread holds
    P                                   programs of a processor: as many as registers, warps and slots allow
    I = fixed + d (per_edge + per_number x) + attributes        instructions of a warp
    steps = min(d, d / U + (U - 1) / 2) rounds of a loop that takes U edges at a time, and what is left one by one

three things bound the time, and the longest counts most (a norm of order 6):

    issue       H / heads  w I / (schedulers clock processors)
    latency     H / heads  (start / nodes + sweeps steps 500 + 7 I) / (P clock processors)          cycles
    memory      (sweeps rows s H C d min(1, 1.5 / readers) (1 + 128 / chunk) + 2 s H C + edge bytes) / bandwidth

where chunk = heads C s bytes lie together, and a row has `readers` edges, most of which find it in a cache.

Where the numbers are from. Instructions and registers are fits to what ptxas makes of the kernels for sm_90 (1, 2, 4, 8 warps;
1, 2, 4 edges; C = 32, 64; bf16, D = 11). 128 bytes: rows of one head, 128 bytes, are read at half the speed. 1.5: bytes of DRAM counted
on an H200 (benchmarks/NOTES.md, "What bounds each kernel"). Numbers of 32 bits are assumed to take half as many instructions again. The 500 cycles of a load, 7 of an instruction that the next one
waits for and 500 of a start are the best fit to the 22 times in `anemoi_gt.kernels.tile`, from which the prediction is 12% off
(root mean square; at most 24%). By themselves the predictions would take another tile than the one measured best in 9 of the 18 cases
of the sweeps, each time for a gain below 7%. So `settle` keeps the rule that the sweeps gave; where a prediction of more than that
stands against it, on shapes that were not swept, `benchmarks/tiles.py` can decide.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

LOAD = 500  # cycles of a load
DEPENDENCY = 7  # cycles of an instruction that the next one waits for
START = 500  # cycles until a program is under way
FETCHES = 1.5  # how often a row comes from memory, whatever its readers
APART = 128  # bytes that could have been fetched where a chunk begins or ends
NORM = 6
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


Tile = RowTile | ContractionTile


class Work(NamedTuple):
    """What a kernel does at a node, at each of its edges, and at each number of a row that a thread holds."""

    fixed: float  # instructions of a warp at a node
    fixed_number: float
    per_edge: float  # instructions of a warp at an edge
    per_number: float
    sweeps: int  # times that it walks the edges, waiting for rows at each
    rows: int  # rows that it gathers at an edge of a sweep
    registers: tuple[float, float, float]  # of a thread: always, for each number, for each number of an edge in flight
    edge_bytes: int  # of [E, H] arrays that it reads and writes, for each head


FORWARD = Work(560, 2.0, 40, 8.6, 2, 1, (28, 1.5, 0.25), 10)
DESTINATIONS = Work(400, 2.0, 56, 9.4, 2, 1, (24, 1.6, 0.55), 18)
SOURCES = Work(60, 6.0, 22, 6.6, 1, 2, (20, 2.2, 0.5), 4)


class Scored(NamedTuple):
    """A tile and the seconds that its kernel is predicted to take at a node, the whole device at work; inf: it cannot run."""

    tile: Tile
    seconds: float


class Choice(NamedTuple):
    """The tile that is taken, and the others, best first."""

    chosen: Scored
    others: tuple[Scored, ...]


def registers(work: Work, tile: RowTile, device: Device) -> int:
    """Registers of a thread, in the steps in which they are given out."""
    held = tile.heads * tile.channels / (device.lanes * tile.num_warps)
    always, number, flight = work.registers
    return -int(-(always + number * held + flight * held * tile.unroll) // 8) * 8


def programs(work: Work, tile: RowTile, device: Device) -> int:
    """Programs of a processor that run at the same time; 0: it cannot run without spilling."""
    each = registers(work, tile, device)
    if each > TILE_REGISTERS:
        return 0
    return min(SLOTS, device.warps // tile.num_warps, device.registers // (each * device.lanes * tile.num_warps))


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
    parallel = programs(work, tile, device)
    if parallel == 0:
        return inf
    degree, groups = shape.degree, -(-shape.heads // tile.heads)
    held = tile.heads * tile.channels / (device.lanes * tile.num_warps)
    wide = shape.itemsize / 2  # loads of 32-bit numbers are twice as many
    instructions = (
        work.fixed + work.fixed_number * held + degree * (work.per_edge + work.per_number * held * (1 + wide) / 2)
    )
    if work.sweeps == 2 and shape.attributes:
        instructions += _attributes(shape, tile, device)
    steps = min(degree, degree / tile.unroll + (tile.unroll - 1) / 2)
    latency = START / tile.nodes + work.sweeps * steps * LOAD + DEPENDENCY * instructions
    row, chunk = (shape.itemsize * heads * shape.channels for heads in (shape.heads, min(shape.heads, tile.heads)))
    gathered = (
        work.sweeps * work.rows * row * degree * min(1.0, FETCHES / max(shape.readers, 1.0)) * (1 + APART / chunk)
    )
    moved = gathered + 2 * row + degree * shape.heads * work.edge_bytes
    cycles = device.clock * device.processors
    bounds = (
        groups * tile.num_warps * instructions / (SCHEDULERS * cycles),
        groups * latency / (parallel * cycles),
        moved / device.bandwidth,
    )
    return _together(bounds)


def _attributes(shape: Shape, tile: RowTile, device: Device) -> float:
    """Instructions of a warp for the attributes of a node's edges: one by one, or as products of 16 edges."""
    columns = max(PRODUCT, shape.attributes)
    held = max(1.0, tile.heads * columns / (device.lanes * tile.num_warps))
    if shape.degree < BUSY_DEGREE:
        return shape.degree * (50 + 12.5 * held)
    return -(-shape.degree // PRODUCT) * (450 + 34 * held)


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
    tiles of some size are alike to within 2%, and the rule is not overruled.
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
    return shape.heads * _together(bounds)


def _together(bounds: tuple[float, ...]) -> float:
    """What several bounds make: the longest, and more where others come close."""
    longest = max(bounds)
    return longest * sum((bound / longest) ** NORM for bound in bounds) ** (1 / NORM)
