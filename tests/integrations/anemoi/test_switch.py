"""install, uninstall and swap_layers change how blocks compute and nothing else."""

import copy
import gc
import logging
import re
import sys
from functools import wraps
from importlib.metadata import version
from inspect import signature

import pytest
import torch
from anemoi.models import models
from anemoi.models.distributed import khop_edges
from anemoi.models.interface import AnemoiModelInterface
from anemoi.models.layers import block as blocks
from anemoi.models.layers import mapper, processor, target_features
from anemoi.models.layers.ensemble import NoiseConditioning
from anemoi.models.layers.graph import NamedNodesAttributes
from anemoi.models.layers.graph_provider import StaticGraphProvider
from anemoi.models.models.ens_encoder_processor_decoder import AnemoiEnsModelEncProcDec
from support.anemoi_model import NODES, OwnConv, OwnLinear, block_inputs, for_gpu, make_block
from support.anemoi_model import differentiate_block as run
from support.same_numbers import assert_same_numbers
from torch.testing._internal.two_tensor import TwoTensor

from anemoi_gt import KernelConfig
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import report
from anemoi_gt.integrations.anemoi.settings import SETTINGS
from anemoi_gt.integrations.anemoi.versions import KNOWN
from anemoi_gt.nn.plain import NOT_COMPUTING

LAYERS = (
    mapper.GraphTransformerBaseMapper,
    processor.GraphTransformerProcessor,
    StaticGraphProvider,
)
BLOCKS = (blocks.GraphTransformerProcessorBlock, blocks.GraphTransformerMapperBlock)
MODELS = (models.AnemoiModelEncProcDec, AnemoiEnsModelEncProcDec)
CHANGED = (
    *BLOCKS,
    AnemoiModelInterface,
    khop_edges.GraphPartition,
    *LAYERS,
    *MODELS,
    mapper,
    processor,
    khop_edges,
)
CHANGED += (
    NoiseConditioning,
    NamedNodesAttributes,
    target_features,
    *(sys.modules[m.__module__] for m in MODELS),
)


inputs = pytest.fixture(block_inputs)


@pytest.mark.parametrize("variable", ("", "triton"))  # Anemoi's for its backend
def test_blocks_built_before_and_after_install_or_for_a_gpu_compute_with_us(
    inputs, attentions, monkeypatch, variable
):
    before, on_gpu = make_block(), for_gpu(make_block())
    expected = run(before, inputs)
    integration.install()
    after = make_block()
    monkeypatch.setattr(blocks, "ATTENTION_BACKEND", variable)
    for block in (before, after, on_gpu):
        attentions.clear()
        assert_same_numbers(run(block, inputs), expected)
        assert len(attentions) == 1


@pytest.mark.parametrize("owner", CHANGED, ids=lambda owner: owner.__name__)
def test_uninstall_leaves_anemois_code_as_it_was(owner):
    before = dict(vars(owner))
    integration.install()
    assert dict(vars(owner)) != before
    integration.uninstall()
    assert dict(vars(owner)) == before


@pytest.mark.parametrize(
    "leave", (lambda: None, integration.uninstall), ids=("left", "uninstalled within")
)
def test_an_inner_context_brings_back_the_outer_one(inputs, attentions, leave):
    with integration.install(backend="torch"):
        with integration.install(precision="bf16", fusion="none"):
            assert SETTINGS.everywhere.config.precision == "bf16"
            leave()
        assert SETTINGS.everywhere.config.backend == "torch"
        assert SETTINGS.everywhere.fusion == "auto"
        run(make_block(), inputs)
    assert len(attentions) == 1
    assert SETTINGS.is_empty


