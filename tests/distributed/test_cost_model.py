"""The cost model recovers the constants that made-up results were made from, and carries them on."""

import json
import sys
from dataclasses import replace

import pytest

from distributed.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import cost_model
from cost_model import Link, Model, check, fit, halo_constants, pass_of, predicted

TRUE = Model(unit=9e-7, host=1.5, link=Link(latency=0.02, bandwidth=2e8), fixed=3.0, slope=6e-8)
SHAPE = {"heads": 16, "channels": 64, "layers": 16}
C = {"encoder": 12.0, "processor": 7.0, "decoder": 5.0}


def halo(ranks, data=500_000, hidden=40_000):
    """A partition whose rows are exactly c sqrt(nodes of a rank)."""
    nodes = {"data": data, "hidden": hidden}
    rows = {step: c * (nodes[cost_model.WHERE[step]] / ranks) ** 0.5 for step, c in C.items()}
    edges = {"encoder": 1.5 * data, "processor": 8 * hidden, "decoder": 3 * data}
    return {"line": "Morton", "ranks": ranks, "nodes": nodes, "edges": edges, "rows": rows}


def record(ranks, way, data=540_000, hidden=40_000, part="strong"):
    """A pass that takes what the true model says."""
    owned = {"encoder": hidden // ranks, "processor": hidden // ranks, "decoder": data // ranks}
    edges = {"encoder": 3 * data // 2 // ranks, "processor": 8 * hidden // ranks, "decoder": 3 * data // ranks}
    rows = {step: [2000, 2600] for step in owned} if ranks > 1 and way != "heads" else {}
    made = SHAPE | {"part": part, "grid": "made up", "ranks": ranks, "way": way, "owned": owned, "edges": edges}
    made |= {"halo_rows": rows, "element_bytes": 2}
    one = pass_of(made)
    return made | {"ms": TRUE.milliseconds(one), "peak_gb": TRUE.gigabytes(one)}


@pytest.fixture
def report():
    records = [record(1, "overlapped"), record(1, "overlapped", 40_320, 10_242, "sizes")]
    records += [record(n, way) for n in (2, 4) for way in ("overlapped", "after_exchange", "heads")]
    sizes = (1e5, 1e6, 1e7)
    messages = [{"part": "exchange", "ranks": 2, "message_bytes": s, "ms": TRUE.link.message(s)} for s in sizes]
    return {"results": records + messages}


def test_the_fit_recovers_the_constants_of_the_passes_and_of_the_messages(report):
    model = fit(report)
    assert [
        model.unit,
        model.host,
        model.link.latency,
        model.link.bandwidth,
        model.fixed,
        model.slope,
    ] == pytest.approx([TRUE.unit, TRUE.host, TRUE.link.latency, TRUE.link.bandwidth, TRUE.fixed, TRUE.slope], rel=1e-6)


def test_passes_on_several_ranks_are_checked_and_not_fitted(report):
    for found in report["results"]:
        if found["part"] != "exchange" and found["ranks"] > 1:
            found["ms"] *= 2
    model = fit(report)
    assert model.host == pytest.approx(TRUE.host, rel=1e-6)
    assert [ms / found["ms"] for found, ms in check(model, report)] == pytest.approx([0.5] * 6, rel=1e-6)


def test_overlap_hides_no_more_than_there_is_to_compute():
    slow, one = Link(latency=1.0, bandwidth=1e5), pass_of(record(2, "overlapped"))
    after = replace(one, way="after_exchange").exposed(slow, TRUE.unit)
    hidden = sum(times * TRUE.unit * one.edges[step] for step, times in one.times.items())
    assert one.exposed(slow, TRUE.unit) == pytest.approx(after - hidden)
    assert one.exposed(Link(0.0, 1e12), TRUE.unit) == 0.0


def test_halos_grow_with_the_square_root_of_what_a_rank_owns():
    found = [halo(ranks) for ranks in (4, 16, 64)]
    assert halo_constants(found) == pytest.approx(C)
    like = pass_of(record(2, "overlapped"))
    few, many = (predicted((6_000_000, 600_000), ranks, "overlapped", found, like) for ranks in (16, 64))
    assert few.rows["processor"] == pytest.approx(2 * many.rows["processor"])
    assert few.edges == pytest.approx({step: 4 * count for step, count in many.edges.items()})


def test_results_without_messages_are_refused_with_the_remedy(report):
    report["results"] = [found for found in report["results"] if found["part"] != "exchange"]
    with pytest.raises(ValueError, match="got 2 passes and 0 messages: run benchmarks/sharding.py with the parts"):
        fit(report)


def test_the_command_prints_a_line_for_every_grid_and_number_of_gpus(report, tmp_path, capsys):
    results, halos = tmp_path / "results.json", tmp_path / "halo.json"
    results.write_text(json.dumps(report))
    halos.write_text(json.dumps([halo(ranks) for ranks in (4, 64)]))
    cost_model.main(["--results", str(results), "--halo", str(halos)])
    said = capsys.readouterr().out
    assert all(f"| {name} | {ranks} | edges |" in said for name in cost_model.GRIDS for ranks in cost_model.RANKS), said
