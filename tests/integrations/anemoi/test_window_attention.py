"""Attention within a window: its numbers, its memory, and which attention of Anemoi is computed by it."""

import copy
import functools
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers.attention import (
    MultiHeadCrossAttention,
    MultiHeadSelfAttention,
    SDPAAttentionWrapper,
)
from anemoi.models.layers.block import TransformerProcessorBlock
from anemoi.models.layers.utils import load_layer_kernels
from support.pairwise import pairwise
from support.same_numbers import assert_same, assert_same_numbers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from anemoi_gt import torch_compat
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import transformer_attention
from anemoi_gt.integrations.anemoi import window_attention as windows
from anemoi_gt.integrations.anemoi.window_attention import Scores, Window, window_attention

NODES = 50
HEADS = 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 8 queries, two blocks of a window of 5 in a group."""
    monkeypatch.setattr(windows, "BLOCK", 8)
    monkeypatch.setattr(windows, "GROUP", 2 * 8 * 18)


def draw(num_queries=NODES, num_keys=NODES, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    rows = []
    for number in (num_queries, num_keys, num_keys):
        row = torch.randn(batch, number, HEADS, 8, generator=generator, dtype=torch.float64)
        rows.append(row.to(dtype).transpose(1, 2).requires_grad_())
    return rows


def by_definition(query, key, value, left, right, scores):
    """Return the attention from scores of all pairs, with the last query level with the last key."""
    i = torch.arange(query.shape[2])[:, None] + key.shape[2] - query.shape[2]
    j = torch.arange(key.shape[2])
    s = query @ key.transpose(-1, -2) * (scores.scale or query.shape[-1] ** -0.5)
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.alibi_slopes is not None:
        s = s - scores.alibi_slopes[..., None, None] * (j - i).abs()
    is_near = torch.ones_like(i + j, dtype=torch.bool)
    if left is not None:
        is_near &= j >= i - left
    if right is not None:
        is_near &= j <= i + right
    return s.masked_fill(~is_near, float("-inf")).softmax(-1).nan_to_num() @ value


def differentiate(attend, operands):
    out = attend(*operands)
    direction = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    return out.detach(), *torch.autograd.grad(out, operands, direction)


SCORES = {
    "plain": Scores(scale=0.3),
    "ALiBi": Scores(alibi_slopes=torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64)),
    "softcap and ALiBi of each member": Scores(
        softcap=2.0, alibi_slopes=torch.rand(2, HEADS, dtype=torch.float64)
    ),
}
CASES = pairwise(
    scores=tuple(SCORES),
    window=((5, 5), (0, 0), (7, 2), (None, 0), (3, None), (None, None), (40, 40)),
    sizes=((50, 50), (48, 48), (7, 7), (50, 61), (61, 50), (1, 30)),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_output_and_gradients_are_those_of_the_definition(case):
    scores = SCORES[case["scores"]]
    left, right = case["window"]
    operands = draw(*case["sizes"])
    attend = functools.partial(window_attention, window=Window(left, right), scores=scores)
    expected = functools.partial(by_definition, left=left, right=right, scores=scores)
    assert_same(differentiate(attend, operands), differentiate(expected, operands))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_it_is_as_accurate_as_the_mask_of_all_pairs(dtype):
    operands = draw(dtype=dtype)
    doubles = [operand.detach().double().requires_grad_() for operand in operands]
    i = torch.arange(NODES)
    mask = (i - i[:, None]).abs() <= 5
    exact = differentiate(lambda *rows: by_definition(*rows, 5, 5, Scores()), doubles)
    ours = differentiate(lambda *rows: window_attention(*rows, Window(5, 5), Scores()), operands)
    theirs = differentiate(
        lambda *rows: F.scaled_dot_product_attention(*rows, attn_mask=mask), operands
    )
    for name, factor, our, their, right in zip(
        "oqkv", (2, 3, 3, 3), ours, theirs, exact, strict=True
    ):
        error, allowed = ((result.double() - right).norm() for result in (our, their))
        assert error <= factor * allowed, name


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("scores", [Scores(), Scores(softcap=1.0)], ids=["plain", "softcap"])
@pytest.mark.parametrize("window", [5, 240])
def test_nothing_is_as_large_as_all_pairs_of_nodes(window, scores):
    """A window of 240 reaches more keys than a block holds apart, so blocks attend to all of them."""
    nodes = 300
    operands = draw(nodes, nodes, batch=1, dtype=torch.float32)
    with Largest() as largest:
        differentiate(
            lambda *rows: window_attention(*rows, Window(window, window), scores), operands
        )
    assert largest.elements < nodes * nodes / 4


def attention_of(kind=MultiHeadSelfAttention, **options):
    """Return an attention of Anemoi with 2 heads of 8 channels and a window of 5."""
    torch.manual_seed(0)
    defaults = {
        "layer_kernels": load_layer_kernels(),
        "attention_implementation": "scaled_dot_product_attention",
        "window_size": 5,
    }
    return kind(2, 16, **(defaults | options)).double()


def inputs(batch=2):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch * NODES, 16, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


def results_of(attention, x, batch=2, call=None):
    """Return output and gradients of the input and of all parameters."""
    call = attention if call is None else call
    out = call(x, GraphShardInfo(), batch)
    leaves = {"x": x, **dict(attention.named_parameters())}
    gradients = torch.autograd.grad(out.sin().sum(), leaves.values())
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


@pytest.fixture
def served(monkeypatch):
    """The windows that were computed here."""
    calls = []
    compute = windows.window_attention

    def record(query, key, value, window, scores):
        calls.append(window)
        return compute(query, key, value, window, scores)

    monkeypatch.setattr(transformer_attention, "window_attention", record)
    return calls


@pytest.mark.parametrize("backend", ("auto", "torch"))
@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize(
    ("options", "window"),
    [
        ({}, (5, 5)),
        ({"window_size": None}, (None, None)),
        ({"window_size": (5, 0)}, (5, 0)),
        ({"window_size": [-1, 4]}, (None, 4)),
        ({"qk_norm": True, "qkv_bias": True, "softcap": 0.0}, (5, 5)),
        ({"attn_channels": 48}, (5, 5)),
    ],
    ids=["window", "global", "causal", "half", "qk-norm", "channels"],
)
def test_attention_of_anemoi_computes_the_same_under_install(
    options, window, batch, backend, served
):
    attention = attention_of(**options)
    x = inputs(batch)
    expected = results_of(copy.deepcopy(attention), x, batch)
    state = {name: tensor.clone() for name, tensor in attention.state_dict().items()}
    with integration.install(backend=backend):
        actual = results_of(attention, x, batch)
        assert integration.installed().computed == ()
    assert served == [window]
    assert_same(actual, expected)
    assert_same(dict(attention.state_dict()), state)
    assert attention.attention.attn_mask is None


def block_with(attention):
    """Return a transformer block with this attention."""
    block = TransformerProcessorBlock(
        num_channels=16,
        hidden_dim=32,
        num_heads=2,
        window_size=5,
        layer_kernels=load_layer_kernels(),
        attention_implementation="scaled_dot_product_attention",
    )
    block.attention = attention
    return block


def test_swapped_models_are_served_and_others_are_not(served):
    attention, other = attention_of(), attention_of()
    integration.swap_layers(block_with(attention))
    expected = results_of(other, inputs())
    assert served == []
    assert_same(results_of(attention, inputs()), expected)
    assert served == [(5, 5)]


def test_a_mask_that_an_untouched_pass_has_kept_is_the_window(served):
    attention = attention_of()
    expected = results_of(attention, inputs())
    assert attention.attention.attn_mask is not None
    with integration.install():
        assert_same(results_of(attention, inputs()), expected)
        with torch.inference_mode():
            attention.attention.attn_mask = attention.attention.attn_mask.clone()
            attention(inputs().detach(), GraphShardInfo(), 2)
        assert served == [(5, 5)] * 2
        attention.attention.attn_mask = attention.attention.attn_mask.clone()
        attention.attention.attn_mask[3, 40] = True
        expected = results_of(attention, inputs())
    assert served == [(5, 5)] * 2
    assert_same(results_of(attention, inputs()), expected)


def with_own_function(attention):
    attention.attention.attention = lambda *rows, **options: F.scaled_dot_product_attention(
        *rows, **options
    )


def with_own_maker(attention):
    attention.attention.create_sliding_window_mask = lambda *sizes, device: torch.ones(
        NODES, NODES, dtype=torch.bool
    )


def with_changed_mask(attention):
    attention.attention.attn_mask = torch.ones(NODES, NODES, dtype=torch.bool).tril()


def with_mask_of_scores(attention):
    attention.attention.attn_mask = torch.randn(NODES, NODES, dtype=torch.float64)


EDITS = {
    "its `attention` is not PyTorch's": with_own_function,
    "it has a create_sliding_window_mask set on it, which would be skipped": with_own_maker,
    "its `attn_mask` is not that of its window": with_changed_mask,
    "its `attn_mask` is not that of its window ": with_mask_of_scores,
}


@pytest.mark.parametrize("reason", EDITS)
def test_an_edited_attention_is_left_to_anemoi_by_name(reason, served, said):
    attention = attention_of()
    EDITS[reason](attention)
    expected = results_of(copy.deepcopy(attention), inputs())
    with integration.install():
        assert_same(results_of(attention, inputs()), expected)
        (computed,) = integration.installed().computed
        assert computed.kind == "SDPAAttentionWrapper"
        assert computed.outcome == "upstream"
        assert computed.reason.startswith(reason.strip())
        assert any(computed.reason in message for message in said())
    with (
        integration.install(backend="torch"),
        pytest.raises(ValueError, match="backend 'torch' cannot run the attention of this"),
    ):
        attention(inputs(), GraphShardInfo(), 2)
    assert served == []


@pytest.mark.parametrize(
    ("options", "reason", "refused"),
    [
        ({"softcap": 1.0}, "it has a softcap", True),
        ({"use_alibi_slopes": True}, "it has ALiBi", True),
        ({"window_size": -1}, "its window must be None, or a number of nodes", False),
        ({"window_size": (-2, 1)}, "its window must be None, or a number of nodes", False),
    ],
    ids=["softcap", "ALiBi", "-1", "-2"],
)
def test_options_for_which_versions_differ_are_left_to_anemoi(
    options, reason, refused, served, said
):
    attention = attention_of(**options)
    refusal = pytest.raises(NotImplementedError) if refused else nullcontext()
    with integration.install(), refusal:
        attention(inputs(), GraphShardInfo(), 2)
    assert served == []
    assert any(reason in message for message in said())


def test_a_causal_call_of_the_wrapper_is_left_to_anemoi(served, said):
    query, key, value = draw()
    wrapper = SDPAAttentionWrapper()
    expected = wrapper(query, key, value, 2, causal=True, window_size=5)
    with integration.install():
        assert_same(wrapper(query, key, value, 2, True, 5), expected)  # noqa: FBT003
    assert served == []
    assert any("it is causal" in message for message in said())


def test_a_window_over_two_sets_of_nodes_is_left_to_anemoi(served, said):
    attention = attention_of(MultiHeadCrossAttention)
    x = inputs().detach()
    pair = (x[: 2 * 30], x)
    arguments = (pair, SimpleNamespace(src_nodes=None, dst_nodes=None), 2)
    expected = copy.deepcopy(attention)(*arguments)
    with integration.install():
        assert_same(attention(*arguments), expected)
    assert served == []
    assert any("two sets of nodes" in message for message in said())


IMPLEMENTATIONS = ("scaled_dot_product_attention", "flash_attention")


def in_precision(implementation, *, swapped, **settings):
    """Return the results of one attention under `install`, or of a block of `swap_layers`."""
    with integration.install():
        attention = attention_of(attention_implementation=implementation)
    if swapped:
        integration.swap_layers(block_with(attention), **settings)
        return results_of(attention, inputs())
    with integration.install(**settings):
        return results_of(attention, inputs())


@pytest.mark.parametrize("swapped", (False, True), ids=("install", "swap_layers"))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("precision", ("bf16", "fp32"))
def test_the_precision_is_that_of_the_settings(precision, implementation, swapped):
    expected = results_of(attention_of(), inputs())
    actual = in_precision(implementation, swapped=swapped, precision=precision)
    assert actual["out"].dtype == torch.float64
    assert not torch.equal(actual["out"], expected["out"])
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[precision]
    assert_same_numbers(actual, expected, dtype)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_precision_is_that_of_the_settings_under_autocast(implementation):
    query, key, value = (rows.float() for rows in draw(batch=1))
    outputs = {}
    for precision in (None, "fp32"):
        with integration.install(precision=precision):
            attention = attention_of(attention_implementation=implementation).attention
            with torch.autocast("cpu", torch.bfloat16):
                outputs[precision] = attention(query, key, value, 1, window_size=5)
    assert outputs[None].dtype == torch.bfloat16
    assert outputs["fp32"].dtype == torch.float32
    assert (outputs[None] - outputs["fp32"]).abs().max() > 1e-3


def test_flash_attn_computes_no_float32(said):
    with integration.install():
        attention = attention_of(attention_implementation="flash_attention")
    stand_in = attention.attention.attention
    attention.attention.attention = stand_in.function  # as flash-attn's is no stand-in
    expected = results_of(attention, inputs())
    with integration.install(precision="fp32"):
        assert_same(results_of(attention, inputs()), expected)
    assert any("precision 'fp32'" in message for message in said())
    with (
        integration.install(backend="torch", precision="fp32"),
        pytest.raises(ValueError, match="flash-attn does not compute in precision 'fp32'"),
    ):
        results_of(attention, inputs())


def test_autocast_and_checkpoints_give_the_numbers_of_anemoi():
    attention = attention_of(qk_norm=True).float()
    x = inputs().detach().float().requires_grad_()

    def checkpointed(*arguments):
        return checkpoint(attention, *arguments, use_reentrant=False)

    with torch.autocast("cpu", torch.bfloat16):
        expected = results_of(copy.deepcopy(attention), x)
        with integration.install():
            actual = results_of(attention, x)
            again = results_of(attention, x, call=checkpointed)
    assert_same_numbers(actual, expected, torch.bfloat16)
    assert_same(again, actual, tolerance=0)


def test_dropout_drops_weights_of_the_softmax_without_bias():
    attention = attention_of(dropout_p=0.5)
    query, key, value = (rows.detach() for rows in draw(batch=1))
    out = []
    with integration.install():
        for _ in range(200):
            out.append(attention.attention(query, key, value, 1, window_size=5, dropout_p=0.5))
        torch.manual_seed(3)
        first = results_of(attention, inputs())
        torch.manual_seed(3)
        assert_same(results_of(attention, inputs()), first, tolerance=0)
        without = results_of(attention.eval(), inputs())
    assert not torch.equal(first["out"], without["out"])
    exact = by_definition(query, key, value, 5, 5, Scores())
    deviation = torch.stack(out).std(0).max() / 200**0.5
    assert (torch.stack(out).mean(0) - exact).abs().max() < 5 * deviation


@pytest.mark.compiled
def test_compiled_code_holds_no_mask_of_all_pairs(traced):
    attention = attention_of(window_size=2)
    expected = results_of(attention, inputs(1), 1)  # after it, the attention has a mask
    compiler, graphs = traced
    with integration.install():
        compiled = torch.compile(attention, fullgraph=True, backend=compiler)
        assert_same(results_of(attention, inputs(1), 1, compiled), expected)
    (graph,) = graphs
    shapes = [
        tuple(node.meta["example_value"].shape)
        for nodes in graph.values()
        for node in nodes
        if isinstance(node.meta.get("example_value"), torch.Tensor) and node.op != "placeholder"
    ]
    assert shapes
    assert not any(shape[-2:] == (NODES, NODES) for shape in shapes)


class Calls(TorchDispatchMode):
    """Arguments of the operators of FlashAttention."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if "_flash_attention" in str(operator):
            names = [argument.name for argument in operator._schema.arguments]
            self.found.append(dict(zip(names, args, strict=False)) | (kwargs or {}))
        return operator(*args, **(kwargs or {}))


