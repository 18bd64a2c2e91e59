"""ChunkedInference: layers without gradients, a block of rows at a time, the same bits for any number of pieces."""

from dataclasses import replace
from functools import partial

import numpy as np
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


@pytest.fixture
def rows_multiplied_alike(monkeypatch):
    """Triton's interpreter multiplies matrices by a BLAS, which on some CPUs rounds a row by its place in the matrix; no GPU does."""
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: (a[..., None] * b[..., None, :, :]).sum(-2, dtype=dtype))


@pytest.mark.usefixtures("rows_multiplied_alike")
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
    graph = replace(make_graph(SRC, DST), dst_schedule=order)
    for dst, _, part in ChunkedInference(graph, 2, rows=5).pieces:
        assert torch.equal(part.dst_schedule + dst.start, order[(order >= dst.start) & (order < dst.stop)])


def test_pieces_know_the_degree_that_all_destinations_of_their_graph_share():
    ends = torch.arange(2 * DST)
    graph = GraphStructure.from_edge_index(torch.stack([ends % SRC, ends // 2]), (SRC, DST))
    assert {part.fixed_in_degree.shape for _, _, part in ChunkedInference(graph, 3, rows=4).pieces} == {(2, 0)}


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


@pytest.mark.parametrize("num_chunks", (1, 2))
@pytest.mark.parametrize("change", (-1, 4))
@pytest.mark.parametrize("name", ("x_src", "x_dst", "edge_attr", "cond_src", "cond_dst"))
def test_rows_that_do_not_fit_are_refused(name, change, num_chunks):
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=5))
    layer, _, graph, _ = make("forward mapper", layer_kernels=kernels)
    sizes = {
        "x_src": (SRC, 6),
        "x_dst": (DST, 4),
        "edge_attr": (EDGES, DIM),
        "cond_src": (SRC, 5),
        "cond_dst": (DST, 5),
    }
    right, width = sizes[name]
    x_src, x_dst, edge_attr, *cond = (draw(*size) for size in (sizes | {name: (right + change, width)}).values())
    with pytest.raises(ValueError, match=f"{name} must have {right} rows, one per .* of the whole graph"):
        ChunkedInference(graph, num_chunks, rows=4)(layer, (x_src, x_dst), edge_attr, cond=tuple(cond))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("processor", lambda x: (x, x), r"x must be a tensor \[N, 16\] or \[B, N, 16\], got tuple"),
        ("forward mapper", lambda x: None, r"x must be a pair of tensors \(x_src, x_dst\), got NoneType"),
        ("backward mapper", lambda x: (x[0], x[0]), r"x_dst must have shape \[N, 4\] .* got \(23, 16\)"),
        ("mapper block", lambda x: x[0], r"x must be a pair of tensors \(x_src, x_dst\), got Tensor"),
        ("conv", lambda x: x[::-1], r"x_src must have shape \[N, 6\] .* got \(19, 4\)"),
    ],
)
def test_features_are_refused_as_the_layer_refuses_them(kind, change, message):
    layer, x, graph, edge_attr = make(kind)
    for refused in (ChunkedInference(graph), lambda layer, x, edge_attr: layer(x, graph, edge_attr)):
        with pytest.raises(ValueError, match=message):
            refused(layer, change(x), edge_attr)


def test_a_pair_may_be_a_list():
    layer, x, graph, edge_attr = make("backward mapper")
    run = ChunkedInference(graph, 2, rows=4)
    assert torch.equal(run(layer, list(x), edge_attr), run(layer, x, edge_attr))


def test_conditions_of_samples_give_as_many_samples_as_the_layer_does():
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=5))
    layer, x, graph, edge_attr = make("backward mapper", layer_kernels=kernels)
    cond = draw(2, 1, 5), draw(2, DST, 5)
    result = ChunkedInference(graph, 2, rows=4)(layer, x, edge_attr, cond=cond)
    torch.testing.assert_close(result, whole(layer, x, graph, edge_attr, cond=cond), rtol=1e-10, atol=1e-10)


def test_a_condition_that_no_norm_takes_is_refused():
    layer, x, graph, edge_attr = make("conv")
    with pytest.raises(ValueError, match="cond must be None, for GraphTransformerConv has no norms"):
        ChunkedInference(graph)(layer, x, edge_attr, cond=(draw(SRC, 5), draw(DST, 5)))


def test_attributes_that_the_layer_does_not_expect_are_refused():
    layer, x, graph, _ = make("conv")
    with pytest.raises(ValueError, match="edge_attr must come exactly when the layer has an edge_dim, got none"):
        ChunkedInference(graph)(layer, x)


def test_an_edge_index_is_no_graph():
    with pytest.raises(ValueError, match="graph must be a GraphStructure, got Tensor; make one of an edge_index"):
        ChunkedInference(torch.zeros(2, 3, dtype=torch.int64))


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
