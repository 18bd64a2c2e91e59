"""Tiles that `benchmarks/tiles.py` tries: all that a kernel can have, ordered by a score.

    held       = heads C / (lanes warps)                              elements of a row in a thread
    registers  = 40 + 1.5 held + held unroll itemsize / 4             of a thread, a multiple of 8
    resident   = min(32, 64 / warps, 65536 / (registers lanes warps)) programs of an SM
    in flight  = resident nodes heads C itemsize degree / steps       bytes of rows awaited by an SM

More bytes in flight come first, then more coalesced bytes an access; ties keep the order of the
list. The score does not decide: its first tile is 14% slower than the heuristic's in the geometric
mean of 18 sweeps, 80% at worst (benchmarks/NOTES.md, 25).
"""

from collections.abc import Iterator
from itertools import product

from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.tiles import BUSY_DEGREE, ContractionTile, RowTile, Shape

Tile = RowTile | ContractionTile

MAX_HELD, MIN_HELD = 32, 4  # elements of a row in a thread
LANES = 32  # threads of a warp
SM_REGISTERS, SM_WARPS, SM_PROGRAMS = 65536, 64, 32  # of one SM; the score knows no other device
SHARED_BYTES = 232_448  # of a program
ROW_KERNELS = {
    "forward": tiles.forward_tile,
    "destinations": tiles.destination_tile,
    "sources": tiles.source_tile,
}
CONTRACTIONS = {
    "project": tiles.project_tile,
    "embed": tiles.embed_tile,
    "weight": tiles.weight_tile,
}


def candidates(kernel: str, shape: Shape) -> list[Tile]:
    """Return the possible tiles of a kernel, the heuristic's first, then by score.

    The kernel is in `ROW_KERNELS` or `CONTRACTIONS`.

    `shape` is the shape of the edges of a row kernel, or of the destinations for a contraction.
    """
    if kernel in ROW_KERNELS:
        chosen = ROW_KERNELS[kernel](shape)
        others = sorted(
            _row_tiles(kernel, shape), key=lambda tile: _score(shape, tile), reverse=True
        )
    else:
        chosen = CONTRACTIONS[kernel](shape.channels, shape.attributes)
        others = _contraction_tiles(chosen)
    return [chosen, *(tile for tile in others if tile != chosen)]


def _row_tiles(kernel: str, shape: Shape) -> Iterator[RowTile]:
    most, padded = tiles.held_by_program(shape)
    pairs = (False, True) if shape.pairs_possible else (False,)
    nodes = (1, 2, 4) if kernel == "sources" and shape.degree < BUSY_DEGREE else (1,)
    axes = (most, most // 2, most // 4), (1, 2, 4, 8), (1, 2, 3, 4), nodes, pairs
    for heads, warps, unroll, number, paired in product(*axes):
        if MIN_HELD * LANES * warps <= heads * padded <= MAX_HELD * LANES * warps:
            yield RowTile(heads, padded, unroll, warps, number, paired)


def _score(shape: Shape, tile: RowTile) -> tuple[float, float]:
    """Return bytes of rows in flight per SM, and coalesced bytes per access; more is better."""
    held = tile.heads * tile.channels / (LANES * tile.num_warps)
    registers = -int(-(40 + 1.5 * held + held * tile.unroll * shape.itemsize / 4) // 8) * 8
    resident = min(
        SM_PROGRAMS,
        SM_WARPS // tile.num_warps,
        SM_REGISTERS // (registers * LANES * tile.num_warps),
    )
    is_exact = shape.degree == int(shape.degree)
    remainder = shape.degree % tile.unroll if is_exact else min(shape.degree, (tile.unroll - 1) / 2)
    # the remainder is taken edge by edge
    steps = (shape.degree - remainder) / tile.unroll + remainder
    row_bytes = tile.heads * tile.channels * shape.itemsize
    bytes_in_flight = resident * tile.nodes * row_bytes * shape.degree / max(steps, 1e-9)
    coalesced_bytes = min(held * shape.itemsize, 16)
    return bytes_in_flight, coalesced_bytes


def _contraction_tiles(chosen: ContractionTile) -> Iterator[ContractionTile]:
    """Yield tiles that split rows as `chosen` does and whose stages fit the shared memory."""
    stages = sorted({1, chosen.num_stages})
    for nodes, number, warps, stage in product((16, 32, 64, 128), (1, 2, 4, 8), (2, 4, 8), stages):
        if stage * nodes * (chosen.channels + chosen.attributes) * 4 <= SHARED_BYTES:
            yield ContractionTile(nodes, number, chosen.channels, chosen.attributes, warps, stage)
