"""Chunks of a graph: every layer gives on them what it gives on the graph, in less memory; inference keeps nothing."""

from functools import partial

import pytest
import torch
from support.differentiate import differentiate, draw, randomise
from support.refusals import raises
from support.same_numbers import assert_same

from anemoi_gt import GraphStructure, KernelConfig, edge_attention, nn
from anemoi_gt.nn import ConditionalLayerNorm, LayerKernels, StaticEdges, split_destinations

SRC = 13
DST = 11
EDGES = 50
DIM = 3
BLOCK = {
    "in_channels": 12,
    "out_channels": 12,
    "hidden_dim": 20,
    "num_heads": 3,
    "edge_dim": DIM,
    "qk_norm": True,
}
SIZES = {"num_channels": 12, "num_heads": 3, "edge_dim": DIM}
MAPPER = {"in_channels_dst": 4, "edge_pre_mlp": True} | SIZES
UP = {"out_channels_dst": 2, **MAPPER}
LAYERS = {  # constructor, features of sources (None: one set of nodes) and destinations
    "conv": (partial(nn.GraphTransformerConv, (6, 4), 8, heads=2, edge_dim=DIM, beta=True), 6, 4),
    "conv in one set": (
        partial(nn.GraphTransformerConv, 12, 4, heads=3, edge_dim=DIM, concat=False),
        None,
        12,
    ),
    "mapper block": (
        partial(nn.GraphTransformerMapperBlock, update_src_nodes=True, **BLOCK),
        12,
        12,
    ),
    "processor block": (partial(nn.GraphTransformerProcessorBlock, **BLOCK), None, 12),
    "processor": (partial(nn.GraphTransformerProcessor, num_layers=2, **SIZES), None, 12),
    "forward mapper": (
        partial(nn.GraphTransformerForwardMapper, in_channels_src=6, **MAPPER),
        6,
        4,
    ),
    "backward mapper": (
        partial(nn.GraphTransformerBackwardMapper, in_channels_src=12, **UP),
        12,
        4,
    ),
}
MAPPERS = ("forward mapper", "backward mapper")
CONDITIONAL = {
    "layer_kernels": LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=5))
}
every_layer = pytest.mark.parametrize("kind", LAYERS)


