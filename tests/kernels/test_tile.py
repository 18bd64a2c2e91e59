"""Chosen tiles are the fastest where there were measurements, and can run everywhere."""

import json
import re
from itertools import product

import pytest
from suite.tile_candidates import MAX_HELD, MIN_HELD, ROW_KERNELS, SHARED_BYTES, candidates
from support.pages import ROOT

from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.tiles import Shape, destination_tile, forward_tile

GRAPHS = {  # N320 and icosphere 6: sources, destinations, edges
    "encoder": (542_080, 40_962, 852_840),
    "processor": (40_962, 40_962, 327_600),
    "decoder": (40_962, 542_080, 1_626_240),
}
SWEEP = json.loads((ROOT / "benchmarks" / "results" / "row_tiles_h200.json").read_text())
MEASURED = {}  # kernel, graph, channels: ms of each tile with all 16 heads on an H200
for graph, width, kind, num_warps, unroll, nodes, pairs, ms in SWEEP["rows"]:
    MEASURED.setdefault((kind, graph, width), {})[
        tiles.RowTile(16, width, unroll, num_warps, nodes, pairs)
    ] = ms


def shape_of(kernel, graph, channels):
    num_src, num_dst, num_edges = GRAPHS[graph]
    if kernel == "sources":
        return Shape(16, channels, 0, num_edges / num_src, 2)
    return Shape(16, channels, 12, num_edges / num_dst, 2, pairs_possible=True)


@pytest.mark.parametrize(("kernel", "graph", "channels"), MEASURED)
def test_the_chosen_tile_is_within_2_percent_of_the_fastest_measured(kernel, graph, channels):
    times = MEASURED[kernel, graph, channels]
    assert times[ROW_KERNELS[kernel](shape_of(kernel, graph, channels))] <= 1.02 * min(
        times.values()
    )


@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_every_time_in_the_notes_is_in_the_results(kernel):
    known = {
        f"{ms:.3f}"
        for case, times in MEASURED.items()
        if case[0] == kernel
        for ms in times.values()
    }
    notes = (ROOT / "benchmarks" / "NOTES.md").read_text().splitlines()
    (row,) = [line for line in notes if line.startswith(f"| `{ROW_KERNELS[kernel].__name__}`")]
    quoted = set(re.findall(r"\d\.\d{3}", row))
    assert len(quoted) > 8
    assert quoted <= known


CHOICES = [name for name in vars(tiles) if name.endswith("_tile") and name != "outer_tile"]


@pytest.mark.parametrize("name", CHOICES)
def test_a_tile_says_on_which_device_and_problem_it_was_measured(name):
    assert re.search(r"H[12]00, |Not measured", getattr(tiles, name).__doc__)


@pytest.mark.parametrize("choose", [forward_tile, destination_tile])
def test_rows_are_read_as_pairs_only_where_possible(choose):
    single = shape_of("forward", "processor", 64)._replace(pairs_possible=False)
    assert choose(single._replace(pairs_possible=True)).pairs
    assert not choose(single).pairs
    assert not any(tile.pairs for tile in candidates("forward", single))


@pytest.mark.parametrize("choose", [forward_tile, destination_tile])
@pytest.mark.parametrize(("itemsize", "channels"), list(product((2, 4), (8, 64, 256))))
def test_rows_in_flight_fit_the_registers_of_a_warp(choose, itemsize, channels):
    for degree in (1, 3, 8, 40):
        tile = choose(Shape(16, channels, 12, degree, itemsize))
        nbytes = tile.unroll * tile.heads * tile.channels * itemsize
        assert tile.unroll == 1 or nbytes <= tiles.FLIGHT_BYTES * tile.num_warps


@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_every_tile_holds_a_row_of_powers_of_two(kernel):
    sizes = product(
        (1, 2, 6, 16, 24), (1, 10, 64, 65, 500, 2000), (0, 3, 200), (1, 1.6, 3, 21), (2, 4)
    )
    for heads, channels, attributes, degree, itemsize in sizes:
        shape = Shape(heads, channels, 0 if kernel == "sources" else attributes, degree, itemsize)
        tile = ROW_KERNELS[kernel](shape)
        assert tile.channels >= channels, shape
        assert tile.heads.bit_count() == tile.channels.bit_count() == 1, shape
        assert tile.num_warps in (1, 2, 4, 8), shape


@pytest.mark.parametrize("kernel", ROW_KERNELS)
def test_candidates_begin_with_the_chosen_tile_and_hold_what_a_thread_can(kernel):
    shape = Shape(16, 64, 0, 8, 2, pairs_possible=kernel != "sources")
    candidate_tiles = candidates(kernel, shape)
    assert candidate_tiles[0] == ROW_KERNELS[kernel](shape)
    assert len(set(candidate_tiles)) == len(candidate_tiles) > 20
    for tile in candidate_tiles:
        elements = tile.heads * tile.channels / (32 * tile.num_warps)  # of a row, in a thread
        assert MIN_HELD <= elements <= MAX_HELD, tile


def test_candidates_of_a_contraction_fit_the_shared_memory():
    candidate_tiles = candidates("embed", shape_of("forward", "decoder", 64))
    assert candidate_tiles[0] == tiles.embed_tile(64, 12)
    assert len(set(candidate_tiles)) == len(candidate_tiles) > 20
    for tile in candidate_tiles:
        shared_bytes = 4 * tile.num_stages * tile.nodes * (tile.channels + tile.attributes)
        assert shared_bytes <= SHARED_BYTES, tile
