"""The search over tiles: what it compares, and that nothing wrong is timed. In small, under Triton's interpreter."""

import json
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import parts
import pytest
import tile_cases
import tiles
import torch
from anemoi_gt.ops.triton_backend.tile_score import ContractionTile, RowTile
from suite import graphs, problems
from suite.graphs import Coo
from suite.operands import draw
from suite.problems import Problem, Random

from anemoi_gt.kernels.jit_launch import Launch


@pytest.fixture
def few(monkeypatch):
    """Two candidates of each kernel, and one call of each."""
    for name, calls in {"FEW": 1, "MANY": 1, "WARM_UP": 0}.items():
        monkeypatch.setattr(tiles, name, calls)
    searches = tile_cases.Case.searches

    def shortened(case):
        return {name: replace(found, others=found.others[:1]) for name, found in searches(case).items()}

    monkeypatch.setattr(tile_cases.Case, "searches", shortened)


@pytest.fixture(scope="module")
def problem():
    return Problem("tiny", "tiny", Random(5, 4, 9), heads=1, channels=128, edge_dim=3, dtype="float32")


@pytest.fixture(scope="module")
def made(problem, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    graphs.build([problem.graph], folder)
    return tiles.make_case(problem, graphs.load(problem.graph, folder))


@pytest.fixture
def case(made):
    return copy(made)


def knit(num_dst, degrees):
    """A graph with as many sources as destinations, which have `degrees` in turn."""
    counts = torch.tensor(degrees).repeat(num_dst)[:num_dst]
    dst = torch.arange(num_dst).repeat_interleave(counts)
    return Coo(torch.stack([(3 * torch.arange(len(dst))) % num_dst, dst]), (num_dst, num_dst))


PAIRED = Problem("equal", "tiny", None, heads=4, channels=64, edge_dim=3)  # bfloat16
GRAPHS = {"equal": knit(5, [3]), "few": knit(5, [3, 2]), "busy": knit(5, [6, 3]), "busy equal": knit(5, [6])}


@pytest.fixture(scope="module")
def equal_case():
    return tiles.make_case(PAIRED, GRAPHS["equal"])


@pytest.fixture
def launched():
    """Launch nothing, and note the kernel and the constants of each launch."""
    seen = []

    def note(launch, **tensors):
        seen.append((launch.kernel.__name__, launch.constants))

    with patch.object(Launch, "__call__", note):
        yield seen


def test_one_command_searches_the_kernels_that_are_named_and_leaves_a_file(few, problem, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(problems, "PROBLEMS", {"tiny": problem})
    out = tmp_path / "r" / "tiles.json"
    tiles.main(["--problems", "tiny", "--kernels", "forward", "weight", "--output", str(out), "--commit", "abc"])
    found = json.loads(out.read_text())
    assert [line["kernel"] for line in found["results"]] == ["forward", "weight"]
    assert all(line["ratio"] >= 1 and len(line["all"]) == 2 and not line["failed"] for line in found["results"])
    assert found["environment"]["commit"] == "abc" and found["verdict"] in capsys.readouterr().out


def test_candidates_are_all_tiles_that_can_run(case):
    found = case.searches()
    assert {type(tile) for name in tiles.ROWS for tile in found[name].others} == {RowTile}
    assert {type(tile) for name in tiles.CONTRACTIONS for tile in found[name].others} == {ContractionTile}
    assert all(search.chosen not in search.others and len(search.others) >= 2 for search in found.values())


@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_every_kernel_gives_the_same_with_another_tile(few, case, kernel):
    found = case.searches()[kernel]
    tiles.assert_alike(found.run(found.others[0]), found.run(found.chosen), kernel)


def test_a_tile_that_gives_another_result_ends_the_search(few, case):
    class Broken(tiles.Case):
        def forward(self, tile=None):
            out, *rest = super().forward(tile)
            return (out * (1 if tile == self.searches()["forward"].chosen else 1.001), *rest)

    case.__class__ = Broken
    with pytest.raises(AssertionError, match="tiny forward RowTile.* differs from the chosen tile"):
        tiles.search(case, "tiny", "forward", tiles.CLOCKS["cpu"])


def test_a_tile_that_does_not_compile_is_told_and_passed_over(few, case):
    class Unable(tiles.Case):
        def forward(self, tile=None):
            if tile is not None and tile != self.searches()["forward"].chosen:
                raise RuntimeError("out of resource: shared memory")
            return super().forward(tile)

    case.__class__ = Unable
    line = tiles.search(case, "tiny", "forward", tiles.CLOCKS["cpu"])
    assert list(line["failed"].values()) == ["RuntimeError: out of resource: shared memory"] and line["ratio"] == 1


@pytest.mark.parametrize("name", GRAPHS)
def test_what_is_searched_is_what_the_operation_launches(launched, name):
    operands = draw(PAIRED, GRAPHS[name])
    torch.autograd.grad(tiles.attention(operands)(), operands.leaves, operands.grad_out)
    expected = [launch for launch in launched if launch[0] != "attribute_bwd"]  # of which there is one tile
    found = tiles.make_case(PAIRED, GRAPHS[name]).searches()
    launched.clear()
    for kernel in tiles.KERNELS:
        found[kernel].run(found[kernel].chosen)
    assert {kernel for kernel, _ in launched} == {kernel for kernel, _ in expected}
    assert all(launch in expected for launch in launched)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_small_cases_compile_to_what_the_problem_does(launched, tmp_path, monkeypatch, kernel, name):
    monkeypatch.setattr(graphs, "load", lambda graph, folder: GRAPHS[name])
    found = tiles.make_case(PAIRED, GRAPHS[name]).searches()[kernel]
    ((problem, degree, fixed_in_degree, _),) = tiles.to_compile([PAIRED], [kernel], tmp_path)
    small = tiles.make_small_case(problem, degree, "cpu", fixed_in_degree=fixed_in_degree).searches()[kernel]
    compiled, needed = [], []
    for search, seen in ((small, compiled), (found, needed)):
        for tile in [search.chosen, *search.others]:
            launched.clear()
            search.run(tile)
            seen += launched
    assert all(launch in compiled for launch in needed)


def test_problems_that_compile_to_the_same_are_compiled_once(monkeypatch, tmp_path):
    several = [replace(PAIRED, name=name, graph=name) for name in ("few", "busy", "equal", "busy equal")]
    several += [replace(problem, name="again") for problem in several] + [replace(PAIRED, edge_dim=4, graph="few")]
    monkeypatch.setattr(graphs, "load", lambda graph, folder: GRAPHS[graph])
    found = [(job[0].edge_dim, job[2], job[3]) for job in tiles.to_compile(several, ["forward", "weight"], tmp_path)]
    forward = [(3, 0, "forward"), (3, 0, "forward"), (3, 3, "forward"), (3, 6, "forward"), (4, 0, "forward")]
    assert sorted(found) == sorted([*forward, (3, 0, "weight"), (4, 0, "weight")])


@pytest.mark.parametrize("kernel", tile_cases.OVER_DESTINATIONS)
def test_kernels_for_one_degree_give_the_same_with_every_tile(equal_case, kernel):
    found = equal_case.searches()[kernel]
    expected = found.run(found.chosen)
    assert {tile.pairs for tile in found.others} == {False, True}
    for tile in found.others:
        tiles.assert_alike(found.run(tile), expected, f"{kernel} {tile}")


@pytest.mark.parametrize("kernel", tile_cases.OVER_DESTINATIONS)
def test_kernels_for_one_degree_are_launched_with_the_tile_that_is_given(launched, kernel):
    found = tiles.make_case(PAIRED, GRAPHS["equal"]).searches()[kernel]
    for tile in [found.chosen, *found.others]:
        launched.clear()
        found.run(tile)
        ((name, constants),) = launched
        assert "_equal_" in name and (constants["num_warps"], constants["PAIRS"]) == (tile.num_warps, tile.pairs)


@pytest.mark.parametrize(
    ("ratios", "passed"), [((1.0, 1.2), True), ((1.0, 1.3), False), ((1.2, 1.2), False), ((1.05, 1.15), True)]
)
def test_the_verdict_is_about_the_mean_and_the_worst(ratios, passed):
    results = [{"ratio": ratio, "problem": f"p{ratio}", "kernel": "forward"} for ratio in ratios]
    verdict, sentence = tiles.verdict(results, {})
    assert verdict == passed and sentence.startswith("PASS" if passed else "FAIL") and f"p{max(ratios)}" in sentence


@pytest.mark.parametrize("results", [[{"ratio": 1.0, "problem": "p", "kernel": "forward"}], []])
def test_what_is_missing_fails_the_verdict_which_names_it(results):
    passed, sentence = tiles.verdict(results, {"p weight": "not run: no time was left"})
    assert not passed and sentence.startswith("FAIL") and sentence.endswith("not searched to the end: p weight")


@pytest.fixture
def searching(problem, case, tmp_path, monkeypatch):
    """A function that runs the command on two kernels, with another function in place of a search; returns status and report."""
    out = tmp_path / "tiles.json"

    def run(search, *options):
        def instead(case, name, kernel, clock):
            search(json.loads(out.read_text()))
            tile = {"nodes": 16}
            return {"problem": name, "kernel": kernel, "fastest": tile, "chosen_ms": 1.0, "ratio": 1.0}

        monkeypatch.setattr(tiles, "search", instead)
        monkeypatch.setattr(tiles, "prepare", lambda *_: case)
        monkeypatch.setattr(problems, "PROBLEMS", {"tiny": problem})
        given = ["--problems", "tiny", "--kernels", "project", "weight", "--output", str(out), *options]
        return tiles.main(given), json.loads(out.read_text())

    return run


def test_a_search_is_written_before_the_next_one_begins(searching):
    seen = []
    status, _ = searching(lambda report: seen.append([line["kernel"] for line in report["results"]]))
    assert seen == [[], ["project"]] and status == 0


def test_when_time_is_up_no_search_begins_and_the_verdict_says_so(searching, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    status, report = searching(lambda _: now.append(now.pop() + 10.0), "--seconds", "5")
    assert [line["kernel"] for line in report["results"]] == ["project"] and status == 1
    assert report["problems"] == {"tiny weight": "not run: no time was left"} and "tiny weight" in report["verdict"]


def test_a_search_that_fails_leaves_the_others_and_fails_the_verdict(searching):
    def fail(report):
        if not report["problems"]:
            raise AssertionError("differs")

    status, report = searching(fail)
    assert [line["kernel"] for line in report["results"]] == ["weight"] and status == 1
    assert report["problems"] == {"tiny project": "AssertionError: differs"}


def test_contractions_are_searched_once_for_equal_destinations(case, problem, tmp_path):
    other = replace(problem, graph=Random(6, 4, 9))
    graphs.build([other.graph], tmp_path)
    other, known = tiles.make_case(other, graphs.load(other.graph, tmp_path)), set()
    assert all(tiles._is_new(kernel, case, known) for kernel in tiles.KERNELS)
    assert [kernel for kernel in tiles.KERNELS if tiles._is_new(kernel, other, known)] == list(tiles.ROWS)


class Recorder:
    """A clock whose recordings are the calls themselves, and which says how long each takes."""

    def __init__(self, **times):
        self.measured, self.asked = times, []

    def record(self, call, count):
        self.asked.append((call, count))
        return lambda: call

    def times(self, replays):
        return [self.measured[replay()].pop(0) for replay in replays]


def test_times_are_medians_of_one_launch_of_recordings_in_turn():
    clock = Recorder(a=[5.0, 10.0, 500.0], b=[20.0, 20.0, 20.0])
    assert tiles.medians_ms(clock, ["a", "b"], launches=5, times=3) == [2.0, 4.0]
    assert clock.asked == [("a", 5), ("b", 5)]


@pytest.mark.parametrize(("ms", "launches"), [(0.02, 10), (0.5, 4), (2.5, 1)])
def test_recordings_of_long_kernels_have_fewer_launches(ms, launches):
    clock = SimpleNamespace(times=lambda calls: [9.0, ms])
    assert tiles.launches_of(clock, None) == launches


def test_results_of_tiles_may_differ_by_rounding_alone():
    exact = torch.randn(100)
    tiles.assert_alike((exact * (1 + 1e-6),), (exact,), "a")
    with pytest.raises(AssertionError, match="^a: differs"):
        tiles.assert_alike((exact * 1.01,), (exact,), "a")
