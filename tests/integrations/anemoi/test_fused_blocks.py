"""Blocks by fused sub-layers under `install`: numbers, compiled code, what is not fused and what is refused."""

import re
from collections import Counter
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from anemoi.models.layers.block import (
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
)
from support import anemoi_model as small
from support.anemoi_model import (
    OwnLinear,
    block_inputs,
    conditional_kernels,
    conditioned_inputs,
    differentiate_block,
    for_gpu,
    make_block,
)
from support.operators import BLOCK, Operators
from support.same_numbers import assert_same_numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from anemoi_gt.integrations import anemoi as integration

# that a gated network has an activation of its own
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore::UserWarning:anemoi"),
]
KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}
ONE_LAYER = {"layers": 1, "layer_chunks": 1}
ATTENTION, FEED_FORWARD = (
    f"anemoi_gt.{name}_triton.default" for name in ("attention_sublayer", "network")
)
BLOCKS = partial(integration.install, backend="triton", fusion="sublayers")
autocast = partial(torch.autocast, "cpu", torch.bfloat16)


@pytest.fixture(scope="session")
def graph(small_graph):
    return small_graph


def block_of(kind, backend="pyg", **options):
    """Return a block; with backend "triton", as Anemoi builds it on a GPU."""
    block = make_block(KINDS[kind], **options)
    return for_gpu(block) if backend == "triton" else block


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kind", "backend", "options"),
    (
        ("processor", "pyg", {}),
        (
            "mapper",
            "triton",
            {"edge_pre_mlp": True, "attn_channels": 8, "mlp_implementation": "swiglu"},
        ),
        ("mapper", "triton", {"shard_strategy": "heads", "bias": False, "qk_norm": True}),
    ),
    ids=str,
)
def test_a_compiled_block_is_two_operators_with_the_same_results(kind, backend, options, traced):
    compiler, graphs = traced
    inputs = block_inputs(KINDS[kind])
    expected = differentiate_block(make_block(KINDS[kind], **options), inputs)
    block = block_of(kind, backend, **options)
    names = list(block.state_dict())
    with BLOCKS():
        assert_same_numbers(differentiate_block(block, inputs), expected)
        compiled = torch.compile(block, fullgraph=True, backend=compiler)
        assert_same_numbers(differentiate_block(block, inputs, compiled), expected)
    (graph,) = graphs
    assert len(graph[ATTENTION]) == len(graph[FEED_FORWARD]) == 1
    of_modules = ("edge_attention", "function linear", "function layer_norm")
    if "edge_pre_mlp" in options:  # whose network is no part of a fused sub-layer
        of_modules = of_modules[:1]
    assert not [name for name in graph if any(part in name for part in of_modules)]
    assert list(block.state_dict()) == names


