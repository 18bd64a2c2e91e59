"""Hubs: nodes whose edges are divided into segments, forced to be small where all cases are against the oracle."""

from dataclasses import replace

import pytest
import torch
from support.accuracy import assert_accurate
from support.cases import BATCHES, GRADIENTS, Case, judge, run
from support.compiled import assert_compiled_attention_is_eager
from support.graphs import GRAPHS, HUBS, crowd
from support.launches import noted_launches
from support.oracle import make_problem
from support.pairwise import pairwise
from support.plans import new_plans
from support.poison import poisoned_memory
from support.run import attend, leaves_of, structure, with_hubs

from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from anemoi_gt.graph.checks import HUB_DEGREE

# edges of a segment, and of the small ones here
SEGMENT = HUB_DEGREE // 2
SMALL = 2
TRITON = KernelConfig("triton")
# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

# heads, channels, edge_dim
COLUMNS = {
    "graph": tuple(HUBS),
    "shape": (
        (1, 1, 1),
        (2, 8, 3),
        (3, 5, 17),
    ),
    "form": ("raw", "raw_without_bias", "embedded", "none"),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "option": ("plain", "dropout", BATCHES[1], *GRADIENTS),
}
CASES = [
    Case(**row | {"shape": row["shape"][:2], "edge_dim": row["shape"][2], "segment": SMALL})
    for row in pairwise(**COLUMNS)
]
# heads in two programs, which divide a node of any kind of hub alike
CASES.append(Case((20, 64), 2, torch.bfloat16, "raw", "plain", "both", SMALL))


@pytest.mark.interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_hubs_are_as_accurate_as_plain_pytorch(case, kernel_device):
    with poisoned_memory():
        judge(case, run(case, TRITON, kernel_device))


def test_destinations_that_are_no_hubs_keep_their_bits(kernel_device):
    problem = make_problem(HUBS["destination"], 3, 8, 5)
    graph = structure(HUBS["destination"], kernel_device)
    others = (graph.colptr.diff() <= 2 * SMALL).cpu()
    divided = attend(problem, with_hubs(graph, SMALL), TRITON)
    whole = attend(problem, graph, TRITON)
    assert 0 < int(others.sum()) < graph.num_dst
    for name in ("out", "lse", "dquery"):
        assert torch.equal(divided[name][others], whole[name][others]), name
    assert not torch.equal(divided["out"][~others], whole["out"][~others]), (
        "the hub was not divided"
    )


@pytest.mark.parametrize("logit", [1e4, torch.inf])
def test_large_and_infinite_logits_of_a_segment_reach_the_whole_hub_and_no_other(
    logit, kernel_device
):
    problem = make_problem(HUBS["destination"], 1, 2, 3, "none")
    graph = with_hubs(structure(HUBS["destination"], kernel_device), SMALL)
    edge = (problem.edge_index[1] == 3).nonzero()[-1]
    base = attend(problem, graph, TRITON)
    problem.query[3], problem.key[problem.edge_index[0, edge]] = 1.0, logit
    result, reads = attend(problem, graph, TRITON), torch.zeros(graph.num_dst, dtype=torch.bool)
    reads[problem.edge_index[1, problem.edge_index[0] == problem.edge_index[0, edge]]] = True
    assert torch.equal(result["out"][~reads], base["out"][~reads])
    if logit == torch.inf:
        assert bool(result["out"][3].isnan().any())
    else:
        assert_accurate(result, problem, torch.float32)


def launches_of(graph):
    """Grid and segment of each kernel of a forward and a backward pass, by name; nothing is launched."""
    problem = make_problem((graph.edge_index(), (graph.num_src, graph.num_dst)), 2, 4, 3)
    with noted_launches() as launches:
        edge_attention(**leaves_of(problem, graph), graph=graph, config=TRITON)[0].sum().backward()
    return {
        launch.name.removeprefix("edge_attention_").split("_fp32")[0]: (
            launch.grid[0],
            launch.constants.get("SEGMENT", 0),
        )
        for launch in launches
    }


WITHOUT_HUBS = {
    "project",
    "fwd",
    "embed",
    "bwd_dst",
    "bwd_attributes",
    "bwd_weight",
    "sum_weight",
    "bwd_src",
}


