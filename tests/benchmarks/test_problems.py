import dataclasses

import pytest
import torch
from suite import floor, graphs
from suite.problems import ATTENTION, DEFAULT, PROBLEMS, STRUCTURE, Problem, Weather, select

OFFICIAL = {  # the published benchmark: N320, icosphere 6
    "encoder": (542080, 40962, 852840),
    "processor": (40962, 40962, 327600),
    "decoder": (40962, 542080, 1626240),
}


def test_a_group_selects_its_problems_and_a_name_one():
    names = [problem.name for problem in select(["edges1000-c64", "o96"])]
    assert names[:6] == [f"{part}-o96-c{c}" for c in (64, 32) for part in ("encoder", "processor", "decoder")]
    assert names[-1] == "edges1000-c64"


def test_an_unknown_problem_is_refused_with_the_groups():
    with pytest.raises(ValueError, match=r"groups \['host', 'n320'.*got \['n321'\]"):
        select(["n321"])


@pytest.mark.parametrize("device", DEFAULT)
def test_defaults_exist(device):
    assert select(DEFAULT[device])


def test_variants_differ_from_their_problem_in_one_respect():
    for name in ("encoder-n320-c64-d3", "encoder-n320-c64-b4", "encoder-n320-c64-fp16"):
        base, variant = PROBLEMS["encoder-n320-c64"], PROBLEMS[name]
        changed = {f.name for f in dataclasses.fields(Problem) if getattr(base, f.name) != getattr(variant, f.name)}
        assert changed - {"name", "group", "gradients"} in ({"edge_dim"}, {"batch"}, {"dtype"})


def test_what_is_replayed_is_judged_and_timed_without_a_recording_too():
    replayed = [problem for problem in PROBLEMS.values() if "replay" in problem.passes]
    assert {f"{part}-n320-c{c}-replay" for part in OFFICIAL for c in (64, 32)} < {problem.name for problem in replayed}
    assert all("forward_backward" in problem.passes for problem in replayed)


@pytest.mark.parametrize("part", OFFICIAL)
def test_the_floor_is_the_published_one(part):
    """Milliseconds at the 4.27 TB/s at which the table was made, forward and backward."""
    published = {"encoder": (1.68, 0.85), "processor": (0.224, 0.116), "decoder": (1.47, 0.76)}[part]
    for channels, milliseconds in zip((64, 32), published, strict=True):
        problem = PROBLEMS[f"{part}-n320-c{channels}"]
        nbytes = floor.compulsory_bytes(problem, OFFICIAL[part], "forward_backward")
        assert nbytes / 4.27e9 == pytest.approx(milliseconds, rel=0.02)


def test_forward_bytes_are_those_of_the_tensors(tiny, drawn, tmp_path):
    problem = tiny(dtype="bfloat16", batch=3)
    o = drawn(problem, tmp_path)
    out, lse = o.query.nbytes, 4 * o.query[..., 0].numel()
    tensors = o.query.nbytes + o.key.nbytes + o.value.nbytes + out + lse + o.edge_attr.nbytes
    sources = 4 * o.edge_attr.shape[0]
    sizes = (*o.coo.sizes, o.edge_attr.shape[0])
    assert floor.compulsory_bytes(problem, sizes, "forward") == tensors + sources


def test_structure_bytes_are_those_of_the_tensors(tiny, drawn, tmp_path):
    from anemoi_gt import GraphStructure

    edge_index, sizes = drawn(tiny(), tmp_path).coo
    graph = GraphStructure.from_edge_index(edge_index, sizes, validate=False).with_reverse()
    made = sum(tensor.nbytes for tensor in graph.state_dict().values())
    counted = floor.compulsory_bytes(tiny(passes=STRUCTURE), (*sizes, edge_index.shape[1]), "structure")
    assert counted == edge_index.nbytes + made


def test_backward_takes_twice_the_operations_of_forward():
    problem = PROBLEMS["encoder-n320-c64"]
    forward, both = (floor.flops(problem, OFFICIAL["encoder"], kind) for kind in ATTENTION)
    assert both == 3 * forward


def test_graphs_come_back_from_their_file_sorted_by_destination(tmp_path):
    graph = Weather("decoder", "O4", 1)
    counts = graphs.build([graph, graph], tmp_path)
    coo = graphs.load(graph, tmp_path)
    assert counts == {"decoder-o4-1": (*coo.sizes, coo.edge_index.shape[1])}
    assert (coo.edge_index[1].diff() >= 0).all() and coo.edge_index.shape[1] == 3 * coo.sizes[1]


def test_operands_are_the_same_for_every_process(tiny, drawn, tmp_path):
    first, second = (drawn(tiny(), tmp_path) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.leaves, second.leaves, strict=True))
