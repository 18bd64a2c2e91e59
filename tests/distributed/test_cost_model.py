"""The cost model recovers the constants that made-up results were made from, and carries them on."""

import json
import re
import sys
from dataclasses import asdict, replace

import pytest

from distributed.ranks import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import cost_model
from cost_model import check, halo_of, predicted
from pass_cost import Cost, Link, Model, fit, pass_of, replays
from sharding_records import merged
from suite.table import put_into

from anemoi_gt.distributed.partition import NODE_COST

LINK = Link(shortest=0.02, bandwidth=2e8)
COMPUTE, MEMORY = Cost(floor=7.0, data=2.4e-4, hidden=2.1e-4), Cost(floor=1.5, data=6e-5, hidden=4e-5)
TRUE = Model(COMPUTE, MEMORY, lead=5.0, host=90.0, launch=0.17, link=LINK)
SHAPE = {"heads": 16, "channels": 64, "layers": 16}
POWERS = {"encoder": 1.0, "processor": 0.5, "decoder": 0.75}
LARGE = (6_599_680, 655_362)
SIZES = ((40_320, 10_242), (130_240, 10_242), (154_368, 40_962))  # data and hidden nodes of smaller grids


def halo(ranks, data=LARGE[0], hidden=LARGE[1]):
    """A partition whose rows are powers of the nodes of a rank."""
    nodes = {"data": data, "hidden": hidden}
    rows = {step: (nodes[cost_model.WHERE[step]] / ranks) ** power for step, power in POWERS.items()}
    edges = {"encoder": 1.5 * data, "processor": 8 * hidden, "decoder": 3 * data}
    return {"line": "Morton", "ranks": ranks, "nodes": nodes, "edges": edges, "rows": rows}


