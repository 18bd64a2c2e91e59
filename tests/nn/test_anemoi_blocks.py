"""The blocks against anemoi-models': the same state dict and results, for all pairs of options."""

from functools import partial

import pytest
import torch
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers import block
from anemoi.models.layers.utils import load_layer_kernels
from support.accuracy import Corpus
from support.differentiate import differentiate, randomise
from support.pairwise import pairwise
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure, nn
from anemoi_gt.nn import ConditionalLayerNorm, LayerKernels

# theirs says that a gate needs no activation
pytestmark = pytest.mark.filterwarnings("ignore:mlp_implementation=")

CHANNELS = 12
HEADS = 3
HIDDEN = 20
DIM = 5
CONDITION = 4
SRC = 9
DST = 7
EDGES = 40
SAMPLES = 2
KINDS = {"processor": "GraphTransformerProcessorBlock", "mapper": "GraphTransformerMapperBlock"}
# What a column's value means as keywords of their `load_layer_kernels` and of our `LayerKernels`.
CONDITIONAL = {
    "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
    "condition_shape": CONDITION,
}
THEIR_KERNELS = {
    "conditional": {"LayerNorm": CONDITIONAL},
    "silu": {"Activation": {"_target_": "torch.nn.SiLU"}},
}
OUR_NORM = partial(ConditionalLayerNorm, condition_shape=CONDITION)
OUR_KERNELS = {"conditional": {"LayerNorm": OUR_NORM}, "silu": {"Activation": torch.nn.SiLU}}
PLAIN = {
    "mlp_implementation": "mlp",
    "qk_norm": False,
    "edge_pre_mlp": False,
    "bias": True,
    "attn_channels": None,
}
PLAIN |= {"update_src_nodes": False, "norm": "plain", "activation": "gelu"}
ROWS = pairwise(
    kind=tuple(KINDS),
    mlp_implementation=("mlp", "glu", "swiglu", "geglu", "reglu"),
    qk_norm=(False, True),
    edge_pre_mlp=(False, True),
    bias=(True, False),
    # 8 a head: a norm of 2 is their sign, whose gradient is what rounding leaves
    attn_channels=(None, 24),
    update_src_nodes=(False, True),
    norm=("plain", "conditional"),
    activation=("gelu", "silu"),
)


def name_of(row):
    return "-".join(
        value if isinstance(value, str) else f"{name}={value}"
        for name, value in sorted(row.items())
    )


def options_of(row):
    sizes = {"in_channels": CHANNELS, "out_channels": CHANNELS, "hidden_dim": HIDDEN}
    sizes |= {"num_heads": HEADS, "edge_dim": DIM}
    left_out = {"kind", "norm", "activation"} | (
        {"update_src_nodes"} if row["kind"] == "processor" else set()
    )
    return sizes | {name: value for name, value in row.items() if name not in left_out}


def kernels_of(row, table):
    return table.get(row["norm"], {}) | table.get(row["activation"], {})


def make_theirs(row):
    kernels = load_layer_kernels(kernels_of(row, THEIR_KERNELS))
    return getattr(block, KINDS[row["kind"]])(
        **options_of(row), layer_kernels=kernels, graph_attention_backend="pyg"
    )


def make_ours(row):
    kernels = LayerKernels(**kernels_of(row, OUR_KERNELS))
    return getattr(nn, KINDS[row["kind"]])(**options_of(row), layer_kernels=kernels)


