"""The structure of a graph is built once, only for its own edges, and freed with them."""

import copy
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.anemoi_model import build, differentiate, draw, make_options
from support.garbage import free_garbage
from support.operators import Operators
from support.same_numbers import assert_same_numbers
from torch.library import opcheck

from anemoi_gt import GraphStructure
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import edge_lists
from anemoi_gt.integrations.anemoi.edge_lists import cached_list, structure_of


@pytest.fixture
def young():
    """Free lists of earlier tests, and exclude those that live on from collections."""
    free_garbage()


def cached():
    """All edge lists that have a cache, made since `young`."""
    gc.collect()
    return [
        item
        for item in gc.get_objects()
        if type(item) is torch.Tensor and hasattr(item, "_anemoi_gt_cache")
    ]


def train(model, x, steps):
    for _ in range(steps):
        model(x)["data"].square().mean().backward()


def test_each_graph_is_sorted_once_over_layers_chunks_recompute_and_steps(graph, sorts):
    model, x = build(graph, make_options(mapper_chunks=3)), draw(graph)
    with integration.install():
        train(model, x, steps=2)
    assert len(sorts) == 1 + 2 * 3


def test_each_source_side_is_made_once_and_not_for_inference(graph, monkeypatch):
    made, with_reverse = [], GraphStructure.with_reverse

    def record(self, **options):
        made.extend([] if self.has_reverse else [self])
        return with_reverse(self, **options)

    monkeypatch.setattr(GraphStructure, "with_reverse", record)
    model, x = build(graph, make_options(mapper_chunks=1)), draw(graph)
    with integration.install():
        with torch.no_grad():
            model(x)
        assert not made
        train(model, x, steps=2)
    assert len(made) == 3


# Operators that make a CPU wait for a GPU, or whose sizes depend on values.
SYNCHRONISING = ("_local_scalar_dense", "nonzero", "_unique2", "is_nonzero", "equal", "sort")


@pytest.mark.parametrize(
    "options", ({}, {"mapper_chunks": 1, "qk_norm": True, "shard_strategy": "heads"}), ids=str
)
def test_a_step_after_the_first_does_not_synchronise_the_device(graph, options, monkeypatch):
    model, x = build(graph, make_options(**options)), draw(graph, batch=2)
    # as on a GPU: values of lists are compared on a CPU only
    on_gpu = lambda tensor: edge_lists.Content(edge_lists.version_of(tensor), None)  # noqa: E731
    monkeypatch.setattr(edge_lists.Content, "of", on_gpu)
    lists, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: lists.append("tolist") or tolist(self))

    def synchronisations():
        lists.clear()
        with Operators() as operators:
            train(model, x, steps=1)
        return [
            name for name in operators.names if name.removeprefix("aten.").startswith(SYNCHRONISING)
        ] + lists

    assert synchronisations()  # upstream
    with integration.install():
        train(model, x, steps=1)
        assert not synchronisations()


