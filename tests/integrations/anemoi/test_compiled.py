"""Blocks under torch.compile compute with us: our operator is in the traced graph, and Anemoi's attention is not."""

from functools import partial

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from anemoi.models.layers.mapper import GraphTransformerBaseMapper
from anemoi.models.layers.processor import GraphTransformerProcessor
from support import anemoi_model as small
from support.anemoi_model import NODES, block_inputs, differentiate_block, for_gpu, make_block
from support.same_numbers import assert_same_numbers
from torch.utils.checkpoint import checkpoint

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi.edge_lists import cached_list

pytestmark = pytest.mark.compiled


def batch_sizes(graph):
    """The batch dimension of the query [B, N_dst, H, C], 1 without B, at each call of anemoi_gt's attention."""
    calls = [
        node
        for name, nodes in graph.items()
        if name.startswith("anemoi_gt.edge_attention_")
        for node in nodes
    ]
    queries = [node.args[0].meta["example_value"] for node in calls]
    return [query.shape[0] if query.dim() == 4 else 1 for query in queries]


def triton_block(*args, **options):
    return for_gpu(make_block(*args, **options))


def assert_ours(names):
    """Assert that a traced graph has our operator and no attention of Anemoi's, neither kernel nor message passing."""
    assert any(name.startswith("anemoi_gt.edge_attention_") for name in names), names
    upstream = ("anemoi.graph_transformer", "scatter", "softmax")
    assert not [name for name in names if any(part in name for part in upstream)]


KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}


# Both kinds of blocks, as Anemoi builds them on a CPU and on a GPU; the code of both has the same
# function for an option.
@pytest.mark.parametrize(
    ("kind", "make", "switch", "options"),
    [
        ("processor", make_block, "install", {"qk_norm": True, "attn_channels": 8}),
        ("mapper", triton_block, "install", {"edge_pre_mlp": True, "shard_strategy": "heads"}),
        ("mapper", make_block, "install, edges embedded", {}),
        ("processor", make_block, "swap_layers", {}),
    ],
)
def test_a_compiled_block_computes_with_us(kind, make, switch, options, traced):
    backend, graphs = traced
    inputs = block_inputs(KINDS[kind])
    expected = differentiate_block(make_block(KINDS[kind], **options), inputs)
    block = make(KINDS[kind], **options)
    if switch == "swap_layers":
        integration.swap_layers(block)
    else:
        integration.install(fusion="auto" if switch == "install" else "none")
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert_same_numbers(differentiate_block(block, inputs, compiled), expected)
    assert len(graphs) == 1
    assert_ours(graphs[0])


@pytest.mark.parametrize(
    ("order", "make"),
    [("checkpoint around compiled", make_block), ("compiled around checkpoint", triton_block)],
)
def test_checkpointed_blocks_compute_with_us(order, make, traced):
    backend, graphs = traced
    inputs = block_inputs()
    expected = differentiate_block(make_block(), inputs)
    block = make()
    compiled = partial(torch.compile, fullgraph=True, backend=backend)
    with integration.install():
        if order == "checkpoint around compiled":
            forward = partial(checkpoint, compiled(block), use_reentrant=False)
        else:
            forward = compiled(lambda *inputs: checkpoint(block, *inputs, use_reentrant=False))
        assert_same_numbers(differentiate_block(block, inputs, forward), expected)
    assert len(graphs) == 1
    assert_ours(graphs[0])


def test_dropout_is_compiled_with_us(traced):
    backend, graphs = traced
    block = make_block()
    block.conv.dropout = 0.5
    with integration.install():
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        first, second = (compiled(*block_inputs())[0] for _ in range(2))
        assert (first - second).abs().max() > 1e-3
        block.eval()
        assert_same_numbers(compiled(*block_inputs())[0], block(*block_inputs())[0])
    for names in graphs:
        assert_ours(names)


def test_install_and_uninstall_reach_compiled_blocks(traced):
    backend, graphs = traced
    block = torch.compile(make_block(), fullgraph=True, backend=backend)
    for switch in (lambda: None, integration.install, integration.uninstall):
        switch()
        block(*block_inputs())
    ours = [any("edge_attention" in name for name in names) for names in graphs]
    assert ours == [False, True, False]


BLOCKS = tuple(KINDS.values())
COMPONENTS = (GraphTransformerProcessor, GraphTransformerBaseMapper)
WHOLE = small.make_options(mapper_chunks=2, layers=2, checkpointing=False)


def compile_parts(model, backend, kinds=BLOCKS):
    for module in model.modules():
        if isinstance(module, kinds):
            module.compile(fullgraph=True, backend=backend)
    return model


