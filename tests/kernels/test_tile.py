"""Which tiles are chosen: those measured best where there were measurements, and others that can run everywhere."""

import json
import math
import re
import timeit
from itertools import product
from pathlib import Path

import pytest

from anemoi_gt.ops.triton_backend.tile_score import (
    DESTINATIONS,
    FORWARD,
    H200,
    SOURCES,
    RowTile,
    Shape,
    predict,
    programs,
    settle,
    steps,
)
from anemoi_gt.ops.triton_backend.tiles import (
    contraction_choice,
    destination_choice,
    embed_tile,
    forward_choice,
    row_tiles,
    source_choice,
)

GRAPHS = {  # N320 and icosphere 6: sources, destinations, edges
    "encoder": (542_080, 40_962, 852_840),
    "processor": (40_962, 40_962, 327_600),
    "decoder": (40_962, 542_080, 1_626_240),
}
KERNELS = {
    "forward": (FORWARD, forward_choice), "destinations": (DESTINATIONS, destination_choice), "sources": (SOURCES, source_choice)
}  # fmt: skip
SWEEP = json.loads((Path(__file__).parents[2] / "benchmarks/results/row_tiles_h200.json").read_text())
MEASURED = {}  # kernel, graph, channels: what each tile with all 16 heads took on an H200, ms
for graph, width, kind, num_warps, unroll, nodes, pairs, ms in SWEEP["rows"]:
    MEASURED.setdefault((kind, graph, width), {})[RowTile(16, width, unroll, num_warps, nodes, pairs)] = ms
DEVICES = {
    "H200": H200,
    "H200 at its highest clock": H200._replace(clock=1.98e9, bandwidth=4.28e12),
    "A100": H200._replace(processors=108, clock=1.41e9, bandwidth=1.7e12, shared=166_912),
}


def shape_of(kernel, channels, part, itemsize=2):
    num_src, num_dst, num_edges = GRAPHS[part]
    degrees = num_edges / num_dst, num_edges / num_src
    if kernel == "sources":
        return Shape(16, channels, 0, *degrees[::-1], itemsize)
    return Shape(16, channels, 12, *degrees, itemsize, pairs_possible=itemsize == 2)


def predicted(kernel, part, tile):
    """Predicted ms of all nodes."""
    number = GRAPHS[part][0 if kernel == "sources" else 1]
    return 1e3 * number * predict(KERNELS[kernel][0], shape_of(kernel, tile.channels, part), tile, H200)


def eligible(kernel, part, channels):
    """Of the tiles that were measured, those that can be chosen, with their ms."""
    choice = KERNELS[kernel][1](shape_of(kernel, channels, part))
    known = {scored.tile for scored in (choice.chosen, *choice.others)}
    return {tile: ms for tile, ms in MEASURED[kernel, part, channels].items() if tile in known}


@pytest.mark.parametrize("device", DEVICES.values(), ids=DEVICES)
@pytest.mark.parametrize(("kernel", "part", "channels"), MEASURED)
def test_the_chosen_tile_is_within_2_percent_of_the_best_that_was_measured(kernel, part, channels, device):
    times = MEASURED[kernel, part, channels]
    tile = KERNELS[kernel][1](shape_of(kernel, channels, part), device).chosen.tile
    assert times[tile] <= 1.02 * min(times.values())


@pytest.mark.parametrize("choose", [forward_choice, destination_choice, source_choice])
def test_every_time_that_a_rule_tells_is_in_the_results(choose):
    kernel = next(name for name, (_, chooser) in KERNELS.items() if chooser is choose)
    known = {f"{ms:.3f}" for case, times in MEASURED.items() if case[0] == kernel for ms in times.values()}
    told = set(re.findall(r"\d\.\d{3}", choose.__doc__))
    assert len(told) > 8 and told <= known


def test_predictions_are_off_by_as_much_as_is_told():
    ratios = [
        predicted(kernel, part, tile) / ms
        for kernel, part, channels in MEASURED
        for tile, ms in eligible(kernel, part, channels).items()
    ]
    assert len(ratios) == 282
    assert math.sqrt(math.fsum(math.log(ratio) ** 2 for ratio in ratios) / 282) == pytest.approx(0.10, abs=0.005)
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    assert errors[-1] == pytest.approx(0.36, abs=0.005) and sum(error > 0.25 for error in errors) == 5


def test_predictions_alone_would_take_slower_tiles():
    """Why `settle` keeps the rule; a better model that makes this fail may take its place."""
    losses = []
    for kernel, part, channels in MEASURED:
        times = eligible(kernel, part, channels)
        taken = min(times, key=lambda tile: predicted(kernel, part, tile))
        losses.append(times[taken] / min(MEASURED[kernel, part, channels].values()) - 1)
    assert sum(loss <= 0.02 for loss in losses) == 11 and max(losses) == pytest.approx(0.16, abs=0.005)


@pytest.mark.parametrize(("kernel", "part", "channels"), MEASURED)
def test_nothing_is_predicted_to_gain_7_percent_over_the_rule_where_it_was_measured(kernel, part, channels):
    choice = KERNELS[kernel][1](shape_of(kernel, channels, part))
    assert choice.chosen.seconds < 1.07 * choice.others[0].seconds