@pytest.mark.parametrize(("batch", "chunks", "folded"), ((3, 1, True), (4, 2, True), (3, 2, False)))
def test_a_batch_is_folded_where_chunks_hold_whole_samples(
    graph, attentions, batch, chunks, folded
):
    model = build(graph, make_options(mapper_chunks=chunks))
    with integration.install():
        model(draw(graph, batch=batch))
    samples = [query.shape[:-3] for query, *_ in attentions]
    chunk = (batch // chunks,) if folded else ()
    # encoder, two processor layers, decoder
    assert samples == [chunk] * chunks + [(batch,)] * 2 + [chunk] * chunks


def test_every_batch_size_and_every_copy_of_a_model_has_its_own(graph, sorts):
    model = build(graph, make_options(mapper_chunks=1))
    with integration.install():
        results = {batch: model(draw(graph, batch=batch))["data"] for batch in (1, 2, 1, 2)}
        assert len(sorts) == 6
        copy.deepcopy(model)(draw(graph))
        assert len(sorts) == 9
    for batch, out in results.items():
        assert_same_numbers(out, model(draw(graph, batch=batch))["data"])


def test_everything_is_freed_with_the_model(graph, young):
    model = build(graph, make_options())
    with integration.install():
        train(model, draw(graph, batch=2), steps=1)
        structures = [
            weakref.ref(edges._anemoi_gt_cache.graph)
            for edges in cached()
            if edges._anemoi_gt_cache.graph
        ]
        assert len(structures) == 5
        del model
        assert not cached()
        assert not any(structure() for structure in structures)


def test_structures_are_freed_when_a_model_is_moved_and_by_uninstall(graph, young):
    model = build(graph, make_options())
    with integration.install():
        for batch in (1, 2):
            model(draw(graph, batch=batch))
        assert cached()
        model.double()
        model._apply(torch.clone)  # as to another device
        assert not cached()
        model.float()(draw(graph))
        assert cached()
    assert not cached()
    assert not edge_lists._BY_BASE


@pytest.mark.parametrize("in_place", (False, True), ids=("another tensor", "written into"))
def test_a_graph_of_the_same_sizes_is_not_taken_for_the_one_before(graph, in_place):
    model, x = build(graph, make_options()), draw(graph)
    provider = model.processor_graph_provider
    with integration.install():
        before = model(x)["data"]
        src, dst = provider.edge_index_base
        rewired = torch.stack([src.roll(1000), dst])
        provider.edge_index_base = provider.edge_index_base.copy_(rewired) if in_place else rewired
        after = model(x)["data"]
    assert_same_numbers(after, model(x)["data"])
    assert (after - before).abs().max() > 1e-3


def test_a_modified_list_is_rebuilt(graph, young):
    model, x = build(graph, make_options()), draw(graph)
    expected = model(x)["data"]
    with integration.install():
        model(x)
        for edge_index in cached():
            edge_index.zero_()
        assert_same_numbers(model(x)["data"], expected)


def test_edges_declared_sorted_are_sorted_nevertheless(graph, attentions):
    model, x = build(graph, make_options()), draw(graph)
    expected = model(x)["data"]
    provider = model.processor_graph_provider
    order = torch.randperm(provider.edge_attr.shape[0], generator=torch.Generator().manual_seed(0))
    provider.edge_index_base = provider.edge_index_base[:, order]
    provider.edge_attr = provider.edge_attr[order]
    with integration.install():
        assert_same_numbers(model(x)["data"], expected)
    assert attentions


def test_chunks_of_edges_that_are_declared_sorted_and_are_not_are_refused(graph):
    model = build(graph, make_options())
    provider = model.encoder_graph_provider["data"]
    provider.edge_index_base = provider.edge_index_base.flip(1)
    with (
        integration.install(),
        pytest.raises(ValueError, match=r"destination .* must hold values in 0 \.\. 80"),
    ):
        model(draw(graph))


def test_training_follows_inference_mode(graph):
    model, x = build(graph, make_options()), draw(graph, batch=2)
    expected, gradients = differentiate(model, x)
    with integration.install():
        with torch.inference_mode():
            model(x)
        out, ours = differentiate(model, x)
    assert_same_numbers(out, expected)
    assert_same_numbers(ours, gradients)


def test_an_unknown_list_is_sorted_once_while_it_lives(sorts, young):
    edge_index = torch.tensor([[0, 1, 2], [1, 0, 1]])
    first, _ = structure_of(edge_index, (3, 2), reverse=False)
    assert structure_of(edge_index, (3, 2), reverse=False)[0] is first
    assert len(sorts) == 1
    edge_index[0, 0] = 2
    assert structure_of(edge_index, (3, 2), reverse=False)[0].row.tolist() == [1, 2, 2]
    del edge_index, first
    gc.collect()
    assert not edge_lists._BY_TENSOR


def test_lists_without_edges_work():
    edge_index = cached_list(torch.zeros(2, 0, dtype=torch.int64), (3, 2))
    assert structure_of(edge_index, (3, 2), reverse=True)[0].num_edges == 0


@pytest.mark.parametrize(
    ("sources", "batch"), (([0, 1, 2, 3], 2), ([0, 1, 3, 2], 1)), ids=("copies", "others")
)
def test_side_by_side_graphs_are_folded_where_they_are_equal(sources, batch):
    edge_index = cached_list(torch.tensor([sources, [0, 1, 2, 3]]), (4, 4), 2)
    graph, folded_batch = structure_of(edge_index, (4, 4), reverse=False)
    assert folded_batch == batch
    assert graph.num_dst == 4 // batch


@pytest.mark.parametrize("reverse", (False, True))
def test_compiled_code_may_write_into_the_structure_it_got_and_its_operator_keeps_the_rules_of_pytorch(
    reverse,
):
    edge_index = torch.tensor([[0, 1, 2], [1, 0, 1]])
    opcheck(torch.ops.anemoi_gt.edge_structure.default, (edge_index, 3, 2, reverse))
    for tensor in edge_lists.edge_structure(edge_index, 3, 2, reverse):
        tensor.zero_()
    assert structure_of(edge_index, (3, 2), reverse=reverse)[0].validate().row.tolist() == [1, 0, 2]


def test_model_groups_of_other_sizes_have_lists_of_their_own():
    whole = cached_list(torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]), (4, 4))
    x = (torch.zeros(4, 1), torch.zeros(4, 1))
    shard_info = SimpleNamespace(src_nodes=None, dst_nodes=None, edges=None)

    def cut(
        self,
        x,
        shard_info,
        batch_size,
        edge_attr,
        edge_index,
        model_comm_group,
        cond,
        edges_are_dst_sorted,
    ):
        local = edge_index[:, : 4 // model_comm_group.size()].clone()
        return *x, edge_attr, local, shard_info, cond, SimpleNamespace(num_parts=1)

    for size in (2, 4):
        group = SimpleNamespace(rank=lambda: 0, size=lambda size=size: size)
        results = edge_lists.prepare_edge_sharding.of(cut)(
            None, x, shard_info, 1, None, whole, group
        )
        local = results[3]
        assert local.shape == (2, 4 // size)