def test_install_logs_one_line_with_the_active_settings(caplog):
    assert integration.installed() is None
    with caplog.at_level(logging.INFO, logger="anemoi_gt"):
        outer = integration.install(backend="torch", fusion="none")
        # as Anemoi's configs do for each component
        integration.install(backend="torch", fusion="none")
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(
        "anemoi_gt computes blocks of graph transformers and graph networks of anemoi-models "
        f"{version('anemoi-models')}, where a model has them"
    )
    assert line.endswith(
        "backend='torch', precision=None, fusion='none', sharding=True, keep_hidden=True"
    )
    with integration.install(precision="bf16") as inner:
        installed = integration.installed()
        assert installed.config == KernelConfig(precision="bf16")
        assert installed.fusion == "auto"
        assert installed.sharding
        assert (
            repr(inner)
            == "Installation(backend='auto', precision='bf16', fusion='auto', sharding=True, "
            "keep_hidden=True; in force)"
        )
        assert repr(outer).endswith("; ended)")
    assert integration.installed().config.backend == "torch"
    assert repr(outer).endswith("; ended)")
    integration.uninstall()
    assert integration.installed() is None
    assert repr(outer).endswith("; ended)")


def test_a_context_uninstalls_on_exit_and_can_be_entered_again(inputs, attentions):
    installation = integration.install(precision="bf16")
    for calls in (1, 2):
        with installation:
            run(make_block(), inputs)
        run(make_block(), inputs)
        assert len(attentions) == calls
        assert SETTINGS.is_empty


def test_swap_layers_swaps_one_model_and_none_of_its_copies_until_uninstall(inputs, attentions):
    ours, theirs = make_block(), make_block()
    assert integration.swap_layers(ours) is ours
    expected = run(theirs, inputs)
    assert_same_numbers(run(ours, inputs), expected)
    run(copy.deepcopy(ours), inputs)
    assert len(attentions) == 1
    integration.uninstall()
    run(ours, inputs)
    assert len(attentions) == 1


def test_a_swapped_model_keeps_its_options_under_install(inputs, attentions):
    block = integration.swap_layers(make_block(), fusion="none")
    with integration.install():
        run(block, inputs)
    assert len(attentions[0]) == 5


def test_a_swapped_block_is_forgotten_when_it_dies():
    block = integration.swap_layers(make_block())
    assert not SETTINGS.is_empty
    del block
    gc.collect()
    assert SETTINGS.is_empty


def test_swap_layers_asks_for_blocks_of_anemoi():
    with pytest.raises(
        ValueError,
        match="must have a block of Anemoi's graph transformers, graph networks or transformers, got Linear",
    ):
        integration.swap_layers(torch.nn.Linear(2, 2))


def swap_block(**options):
    return integration.swap_layers(make_block(), **options)


SWITCHES = (
    *((integration.install, name) for name in signature(integration.install).parameters),
    *((swap_block, name) for name in list(signature(integration.swap_layers).parameters)[1:]),
)


@pytest.mark.parametrize(("switch", "option"), SWITCHES)
def test_a_wrong_option_is_refused_before_anything_changes(switch, option):
    with pytest.raises(ValueError, match=f"{option} must be .*'wrong'"):
        switch(**{option: "wrong"})
    for block in BLOCKS:
        assert SETTINGS.is_empty
        assert block.forward.__code__.co_filename.endswith("block.py")
        assert not hasattr(block.forward, "__wrapped__")


def test_missing_anemoi_is_named_with_the_command_that_installs_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("anemoi.models")]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="pip install anemoi-models==0.19.0"):
        integration.install()


def another_body(upstream):
    """Return a method with the parameters of `upstream` that does something before."""

    @wraps(upstream)
    def method(*args, **kwargs):
        torch.manual_seed(0)
        return upstream(*args, **kwargs)

    method.__signature__ = signature(upstream)
    del method.__wrapped__
    return method


def test_a_forward_with_known_parameters_and_another_body_is_left_alone_and_named(
    inputs, attentions, said, monkeypatch
):
    expected = run(make_block(), inputs)
    other = another_body(BLOCKS[0].forward)
    monkeypatch.setattr(BLOCKS[0], "forward", other)
    with integration.install():
        assert BLOCKS[0].forward is other
        assert_same_numbers(run(make_block(), inputs), expected)
        assert not attentions
        run(make_block(BLOCKS[1]), block_inputs(BLOCKS[1]))
        assert len(attentions) == 1
    (message,) = said()
    assert (
        "GraphTransformerProcessorBlock.forward (its body matches no reviewed version of anemoi-models"
        in message
    )
    assert message.endswith("results are the same, slower")


