"""ChunkedInference: layers without gradients, a block of rows at a time, the same bits for any number of pieces."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from support.differentiate import randomise

from anemoi_gt import (
    AttentionConfig,
    GraphStructure,
    GraphTransformerConv,
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
)
from anemoi_gt.nn import (
    ChunkedInference,
    ConditionalLayerNorm,
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
    GraphTransformerProcessor,
    LayerKernels,
)

SRC, DST, EDGES, DIM = 23, 19, 80, 3
BLOCK = {"in_channels": 16, "out_channels": 16, "hidden_dim": 24, "num_heads": 2, "edge_dim": DIM, "qk_norm": True}
MAPPER = {"in_channels_dst": 4, "num_channels": 16, "num_heads": 2, "edge_dim": DIM, "edge_pre_mlp": True}
LAYERS = {  # layer, features of sources and of destinations
    "conv": (lambda **options: GraphTransformerConv((6, 4), 8, heads=2, edge_dim=DIM, beta=True, **options), 6, 4),
    "mapper block": (lambda **options: GraphTransformerMapperBlock(**BLOCK, **options), 16, 16),
    "forward mapper": (lambda **options: GraphTransformerForwardMapper(in_channels_src=6, **MAPPER, **options), 6, 4),
    "backward mapper": (
        lambda **options: GraphTransformerBackwardMapper(in_channels_src=16, out_channels_dst=2, **MAPPER, **options),
        16,
        4,
    ),
}
SQUARE = {
    "processor block": lambda **options: GraphTransformerProcessorBlock(**BLOCK, **options),
    "processor": lambda **options: GraphTransformerProcessor(
        num_layers=2, num_channels=16, num_heads=2, edge_dim=DIM, **options
    ),
    "conv within": lambda **options: GraphTransformerConv(16, 8, heads=2, edge_dim=DIM, concat=False, **options),
}
EVERY = [*LAYERS, *SQUARE]
every_kind = pytest.mark.parametrize("kind", EVERY)
TRITON = AttentionConfig(backend="triton")


def make_graph(num_src, num_dst, edges=EDGES):
    """Edges sorted by destination; the last destination has none."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(num_src, (edges,), generator=generator)
    dst = torch.randint(num_dst - 1, (edges,), generator=generator).sort().values
    return GraphStructure.from_edge_index(torch.stack([src, dst]), (num_src, num_dst))


def draw(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def make(kind, dtype=torch.float64, samples=(), **options):
    """Layer in eval mode, what it takes, and its graph."""
    torch.manual_seed(0)
    if kind in SQUARE:
        layer, x, graph = SQUARE[kind](**options), draw(*samples, DST, 16, dtype=dtype), make_graph(DST, DST)
    else:
        build, src, dst = LAYERS[kind]
        layer, graph = build(**options), make_graph(SRC, DST)
        x = draw(*samples, SRC, src, dtype=dtype), draw(*samples, DST, dst, dtype=dtype)
    return randomise(layer.to(dtype)).eval(), x, graph, draw(EDGES, DIM, dtype=dtype)


def whole(layer, x, graph, edge_attr, **options):
    with torch.no_grad():
        result = layer(x, graph, edge_attr, **options)
    return result[1] if isinstance(result, tuple) else result


@pytest.mark.parametrize(("rows", "num_chunks", "samples"), [(3, 1, ()), (7, 3, (2,)), (100, 1, ()), (1, DST, ())])
@every_kind
def test_result_is_that_of_the_layer(kind, rows, num_chunks, samples):
    layer, x, graph, edge_attr = make(kind, samples=samples)
    result = ChunkedInference(graph, num_chunks, rows=rows)(layer, x, edge_attr)
    torch.testing.assert_close(result, whole(layer, x, graph, edge_attr), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", ["backward mapper", "conv within"])
def test_any_number_of_pieces_gives_the_same_bits_on_triton(kind, kernel_device):
    layer, x, graph, _ = make(kind, torch.float32, config=TRITON)
    row = torch.randint(graph.num_src, (3 * DST,), generator=torch.Generator().manual_seed(2))
    graph = GraphStructure.from_csc(torch.arange(0, 3 * DST + 1, 3), row, graph.num_src).to(kernel_device)
    layer, edge_attr = layer.to(kernel_device), draw(3 * DST, DIM, dtype=torch.float32).to(kernel_device)
    x = tuple(side.to(kernel_device) for side in x) if isinstance(x, tuple) else x.to(kernel_device)
    one, *others = (ChunkedInference(graph, number, rows=5)(layer, x, edge_attr) for number in (1, 3))
    for result in others:
        assert torch.equal(result, one)


@pytest.mark.parametrize("kind", ["backward mapper", "conv"])
def test_any_number_of_pieces_gives_the_same_bits_on_torch(kind):
    build, src, dst = LAYERS[kind]
    torch.manual_seed(0)
    layer, graph = randomise(build()).eval(), make_graph(SRC, 20_000, 50_000)
    x, edge_attr = (
        (draw(SRC, src, dtype=torch.float32), draw(20_000, dst, dtype=torch.float32)),
        torch.randn(50_000, DIM),
    )
    one, *others = (ChunkedInference(graph, number, rows=8192)(layer, x, edge_attr) for number in (1, 2, 3))
    for result in others:
        assert torch.equal(result, one)


def test_condition_of_every_node_or_of_all_reaches_the_norms():
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=5))
    layer, x, graph, edge_attr = make("backward mapper", layer_kernels=kernels)
    for cond in ((draw(SRC, 5), draw(DST, 5)), (draw(1, 5), draw(1, 5))):
        result = ChunkedInference(graph, 2, rows=4)(layer, x, edge_attr, cond=cond)
        torch.testing.assert_close(result, whole(layer, x, graph, edge_attr, cond=cond), rtol=1e-10, atol=1e-10)


