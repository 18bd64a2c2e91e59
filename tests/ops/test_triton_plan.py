"""The kernels that are reported for a call are those that it launches, with their tiles, forced or chosen."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from anemoi_gt import AttentionConfig, GraphStructure
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops import triton_backend
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend import launch, launch_plan
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem, Sizes

INDICES = ("colptr", "rowptr", "perm", "dst_schedule")  # of nodes, and the caller's order, which bytes leave out
LEAVES = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")


def operands_of(form, dtype, size):
    """Leaves by name: 5 sources, 4 destinations, 12 edges, 2 heads of 8, `size` of them in a batch."""

    def draw(*shape):
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    batch = () if size == 1 else (size,)
    operands = {"query": draw(*batch, 4, 2, 8), "key": draw(*batch, 5, 2, 8), "value": draw(*batch, 5, 2, 8)}
    first = () if size == 1 else (1,)
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
        kept.pop("attr_dp", None)
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


def differentiate(operands, graph, **config):
    """Forward and backward of the operator."""
    operands = AttentionOperands(*operands.values())
    out, _ = triton_backend.attend(operands, graph, None, 0.5, 0.0, AttentionConfig(**config))
    out.sum().backward()


def sizes_of(operands, graph):
    given = AttentionOperands(*(None if operand is None else operand.detach() for operand in operands.values()))
    return Problem(given, IndexTensors.of(graph), Options(scale=0.5)).sizes


@pytest.fixture(params=["three in-edges each", "degrees that differ"])
def graph(request):
    numbers = torch.arange(12)
    dst = numbers // 3 if request.param == "three in-edges each" else (numbers + 2).clamp_min(4) // 4
    return GraphStructure.from_edge_index(torch.stack([numbers % 5, dst]), (5, 4)).with_reverse()


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["raw", "raw_without_bias", "embedded", "none"])
def test_the_plan_is_what_a_forward_and_a_backward_launch(launched, graph, form, dtype, batch):
    operands = operands_of(form, dtype, batch)
    differentiate(operands, graph)
    needs = launch_plan.Needs(**{name: operands[name] is not None for name in LEAVES})
    sizes = sizes_of(operands, graph)
    planned = [*launch_plan.forward_kernels(sizes), *launch_plan.backward_kernels(sizes, needs)]
    assert [kernel.name for kernel in planned] == [name for name, _ in launched]
    raw = form.startswith("raw")
    assert [kernel.bytes for kernel in planned] == [bytes_of(name, tensors, raw) for name, tensors in launched]
    fixed = sum("_fixed_degree_" in name for name, _ in launched)
    assert fixed == (2 if graph.fixed_in_degree is not None and form != "embedded" else 0)


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


def sizes(heads=2, channels=8, dtype=torch.bfloat16, **more):
    return Sizes(
        batch=1, num_dst=4, num_src=5, num_edges=12, heads=heads, channels=channels, edge_dim=3, bias=1, embedded=False,
        attr_stride=0, dtype=dtype, needs_int64=False, scale=0.5, dropout_p=0.0, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "channels", "packed"),
    [
        *[(torch.bfloat16, 8, "bf16"), (torch.bfloat16, 7, None)],
        *[(torch.float16, 8, "fp16"), (torch.float16, 7, None), (torch.float32, 8, None)],
    ],
)
def test_kernels_over_destinations_read_even_16_bit_rows_as_packed_pairs(dtype, channels, packed):
    for launch_of in (launch.forward_launch, launch.destination_launch):
        assert launch_of(sizes(2, channels, dtype)).constants["PACKED"] == packed
    assert not launch.source_tile(sizes(2, channels, dtype)).pairs


@pytest.mark.parametrize(("channels", "packed"), [(32, "bf16"), (64, None)])  # 16 and 32 elements of a row a thread
def test_the_fixed_degree_backward_reads_packed_pairs_where_threads_hold_few_elements(channels, packed):
    fixed = sizes(16, channels, fixed_in_degree=3)
    assert launch.destination_launch(fixed).constants["PACKED"] == packed
    assert launch.forward_launch(fixed).constants["PACKED"] is None
    given = replace(launch.forward_tile(fixed), pairs=True, num_warps=8)
    for launch_of in (launch.forward_launch, launch.destination_launch):
        constants = launch_of(fixed, given).constants
        assert constants["PACKED"] == "bf16" and constants["num_warps"] == 8


@pytest.mark.parametrize("use", [True, False])
def test_the_config_switches_the_fixed_degree_kernels(launched, graph, use):
    differentiate(operands_of("raw", torch.bfloat16, 1), graph, fixed_degree_kernels=use)
    found = any("_fixed_degree_" in name for name, _ in launched)
    assert found == (use and graph.fixed_in_degree is not None)


def test_the_config_forces_the_fields_of_a_tile_that_a_kernel_has():
    forced = "heads=1,unroll=2,num_warps=8,nodes=4,packed=0"
    for launch_of, names in (
        (launch.forward_launch, {"HEADS": 1, "UNROLL": 2, "num_warps": 8, "PACKED": None}),
        (launch.destination_launch, {"HEADS": 1, "UNROLL": 2, "num_warps": 8, "PACKED": None}),
        (launch.source_launch, {"HEADS": 1, "UNROLL": 2, "num_warps": 8, "NODES": 4}),
    ):
        constants = launch_of(sizes(tile=forced)).constants
        assert {name: constants[name] for name in names} == names
    constants = launch.forward_launch(sizes(tile=forced, fixed_in_degree=3)).constants
    assert (constants["HEADS"], constants["K"], constants["num_warps"]) == (2, 3, 8)


def test_packed_pairs_are_forced_on_16_bit_rows_only():
    assert launch.forward_launch(sizes(fixed_in_degree=3, tile="packed=1")).constants["PACKED"] == "bf16"
    with pytest.raises(ValueError, match=r"packed=1 for 16-bit rows .*, got torch.float32 and 8 channels"):
        launch.forward_launch(sizes(dtype=torch.float32, tile="packed=1"))


def test_a_forced_tile_reaches_the_kernels_of_a_call(graph):
    seen = []
    with mock.patch.object(Launch, "__call__", lambda launch, **_: seen.append(launch.constants)):
        differentiate(operands_of("raw", torch.bfloat16, 1), graph, tile="num_warps=2")
    row_kernels = [constants for constants in seen if "UNROLL" in constants or "K" in constants]
    assert len(row_kernels) == 3 and {constants["num_warps"] for constants in row_kernels} == {2}