CHANGES = {  # of parts of a block that stays fused
    "tanh GELU": lambda block: block.node_dst_mlp.mlp.__setitem__(1, nn.GELU("tanh")),
    "a norm without bias": lambda block: block.set_submodule(
        "layer_norm_mlp_dst", nn.LayerNorm(16, bias=False)
    ),
    "norms without parameters": lambda block: [
        block.set_submodule(name, nn.LayerNorm(16, elementwise_affine=False))
        for name in ("layer_norm_attention", "layer_norm_mlp_dst")
    ],
    "linear maps without bias": lambda block: [
        block.set_submodule(name, nn.Linear(16, 16, bias=False))
        for name in ("lin_value", "projection", "lin_key")
    ],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_with_other_supported_parts_is_fused(change):
    block, inputs = block_of("processor"), block_inputs()
    CHANGES[change](block)
    expected = differentiate_block(block, inputs)
    with BLOCKS(), Operators() as operators:
        assert_same_numbers(differentiate_block(block, inputs), expected)
    assert counted(operators.names) == {BLOCK: 1, ATTENTION: 0, FEED_FORWARD: 0}


def counted(names):
    """Count fused blocks and single sub-layers among the names of operators."""
    return {name: list(names).count(name) for name in (BLOCK, ATTENTION, FEED_FORWARD)}


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("kind", "mode"),
    (
        ("processor", "eager"),
        *(("mapper", mode) for mode in ("eager", "compiled", "checkpointed")),
    ),
)
def test_conditional_norms_and_norms_of_queries_and_keys_are_fused_and_match_anemoi(
    kind, mode, traced
):
    """The sources of a mapper are updated under their own condition, as in anemoi-models 0.14 and newer."""
    options = {"update_src_nodes": True} if kind == "mapper" else {}
    compiler, graphs = traced
    block = make_block(KINDS[kind], layer_kernels=conditional_kernels(), qk_norm=True, **options)
    inputs = conditioned_inputs(KINDS[kind])
    expected = differentiate_block(block, inputs)
    forward = {
        "eager": block,
        "compiled": torch.compile(block, fullgraph=True, backend=compiler),
        "checkpointed": partial(checkpoint, block, use_reentrant=False),
    }[mode]
    with BLOCKS():
        actual = differentiate_block(block, inputs, forward)
        report = [(block.outcome, block.reason) for block in integration.installed().computed]
        if mode != "compiled":
            with Operators() as operators:
                differentiate_block(block, inputs, forward)
    assert_same_numbers(actual, expected)
    for tensor, gradient in actual.items():
        assert gradient is not None or not tensor.startswith("condition"), tensor
    if mode == "compiled":
        names = []
        for traced_graph in graphs:
            for operator, nodes in traced_graph.items():
                names += len(nodes) * [operator]
    else:
        names = operators.names
        assert report == [("fused", None)]
    times = 2 if mode == "checkpointed" else 1
    sources = times if options else 0
    expected_calls = {BLOCK: times, ATTENTION: 0, FEED_FORWARD: sources}
    if mode == "compiled":
        expected_calls = {BLOCK: 0, ATTENTION: times, FEED_FORWARD: times + sources}
    assert counted(names) == expected_calls


def widened(inputs, dtype):
    """Return the inputs with floating-point tensors in another dtype, as leaves."""
    if isinstance(inputs, tuple):
        return tuple(widened(element, dtype) for element in inputs)
    if isinstance(inputs, torch.Tensor) and inputs.is_floating_point():
        return inputs.detach().to(dtype).requires_grad_()
    return inputs


def rms(tensor):
    return tensor.double().square().mean().sqrt().item()


def assert_as_accurate(ours, anemoi, exact, dtype):
    """Assert that errors are at most three times Anemoi's errors, and four eps of the dtype."""
    for name, expected in exact.items():
        if expected is None:
            assert ours[name] is None, name
            continue
        error = rms(ours[name] - expected)
        anemoi_error = rms(anemoi[name] - expected)
        allowed = 3 * anemoi_error + 4 * torch.finfo(dtype).eps * rms(expected)
        assert error <= allowed, f"{name}: RMS error {error:.1e}, Anemoi's {anemoi_error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", (torch.bfloat16, torch.float16), ids=str)
def test_errors_are_at_most_three_times_anemois_blocks(kind, nodes):
    """Errors are against float64, for 16-bit nodes, the dtype of Anemoi's embeddings under autocast."""
    inputs = block_inputs(KINDS[kind])
    exact = differentiate_block(block_of(kind).double(), widened(inputs, torch.float64))
    block = block_of(kind)
    x, *rest = inputs
    half_inputs = (widened(x, nodes), *rest)
    results = []
    for install in (nullcontext, BLOCKS):
        with install(), torch.autocast("cpu", nodes):
            results.append(differentiate_block(block, half_inputs))
    anemoi, ours = results
    assert_as_accurate(ours, anemoi, exact, nodes)


def test_a_model_matches_anemoi(graph):
    """With a batch of two, which chunks of mappers store as one graph."""
    options = small.make_options(checkpointing=False, mapper_chunks=3, **ONE_LAYER)
    model = small.build(graph, options)
    x = small.draw(graph, batch=2)
    expected = small.differentiate(model, x)
    with BLOCKS():
        assert_same_numbers(small.differentiate(model, x), expected)
        computed = integration.installed().computed
    assert len(computed) == 3
    assert {block.outcome for block in computed} == {"fused"}


FAMILIES = {"ensemble": ({"ensemble": 2}, {"fcstep": 1}), "transport": ({"batch": 2}, None)}


