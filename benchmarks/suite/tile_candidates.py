"""Tiles that `benchmarks/tiles.py` tries: all that a kernel can have."""

from collections.abc import Iterator
from itertools import product

from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.tiles import BUSY_DEGREE, ContractionTile, RowTile, Shape

Tile = RowTile | ContractionTile

MAX_HELD, MIN_HELD = 32, 4  # elements of a row in a thread
LANES = 32  # threads of a warp
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
    """Return the possible tiles of a kernel, the heuristic's first.

    The kernel is in `ROW_KERNELS` or `CONTRACTIONS`.

    `shape` is the shape of the edges of a row kernel, or of the destinations for a contraction.
    """
    if kernel in ROW_KERNELS:
        chosen = ROW_KERNELS[kernel](shape)
        others = _row_tiles(kernel, shape)
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


def _contraction_tiles(chosen: ContractionTile) -> Iterator[ContractionTile]:
    """Yield tiles that split rows as `chosen` does and whose stages fit the shared memory."""
    stages = sorted({1, chosen.num_stages})
    for nodes, number, warps, stage in product((16, 32, 64, 128), (1, 2, 4, 8), (2, 4, 8), stages):
        if stage * nodes * (chosen.channels + chosen.attributes) * 4 <= SHARED_BYTES:
            yield ContractionTile(nodes, number, chosen.channels, chosen.attributes, warps, stage)
