"""The search over tiles: what it compares, and that nothing wrong is timed. In small, under Triton's interpreter."""

import json
from copy import copy
from dataclasses import replace

import pytest
import tiles
import torch
from suite import graphs, problems
from suite.problems import Problem, Random

from anemoi_gt.kernels.score import ContractionTile, RowTile


@pytest.fixture
def few(monkeypatch):
    """Two candidates of each kernel, and one call of each."""
    for name, calls in {"FEW": 1, "MANY": 1, "WARM_UP": 0}.items():
        monkeypatch.setattr(tiles, name, calls)
    searches = tiles.Case.searches

    def shortened(case):
        return {name: replace(found, others=found.others[:1]) for name, found in searches(case).items()}

    monkeypatch.setattr(tiles.Case, "searches", shortened)


@pytest.fixture(scope="module")
def problem():
    return Problem("tiny", "tiny", Random(5, 4, 8), heads=1, channels=128, edge_dim=3, dtype="float32")


@pytest.fixture(scope="module")
def made(problem, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    graphs.build([problem.graph], folder)
    return tiles.Case(problem, graphs.load(problem.graph, folder))


@pytest.fixture
def case(made):
    return copy(made)


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


def test_small_cases_compile_to_what_the_problem_does(case, problem):
    small = tiles.small(problem, degree=1, device="cpu").problem.sizes
    same = ("heads", "channels", "edge_dim", "bias", "embedded", "dtype", "wide")
    assert [getattr(small, name) for name in same] == [getattr(case.problem.sizes, name) for name in same]
    assert small.degree(small.num_dst) == small.degree(small.num_src) == 1


@pytest.mark.parametrize(
    ("ratios", "passed"), [((1.0, 1.2), True), ((1.0, 1.3), False), ((1.2, 1.2), False), ((1.05, 1.15), True)]
)
def test_the_verdict_is_about_the_mean_and_the_worst(ratios, passed):
    results = [{"ratio": ratio, "problem": f"p{ratio}", "kernel": "forward"} for ratio in ratios]
    verdict, sentence = tiles.verdict(results)
    assert verdict == passed and sentence.startswith("PASS" if passed else "FAIL") and f"p{max(ratios)}" in sentence


def test_contractions_are_searched_once_for_equal_destinations(case, problem, tmp_path):
    other = replace(problem, graph=Random(6, 4, 8))
    graphs.build([other.graph], tmp_path)
    other, known = tiles.Case(other, graphs.load(other.graph, tmp_path)), set()
    assert all(tiles._is_new(kernel, case, known) for kernel in tiles.KERNELS)
    assert [kernel for kernel in tiles.KERNELS if tiles._is_new(kernel, other, known)] == list(tiles.ROWS)


def test_results_of_tiles_may_differ_by_rounding_alone():
    exact = torch.randn(100)
    tiles.assert_alike((exact * (1 + 1e-6),), (exact,), "a")
    with pytest.raises(AssertionError, match="^a: differs"):
        tiles.assert_alike((exact * 1.01,), (exact,), "a")
