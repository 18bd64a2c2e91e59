"""What is told of the kernels of a call is what the call launches."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from anemoi_gt import GraphStructure
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops import triton_backend
from anemoi_gt.ops.triton_backend import fixed_degree_launch, launch, launch_plan
from anemoi_gt.ops.triton_backend.problem import Problem, Sizes

INDICES = ("colptr", "rowptr", "perm", "order")  # of nodes, and the caller's order, which bytes leave out
LEAVES = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")


def operands_of(form, dtype, samples):
    """Leaves by name: 5 sources, 4 destinations, 12 edges, 2 heads of 8."""

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    batch = () if samples == 1 else (samples,)
    operands = {"query": draw(*batch, 4, 2, 8), "key": draw(*batch, 5, 2, 8), "value": draw(*batch, 5, 2, 8)}
    first = () if samples == 1 else (1,)
    if form == "embedded":
        return operands | {"edge_attr": draw(*first, 12, 2, 8), "edge_weight": None, "edge_bias": None}
    if form == "none":
        return operands | {"edge_attr": None, "edge_weight": None, "edge_bias": None}
    bias = draw(16) if form == "raw" else None
    return operands | {"edge_attr": draw(*first, 12, 3), "edge_weight": draw(16, 3), "edge_bias": bias}


@pytest.fixture
def launched():
    """Launch nothing, and note of each launch its name and the bytes of its tensors."""
    seen = []

    def note(launch, **tensors):
        names = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
        dtype = next(tensors[name].dtype for name in ("query", "rows", "edge_attr") if name in tensors)
        there = {name: tensor for name, tensor in tensors.items() if tensor is not None and name not in INDICES}
        seen.append((launch.name(names[dtype]), there))

    with mock.patch.object(Launch, "__call__", note):
        yield seen


def bytes_of(name, tensors, raw):
    """What a kernel reads and writes: embedded features and `query` where they are used, scratch of attributes with them."""
    kept = dict(tensors)
    if "bwd_dst" in name and not raw:
        kept.pop("products", None)
        if "edge_attr" not in kept:
            kept.pop("query")
    elif "bwd_dst" in name:
        kept.pop("query")
    if "bwd_attributes" in name and "dedge_attr" not in kept:
        kept.pop("projected"), kept.pop("projected_grad")
    if "bwd_src" in name:
        for gradient, read in (("dkey", "query"), ("dvalue", "grad_out")):
            if gradient not in kept:
                kept.pop(read)
    rows = [tensor.nbytes for tensor in kept.values()]
    twice = kept["rows"].nbytes if "embed" in name else 0  # read and written
    indices = 4 * 12 if "bwd_attributes" in name else 0  # perm, which the graph of this test has not
    return sum(rows) + twice + indices


def differentiate(operands, graph):
    """Forward and backward of the operator."""
    query, key, value, *edges = operands.values()
    out, _ = triton_backend.attend(query, key, value, graph, *edges, None, 0.5, 0.0)
    out.sum().backward()


def sizes_of(operands, graph):
    given = [None if operand is None else operand.detach() for operand in operands.values()]
    degree = 0 if graph.fixed_in_degree is None else graph.fixed_in_degree.shape[0]
    return Problem(*given, graph.colptr, graph.row, None, None, None, None, 0.5, 0.0, degree).sizes


@pytest.fixture(params=["three in-edges each", "degrees that differ"])
def graph(request):
    numbers = torch.arange(12)
    dst = numbers // 3 if request.param == "three in-edges each" else (numbers + 2).clamp_min(4) // 4
    return GraphStructure.from_edge_index(torch.stack([numbers % 5, dst]), (5, 4)).with_reverse()


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
def test_the_plan_is_what_a_forward_and_a_backward_launch(launched, graph, form, dtype, samples):
    operands = operands_of(form, dtype, samples)
    differentiate(operands, graph)
    needs = launch_plan.Needs(**{name: operands[name] is not None for name in LEAVES})
    sizes = sizes_of(operands, graph)
    planned = [*launch_plan.forward_kernels(sizes), *launch_plan.backward_kernels(sizes, needs)]
    assert [kernel.name for kernel in planned] == [name for name, _ in launched]
    raw = form.startswith("raw")
    assert [kernel.bytes for kernel in planned] == [bytes_of(name, tensors, raw) for name, tensors in launched]
    for_equal = sum("_equal_" in name for name, _ in launched)
    assert for_equal == (2 if graph.fixed_in_degree is not None and form != "embedded" else 0)


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("edge_attr",), ("edge_weight",), ("key", "edge_bias")])
def test_the_plan_knows_which_gradients_are_needed(launched, graph, wanted):
    operands = operands_of("raw", torch.float32, 1)
    for name, operand in operands.items():
        operand.requires_grad_(name in wanted)
    differentiate(operands, graph)
    sizes = sizes_of(operands, graph)
    needs = launch_plan.Needs(**{name: name in wanted for name in LEAVES})
    planned = [*launch_plan.forward_kernels(sizes), *launch_plan.backward_kernels(sizes, needs)]
    assert [kernel.name for kernel in planned] == [name for name, _ in launched]
    assert [kernel.bytes for kernel in planned] == [bytes_of(name, tensors, True) for name, tensors in launched]


@pytest.mark.parametrize(
    ("dtype", "channels", "pairs"),
    [(torch.bfloat16, 8, True), (torch.bfloat16, 7, False), (torch.float16, 8, False), (torch.float32, 8, False)],
)
def test_the_kernels_over_destinations_read_even_rows_of_bfloat16_as_pairs(dtype, channels, pairs):
    sizes = Sizes(
        samples=1, num_dst=4, num_src=5, num_edges=12, heads=2, channels=channels, edge_dim=3, bias=1, embedded=False,
        attr_stride=0, dtype=dtype, wide=False, scale=0.5, dropout_p=0.0,
    )  # fmt: skip
    for launch_of in (launch.forward_launch, launch.destination_launch):
        assert launch_of(sizes).constants["PAIRS"] == pairs
    assert not launch.source_choice(sizes.over_sources).chosen.tile.pairs


@pytest.mark.parametrize(("channels", "pairs"), [(32, True), (64, False)])  # 16 and 32 numbers of a row in each thread
def test_of_the_kernels_for_one_degree_the_backward_reads_rows_as_pairs_where_threads_hold_few_numbers(channels, pairs):
    sizes = Sizes(
        samples=1, num_dst=4, num_src=5, num_edges=12, heads=16, channels=channels, edge_dim=3, bias=1, embedded=False,
        attr_stride=0, dtype=torch.bfloat16, wide=False, scale=0.5, dropout_p=0.0, fixed_in_degree=3,
    )  # fmt: skip
    assert fixed_degree_launch.destination_launch(sizes).constants["PAIRS"] == pairs
    assert not fixed_degree_launch.forward_launch(sizes).constants["PAIRS"]
    given = replace(fixed_degree_launch.forward_tile(sizes), pairs=True, num_warps=8)
    for launch_of in (fixed_degree_launch.forward_launch, fixed_degree_launch.destination_launch):
        constants = launch_of(sizes, given).constants
        assert constants["PAIRS"] and constants["num_warps"] == 8