@pytest.mark.parametrize(
    ("fixed_in_degree", "unroll", "rounds"),
    [(3.0, 1, 3), (3.0, 2, 2), (3.0, 3, 1), (3.0, 4, 3), (8.0, 3, 4), (0.0, 3, 0)],
)
def test_edges_that_are_left_over_are_taken_one_by_one(degree, unroll, rounds):
    assert steps(degree, unroll) == rounds


def test_a_mean_degree_between_whole_numbers_leaves_half_of_what_a_round_lacks():
    assert steps(20.5, 3) == pytest.approx((20.5 - 1) / 3 + 1) and steps(20.5, 1) == 20.5 and steps(0.5, 4) == 0.5


def test_rows_are_read_as_pairs_only_where_they_can_be():
    single = shape_of("forward", 64, "processor")._replace(pairs_possible=False)
    for choose in (forward_choice, destination_choice):
        assert choose(single._replace(pairs_possible=True)).chosen.tile.pairs
        choice = choose(single)
        assert not any(scored.tile.pairs for scored in (choice.chosen, *choice.others))


@pytest.mark.parametrize(("itemsize", "channels"), list(product((2, 4), (8, 64, 256))))
def test_rows_in_flight_fit_the_registers_of_a_warp(itemsize, channels):
    for choose in (forward_choice, destination_choice):
        for degree in (1, 3, 8, 40):
            tile = choose(Shape(16, channels, 12, degree, 8, itemsize)).chosen.tile
            assert tile.unroll == 1 or tile.unroll * tile.heads * tile.channels * itemsize <= 6144 * tile.num_warps


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_choice_can_run(kernel):
    work, choose = KERNELS[kernel]
    sizes = product((1, 2, 6, 16, 24), (1, 10, 64, 65, 500, 2000), (0, 3, 200), ((1, 1), (3, 40), (21, 1.6)), (2, 4))
    for heads, channels, attributes, degrees, itemsize in sizes:
        shape = Shape(heads, channels, 0 if kernel == "sources" else attributes, *degrees, itemsize)
        tile = choose(shape).chosen.tile
        assert tile.channels >= channels and tile.heads.bit_count() == tile.channels.bit_count() == 1, shape
        assert programs(work, shape, tile, H200) > 0 and tile.num_warps in (1, 2, 4, 8), shape


def test_what_would_spill_is_never_chosen():
    assert predict(SOURCES, Shape(16, 256, 0, 8, 8, 2), RowTile(16, 256, 4, 1), H200) == math.inf


def test_a_tile_that_is_predicted_better_is_told_and_not_taken():
    """24 heads in programs of 16 leave a third of their work to nobody."""
    choice = forward_choice(Shape(24, 64, 3, 3, 40, 2))
    assert choice.chosen.tile == RowTile(16, 64, 1, 1)
    best = choice.others[0]
    assert best.tile.heads == 8 and choice.chosen.seconds > 1.1 * best.seconds


def test_where_the_rules_tile_would_spill_another_is_taken():
    spills, fits = RowTile(16, 256, 4, 1), RowTile(4, 256, 1, 1)
    choice = settle(SOURCES, Shape(16, 256, 0, 8, 8, 2), spills, [fits], H200)
    assert choice.chosen.tile == fits and choice.others[-1].tile == spills


def test_runners_up_come_best_first_and_leave_the_choice_out():
    choice = source_choice(shape_of("sources", 64, "encoder"))
    assert [other.seconds for other in choice.others] == sorted(other.seconds for other in choice.others)
    assert choice.chosen not in choice.others


def test_a_choice_takes_no_longer_than_a_hundred_thousand_steps_of_an_empty_loop():
    shape = shape_of("sources", 64, "encoder")
    loop = min(timeit.repeat("for _ in range(100_000): pass", number=1, repeat=30))  # 2 or 3 ms
    assert min(timeit.repeat(lambda: source_choice.__wrapped__(shape), number=1, repeat=30)) < loop


def test_contractions_keep_their_rule_and_are_predicted_at_the_speed_of_the_memory():
    shape = shape_of("forward", 64, "decoder")
    choice = contraction_choice(shape, "embed")
    assert choice.chosen.tile == embed_tile(64, 12)
    nbytes = 2 * 16 * (2 * 64 + 16)
    assert choice.chosen.seconds == pytest.approx(nbytes / H200.bandwidth, rel=0.02)


def test_tiles_of_a_contraction_that_overflow_the_shared_memory_are_infinite():
    little = H200._replace(shared=20_000)
    assert contraction_choice(shape_of("forward", 64, "decoder"), "embed", little).others[-1].seconds == math.inf


def test_tiles_hold_at_most_what_a_thread_can():
    for tile in row_tiles(Shape(16, 64, 12, 8, 8, 2, pairs_possible=True), (1,)):
        assert 4 <= tile.heads * tile.channels / (32 * tile.num_warps) <= 32