@pytest.mark.parametrize(("to", "of"), [(None, None), (3, None), (None, 2), (3, 2)])
def test_only_graphs_with_hubs_launch_kernels_for_hubs(to, of, kernel_device):
    edges = 2 * HUB_DEGREE
    graph = structure(crowd(5, 6, to, of, edges), kernel_device).with_reverse()
    has_dst_hub = to is not None
    has_src_hub = of is not None
    assert (graph.dst_hubs is not None) == has_dst_hub
    assert (graph.src_hubs is not None) == has_src_hub
    launches = launches_of(graph)
    expected = set(WITHOUT_HUBS)
    if has_dst_hub or has_src_hub:
        expected.add("join_segments")
    if has_dst_hub:
        expected.add("bwd_dst_hub")
    assert set(launches) == expected
    blocks = edges // SEGMENT
    by_destination = (6 + blocks, SEGMENT) if has_dst_hub else (6, 0)
    assert launches["fwd"] == launches["bwd_dst"] == by_destination
    assert launches["bwd_src"] == ((5 + blocks, SEGMENT) if has_src_hub else (5, 0))


@pytest.mark.parametrize("edges", [HUB_DEGREE, HUB_DEGREE + 1])
def test_where_values_were_not_checked_the_launch_is_bounded_by_the_number_of_edges(
    edges, kernel_device
):
    graph = structure(crowd(5, 6, edges=edges), kernel_device, validate=False).with_reverse()
    expected = (6, 0) if edges == HUB_DEGREE else (6 + 3, SEGMENT)
    assert graph.dst_hubs is not None
    assert launches_of(graph)["fwd"] == expected


@pytest.mark.interpreted
@pytest.mark.parametrize(("segment", "num_edges"), [(SEGMENT, 400), (SMALL, 80)])
def test_more_segments_than_are_read_together_are_joined(segment, num_edges, kernel_device):
    edges = crowd(5, 6, to=3, of=2, edges=num_edges)
    problem, graph = make_problem(edges, 2, 4, 2), structure(edges, kernel_device).with_reverse()
    assert all(pointers.diff().max() > 2 * segment for pointers in (graph.colptr, graph.rowptr))
    graph = with_hubs(graph, segment)
    with new_plans(joined=16, statistics=2):
        assert_accurate(attend(problem, graph, TRITON), problem, torch.float32)


@pytest.mark.compiled
def test_compiled_attention_on_hubs_equals_eager_and_never_recompiles(kernel_device):
    cases = []
    for num_src, num_dst, edges in ((8, 3, 40), (4, 6, 56)):
        sizes = crowd(num_src, num_dst, to=1, of=2, edges=edges)
        graph = structure(sizes, kernel_device, validate=False).with_reverse()
        cases.append((make_problem(sizes, 1, 7, 2), with_hubs(graph, SMALL)))
    assert_compiled_attention_is_eager(TRITON, cases)


class TestStructure:
    def test_hub_marks_survive_conversions_and_disjoint_graphs_with_one_hub_have_it(self):
        hubs, calm = (
            GraphStructure.from_edge_index(*crowd(5, 6, to=to, edges=600)) for to in (3, None)
        )
        assert GraphStructure.from_state(hubs.with_reverse().state_dict()).dst_hubs.shape == (
            HUB_DEGREE + 1,
            0,
        )
        assert calm.dst_hubs is None
        assert calm.src_hubs is None
        assert GraphStructure.disjoint([calm, hubs]).dst_hubs is not None
        assert GraphStructure.disjoint([calm, calm]).dst_hubs is None

    def test_unchecked_values_may_hold_hubs_and_wrong_ones_are_refused(self):
        calm = GraphStructure.from_edge_index(*GRAPHS["shuffled"])
        unchecked = GraphStructure.from_csc(calm.colptr, calm.row, calm.num_src, validate=False)
        assert unchecked.dst_hubs is not None
        assert unchecked.src_hubs is not None
        with pytest.raises(ValueError, match=r"src_hubs must have shape \[257, 0\].*got \(3,\)"):
            replace(calm, src_hubs=torch.empty(3))
