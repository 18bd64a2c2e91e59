"""Chunks of a graph, mappers over them, groups of a processor: pieces that make a whole."""

from functools import partial

import pytest
import torch
from support.differentiate import differentiate, randomise

from anemoi_gt import GraphStructure, edge_attention
from anemoi_gt.nn import (
    ChunkedEdges,
    ConditionalLayerNorm,
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
    GraphTransformerProcessor,
    LayerKernels,
    split_destinations,
)

SRC, DST, EDGES, DIM = 13, 11, 50, 3
SIZES = {"num_channels": 12, "num_heads": 3, "edge_dim": DIM}


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.fixture
def graph():
    """Sorted by destination; destinations 4, 5 and 6 have no in-edge."""
    generator = torch.Generator().manual_seed(1)
    src = torch.randint(SRC, (EDGES,), generator=generator)
    dst = torch.randint(DST - 3, (EDGES,), generator=generator).sort().values
    return GraphStructure.from_edge_index(torch.stack([src, dst + 3 * (dst > 3)]), (SRC, DST))


@pytest.mark.parametrize("number", (1, 2, 4, 11))
def test_pieces_hold_every_destination_and_every_edge_once(graph, number):
    chunks = split_destinations(graph, number)
    sources, edge_index = torch.arange(SRC)[:, None], graph.edge_index()
    found = []
    for chunk in chunks:
        chunk.graph.validate()
        src, dst = chunk.graph.edge_index()
        names = chunk.sources(sources)[:, 0], chunk.destinations(torch.arange(DST)[:, None])[:, 0]
        found.append(torch.stack([names[0][src], names[1][dst]]))
        assert torch.equal(chunk.attributes(edge_index.T), found[-1].T)
    assert len(chunks) == number and torch.equal(torch.cat(found, dim=1), edge_index)
    sizes = [chunk.graph.num_dst for chunk in chunks]
    assert sum(sizes) == DST and max(sizes) - min(sizes) <= 1


def test_pieces_know_the_degree_that_all_destinations_of_their_graph_share(graph):
    equal = GraphStructure.from_edge_index(torch.stack([torch.arange(12) % SRC, torch.arange(12) // 3]), (SRC, 4))
    assert [chunk.graph.fixed_in_degree.shape for chunk in split_destinations(equal, 3)] == [(3, 0)] * 3
    assert [chunk.graph.fixed_in_degree for chunk in split_destinations(graph, 3)] == [None] * 3


def test_one_piece_is_the_graph_itself(graph):
    (chunk,) = split_destinations(graph, 1)
    assert chunk.graph is graph and chunk.src is None


def test_pieces_hold_no_source_that_they_do_not_read(graph):
    for chunk in split_destinations(graph, 4):
        assert torch.equal(chunk.graph.row.unique().long(), torch.arange(chunk.graph.num_src))


@pytest.mark.parametrize("number", (2, 4, 11))
def test_attention_of_a_destination_is_that_of_the_whole_bit_by_bit(graph, number):
    query, key, value, embedded = draw(DST, 3, 4), draw(SRC, 3, 4), draw(SRC, 3, 4), draw(EDGES, 12)
    expected, _ = edge_attention(query, key, value, graph, embedded.reshape(EDGES, 3, 4))

    def attend(chunk):
        rows = [chunk.sources(side.reshape(SRC, 12)).reshape(-1, 3, 4) for side in (key, value)]
        edges = chunk.attributes(embedded).reshape(-1, 3, 4)
        return edge_attention(query[chunk.dst], *rows, chunk.graph, edges)[0]

    assert torch.equal(torch.cat([attend(chunk) for chunk in split_destinations(graph, number)]), expected)


@pytest.mark.parametrize("number", (0, -1, 12))
def test_number_of_pieces_beyond_that_of_destinations_is_refused(graph, number):
    with pytest.raises(ValueError, match=rf"num_chunks must be in 1 .. 11, the number of destinations, got {number}"):
        split_destinations(graph, number)


def test_graph_whose_edges_are_not_sorted_is_not_cut():
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    with pytest.raises(ValueError, match="must hold its edges sorted by destination: build it from a sorted"):
        split_destinations(graph, 2)


def test_chunked_edges_have_the_state_dict_of_any_number_of_pieces():
    edge_index, edge_attr = torch.tensor([[2, 0, 2, 1], [0, 1, 1, 0]]), torch.arange(12.0).reshape(4, 3)
    one, two = (ChunkedEdges(edge_index, edge_attr, (3, 2), 8, num_chunks=number) for number in (1, 2))
    assert list(one.state_dict()) == list(two.state_dict()) == ["trainable"]
    assert [len(edges()[0]) for edges in (one, two)] == [1, 2]
    assert torch.equal(one()[1], two()[1])


def test_pieces_know_the_sizes_of_the_whole_graph_as_modules_too(graph):
    edges = ChunkedEdges(graph.edge_index(), draw(EDGES, DIM), (SRC, DST), num_chunks=3)
    for chunks in (edges()[0], split_destinations(graph, 3)):
        assert [chunk.sizes for chunk in chunks] == [(SRC, DST, EDGES)] * 3


MAPPERS = {
    "forward": lambda **options: GraphTransformerForwardMapper(in_channels_src=6, in_channels_dst=4, **options),
    "backward": lambda **options: GraphTransformerBackwardMapper(
        in_channels_src=6, in_channels_dst=4, out_channels_dst=2, **options
    ),
}


def run_mapper(mapper, graph):
    torch.manual_seed(7)
    inputs = {"src": draw(2, SRC, 6), "dst": draw(2, DST, 4), "edge_attr": draw(EDGES, DIM)}
    return differentiate(
        mapper, inputs, lambda tensors: mapper((tensors["src"], tensors["dst"]), graph, tensors["edge_attr"])
    )


@pytest.mark.parametrize("checkpointing", (False, True))
@pytest.mark.parametrize("dropout", (0.0, 0.4))
@pytest.mark.parametrize("kind", MAPPERS)
def test_mapper_gives_the_same_for_any_number_of_pieces(graph, kind, dropout, checkpointing):
    mapper = MAPPERS[kind](**SIZES, dropout=dropout, gradient_checkpointing=checkpointing)
    randomise(mapper.double())
    expected = run_mapper(mapper, graph)
    for number in (1, 2, 4, 11):
        actual = run_mapper(mapper, split_destinations(graph, number))
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-10, atol=1e-10, msg=f"{name}, {number} pieces")


def test_mapper_draws_new_masks_at_every_call(graph):
    mapper = MAPPERS["forward"](**SIZES, dropout=0.4).double()
    x, chunks = (draw(SRC, 6), draw(DST, 4)), split_destinations(graph, 3)
    assert not torch.equal(mapper(x, chunks, draw(EDGES, DIM)), mapper(x, chunks, draw(EDGES, DIM)))


@pytest.mark.parametrize("change", (-1, 4))
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x_src", f"x_src must have {SRC} rows, one per source of the whole graph, got"),
        ("x_dst", f"x_dst must have {DST} rows, one per destination of the whole graph, got"),
        ("edge_attr", f"edge_attr must have {EDGES} rows, one per edge of the whole graph, got"),
        ("cond_src", f"cond_src must have {SRC} rows, one per source of the whole graph, or one for all, got"),
        ("cond_dst", f"cond_dst must have {DST} rows, one per destination of the whole graph, or one for all, got"),
    ],
)
def test_rows_that_do_not_fit_the_whole_graph_are_refused_in_pieces(graph, name, message, change):
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=5))
    mapper = MAPPERS["forward"](**SIZES, layer_kernels=kernels).double()
    shapes = {
        "x_src": (SRC, 6),
        "x_dst": (DST, 4),
        "edge_attr": (EDGES, DIM),
        "cond_src": (SRC, 5),
        "cond_dst": (DST, 5),
    }
    shapes[name] = (shapes[name][0] + change, shapes[name][1])
    x_src, x_dst, edge_attr, *cond = (draw(*shape) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        mapper((x_src, x_dst), split_destinations(graph, 3), edge_attr, cond=tuple(cond))


@pytest.mark.parametrize("nodes", (1, None))
def test_condition_of_every_node_or_of_all_gives_the_same_in_pieces(graph, nodes):
    kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=5))
    mapper = randomise(MAPPERS["forward"](**SIZES, layer_kernels=kernels).double())
    x, edge_attr, cond = (draw(SRC, 6), draw(DST, 4)), draw(EDGES, DIM), (draw(nodes or SRC, 5), draw(nodes or DST, 5))
    expected = mapper(x, graph, edge_attr, cond=cond)
    torch.testing.assert_close(mapper(x, split_destinations(graph, 3), edge_attr, cond=cond), expected)