def make_inputs(row, dtype=torch.float64):
    """Edges, and tensors by name; the last destination has no in-edge."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    num_src = SRC if row["kind"] == "mapper" else DST
    ends = [torch.randint(n, (EDGES,), generator=generator) for n in (num_src, DST - 1)]
    inputs = {"dst": draw(SAMPLES, DST, CHANNELS), "edge_attr": draw(EDGES, DIM)}
    if row["kind"] == "mapper":
        inputs["src"] = draw(SAMPLES, SRC, CHANNELS)
    if row["norm"] == "conditional":
        inputs["cond_dst"] = draw(SAMPLES, DST, CONDITION)
        if row["kind"] == "mapper":
            inputs["cond_src"] = draw(SAMPLES, SRC, CONDITION)
    return torch.stack(ends), num_src, inputs


def arguments(row, tensors):
    if row["kind"] == "processor":
        return tensors["dst"], {"cond": tensors["cond_dst"]} if "cond_dst" in tensors else {}
    cond = {"cond": (tensors["cond_src"], tensors["cond_dst"])} if "cond_dst" in tensors else {}
    return (tensors["src"], tensors["dst"]), cond


def run_ours(layer, row, dtype=torch.float64):
    edge_index, num_src, inputs = make_inputs(row, dtype)
    graph = GraphStructure.from_edge_index(edge_index, (num_src, DST))

    def call(tensors):
        x, cond = arguments(row, tensors)
        return layer(x, graph, tensors["edge_attr"], **cond)

    return differentiate(layer, inputs, call)


def run_theirs(layer, row, dtype=torch.float64):
    """One batch element at a time: their blocks have no batch dimension."""
    edge_index, num_src, inputs = make_inputs(row, dtype)
    shards = GraphShardInfo() if row["kind"] == "processor" else BipartiteGraphShardInfo()

    def call(tensors):
        parts = []
        for i in range(SAMPLES):
            x, cond = arguments(
                row, {n: t if n == "edge_attr" else t[i] for n, t in tensors.items()}
            )
            size = (num_src, DST)
            out, _ = layer(
                x,
                tensors["edge_attr"],
                edge_index,
                shards,
                1,
                size,
                edges_are_dst_sorted=False,
                **cond,
            )
            parts.append(out)
        return (
            torch.stack(parts)
            if row["kind"] == "processor"
            else tuple(map(torch.stack, zip(*parts, strict=True)))
        )

    return differentiate(layer, inputs, call)


def make_pair(row):
    theirs = randomise(make_theirs(row).double())
    ours = make_ours(row).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_state_dicts_load_both_ways_and_output_and_all_gradients_are_anemois_in_float64(row):
    theirs, ours = make_pair(row)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_same(run_ours(ours, row), run_theirs(theirs, row))
    theirs.load_state_dict(randomise(ours, seed=3).state_dict())
    assert_same(theirs.state_dict(), ours.state_dict(), 0)


def test_float32_loses_no_more_than_anemoi_over_all_options():
    corpus = Corpus()
    for row in ROWS:
        theirs, ours = make_pair(row)
        exact = run_theirs(theirs, row)
        baseline = run_theirs(theirs.float(), row, torch.float32)
        result = run_ours(ours.float(), row, torch.float32)
        assert all(value.dtype == torch.float32 for value in result.values() if value is not None)
        learnt = [
            name for name in exact if exact[name] is not None and not name.endswith("lin_key.bias")
        ]
        corpus.add_errors(
            *({name: side[name] for name in learnt} for side in (result, exact, baseline))
        )
    assert len(corpus.ours) > 40
    corpus.assert_accurate()


@pytest.mark.parametrize("kind", KINDS)
def test_one_seed_draws_the_weights_of_anemoi(kind):
    row = PLAIN | {"kind": kind, "mlp_implementation": "glu", "qk_norm": True, "edge_pre_mlp": True}
    row |= {"update_src_nodes": True, "attn_channels": 6}
    torch.manual_seed(5)
    theirs = make_theirs(row)
    torch.manual_seed(5)
    assert_same(make_ours(row).state_dict(), theirs.state_dict(), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_their_layer_kernels_make_our_blocks(kind):
    row = PLAIN | {"kind": kind, "qk_norm": True, "norm": "conditional"}
    theirs = randomise(make_theirs(row).double())
    kernels = load_layer_kernels(kernels_of(row, THEIR_KERNELS))
    ours = getattr(nn, KINDS[kind])(**options_of(row), layer_kernels=kernels).double()
    ours.load_state_dict(theirs.state_dict())
    assert_same(run_ours(ours, row)["out"], run_theirs(theirs, row)["out"])


@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_outputs_have_their_dtype_and_are_as_close(kind):
    row = PLAIN | {"kind": kind, "qk_norm": True}
    theirs, ours = make_pair(row)
    exact = run_theirs(theirs, row)["out"]
    with torch.autocast("cpu", torch.bfloat16):
        baseline = run_theirs(theirs.float(), row, torch.float32)["out"]
        out = run_ours(ours.float(), row, torch.float32)["out"]
    assert out.dtype == baseline.dtype == torch.float32  # the residual keeps them
    assert (out - exact).square().mean() <= 4 * (baseline - exact).square().mean()