@pytest.mark.parametrize(("family", "checkpointing"), (("ensemble", True), ("transport", False)))
def test_ensemble_and_diffusion_models_are_fused_and_match_anemoi(graph, family, checkpointing):
    """Small models from Anemoi's configs, with random values for all parameters that are initialised to zero."""
    options = small.make_family_options(
        family, channels=16, heads=2, mapper_chunks=1, checkpointing=checkpointing, **ONE_LAYER
    )
    model = small.draw_conditions(small.build(graph, options))
    shape, arguments = FAMILIES[family]
    if arguments is None:
        arguments = small.transport_arguments(graph, **shape)
    x = small.draw(graph, **shape)
    expected = small.differentiate(model, x, **arguments)
    _, gradients = expected
    for name, gradient in gradients.items():
        if ".scale." in name:
            assert gradient is not None, name
            assert gradient.any(), name
    with BLOCKS():
        assert_same_numbers(small.differentiate(model, x, **arguments), expected)
        computed = integration.installed().computed
    assert len(computed) == 3
    assert {(block.outcome, block.reason) for block in computed} == {("fused", None)}


@pytest.mark.parametrize(
    ("kind", "options"), (("mapper", {"update_src_nodes": True}), ("processor", {})), ids=str
)
def test_sources_that_are_updated_and_a_block_without_gradients_have_anemois_numbers(kind, options):
    block, inputs = block_of(kind, **options), block_inputs(KINDS[kind])
    expected = block(*inputs)[0]
    with BLOCKS(), Operators() as operators:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert_same_numbers(block(*inputs)[0], expected)
    sources = 2 if options else 0
    assert counted(operators.names) == {BLOCK: 2, ATTENTION: 0, FEED_FORWARD: sources}


def with_part(name, make):
    """Return a function that replaces a part of a block by `make(part)`."""
    return lambda block: block.set_submodule(name, make(block.get_submodule(name)))


def double(owner, method):
    """Replace a method of one instance by twice what it returns."""
    upstream = getattr(owner, method)
    setattr(owner, method, lambda *arguments: 2 * upstream(*arguments))


# more reasons: tests/nn/test_sublayers.py
NO_ATTENTION = {  # reason: a change after which only the feed-forward sub-layer is fused
    "its lin_query is a support.anemoi_model.OwnLinear, and a torch.nn.Linear is needed": lambda block: (
        setattr(block.lin_query, "__class__", OwnLinear)
    ),
    "its lin_value has hooks, which would be skipped": lambda block: (
        block.lin_value.register_forward_hook(lambda *_: None)
    ),
    "its lin_query has a forward set on it, which would be skipped": lambda block: double(
        block.lin_query, "forward"
    ),
    "its attention drops weights in training": lambda block: setattr(block.conv, "dropout", 1.0),
}
NO_FEED_FORWARD = {  # reason: a change after which only the attention sub-layer is fused
    "its node_dst_mlp.mlp.1 has hooks, which": lambda block: block.node_dst_mlp.mlp[
        1
    ].register_full_backward_hook(lambda *_: None),
    "its layer_norm_mlp_dst is a torch.nn.modules.normalization.GroupNorm, and": with_part(
        "layer_norm_mlp_dst", lambda _: nn.GroupNorm(1, 16)
    ),
    "its node_dst_mlp.mlp.0 has a forward set on it, which would be skipped": lambda block: double(
        block.node_dst_mlp.mlp[0], "forward"
    ),
}
UNSERVED = NO_ATTENTION | NO_FEED_FORWARD
# of tools that come and go
WATCHED = (
    "its lin_value has hooks, which would be skipped",
    "its node_dst_mlp.mlp.1 has hooks, which",
)


def remaining(reason):
    """Count the calls of each fused sub-layer."""
    return {
        BLOCK: 0,
        ATTENTION: int(reason in NO_FEED_FORWARD),
        FEED_FORWARD: int(reason in NO_ATTENTION),
    }


def changed_block(reason):
    """A block that is changed for a reason."""
    block = block_of("processor")
    UNSERVED[reason](block)
    return block


