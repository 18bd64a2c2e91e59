"""Bytes of passes: what the launches of a pass move, beside what no implementation can do without."""

import json

import pytest
import tile_cases
import traffic
from suite.floor import compulsory_bytes
from suite.problems import ATTENTION


@pytest.fixture(scope="module")
def facts():
    """A decoder of 100 points, as a results file tells of it."""
    from dataclasses import asdict

    from suite.problems import PROBLEMS

    problem, sizes = PROBLEMS["decoder-n320-c64"], (20, 100, 300)
    counted = {kind: compulsory_bytes(problem, sizes, kind) for kind in ATTENTION}
    return asdict(problem) | {"graph": str(problem.graph), "sizes": sizes, "bytes": counted}


@pytest.fixture
def results(facts):
    line = {"problem": "decoder", "peer": "ours", "median_ms": 2.0}
    others = {**line, "peer": "pyg", "pass": "forward"}, {**line, "pass": "replay"}
    return {
        "environment": {"copy_bytes_per_second": [0.5e9, 1e9]},
        "problems": {"decoder": facts},
        "results": [*({**line, "pass": kind} for kind in ATTENTION), *others],
    }


def test_the_kernels_of_a_decoder_are_those_for_one_degree(facts):
    names = [launch.name for launch in traffic.launches(facts, "forward_backward")]
    assert sum("_equal_" in name for name in names) == 2
    assert {traffic.kernel_of(name) for name in names} == set(tile_cases.KERNELS)


def test_an_encoder_sums_attributes_in_a_kernel_of_its_own(facts):
    names = [launch.name for launch in traffic.launches(facts | {"graph": "encoder-n320-6"}, "forward_backward")]
    assert {traffic.kernel_of(name) for name in names} == {*tile_cases.KERNELS, "attributes"}


def test_a_pass_moves_more_than_it_must_and_a_gradient_less_moves_less(facts):
    def moved(kind, **changes):
        return sum(launch.bytes for launch in traffic.launches(facts | changes, kind))

    assert facts["bytes"]["forward"] < moved("forward") < moved("forward_backward")
    without = tuple(name for name in facts["gradients"] if name != "edge_attr")
    assert moved("forward_backward", gradients=without) < moved("forward_backward")


def test_the_table_tells_of_our_attention_alone(results, tmp_path, capsys):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(results))
    traffic.main([str(path)])
    head, _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["`decoder`, forward", "`decoder`, forward + backward"]
    moved = sum(launch.bytes for launch in traffic.launches(results["problems"]["decoder"], "forward"))
    values = dict(zip(head.split("|"), lines[0].split("|"), strict=True))
    assert float(values[" achieved, TB/s "]) == pytest.approx(moved / 2e-3 / 1e12, abs=0.005)
    assert values[" of the copy "].strip() == f"{moved / 2e-3 / 1e9:.0%}"


def test_kernels_are_told_with_the_times_of_a_search(results):
    line = {"problem": "decoder", "kernel": "sources", "chosen_ms": 1.0}
    told = traffic.of_kernels(results, {"results": [line, line | {"problem": "another"}]})
    (launch,) = [found for found in traffic.launches(results["problems"]["decoder"], "replay") if "src" in found.name]
    assert told.splitlines()[2:] == [
        f"| `decoder`, sources | {launch.bytes / 1e9:.3g} | 1 | {launch.bytes / 1e9:.2f} | {launch.bytes / 1e-3 / 1e9:.0%} |"
    ]
