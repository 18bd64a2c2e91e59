"""The kernels that explain lists for a call are those that the call launches."""

import re
from dataclasses import replace
from unittest import mock

import pytest
import torch
from anemoi_gt.ops.triton_backend.problem import Sizes
from support.run import with_hubs

from anemoi_gt import AttentionConfig, GraphStructure, edge_attention, explain_attention
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.tiles import RowTile

CONFIG = AttentionConfig(backend="triton")


def operands_of(form, dtype, batch_size):
    """Leaves by name: 5 sources, 4 destinations, 12 edges, 2 heads of 8."""

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    batch = () if batch_size == 1 else (batch_size,)
    operands = {"query": draw(*batch, 4, 2, 8), "key": draw(*batch, 5, 2, 8), "value": draw(*batch, 5, 2, 8)}
    if form == "embedded":
        return operands | {"edge_attr": draw(12, 2, 8), "edge_weight": None, "edge_bias": None}
    if form == "none":
        return operands | {"edge_attr": None, "edge_weight": None, "edge_bias": None}
    bias = draw(16) if form == "raw" else None
    return operands | {"edge_attr": draw(12, 3), "edge_weight": draw(16, 3), "edge_bias": bias}


@pytest.fixture
def launched():
    """Launch nothing; list the name and the constants of each launch."""
    seen = []

    def record(launch, **tensors):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        name = launch.name({name: names.get(tensor.dtype) for name, tensor in there.items()})
        seen.append((name, launch.constants))

    with mock.patch.object(Launch, "__call__", record):
        yield seen


def compare(launched, operands, graph):
    """Compare the kernels that explain lists with those of a forward and a backward pass; returns their names."""
    query, key, value, *edges = operands.values()
    (layer,) = explain_attention(query, key, value, graph, *edges, config=CONFIG).layers
    launched.clear()
    out, _ = edge_attention(query, key, value, graph, *edges, config=CONFIG)
    out.sum().backward()
    listed = [kernel for pass_ in layer.passes for kernel in pass_.kernels]
    assert listed == [name for name, _ in launched]
    return listed


@pytest.fixture(params=["three in-edges each", "different in-degrees"])
def graph(request):
    numbers = torch.arange(12)
    dst = numbers // 3 if request.param == "three in-edges each" else (numbers + 2).clamp_min(4) // 4
    return GraphStructure.from_edge_index(torch.stack([numbers % 5, dst]), (5, 4))


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
def test_the_listed_kernels_are_those_of_a_forward_and_a_backward(launched, graph, form, dtype, batch_size):
    names = compare(launched, operands_of(form, dtype, batch_size), graph)
    fixed_degree = sum("_fixed_degree_" in name for name in names)
    assert fixed_degree == (2 if graph.fixed_in_degree is not None and form != "embedded" else 0)


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("edge_attr",), ("edge_weight",), ("key", "edge_bias")])
def test_the_listed_kernels_depend_on_the_gradients_that_are_needed(launched, graph, wanted):
    operands = operands_of("raw", torch.float32, 1)
    for name, operand in operands.items():
        operand.requires_grad_(name in wanted)
    compare(launched, operands, graph)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
@pytest.mark.parametrize("wanted", ["all", "query", "value"])
def test_the_listed_kernels_are_those_of_a_call_with_hubs(launched, graph, form, wanted, batch_size):
    operands = operands_of(form, torch.bfloat16, batch_size)
    for name, operand in operands.items():
        if operand is not None:
            operand.requires_grad_(wanted in ("all", name))
    names = compare(launched, operands, with_hubs(graph, 4))
    joined = sum("join_segments" in name for name in names)
    is_fixed = graph.fixed_in_degree is not None and form != "embedded"
    over_destinations = 0 if is_fixed else 2 + (wanted != "value") + (form == "raw" and wanted != "value")
    assert joined == over_destinations + (wanted != "query")


@pytest.mark.parametrize(
    ("dtype", "channels", "pairs"),
    [(torch.bfloat16, 8, True), (torch.bfloat16, 7, False), (torch.float16, 8, True), (torch.float32, 8, False)],
)
def test_kernels_over_destinations_read_even_16_bit_rows_as_packed_pairs(launched, dtype, channels, pairs):
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 2], [0, 0, 1]]), (3, 2))
    packed = packed_in(launched, graph, *(torch.zeros(nodes, 2, channels, dtype=dtype) for nodes in (2, 3)))
    assert packed == {"fwd": pairs, "bwd_dst": pairs}


@pytest.mark.parametrize(("channels", "pairs"), [(32, True), (64, False)])  # 16 and 32 elements of a row in each thread
def test_fixed_degree_backward_reads_pairs_where_threads_hold_few_elements(launched, channels, pairs):
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 2, 1, 2, 0], [0, 0, 0, 1, 1, 1]]), (3, 2))
    rows = (torch.zeros(count, 16, channels, dtype=torch.bfloat16) for count in (2, 3))
    packed = packed_in(launched, graph, *rows)
    assert packed == {"fixed_degree_fwd": False, "fixed_degree_bwd_dst": pairs}


def packed_in(launched, graph, query, key):
    """Return whether each kernel over destinations reads packed pairs, by its name without dtype and sizes."""
    query, key = query.requires_grad_(), key.requires_grad_()
    edge_attention(query, key, key, graph.with_reverse(), config=CONFIG)[0].sum().backward()
    packed = {name: constants["PACKED"] is not None for name, constants in launched if "PACKED" in constants}
    return {re.search(r"edge_attention_(\w+?)_(bf16|fp16|fp32)", name)[1]: pairs for name, pairs in packed.items()}


def sizes(heads=2, channels=8, dtype=torch.bfloat16, **more):
    return Sizes(
        batch=1, num_dst=4, num_src=5, num_edges=12, heads=heads, channels=channels, edge_dim=3, bias=1, embedded=False,
        attr_stride=0, dtype=dtype, needs_int64=False, scale=0.5, dropout_p=0.0, **more,
    )  # fmt: skip


@pytest.mark.parametrize("is_known", [True, False])
def test_the_fixed_degree_kernels_serve_a_structure_that_has_the_degree(launched, graph, is_known):
    query, key, value, *edges = operands_of("raw", torch.bfloat16, 1).values()
    structure = graph if is_known else replace(graph, fixed_in_degree=None)
    edge_attention(query, key, value, structure, *edges, config=CONFIG)[0].sum().backward()
    uses_fixed_degree = any("_fixed_degree_" in name for name, _ in launched)
    assert uses_fixed_degree == (structure.fixed_in_degree is not None)


def test_a_launch_takes_another_tile_than_the_chosen_one():
    tile = RowTile(heads=1, channels=8, unroll=2, num_warps=8, nodes=4)
    for launch_of, names in (
        (launch.forward_launch, {"HEADS": 1, "UNROLL": 2, "num_warps": 8, "PACKED": None}),
        (launch.destination_launch, {"HEADS": 1, "UNROLL": 2, "num_warps": 8, "PACKED": None}),
        (launch.source_launch, {"HEADS": 1, "UNROLL": 2, "num_warps": 8, "NODES": 4}),
    ):
        constants = launch_of(sizes(), tile).constants
        assert {name: constants[name] for name in names} == names
