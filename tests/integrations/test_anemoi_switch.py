"""install, uninstall and swap_layers change how blocks compute and nothing else."""

import copy
import gc
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from anemoi.models.distributed import khop_edges
from anemoi.models.distributed.khop_edges import GraphPartition
from anemoi.models.layers import mapper, processor
from anemoi.models.layers.block import (
    GraphTransformerBaseBlock,
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
)
from anemoi.models.layers.graph_provider import StaticGraphProvider
from anemoi.models.layers.mapper import GraphTransformerBaseMapper
from anemoi.models.layers.processor import GraphTransformerProcessor
from anemoi.models.layers.utils import load_layer_kernels
from anemoi.models.models import AnemoiModelEncProcDec
from anemoi.models.models.ens_encoder_processor_decoder import AnemoiEnsModelEncProcDec
from anemoi.models.triton.gt import graph_transformer_attention_conv
from support.anemoi_model import (
    EDGES,
    NODES,
    OwnConv,
    OwnLinear,
    block_inputs,
    build,
    differentiate_block,
    draw,
    make_block,
    make_options,
)
from support.same_numbers import assert_same_numbers

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import attention as our_methods
from anemoi_gt.integrations.anemoi.attention import SETTINGS

CHANGED = (
    GraphTransformerBaseBlock,
    StaticGraphProvider,
    GraphTransformerBaseMapper,
    GraphPartition,
    mapper,
    processor,
    khop_edges,
    GraphTransformerProcessor,
    AnemoiModelEncProcDec,
    AnemoiEnsModelEncProcDec,
)


@pytest.fixture
def inputs():
    """What a processor block is called with."""
    return block_inputs()


run = differentiate_block


def test_blocks_built_before_and_after_install_compute_with_us(inputs, attentions):
    before = make_block()
    expected = run(before, inputs)
    integration.install()
    for block in (before, make_block()):
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


def test_the_context_ends_what_it_began(inputs, attentions):
    block = make_block()
    with integration.install():
        run(block, inputs)
    assert len(attentions) == 1
    run(block, inputs)
    assert len(attentions) == 1


def test_an_inner_context_brings_back_the_outer_one():
    with integration.install(backend="torch"):
        with integration.install(precision="bf16", fuse_edges=False):
            assert SETTINGS.everywhere.config.precision == "bf16"
        assert SETTINGS.everywhere.config.backend == "torch" and SETTINGS.everywhere.fuse_edges
    assert SETTINGS.is_empty


def test_what_install_returned_can_be_entered_again(inputs, attentions):
    installation = integration.install(precision="bf16")
    for calls in (1, 2):
        with installation:
            run(make_block(), inputs)
        assert len(attentions) == calls and SETTINGS.is_empty


def test_an_outer_context_lasts_though_uninstall_was_called_within(inputs, attentions):
    with integration.install():
        with integration.install():
            integration.uninstall()
        run(make_block(), inputs)
    assert len(attentions) == 1


def test_swap_layers_swaps_one_model(inputs, attentions):
    ours, theirs = make_block(), make_block()
    assert integration.swap_layers(ours) is ours
    assert_same_numbers(run(ours, inputs), run(theirs, inputs))
    assert len(attentions) == 1


def test_a_swapped_model_keeps_its_options_under_install(inputs, attentions):
    block = integration.swap_layers(make_block(), fuse_edges=False)
    with integration.install():
        run(block, inputs)
    assert len(attentions[0]) == 5


def test_a_block_built_for_anemois_kernels_computes_with_us(inputs, attentions):
    block = make_block()
    expected = run(block, inputs)
    del block.conv
    block.conv, block.graph_attention_backend = graph_transformer_attention_conv, "triton"  # as on a GPU
    with integration.install():
        assert_same_numbers(run(block, inputs), expected)
    assert len(attentions) == 1


def test_uninstall_ends_swap_layers_too(inputs, attentions):
    block = integration.swap_layers(make_block())
    integration.uninstall()
    run(block, inputs)
    assert not attentions


def test_a_swapped_block_is_forgotten_when_it_dies():
    block = integration.swap_layers(make_block())
    assert not SETTINGS.is_empty
    del block
    gc.collect()
    assert SETTINGS.is_empty


def test_a_copy_is_not_swapped(inputs, attentions):
    run(copy.deepcopy(integration.swap_layers(make_block())), inputs)
    assert not attentions