@pytest.mark.parametrize("reason", UNSERVED)
def test_an_unsupported_option_costs_only_its_sub_layer_and_is_logged_once(reason, said):
    block, inputs = changed_block(reason), block_inputs()
    exact = differentiate_block(block, inputs)
    with autocast():
        anemoi = differentiate_block(block, inputs)
    with integration.install(backend="triton"), autocast():
        with Operators() as operators:
            ours = differentiate_block(block, inputs)
        block(*inputs)  # again, and nothing is logged
        assert counted(operators.names) == remaining(reason)
        (computed,) = integration.installed().computed
    assert computed.outcome == ("fused" if reason in NO_FEED_FORWARD else "attention only")
    assert re.match(reason, computed.reason)
    assert_as_accurate(ours, anemoi, exact, torch.bfloat16)
    (message,) = said()
    assert re.match(rf"an Anemoi block \(.*\) is not fused as a whole: {reason}", message)


@pytest.mark.parametrize("reason", UNSERVED)
def test_a_sub_layer_that_was_asked_for_and_cannot_be_fused_is_refused_unless_a_tool_watches(
    reason,
):
    block, inputs = changed_block(reason), block_inputs()
    if reason in WATCHED:  # which must not end a run
        expected = differentiate_block(block, inputs)
        with BLOCKS(), Operators() as operators:
            assert_same_numbers(differentiate_block(block, inputs), expected)
        assert counted(operators.names) == remaining(reason)
        return
    refused = f"fusion='sublayers' with backend 'triton' cannot compute this Anemoi block: {reason}"
    with BLOCKS(), pytest.raises(ValueError, match=refused):
        block(*inputs)


WRONG_INPUTS = {  # changes of the arguments of a block, and what it says
    "fewer features": (
        lambda x, edges, cond: (x[:, 1:], edges, cond),
        "x_dst must have 16 features",
    ),
    "more features": (lambda x, edges, cond: (x.repeat(1, 2), edges, cond), "x_dst must have 16"),
    "fewer attributes": (
        lambda x, edges, cond: (x, edges[:, 1:], cond),
        "edge_attr must have shape",
    ),
    "more attributes": (
        lambda x, edges, cond: (x, edges.repeat(1, 2), cond),
        "edge_attr must have",
    ),
    "fewer edges": (lambda x, edges, cond: (x, edges[1:], cond), "edge_attr must have shape"),
    "integers": (
        lambda x, edges, cond: (x, edges.long(), cond),
        "edge_attr must be floating point",
    ),
    "no condition of sources": (lambda x, edges, cond: (x, edges, (None, cond)), "cond must hold"),
    "no condition of destinations": (lambda x, edges, cond: (x, edges, (cond, None)), "cond must"),
}


@pytest.mark.parametrize("name", WRONG_INPUTS)
def test_inputs_that_anemoi_refuses_are_refused(name):
    kind = KINDS["mapper" if "condition" in name else "processor"]
    block = make_block(kind, layer_kernels=conditional_kernels())
    x, edges, index, *others, _, cond = conditioned_inputs(kind)
    rows, cond = (x, cond) if isinstance(x, torch.Tensor) else (x[1], cond[1])
    change, text = WRONG_INPUTS[name]
    rows, edges, cond = change(rows, edges, cond)
    inputs = (rows if isinstance(x, torch.Tensor) else (x[0], rows), edges, index, *others)
    with torch.no_grad():
        with pytest.raises((RuntimeError, TypeError)):
            block(*inputs, None, cond)
        with BLOCKS(), pytest.raises(ValueError, match=f"^{text}"):
            block(*inputs, None, cond)


# Dynamo sees each of these in another way: hooks, a method of an instance, another module, and another class.
COMPILED_REASONS = (
    "its lin_query has a forward set on it, which would be skipped",
    "its node_dst_mlp.mlp.0 has a forward set on it, which would be skipped",
)