def test_mapper_without_any_piece_is_refused():
    with pytest.raises(ValueError, match="graph must be a GraphStructure, or at least one piece .* got none"):
        MAPPERS["forward"](**SIZES).double()((draw(SRC, 6), draw(DST, 4)), (), draw(EDGES, DIM))


@pytest.mark.parametrize("kind", MAPPERS)
def test_mapper_that_would_update_its_sources_is_refused(kind):
    with pytest.raises(ValueError, match="update_src_nodes must be False in a mapper, which returns destinations only"):
        MAPPERS[kind](**SIZES, update_src_nodes=True)


def test_hidden_layer_is_as_large_as_the_largest_piece(graph):
    mapper, sizes = MAPPERS["forward"](**SIZES).double(), []
    mapper.proc.node_dst_mlp.mlp[0].register_forward_hook(lambda module, args, out: sizes.append(out.shape[0]))
    mapper((draw(SRC, 6), draw(DST, 4)), split_destinations(graph, 4), draw(EDGES, DIM))
    assert sizes == [2, 3, 3, 3]


@pytest.mark.parametrize("groups", (1, 2, 5))
def test_groups_of_a_processor_run_every_layer_once_in_order(graph, groups):
    torch.manual_seed(0)
    processor = GraphTransformerProcessor(num_layers=5, **SIZES, checkpoint_groups=groups).double()
    square = GraphStructure.from_edge_index(graph.edge_index() % DST, DST)
    x, edge_attr = draw(DST, 12), draw(EDGES, DIM)
    expected = x
    for block in processor.proc:
        expected = block(expected, square, edge_attr)
    assert torch.equal(processor(x, square, edge_attr), expected)


def test_condition_reaches_every_layer_of_a_recomputed_processor(graph):
    seen = []

    class Norm(torch.nn.LayerNorm):
        def forward(self, x, cond):
            seen.append(cond)
            return super().forward(x)

    kernels = LayerKernels(LayerNorm=Norm)
    processor = GraphTransformerProcessor(num_layers=2, **SIZES, layer_kernels=kernels, checkpoint_groups=2).double()
    square, cond = GraphStructure.from_edge_index(graph.edge_index() % DST, DST), draw(1, 4)
    processor(draw(DST, 12), square, draw(EDGES, DIM), cond=cond)
    assert len(seen) == 4 and all(given is cond for given in seen)