IN_BLOCKS = sorted(
    name
    for name in KNOWN
    if name.startswith("GraphTransformerBaseBlock") and name.rpartition(".")[2] not in NOT_COMPUTING
)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_of_a_version_in_which_a_method_has_another_body_are_left_alone(
    inputs, attentions, said, monkeypatch, name
):
    monkeypatch.setitem(KNOWN, name, {})
    block = make_block()
    before = [dict(vars(owner)) for owner in BLOCKS]
    expected = run(block, inputs)
    with integration.install():
        assert_same_numbers(run(block, inputs), expected)
        report.add_model(block)
        (computed,) = integration.installed().computed
        assert [dict(vars(owner)) for owner in BLOCKS] == before
    assert not attentions
    method = name.rpartition(".")[2]
    unknown = rf"of its {method}, its body matches no reviewed version of anemoi-models \(hash [0-9a-f]{{12}}\)"
    (message,) = said()
    assert re.search(unknown, message)
    assert computed.outcome == "upstream"
    assert re.search(unknown, computed.reason)
    for options in ({"backend": "torch"}, {"fusion": "sublayers"}):
        with pytest.raises(ImportError, match=unknown):
            integration.install(**options)
    assert [dict(vars(owner)) for owner in BLOCKS] == before


def with_own_function(block):
    conv = block._modules.pop("conv")
    block.conv = lambda *operands: conv(*operands)


class OwnSplit(blocks.GraphTransformerProcessorBlock):
    """A block that prepares its heads itself."""

    def prepare_qkve_edge_sharding(self, query, key, value, edges):
        return super().prepare_qkve_edge_sharding(query, key, value, edges)


class OwnUpdate(blocks.GraphTransformerProcessorBlock):
    """A block that updates its nodes in a way of its own."""

    def run_node_dst_mlp(self, *arguments):
        return 2 * super().run_node_dst_mlp(*arguments)


class OwnProjection(blocks.GraphTransformerProcessorBlock):
    """A block that projects nodes and edges itself."""

    def get_qkve(self, x, edge_attr):
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        return (
            self.lin_query(x_dst),
            self.lin_key(x_src),
            self.lin_value(x_src),
            self.lin_edge(edge_attr),
        )


UNSERVED = {
    "it is a .*OwnSplit, which overrides prepare_qkve_edge_sharding": lambda block: setattr(
        block, "__class__", OwnSplit
    ),
    "it is a .*OwnProjection, which overrides get_qkve": lambda block: setattr(
        block, "__class__", OwnProjection
    ),
    "it is a .*OwnUpdate, which overrides run_node_dst_mlp": lambda block: setattr(
        block, "__class__", OwnUpdate
    ),
    "it has a run_node_dst_mlp set on it, which would be skipped": lambda block: setattr(
        block, "run_node_dst_mlp", lambda x, **_: 2 * x
    ),
    "it has a apply_gt set on it, which would be skipped": lambda block: setattr(
        block, "apply_gt", block.apply_gt
    ),
    "its conv is a builtins.function, and Anemoi's attention is needed": with_own_function,
    "its conv is a .*OwnConv, and Anemoi's attention is needed": lambda block: setattr(
        block, "conv", OwnConv(block.conv)
    ),
    "its conv has hooks, which would be skipped": lambda block: block.conv.register_forward_hook(
        lambda *_: None
    ),
    "its conv has hooks, .* be skipped": lambda block: block.conv.register_full_backward_pre_hook(
        lambda *_: None
    ),
}