def test_swap_layers_asks_for_blocks_of_anemoi():
    with pytest.raises(ValueError, match="must have a graph-transformer block of Anemoi, got Linear without one"):
        integration.swap_layers(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "switch", (integration.install, lambda **options: integration.swap_layers(make_block(), **options))
)
def test_a_wrong_option_is_refused_before_anything_changes(switch):
    with pytest.raises(ValueError, match="backend must be one of auto, triton, torch, got 'pyg'"):
        switch(backend="pyg")
    assert SETTINGS.is_empty and GraphTransformerBaseBlock.apply_gt.__code__.co_filename.endswith("block.py")
    assert not hasattr(GraphTransformerBaseBlock.apply_gt, "__wrapped__")


def test_nothing_of_ours_is_in_a_trained_model(graph):
    model, x = build(graph, make_options()), draw(graph)
    before = {name: type(module) for name, module in model.named_modules()}
    conv, keys, pickled = model.processor.proc[0].conv, list(model.state_dict()), pickle.dumps(model)
    integration.install()
    integration.swap_layers(model)
    model(x)["data"].sum().backward()
    model.zero_grad()
    assert {name: type(module) for name, module in model.named_modules()} == before
    assert model.processor.proc[0].conv is conv and list(model.state_dict()) == keys
    assert pickle.dumps(model) == pickled


def test_installation_pickles_as_an_empty_context():
    loaded = pickle.loads(pickle.dumps(integration.install()))
    assert type(loaded).__module__ == "contextlib"
    with loaded:
        pass


def test_missing_anemoi_is_named_with_the_command_that_installs_it():
    code = (
        "import sys; sys.modules['anemoi.models'] = None\nfrom anemoi_gt.integrations import anemoi\nanemoi.install()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "pip install --no-deps anemoi-models==0.19.0 anemoi-utils anemoi-graphs" in result.stderr


OTHER_VERSIONS = {  # of a method that stands for Anemoi's, with one parameter more
    "get_qkve": lambda theirs: lambda self, x, edge_attr, more=None: theirs(self, x, edge_attr),
    "attention_block": lambda theirs: lambda self, *operands, more=None, **options: theirs(self, *operands, **options),
}


@pytest.mark.parametrize("name", OTHER_VERSIONS)
def test_another_version_of_a_method_is_left_alone(inputs, attentions, caplog, monkeypatch, name):
    expected = run(make_block(), inputs)
    other = OTHER_VERSIONS[name](getattr(GraphTransformerBaseBlock, name))
    monkeypatch.setattr(GraphTransformerBaseBlock, name, other)
    with integration.install():
        assert getattr(GraphTransformerBaseBlock, name) is other
        assert_same_numbers(run(make_block(), inputs), expected)
    assert len(attentions[0]) == 5
    assert said(caplog) == [
        f"this anemoi-models has another GraphTransformerBaseBlock.{name}: expect less speed, not other results"
    ]


@pytest.mark.parametrize("other", (None, lambda self, everything: everything), ids=("missing", "another"))
def test_a_version_without_the_apply_gt_that_we_know_is_refused(monkeypatch, other):
    monkeypatch.delattr(GraphTransformerBaseBlock, "apply_gt")
    if other is not None:
        monkeypatch.setattr(GraphTransformerBaseBlock, "apply_gt", other, raising=False)
    before = [dict(vars(owner)) for owner in CHANGED]
    refused = r"must have GraphTransformerBaseBlock\.apply_gt as 0\.18\.0 and 0\.19\.0 have it, got 0\.\d+"
    with pytest.raises(ImportError, match=refused):
        integration.install()
    assert [dict(vars(owner)) for owner in CHANGED] == before


def with_own_conv():
    block = make_block()
    block.conv = OwnConv(block.conv)
    return block


def with_watched_conv(register):
    block = make_block()
    getattr(block.conv, register)(lambda *_: None)
    return block


UNSERVED = {
    "its conv is .*OwnConv, which is not Anemoi's attention": with_own_conv,
    "hooks watch its conv, which would not be called": lambda: with_watched_conv("register_forward_hook"),
    "hooks watch its conv, which would .* called": lambda: with_watched_conv("register_full_backward_pre_hook"),
}


def said(caplog):
    """What we logged, Anemoi's own messages apart."""
    return [record.message for record in caplog.records if record.name.startswith("anemoi_gt")]


@pytest.mark.parametrize("reason", UNSERVED)
@pytest.mark.parametrize("fuse_edges", (False, True))
def test_what_we_cannot_serve_runs_anemois_code_and_says_so_once(inputs, attentions, caplog, reason, fuse_edges):
    block = UNSERVED[reason]()
    expected = run(block, inputs)
    our_methods._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="anemoi_gt"), integration.install(fuse_edges=fuse_edges):
        for _ in range(2):
            assert_same_numbers(run(block, inputs), expected)
    assert not attentions
    (message,) = said(caplog)
    assert message.startswith("an Anemoi block runs Anemoi's own attention: ")
    refused = f"backend 'torch' cannot serve this Anemoi block: {reason}; backend 'auto' runs"
    with integration.install(backend="torch"), pytest.raises(ValueError, match=refused):
        block(*inputs)