def test_the_kernel_of_pytorch_gets_the_window_in_both_passes(monkeypatch):
    """On meta tensors, which have no values; a GPU compares the numbers (benchmarks/families.py aifs)."""
    monkeypatch.setattr(windows, "_why_not_kernel", lambda query, scores: None)
    operands = [
        torch.empty(2, NODES, HEADS, 16, dtype=torch.float16, device="meta").transpose(1, 2)
        for _ in range(3)
    ]
    leaves = [operand.requires_grad_() for operand in operands]
    with Calls() as calls:
        out = window_attention(*leaves, Window(7, None), Scores(dropout_p=0.25, scale=0.5))
        gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert out.shape == leaves[0].shape
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in leaves]
    assert len(calls.found) == 2
    for call in calls.found:
        assert call["query"].shape == (2, NODES, HEADS, 16)
        assert (call["max_q"], call["max_k"]) == (NODES, NODES)
        assert (call["window_size_left"], call["window_size_right"]) == (7, NODES - 1)
        assert (call["dropout_p"], call["scale"], call["is_causal"]) == (0.25, 0.5, False)


def on_gpu(**changes):
    """Return what is read of a query on a GPU."""
    query = {"shape": (1, 16, 40320, 64), "device": torch.device("cuda", 0), "dtype": torch.float16}
    return SimpleNamespace(**(query | changes))