WATCHED = ("its conv has hooks, which would be skipped", "its conv has hooks, .* be skipped")


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("reason", "fusion"),
    (
        *((reason, "none") for reason in UNSERVED),
        ("its conv has hooks, which would be skipped", "auto"),
        ("it is a .*OwnSplit, which overrides prepare_qkve_edge_sharding", "auto"),
    ),
)
def test_an_unsupported_block_falls_back_to_anemoi_and_logs_it_once(
    inputs, attentions, said, reason, fusion
):
    torch.compiler.reset()
    block = make_block()
    UNSERVED[reason](block)
    expected = run(block, inputs)
    compiled = []
    for fullgraph in (False, True) if fusion == "auto" else ():
        compiled.append(torch.compile(block, backend="eager", fullgraph=fullgraph))
    with integration.install(fusion=fusion):
        for forward in (*compiled[:1], block, block):
            assert_same_numbers(run(block, inputs, forward), expected)
    assert not attentions
    (message,) = said()
    assert message.startswith("an Anemoi block (upstream) is not fused as a whole: ")
    if reason in WATCHED:  # by a tool, which must not end a run
        with integration.install(backend="torch"):
            assert_same_numbers(run(block, inputs), expected)
        return
    refused = f"backend 'torch' cannot run this Anemoi block: {reason}; backend 'auto' runs"
    for forward in (block, *compiled):
        errors = (ValueError, torch._dynamo.exc.Unsupported)
        with integration.install(backend="torch"), pytest.raises(errors, match=refused):
            forward(*inputs)


def test_a_sparse_adjacency_is_named_as_the_reason(inputs):
    x, edge_attr, edge_index, *rest = inputs
    adjacency = torch.sparse_coo_tensor(edge_index, torch.ones(len(edge_attr)), (NODES, NODES))
    with (
        integration.install(backend="torch"),
        pytest.raises(ValueError, match="got a sparse adjacency"),
    ):
        make_block()(x, edge_attr, adjacency, *rest)


UNFUSED = {
    "its lin_edge is": lambda block: setattr(block.lin_edge, "__class__", OwnLinear),
    "its lin_edge has hooks": lambda block: block.lin_edge.register_forward_hook(lambda *_: None),
    "its lin_edge has a weight of the tensor subclass": lambda block: setattr(
        block.lin_edge,
        "weight",
        torch.nn.Parameter(TwoTensor(*[block.lin_edge.weight.detach()] * 2)),
    ),
}


@pytest.mark.parametrize("reason", UNFUSED)
def test_edges_are_embedded_where_their_weight_is_not_all(inputs, attentions, said, reason):
    block = make_block()
    UNFUSED[reason](block)
    expected = run(block, inputs)
    with integration.install():
        for _ in range(2):
            assert_same_numbers(run(block, inputs), expected)
    assert len(attentions[0]) == 5
    assert attentions[0][4].shape == (len(inputs[1]), 2, 8)
    (message,) = said()
    assert message.startswith(f"an Anemoi block (attention only) is not fused as a whole: {reason}")


@pytest.mark.parametrize(
    ("kind", "change", "cast"),  # in bfloat16, of what query, key and value are projected from
    (
        ("Processor", None, (True, True, True)),
        ("Mapper", None, (False, True, True)),
        ("Processor", OwnLinear, (False,) * 3),
    ),
    ids=(
        "nodes once for all",
        "sources of a mapper once",
        "nothing for a projection of another class",
    ),
)
def test_autocast_casts(kind, change, cast):
    kind = getattr(blocks, f"GraphTransformer{kind}Block")
    block, seen = make_block(kind), []
    block.lin_value.__class__ = change or type(block.lin_value)
    for layer in (block.lin_query, block.lin_key, block.lin_value):
        layer.register_forward_pre_hook(lambda _, rows: seen.append(*rows))
    with integration.install(), torch.autocast("cpu", torch.bfloat16):
        block(*block_inputs(kind))
    assert tuple(rows.dtype == torch.bfloat16 for rows in seen) == cast
    assert len({id(rows) for rows in seen if rows.dtype == torch.bfloat16}) == any(cast)
    assert {rows.dtype for rows in seen} <= {torch.float32, torch.bfloat16}


def test_dropout_of_the_attention_drops_in_training_only(inputs):
    block = make_block()
    expected = run(block, inputs)
    block.conv.dropout = 1.0
    integration.install()
    attended = []
    block.projection.register_forward_pre_hook(
        lambda _, args: attended.append(args[0] - block.lin_self(normed))
    )
    normed = block.layer_norm_attention(inputs[0])
    block(*inputs)
    assert attended[0].abs().max() < 1e-6
    assert_same_numbers(run(block.eval(), inputs), expected)