def test_a_sparse_adjacency_is_named_as_the_reason(inputs):
    x, edge_attr, edge_index, *rest = inputs
    adjacency = torch.sparse_coo_tensor(edge_index, torch.ones(EDGES), (NODES, NODES))
    with integration.install(backend="torch"), pytest.raises(ValueError, match="its edges came as a sparse adjacency"):
        make_block()(x, edge_attr, adjacency, *rest)


def with_own_linear():
    kernels = load_layer_kernels()
    kernels["Linear"] = OwnLinear
    return make_block(layer_kernels=kernels)


def with_watched_linear():
    block = make_block()
    block.lin_edge.register_forward_hook(lambda *_: None)
    return block


class OwnSplit(GraphTransformerProcessorBlock):
    """A block that prepares its heads itself."""

    def prepare_qkve_edge_sharding(self, query, key, value, edges):
        return super().prepare_qkve_edge_sharding(query, key, value, edges)


class OwnProjection(GraphTransformerProcessorBlock):
    """A block that projects nodes and edges itself."""

    def get_qkve(self, x, edge_attr):
        x_src, x_dst = x if isinstance(x, tuple) else (x, x)
        return self.lin_query(x_dst), self.lin_key(x_src), self.lin_value(x_src), self.lin_edge(edge_attr)


def of_class(kind):
    block = make_block()
    block.__class__ = kind
    return block


UNFUSED = {
    "its lin_edge is": with_own_linear,
    "hooks watch its lin_edge": with_watched_linear,
    "OwnSplit has a prepare_qkve_edge_sharding of its own": lambda: of_class(OwnSplit),
    "OwnProjection has a get_qkve of its own": lambda: of_class(OwnProjection),
}


@pytest.mark.parametrize("reason", UNFUSED)
def test_edges_are_embedded_where_their_weight_is_not_all(inputs, attentions, caplog, reason):
    block = UNFUSED[reason]()
    expected = run(block, inputs)
    our_methods._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="anemoi_gt"), integration.install():
        for _ in range(2):
            assert_same_numbers(run(block, inputs), expected)
    assert len(attentions[0]) == 5 and attentions[0][4].shape == (EDGES, 2, 8)
    (message,) = said(caplog)
    assert message.startswith(f"an Anemoi block embeds its edges before the attention: {reason}")


def read_by_projections(block, inputs):
    """What query, key and value are projected from, in bfloat16 autocast under `install`."""
    seen = []
    for name in ("lin_query", "lin_key", "lin_value"):
        getattr(block, name).register_forward_pre_hook(lambda _, rows: seen.append(*rows))
    with integration.install(), torch.autocast("cpu", torch.bfloat16):
        block(*inputs)
    return seen


def test_autocast_casts_nodes_once_for_all_that_they_are_projected_to(inputs):
    query, key, value = read_by_projections(make_block(), inputs)
    assert query is key is value and query.dtype == torch.bfloat16


def test_autocast_casts_the_sources_of_a_mapper_once():
    block = make_block(GraphTransformerMapperBlock)
    query, key, value = read_by_projections(block, block_inputs(GraphTransformerMapperBlock))
    assert key is value and key.dtype == torch.bfloat16 and query.dtype == torch.float32


def test_a_projection_of_another_class_reads_nodes_as_they_are(inputs):
    block = make_block()
    block.lin_value.__class__ = OwnLinear
    assert [rows.dtype for rows in read_by_projections(block, inputs)] == [torch.float32] * 3


def test_anemois_variable_for_its_backend_does_not_stop_us(inputs, attentions, monkeypatch):
    block = make_block()
    expected = run(block, inputs)
    monkeypatch.setattr("anemoi.models.layers.block.ATTENTION_BACKEND", "triton")
    with integration.install():
        assert_same_numbers(run(block, inputs), expected)
    assert len(attentions) == 1


def test_dropout_of_the_attention_drops_in_training_only(inputs):
    block = make_block()
    expected = run(block, inputs)
    block.conv.dropout = 1.0
    integration.install()
    attended = []
    block.projection.register_forward_pre_hook(lambda _, args: attended.append(args[0] - block.lin_self(normed)))
    normed = block.layer_norm_attention(inputs[0])
    block(*inputs)
    assert attended[0].abs().max() < 1e-6
    assert_same_numbers(run(block.eval(), inputs), expected)
