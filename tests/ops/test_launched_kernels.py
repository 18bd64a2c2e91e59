"""The kernels that `explain` lists for a call are the kernels that the call launches."""

import re
from dataclasses import replace

import pytest
import torch
from support.launches import noted_launches
from support.run import with_hubs

from anemoi_gt import GraphStructure, KernelConfig, edge_attention, explain_attention

CONFIG = KernelConfig(backend="triton")


def operands_of(form, batch_size=1):
    """Leaves by name: 5 sources, 4 destinations, 12 edges, 2 heads of 8."""

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    batch = () if batch_size == 1 else (batch_size,)
    operands = {
        "query": draw(*batch, 4, 2, 8),
        "key": draw(*batch, 5, 2, 8),
        "value": draw(*batch, 5, 2, 8),
    }
    if form == "embedded":
        return operands | {"edge_attr": draw(12, 2, 8), "edge_weight": None, "edge_bias": None}
    if form == "none":
        return operands | {"edge_attr": None, "edge_weight": None, "edge_bias": None}
    bias = draw(16) if form == "raw" else None
    return operands | {"edge_attr": draw(12, 3), "edge_weight": draw(16, 3), "edge_bias": bias}


@pytest.fixture
def launched():
    with noted_launches() as launches:
        yield launches


def compare(launched, operands, graph):
    """Compare the kernels that explain lists with a forward and a backward pass; return their names."""
    query, key, value, *edges = operands.values()
    (layer,) = explain_attention(query, key, value, graph, *edges, config=CONFIG).layers
    launched.clear()
    out, _ = edge_attention(query, key, value, graph, *edges, config=CONFIG)
    out.sum().backward()
    listed = [kernel for pass_ in layer.passes for kernel in pass_.kernels]
    assert listed == [launch.name for launch in launched]
    return listed


@pytest.fixture(params=["three in-edges each", "different in-degrees"])
def graph(request):
    numbers = torch.arange(12)
    dst = (
        numbers // 3 if request.param == "three in-edges each" else (numbers + 2).clamp_min(4) // 4
    )
    return GraphStructure.from_edge_index(torch.stack([numbers % 5, dst]), (5, 4))


@pytest.mark.parametrize(
    ("form", "batch_size"), [("raw", 1), ("raw_without_bias", 3), ("embedded", 3), ("none", 1)]
)
def test_the_listed_kernels_match_a_forward_and_a_backward(launched, graph, form, batch_size):
    names = compare(launched, operands_of(form, batch_size), graph)
    fixed_degree = sum("_fixed_degree_" in name for name in names)
    assert fixed_degree == (2 if graph.fixed_in_degree is not None and form != "embedded" else 0)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"query"}, {"project", "bwd_dst", "bwd_attributes", "embed"}),
        ({"key"}, {"project", "bwd_dst", "bwd_src"}),
        ({"edge_attr"}, {"project", "bwd_dst", "bwd_attributes"}),
        ({"edge_bias"}, {"project", "bwd_dst", "bwd_attributes", "bwd_weight", "sum_weight"}),
        (
            {"key", "edge_weight"},
            {"project", "bwd_dst", "bwd_attributes", "bwd_weight", "sum_weight", "bwd_src"},
        ),
    ],
    ids=lambda names: "+".join(sorted(names)),
)
def test_kernels_run_only_for_gradients_that_are_needed(launched, graph, wanted, expected):
    graph = replace(graph, fixed_in_degree=None)
    operands = operands_of("raw")
    for name, operand in operands.items():
        operand.requires_grad_(name in wanted)
    names = compare(launched, operands, graph)
    backward = names[names.index("edge_attention_embed_bf16_h2_c8_d3") + 1 :]
    assert {re.sub(r"edge_attention_|_(bf16|fp32).*", "", name) for name in backward} == expected


def test_a_missing_incoming_gradient_is_not_made_up(launched, graph):
    query, key, value, *edges = operands_of("raw").values()
    edge_attention(query, key, value, graph, *edges, config=CONFIG)[0].sum().backward()
    (rows,) = [launch for launch in launched if "bwd_dst" in launch.name]
    assert "grad_out" in rows.tensors
    assert "grad_lse" not in rows.tensors


@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
@pytest.mark.parametrize("wanted", ["all", "query", "value"])
def test_the_listed_kernels_match_a_call_with_hubs(launched, graph, form, wanted):
    operands = operands_of(form, 3)
    for name, operand in operands.items():
        if operand is not None:
            operand.requires_grad_(wanted in ("all", name))
    names = compare(launched, operands, with_hubs(graph, 4))
    joined = sum("join_segments" in name for name in names)
    is_fixed = graph.fixed_in_degree is not None and form != "embedded"
    over_destinations = (
        0 if is_fixed else 2 + (wanted != "value") + (form == "raw" and wanted != "value")
    )
    assert joined == over_destinations + (wanted != "query")


@pytest.mark.parametrize(
    ("dtype", "channels", "pairs"),
    [
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 7, False),
        (torch.float16, 8, True),
        (torch.float32, 8, False),
    ],
)
def test_kernels_over_destinations_read_even_16_bit_rows_as_packed_pairs(
    launched, dtype, channels, pairs
):
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 1]]), (3, 2))
    packed = packed_in(
        launched, graph, *(torch.zeros(nodes, 2, channels, dtype=dtype) for nodes in (2, 3))
    )
    assert packed == {"fwd": pairs, "bwd_dst": pairs}


@pytest.mark.parametrize(
    ("channels", "pairs"), [(32, True), (64, False)]
)  # 16 and 32 elements of a row in each thread
def test_fixed_degree_backward_reads_pairs_where_threads_hold_few_elements(
    launched, channels, pairs
):
    graph = GraphStructure.from_edge_index(
        torch.tensor([[0, 1, 2, 1, 2, 0], [0, 0, 0, 1, 1, 1]]), (3, 2)
    )
    rows = (torch.zeros(count, 16, channels, dtype=torch.bfloat16) for count in (2, 3))
    packed = packed_in(launched, graph, *rows)
    assert packed == {"fixed_degree_fwd": False, "fixed_degree_bwd_dst": pairs}


def packed_in(launched, graph, query, key):
    """Return whether each kernel over destinations reads packed pairs, by its name without dtype and sizes."""
    query, key = query.requires_grad_(), key.requires_grad_()
    edge_attention(query, key, key, graph.with_reverse(), config=CONFIG)[0].sum().backward()
    packed = {}
    for launch in launched:
        if "PACKED" in launch.constants:
            name = re.search(r"edge_attention_(\w+?)_(bf16|fp16|fp32)", launch.name)[1]
            packed[name] = launch.constants["PACKED"] is not None
    return packed


def test_fixed_degree_kernels_require_a_known_fixed_in_degree(launched, graph):
    names = compare(launched, operands_of("raw"), replace(graph, fixed_in_degree=None))
    assert not any("_fixed_degree_" in name for name in names)