@pytest.mark.compiled
@pytest.mark.parametrize("reason", COMPILED_REASONS)
def test_compiled_code_has_the_sub_layer_that_can_be_fused(reason, traced):
    compiler, graphs = traced
    block = changed_block(reason)
    with integration.install(backend="triton"), autocast():
        expected = differentiate_block(block, block_inputs())
        compiled = torch.compile(block, backend=compiler)
        actual = differentiate_block(block, block_inputs(), compiled)
    for name, value in expected.items():
        if value is None:
            assert actual[name] is None, name
        else:
            assert torch.equal(actual[name], value), name
    counts = Counter()
    for graph in graphs:
        for name, nodes in graph.items():
            counts[name] = len(nodes)
    assert counts >= Counter({name: count for name, count in remaining(reason).items() if count})
    other = ATTENTION if reason in NO_ATTENTION else FEED_FORWARD
    assert not [graph for graph in graphs if other in graph]


@pytest.mark.compiled
@pytest.mark.parametrize("is_compiled", (False, True))
def test_hooks_of_all_modules_see_the_parts_of_a_block(is_compiled, said, traced):
    block, inputs = block_of("processor"), block_inputs()
    forward = torch.compile(block, backend=traced[0]) if is_compiled else block
    double_activations = lambda module, _, out: 2 * out if isinstance(module, nn.GELU) else out  # noqa: E731
    hook = nn.modules.module.register_module_forward_hook(double_activations)
    try:
        expected = differentiate_block(block, inputs)
        with integration.install(fusion="sublayers"):
            assert_same_numbers(differentiate_block(block, inputs, forward), expected)
        with BLOCKS():
            assert_same_numbers(differentiate_block(block, inputs), expected)
    finally:
        hook.remove()
    assert "hooks are registered for all modules, which would be skipped" in said()[0]


@pytest.mark.parametrize(("kind", "swapped"), (("processor", False), ("mapper", True)))
def test_hidden_layers_are_computed_again_with_the_same_bits_if_they_are_not_kept(kind, swapped):
    block, inputs = block_of(kind, "triton"), block_inputs(KINDS[kind])

    def differentiate(keep_hidden):
        """Return results and gradients, and the bytes that sub-layers keep in blocks."""
        kept = []

        def note(tensor):
            if tensor.dtype == torch.uint8:
                kept.append(tensor.numel())
            return tensor

        options = {"backend": "triton", "fusion": "sublayers", "keep_hidden": keep_hidden}
        try:
            if swapped:
                integration.swap_layers(block, **options)
            else:
                integration.install(**options)
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                return differentiate_block(block, inputs), sum(kept)
        finally:
            integration.uninstall()

    expected, bytes_with = differentiate(keep_hidden=True)
    numbers, bytes_without = differentiate(keep_hidden=False)
    for name, value in expected.items():
        assert torch.equal(numbers[name], value), name
    linear = next(
        module for module in block.node_dst_mlp.modules() if isinstance(module, nn.Linear)
    )
    num_rows = (inputs[0] if kind == "processor" else inputs[0][1]).shape[0]
    padding = 512
    assert abs(bytes_with - bytes_without - 4 * linear.out_features * num_rows) <= padding


@pytest.mark.parametrize(
    ("options", "dtype", "is_fused"),
    (
        ({}, torch.bfloat16, True),
        ({}, torch.float16, True),
        ({}, None, False),
        ({"fusion": "attention"}, torch.bfloat16, False),
        ({"backend": "auto"}, torch.bfloat16, False),  # which computes with the reference on a CPU
        ({"fusion": "sublayers"}, None, True),
    ),
)
def test_fused_sub_layers_are_the_default_under_16_bit_autocast_on_triton(
    options, dtype, is_fused, said
):
    with (
        integration.install(**({"backend": "triton"} | options)),
        torch.autocast("cpu", dtype, enabled=bool(dtype)),
        Operators() as operators,
    ):
        block_of("processor")(*block_inputs())
    assert counted(operators.names) == {BLOCK: is_fused, ATTENTION: 0, FEED_FORWARD: 0}
    assert not said()


def test_blocks_that_backend_torch_computes_are_named_if_they_were_asked_for(said):
    with integration.install(fusion="sublayers"):
        block_of("processor")(*block_inputs())
    assert "the backend of its attention has no fused sub-layers" in said()[0]


@pytest.mark.parametrize("fusion", ["all", None, True])
def test_fusion_must_be_one_of_its_values(fusion):
    expected = re.escape(f"one of auto, none, attention, sublayers, got {fusion!r}")
    with pytest.raises(ValueError, match=expected):
        integration.install(fusion=fusion)