@pytest.mark.parametrize(
    ("query", "capability", "scores", "reason"),
    [
        (on_gpu(), (9, 0), Scores(), None),
        (on_gpu(dtype=torch.bfloat16), (8, 0), Scores(dropout_p=0.1), None),
        (on_gpu(device=torch.device("cpu")), None, Scores(), "not on a GPU"),
        (on_gpu(), (7, 5), Scores(), "no compute capability 8.0"),
        (on_gpu(dtype=torch.float32), (9, 0), Scores(), "it takes 16 bits"),
        (on_gpu(shape=(1, 16, 9, 60)), (9, 0), Scores(), "60 channels"),
        (on_gpu(shape=(1, 16, 9, 256)), (9, 0), Scores(), "256 channels"),
        (on_gpu(), (9, 0), Scores(softcap=1.0), "no softcap and no ALiBi"),
        (on_gpu(), (9, 0), Scores(alibi_slopes=torch.ones(16)), "no softcap and no ALiBi"),
    ],
)
def test_the_kernel_of_pytorch_is_chosen_by_device_dtype_and_channels(
    query, capability, scores, reason, monkeypatch
):
    monkeypatch.setattr(windows, "_capability_of", lambda index: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    actual = windows._why_not_kernel(query, scores)
    assert (actual is None) == (reason is None)
    assert reason is None or reason in actual


def test_amd_and_a_pytorch_whose_kernel_takes_no_window_compute_by_blocks(monkeypatch):
    monkeypatch.setattr(windows, "_capability_of", lambda index: (9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in windows._why_not_kernel(on_gpu(), Scores())
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch_compat, "_flash_attention", None)
    assert "takes no window" in windows._why_not_kernel(on_gpu(), Scores())


def test_the_log_says_once_how_it_is_computed(caplog):
    windows._log_once.cache_clear()
    caplog.set_level("INFO", logger="anemoi_gt")
    for _ in range(2):
        window_attention(*draw(), Window(5, 5), Scores())
    (record,) = caplog.records
    assert record.message == (
        "attention within a window: blocks of 8 queries, because PyTorch's FlashAttention kernel "
        "cannot run: nodes are not on a GPU"
    )