def test_pieces_keep_the_order_of_programs():
    order = torch.randperm(DST, generator=torch.Generator().manual_seed(0)).int()
    graph = replace(make_graph(SRC, DST), program_order=order)
    for dst, _, part in ChunkedInference(graph, 2, rows=5).pieces:
        assert torch.equal(part.program_order + dst.start, order[(order >= dst.start) & (order < dst.stop)])


def test_features_are_made_for_so_many_rows_at_a_time():
    layer, x, graph, edge_attr = make("backward mapper")
    seen = []
    for module in layer.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, args, out: seen.append(out.shape[-2]))
    layer.proc.edge_pre_mlp = torch.nn.Sequential()
    ChunkedInference(graph, 2, rows=4)(layer, x, edge_attr)
    assert max(seen) == 4


@every_kind
def test_nothing_is_kept_for_a_backward_pass(kind):
    layer, x, graph, edge_attr = make(kind)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        result = ChunkedInference(graph, 2, rows=5)(layer, x, edge_attr)
    assert kept == [] and not result.requires_grad


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["conv", "backward mapper", "processor block"])
def test_layers_without_gradients_keep_nothing_and_build_no_source_side(kind, backend, monkeypatch, kernel_device):
    if backend == "triton" and kernel_device.type == "cuda":
        pytest.skip("tensors here lie on the CPU")
    config = AttentionConfig(backend=backend)
    layer, x, graph, edge_attr = make(kind, torch.float32, config=config)
    monkeypatch.setattr(GraphStructure, "with_reverse", lambda self: pytest.fail("built the source side"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        whole(layer, x, graph, edge_attr)
    assert kept == []


def test_triton_keeps_no_numerators_without_gradients(kernel_device):
    from anemoi_gt.ops.triton_backend import op

    graph, rows = make_graph(SRC, SRC).to(kernel_device), draw(SRC, 2, 16, dtype=torch.float32).to(kernel_device)
    made, operator = [], op.edge_attention_triton

    def spy(*operands):
        made.extend(results := operator(*operands))
        return results

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(op, "edge_attention_triton", spy)
        op.attend(rows, rows, rows, graph, None, None, None, None, 0.25, 0.0)
    assert [tensor.numel() for tensor in made[2:]] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"num_chunks": 0}, "num_chunks must be in 1 .. 1, the blocks of 16384 rows of 19 destinations, got 0"),
        ({"num_chunks": 5, "rows": 5}, "num_chunks must be in 1 .. 4, .* got 5; lower rows for more"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ChunkedInference(make_graph(SRC, DST), **arguments)


def test_edges_that_are_not_sorted_are_not_cut():
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    with pytest.raises(ValueError, match="must hold its edges sorted by destination: build it from a sorted"):
        ChunkedInference(graph, 2, rows=1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: (x[0][:-1], x[1]), f"x must have {SRC} rows, one per source of the graph, got"),
        (lambda x: (x[0], x[1].repeat(2, 1)), f"x must have {DST} rows, one per destination of the graph, got"),
    ],
)
def test_rows_that_do_not_fit_are_refused(change, message):
    layer, x, graph, edge_attr = make("conv")
    with pytest.raises(ValueError, match=message):
        ChunkedInference(graph)(layer, change(x), edge_attr)


def test_layers_that_drop_attention_are_refused():
    layer, x, graph, edge_attr = make("mapper block", dropout=0.5)
    ChunkedInference(graph)(layer, x, edge_attr)
    with pytest.raises(
        ValueError, match="must not drop attention in inference, call eval\\(\\) first, got dropout=0.5"
    ):
        ChunkedInference(graph)(layer.train(), x, edge_attr)


def test_blocks_that_update_their_sources_are_refused():
    layer, x, graph, edge_attr = make("mapper block", update_src_nodes=True)
    with pytest.raises(ValueError, match="update_src_nodes must be False here"):
        ChunkedInference(graph)(layer, x, edge_attr)


def test_other_modules_are_refused_by_name():
    with pytest.raises(ValueError, match="layer must be one of GraphTransformerConv, .*, got Linear"):
        ChunkedInference(make_graph(DST, DST))(torch.nn.Linear(2, 2), draw(DST, 2))