def record(ranks, way, data=540_000, hidden=40_000, part="strong", replayed=False):
    """A pass that takes what the true model says, launched by Python or replayed."""
    owned = {"encoder": hidden // ranks, "processor": hidden // ranks, "decoder": data // ranks}
    edges = {"encoder": 3 * data // 2 // ranks, "processor": 8 * hidden // ranks, "decoder": 3 * data // ranks}
    rows = {step: [2000, 2600] for step in owned} if ranks > 1 and way != "heads" else {}
    made = SHAPE | {"part": part, "grid": "made up", "ranks": ranks, "way": way, "owned": owned, "edges": edges}
    made |= {"halo_rows": rows, "element_bytes": 2}
    one = pass_of(made)
    if replayed:
        return made | {"ms": TRUE.device(one), "replayed": True}
    return made | {"ms": TRUE.milliseconds(one), "peak_gb": TRUE.memory.of(one)}


def alone(nodes, replayed=False):
    """A pass of a smaller grid on one rank."""
    return record(1, "after_exchange", *nodes, "sizes", replayed)


def message(size, replayed):
    """A message that takes what the true model says, or what Python needs to launch it."""
    ms = TRUE.link.message(size)
    made = {"part": "exchange", "ranks": 2, "message_bytes": size, "replayed": replayed}
    return made | {"ms": ms if replayed else max(TRUE.launch, ms)}


def halos(*ranks):
    """Two grids on each number of ranks."""
    return [halo(n, *nodes) for n in ranks for nodes in (LARGE, (LARGE[0] // 4, LARGE[1] // 4))]


@pytest.fixture
def report():
    records = [record(1, "after_exchange")] + [alone(nodes, replayed) for nodes in SIZES for replayed in (False, True)]
    records += [record(n, way) for n in (2, 4) for way in ("overlapped", "after_exchange", "heads")]
    records += [record(n, "after_exchange", part="replay", replayed=True) for n in (1, 2)]
    messages = [message(size, replayed) for replayed in (False, True) for size in (1e5, 1e6, 2e7, 4e7)]
    facts = {"device": "Abacus", "commit": "abc", "date": "today"}
    return {"environment": facts, "jobs": [], "results": records + messages}


def test_the_fit_recovers_the_constants_of_the_passes_and_of_the_messages(report):
    found, true = asdict(fit(report)), asdict(TRUE)
    for name in ("compute", "memory", "link"):
        assert found.pop(name) == pytest.approx(true.pop(name), rel=1e-6), name
    assert found == pytest.approx(true, rel=1e-6)


def test_without_replayed_messages_launched_ones_stand_for_both(report):
    report["results"] = [found for found in report["results"] if found["part"] != "exchange" or not found["replayed"]]
    model = fit(report)
    assert model.launch == model.link.shortest == pytest.approx(TRUE.launch, rel=1e-6)
    assert model.link.bandwidth == pytest.approx(TRUE.link.bandwidth, rel=1e-6)
    assert "where Python launches it" not in cost_model.constants(model, report)
    both = "a message at least 0.020 ms, 0.170 ms where Python launches it, 200 GB/s"
    assert both in cost_model.constants(TRUE, report)


def test_a_smaller_pass_that_does_not_wait_for_python_leaves_the_host_as_it_is(report):
    long = alone(SIZES[-1])
    assert long["ms"] > TRUE.host
    report["results"].append(long | {"ms": 1.02 * long["ms"]})  # it takes a little longer than the model says
    assert fit(report).host == pytest.approx(TRUE.host, rel=1e-6)


@pytest.mark.parametrize("other", [{"part": "compiled", "compiled": True}, {"way": "overlapped"}])
def test_compiled_and_overlapped_passes_on_one_rank_are_not_fitted(report, other):
    known = fit(report)
    for found in (record(1, "after_exchange"), record(1, "after_exchange", part="replay", replayed=True)):
        report["results"].append(found | other | {"ms": found["ms"] / 2})
    assert fit(report) == known


def test_grids_whose_hidden_nodes_grow_with_their_data_nodes_are_refused_with_the_remedy(report):
    on_a_line = ((40_320, 10_242), (154_368, 40_962), (604_000, 163_842))  # O96, O192, O384 with icospheres 5, 6, 7
    passes = [alone(nodes, replayed) for nodes in on_a_line for replayed in (False, True)]
    large = [record(1, "after_exchange", *on_a_line[0])]
    large.append(record(1, "after_exchange", *on_a_line[0], "replay", replayed=True))
    report["results"] = large + passes + [found for found in report["results"] if found["part"] == "exchange"]
    with pytest.raises(ValueError, match=r"not near one line, got \[\(40320, 163872\), .*: run benchmarks/sharding.py"):
        fit(report)


def test_two_grids_are_too_few_and_refused_with_the_remedy(report):
    small = SIZES[0][0]
    report["results"] = [
        found for found in report["results"] if found["part"] != "sizes" or found["owned"]["decoder"] == small
    ]
    with pytest.raises(ValueError, match="three grids or more .* parts strong, replay and sizes, which have such"):
        fit(report)


def test_the_largest_error_of_the_fit_on_one_rank_is_told(report):
    report["results"].append(alone(SIZES[1], replayed=True))
    report["results"][-1]["ms"] *= 1.1
    found = cost_model.left(TRUE.compute, replays(report), "ms")
    assert found == pytest.approx(1 - 1 / 1.1)
    assert "They are off by 9.1% and 0.0% at most where they were fitted" in cost_model.constants(TRUE, report)


def test_a_pass_takes_as_long_as_python_needs_to_launch_it_where_the_device_is_faster():
    small = pass_of(record(2, "after_exchange", 40_320, 10_242))
    assert small.messages == 36
    assert TRUE.milliseconds(small) == pytest.approx(90.0 + 36 * 0.17) and TRUE.bound(small) == "host"
    large = pass_of(record(2, "after_exchange"))
    assert TRUE.milliseconds(large) == pytest.approx(5.0 + TRUE.device(large)) and TRUE.bound(large) == "compute"


def test_without_smaller_passes_that_wait_for_the_host_it_costs_nothing(report):
    for found in report["results"]:
        if found["part"] == "sizes" and "replayed" not in found:
            found["ms"] = TRUE.device(pass_of(found))
    assert fit(report).host == 0.0


def test_passes_on_several_ranks_are_checked_and_not_fitted(report):
    for found in report["results"]:
        if found["part"] != "exchange" and found["ranks"] > 1:
            found["ms"] *= 2
    model = fit(report)
    assert model.host == pytest.approx(TRUE.host, rel=1e-6)
    assert [ms / found["ms"] for found, ms in check(model, report)] == pytest.approx([0.5] * 7, rel=1e-6)


def test_overlap_hides_no_more_than_there_is_to_compute():
    slow, one = Link(shortest=1.0, bandwidth=1e3), pass_of(record(2, "overlapped"))
    edge = TRUE.edge(one)
    after = replace(one, way="after_exchange").exposed(slow, edge)
    hidden = sum(times * edge * one.edges[step] for step, times in one.times.items())
    assert one.exposed(slow, edge) == pytest.approx(after - hidden)
    assert one.exposed(Link(0.0, 1e12), edge) == 0.0


def test_a_hidden_node_costs_as_much_as_its_edges_and_node_cost_edges_besides():
    one = pass_of(record(2, "overlapped"))
    assert one.in_degree == 8
    assert (NODE_COST + 8) * TRUE.edge(one) == pytest.approx(TRUE.compute.hidden)


def test_halos_of_a_grid_that_was_divided_are_those_of_its_partition():
    assert halo_of(LARGE, 16, halos(4, 16)) == pytest.approx(halo(16)["rows"])


def test_halos_of_a_larger_grid_grow_as_they_grew_to_the_largest_that_was_divided():
    larger = (4 * LARGE[0], 4 * LARGE[1])
    assert halo_of(larger, 16, halos(4, 16)) == pytest.approx(halo(16, *larger)["rows"])


def test_halos_of_one_grid_alone_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="of two grids on 8 ranks, got 1: run benchmarks/halo_rows.py with --ranks 8"):
        halo_of(LARGE, 8, [halo(8)])


def test_edges_are_shared_out_among_ranks():
    few, many = (
        predicted(LARGE, ranks, "after_exchange", halos(16, 64), pass_of(record(2, "heads"))) for ranks in (16, 64)
    )
    assert few.edges == pytest.approx({step: 4 * count for step, count in many.edges.items()})


@pytest.mark.parametrize(("part", "told"), [("exchange", "1, 1, 3 and 0"), ("replay", "1, 0, 3 and 4")])
def test_results_that_are_not_enough_are_refused_with_the_remedy(report, part, told):
    report["results"] = [found for found in report["results"] if found["part"] != part]
    with pytest.raises(ValueError, match=f"got {told}: run benchmarks/sharding.py with the parts"):
        fit(report)


def test_the_command_prints_a_line_for_every_grid_and_number_of_gpus(report, tmp_path, capsys):
    results, rows = tmp_path / "results.json", tmp_path / "halo.json"
    results.write_text(json.dumps(report))
    rows.write_text(json.dumps(halos(*cost_model.RANKS)))
    cost_model.main(["--results", str(results), "--halo", str(rows)])
    said = capsys.readouterr().out
    assert all(f"| {name} | {ranks} | edges |" in said for name in cost_model.GRIDS for ranks in cost_model.RANKS), said


def test_the_page_holds_halos_as_they_were_found():
    page = (ROOT / "docs" / "distributed.md").read_text().replace(",", "")
    found = json.loads((ROOT / "benchmarks" / "results" / "halo_rows.json").read_text())
    pattern = r"^\| (\w+) icosphere \d (\d+) ranks \| by number[^|]*\|(.*)\|$\n^\| \| Morton \|(.*)\|$"
    lines = re.findall(pattern, page, re.MULTILINE)
    assert lines
    for grid, ranks, *cells in lines:
        here = {one["line"]: one for one in found if (one["grid"], one["ranks"]) == (grid, int(ranks))}
        number, morton = here["by number"], here["Morton"]
        owned = [number["owned"][cost_model.WHERE[step]] for step in number["rows"]]
        told = [f"{rows} ({own})" for rows, own in zip(number["rows"].values(), owned, strict=True)]
        expected = [told, [str(rows) for rows in morton["rows"].values()]]
        assert [[cell.strip() for cell in line.split("|")] for line in cells] == expected, (grid, ranks)


def test_the_page_holds_what_the_model_says_of_the_results():
    page, results = (ROOT / "docs" / "distributed.md").read_text(), ROOT / "benchmarks" / "results"
    files = re.search(r"^```\{sharding\} (.+)$", page, re.MULTILINE)[1].split()
    report = merged([json.loads((results / name).read_text()) for name in files])
    said = cost_model.text(report, json.loads((results / "halo_rows.json").read_text()))
    assert put_into(page, "cost_model.py", said) == page, (
        f"python benchmarks/cost_model.py --results {' '.join(files)} --halo halo_rows.json --page docs/distributed.md"
    )