def make_graph(num_src=SRC):
    """Edges sorted by destination; destinations 4, 5 and 6 have none."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(num_src, (EDGES,), generator=generator)
    dst = torch.randint(DST - 3, (EDGES,), generator=generator).sort().values
    return GraphStructure.from_edge_index(torch.stack([src, dst + 3 * (dst > 3)]), (num_src, DST))


graph = pytest.fixture(make_graph)


def make(kind, batch=(), **options):
    """Layer, its inputs by name, and its graph."""
    torch.manual_seed(0)
    build, src, dst = LAYERS[kind]
    inputs = {"dst": draw(*batch, DST, dst), "edge_attr": draw(EDGES, DIM)}
    if src is not None:
        inputs["src"] = draw(*batch, SRC, src)
    return randomise(build(**options).double()), inputs, make_graph(DST if src is None else SRC)


def run(layer, tensors, graph, **options):
    x = (tensors["src"], tensors["dst"]) if "src" in tensors else tensors["dst"]
    return layer(x, graph, tensors["edge_attr"], **options)


@pytest.mark.parametrize("number", (1, 2, 4, 11))
def test_chunks_hold_every_destination_and_every_edge_once_and_only_sources_that_they_read(
    graph, number
):
    chunks = split_destinations(graph, number)
    sources = torch.arange(SRC)[:, None]
    destinations = torch.arange(DST)[:, None]
    edge_index = graph.edge_index()
    edges_of_chunks = []
    for chunk in chunks:
        chunk.graph.validate()
        src, dst = chunk.graph.edge_index()
        source_ids = chunk.sources(sources)[:, 0]
        destination_ids = chunk.destinations(destinations)[:, 0]
        edges = torch.stack([source_ids[src], destination_ids[dst]])
        edges_of_chunks.append(edges)
        assert torch.equal(chunk.attributes(edge_index.T), edges.T)
        assert number == 1 or torch.equal(src.unique().long(), torch.arange(chunk.graph.num_src))
    assert len(chunks) == number
    assert torch.equal(torch.cat(edges_of_chunks, dim=1), edge_index)
    sizes = [chunk.graph.num_dst for chunk in chunks]
    assert sum(sizes) == DST
    assert max(sizes) - min(sizes) <= 1


def test_one_chunk_is_the_graph_itself(graph):
    (chunk,) = split_destinations(graph, 1)
    assert chunk.graph is graph
    assert chunk.src is None


def test_chunks_keep_the_fixed_in_degree_of_their_graph(graph):
    ends = torch.arange(12)
    fixed = GraphStructure.from_edge_index(torch.stack([ends % SRC, ends // 3]), (SRC, 4))
    assert [chunk.graph.fixed_in_degree.shape for chunk in split_destinations(fixed, 3)] == [
        (3, 0)
    ] * 3
    assert [chunk.graph.fixed_in_degree for chunk in split_destinations(graph, 3)] == [None] * 3


@pytest.mark.parametrize("backend", ("torch", "triton"))
@pytest.mark.parametrize("number", (2, 4, 11))
def test_attention_of_a_destination_is_bitwise_that_on_the_whole_graph(
    graph, number, backend, kernel_device
):
    tensors = (draw(DST, 12), draw(SRC, 12), draw(SRC, 12), draw(EDGES, 12))
    query, key, value, embedded = (tensor.float().to(kernel_device) for tensor in tensors)
    graph, config = graph.to(kernel_device), KernelConfig(backend)

    def attend(chunk):
        rows = (
            chunk.destinations(query),
            chunk.sources(key),
            chunk.sources(value),
            chunk.attributes(embedded),
        )
        query_, key_, value_, edges = (side.unflatten(-1, (3, 4)) for side in rows)
        return edge_attention(query_, key_, value_, chunk.graph, edges, config=config)[0]

    (expected,) = (attend(chunk) for chunk in split_destinations(graph, 1))
    assert torch.equal(
        torch.cat([attend(chunk) for chunk in split_destinations(graph, number)]), expected
    )


@pytest.mark.parametrize(("number", "batch"), [(1, ()), (3, (2,)), (DST, ())])
@every_layer
def test_layer_gives_the_same_output_and_gradients_in_chunks(kind, number, batch):
    layer, inputs, graph = make(kind, batch)
    expected = differentiate(layer, inputs, lambda tensors: run(layer, tensors, graph))
    chunks = split_destinations(graph, number)
    assert_same(differentiate(layer, inputs, lambda tensors: run(layer, tensors, chunks)), expected)


@pytest.mark.parametrize("dropout", (0.0, 0.4))
@pytest.mark.parametrize("number", (1, 4))
@pytest.mark.parametrize("kind", MAPPERS)
def test_activation_checkpointing_of_chunks_changes_no_output_and_no_gradient(
    kind, number, dropout
):
    results = []
    for checkpointing in (False, True):
        layer, inputs, graph = make(
            kind, (2,), dropout=dropout, gradient_checkpointing=checkpointing
        )
        chunks = split_destinations(graph, number)
        results.append(differentiate(layer, inputs, lambda tensors: run(layer, tensors, chunks)))  # noqa: B023
    assert_same(*results)


def test_chunks_draw_new_dropout_masks_at_every_call(graph):
    layer, inputs, _ = make("forward mapper", dropout=0.4)
    chunks = split_destinations(graph, 3)
    assert not torch.equal(run(layer, inputs, chunks), run(layer, inputs, chunks))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("rows", (1, None))
@pytest.mark.parametrize("kind", ("backward mapper", "processor"))
def test_condition_of_every_node_or_of_all_gives_the_same_in_chunks(kind, rows, batch):
    layer, inputs, graph = make(kind, **CONDITIONAL)
    cond = draw(*batch, rows or SRC, 5), draw(*batch, rows or DST, 5)
    cond = cond if "src" in inputs else cond[1]
    expected = run(layer, inputs, graph, cond=cond)
    assert_same(run(layer, inputs, split_destinations(graph, 3), cond=cond), expected)


@pytest.mark.parametrize("kind", ("conv", "mapper block", "processor block", *MAPPERS))
def test_features_exist_for_one_chunk_at_a_time(kind):
    layer, inputs, graph = make(
        kind, **({"update_src_nodes": False} if kind == "mapper block" else {})
    )
    chunks, rows = split_destinations(graph, DST), set()
    for name, module in layer.named_modules():
        # is not called
        if hasattr(module, "weight") and module.weight.dim() == 2 and not name.endswith("lin_edge"):
            module.register_forward_hook(lambda module, args, out: rows.add(out.shape[-2]))
    run(layer, inputs, chunks)
    assert (
        max(rows) <= max(max(chunk.graph.num_src, chunk.graph.num_edges) for chunk in chunks) < SRC
    )


@pytest.mark.parametrize("number", (0, -1, 12))
def test_more_chunks_than_destinations_raise(graph, number):
    message = f"num_chunks must be in 1 .. 11, the number of destinations, got {number}"
    raises(lambda: split_destinations(graph, number), message)


def test_graph_whose_edges_are_not_sorted_is_not_split():
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    raises(
        lambda: split_destinations(graph, 2),
        "must have its edges sorted by destination: build it from a sorted",
    )


@pytest.mark.parametrize("change", (-1, 4))
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x_src", f"{SRC} rows, one per source of the whole graph, got"),
        ("x_dst", f"{DST} rows, one per destination of the whole graph, got"),
        ("edge_attr", f"{EDGES} rows, one per edge of the whole graph, got"),
        ("cond_src", f"{SRC} rows, one per source of the whole graph, or one for all, got"),
        ("cond_dst", f"{DST} rows, one per destination of the whole graph, or one for all, got"),
    ],
)
def test_rows_that_do_not_fit_the_whole_graph_are_refused(graph, name, message, change):
    layer, _, _ = make("forward mapper", **CONDITIONAL)
    rows = {"x_src": SRC, "x_dst": DST, "edge_attr": EDGES, "cond_src": SRC, "cond_dst": DST}
    rows[name] += change
    x_src, x_dst, edge_attr, *cond = map(draw, rows.values(), (6, 4, DIM, 5, 5))
    call = partial(layer, (x_src, x_dst), split_destinations(graph, 3), edge_attr, cond=tuple(cond))
    raises(call, f"{name} must have {message}")


@pytest.mark.parametrize(("chunks", "got"), [((), "a tuple of no chunk"), ([1], "a list of int")])
@every_layer
def test_what_is_not_a_chunk_is_refused(kind, chunks, got):
    layer, inputs, _ = make(kind)
    raises(
        lambda: run(layer, inputs, chunks),
        f"graph must be a GraphStructure, or its chunks .* got {got}",
    )


def test_attention_weights_of_chunks_are_refused(graph):
    layer, inputs, _ = make("conv")
    with pytest.raises(
        ValueError, match="return_attention_weights must be None with chunks, got True"
    ):
        run(layer, inputs, split_destinations(graph, 2), return_attention_weights=True)


@pytest.mark.parametrize("kind", MAPPERS)
def test_mapper_that_would_update_its_sources_is_refused(kind):
    with pytest.raises(TypeError, match="multiple values for keyword argument 'update_src_nodes'"):
        make(kind, update_src_nodes=True)


def test_static_edges_have_one_state_dict_for_any_number_of_chunks(graph):
    edges = (graph.edge_index(), draw(EDGES, DIM), (SRC, DST), 8)
    whole, edges = (StaticEdges(*edges, num_chunks=number) for number in (1, 3))
    assert list(whole.state_dict()) == list(edges.state_dict()) == ["trainable"]
    (structure, edge_attr), (chunks, same_attr) = whole(), edges()
    assert torch.equal(edge_attr, same_attr)
    assert torch.equal(structure.row, graph.row)
    for chunk, expected in zip(chunks, split_destinations(graph, 3), strict=True):
        assert (chunk.dst, chunk.edges, chunk.sizes) == (
            expected.dst,
            expected.edges,
            expected.sizes,
        )
        assert torch.equal(chunk.graph.row, expected.graph.row)
        assert torch.equal(chunk.src, expected.src)