@pytest.mark.parametrize(
    ("options", "shape", "forward", "folded"),
    (
        (WHOLE, {"batch": 2}, {}, {1, 2}),
        (small.make_ensemble_options(), {"batch": 2, "ensemble": 2}, {"fcstep": 1}, {2, 4}),
    ),
    ids=("components", "ensemble"),
)
def test_compiled_code_folds_batches_as_eager_and_sort_nothing(
    graph, traced, sorts, options, shape, forward, folded
):
    backend, graphs = traced
    model, x = small.build(graph, options), small.draw(graph, **shape)
    expected = small.differentiate(model, x, **forward)
    with integration.install():
        assert_same_numbers(small.differentiate(model, x, **forward), expected)
        sorts.clear()
        compile_parts(model, backend, COMPONENTS if options is WHOLE else BLOCKS)
        for _ in range(2):
            assert_same_numbers(small.differentiate(model, x, **forward), expected)
    assert not sorts
    assert not any("edge_structure" in name for names in graphs for name in names)
    for names in graphs:
        assert_ours(names)
    assert {size for names in graphs for size in batch_sizes(names)} == folded


def test_compiled_code_sorts_each_list_once_when_nothing_ran_before(graph, traced, sorts):
    backend, graphs = traced
    options = small.make_options(mapper_chunks=2, layers=2)
    model = compile_parts(small.build(graph, options), backend)
    x = small.draw(graph, batch=2)
    with integration.install():
        for _ in range(3):
            small.differentiate(model, x)
    assert len(sorts) == 1 + 2 * 2
    assert len(graphs) <= 4  # encoder, decoder (the second with dynamic sizes) and processor


# as docs/anemoi.md asks for checkpointed mappers, which PyTorch 2.9 cannot trace as a whole: its
# checkpoints do not take Anemoi's BipartiteGraphShardInfo
@torch._dynamo.config.patch(specialize_float=True)
@pytest.mark.parametrize(
    "checkpointing", [False, True] if torch.__version__ >= (2, 10) else [False]
)
def test_compiled_mappers_take_batches_of_other_sizes_without_graph_breaks(
    graph, traced, checkpointing
):
    backend, graphs = traced
    model = small.build(graph, small.make_options(mapper_chunks=2, checkpointing=checkpointing))
    batches = [small.draw(graph, batch=batch) for batch in (2, 3)]
    expected = [small.differentiate(model, x) for x in batches]
    for mapper in (model.encoder["encoder"], model.decoder["decoder"]):
        mapper.compile(fullgraph=True, dynamic=True, backend=backend)
    with integration.install():
        for x, numbers in zip(batches, expected, strict=True):
            assert_same_numbers(small.differentiate(model, x), numbers)
    for names in graphs:
        assert_ours(names)


def test_a_list_of_unknown_origin_is_sorted_once_in_compiled_code(traced, sorts):
    backend, graphs = traced
    block, inputs = make_block(), block_inputs()
    expected = differentiate_block(block, inputs)
    with integration.install():
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for _ in range(3):
            assert_same_numbers(differentiate_block(block, inputs, compiled), expected)
    assert len(sorts) == 1
    assert "anemoi_gt.edge_structure.default" in graphs[0]


def test_compiled_code_distinguishes_lists_of_the_same_sizes(traced):
    backend, _ = traced
    block, (x, edge_attr, edge_index, *rest) = make_block(), block_inputs()
    lists = [edge_index, edge_index.flip(0), torch.stack([edge_index[0], edge_index[0]])]
    expected = [differentiate_block(block, (x, edge_attr, edges, *rest)) for edges in lists]
    cached = [cached_list(edges.clone(), (NODES, NODES)) for edges in lists[:2]] + lists[2:]
    with integration.install():
        compiled = torch.compile(block, fullgraph=True, backend=backend)
        for _ in range(2):
            for edges, reference in zip(cached, expected, strict=True):
                actual = differentiate_block(block, (x, edge_attr, edges, *rest), compiled)
                assert_same_numbers(actual, reference)


def test_inference_compiled_makes_no_source_side(traced):
    backend, _ = traced
    edge_index = cached_list(block_inputs()[2], (NODES, NODES))
    inputs = [*block_inputs()[:2], edge_index, *block_inputs()[3:]]
    with integration.install(), torch.no_grad():
        torch.compile(make_block(), fullgraph=True, backend=backend)(*inputs)
        assert not edge_index._anemoi_gt_cache.graph.has_reverse
