"""Anemoi's models on several ranks with our halo exchange compute what Anemoi computes on one."""

from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from anemoi.models.distributed.shapes import GraphShardInfo, get_shard_sizes
from support import anemoi_shards
from support.anemoi_model import build, draw, make_options
from support.anemoi_shards import CASES, LAYERS
from support.forked import Program
from support.once import compute_once
from support.same_numbers import assert_same_numbers
from support.weather import KINDS, weather_graph
from torch.testing._internal.distributed.fake_pg import FakeStore

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi.installation import CALLED, PATCHES, SHARDING
from anemoi_gt.integrations.anemoi.settings import SETTINGS
from anemoi_gt.integrations.anemoi.upstream import find

EXCHANGES = LAYERS + 2  # of a forward pass: each layer, encoder and decoder
# tensors of trained attributes: two sets of nodes, three of edges, whose whole gradient every rank
# gets
TRAINED = 5


def run_ranks(folder, names):
    """Run cases on ranks, which write files into the folder; return it."""
    process = Program(anemoi_shards.__file__, folder, *names, folder=folder)
    # They compile on as many cores as there are: minutes with PyTorch 2.9 beside other tests.
    status, _, error = process.finish(timeout=900)
    assert status == 0, error[-3000:]
    return str(folder)


@pytest.fixture(scope="session")
def folder(request, tmp_path_factory, worker_id):
    """The files that the ranks wrote, of the cases that the selected tests read."""
    read = set()
    for item in request.session.items:
        if item.path == Path(__file__) and "folder" in item.fixturenames:
            read.update(item.callspec.params.values())
    names = [name for name in CASES if name in read]
    run = partial(run_ranks, tmp_path_factory.mktemp("shards"), names)
    return Path(compute_once("shards", run, tmp_path_factory, worker_id))


@cache
def one_rank(name):
    return (
        anemoi_shards.run_conditioned(None)[:2]
        if name == "conditioned"
        else anemoi_shards.one_rank(CASES[name])
    )


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*CASES, "conditioned"])
def test_loss_and_gradients_equal_one_rank(folder, name):
    loss, gradients, _ = torch.load(folder / f"{name}.pt")
    expected, of_one = one_rank(name)
    if name in CASES and CASES[name].fused:
        assert_same_numbers({"loss": loss} | gradients, {"loss": expected} | of_one, torch.float32)
        return
    assert abs(loss - expected) <= 1e-10 * abs(expected)
    # Anemoi's sharding sums gradients in float32.
    rounding = 1e-6 if "Anemoi's" in name else 1e-10
    largest = max(gradient.abs().max() for gradient in of_one.values())
    for parameter, gradient in of_one.items():
        # Gradients that are mathematically zero have no scale of their own.
        scale = max(gradient.abs().max(), 1e-6 * largest)
        error = (gradients[parameter] - gradient).abs().max()
        assert error <= rounding * scale, f"{parameter}: off by {error:.1e} of {scale:.1e}"


SORTS = {
    # two chunks of the encoder, two layers with their own halos, two chunks of the decoder
    "Anemoi's edges": 2 + 2 + 2,
    # gathered lists of encoder, processor and decoder, recompute included
    "Anemoi's heads": 3,
    "fused graph network, gathered": 3,  # the shards of the same
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", SORTS)
def test_with_anemois_sharding_lists_are_sorted_once(folder, name):
    counts = torch.load(folder / f"{name}.pt")[2]
    assert [step["from_edge_index"] for step in counts] == [SORTS[name], 0]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "on_one_rank", "repeated"),  # exchanges of checkpointed layers
    [
        ("symmetric-3-batch1", "symmetric-1-batch1", LAYERS),
        ("asymmetric-4-batch2", "symmetric-1-batch1", LAYERS),
        ("graph network-3", "graph network-1", EXCHANGES),  # of blocks, also in mappers
    ],
)
def test_a_step_sorts_nothing_and_exchanges_only_halo_rows_and_gradients_of_trained_attributes(
    folder, name, on_one_rank, repeated
):
    _, _, (_, one_rank_counts) = torch.load(folder / f"{on_one_rank}.pt")
    _, _, (_, counts) = torch.load(folder / f"{name}.pt")
    assert not one_rank_counts
    assert counts.pop("all_reduce") == 1  # of the loss, by the test
    assert counts.pop("send") == EXCHANGES + repeated
    assert sum(counts.values()) == TRAINED  # and no list is sorted in this second step


@pytest.fixture
def two_ranks():
    """A group of two ranks; the first is this process, the second never responds."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.compiled
def test_compiled_blocks_fuse_around_anemois_exchange_which_breaks_their_graphs(two_ranks):
    # a few nodes, for the interpreter, which the two ranks share evenly
    graph = weather_graph({"data": 8, "hidden": 6}, dict.fromkeys(KINDS, 14))
    model = build(graph, make_options(layers=1, layer_chunks=1, mapper_chunks=1))
    x = draw(graph)
    sizes = {name: get_shard_sizes(rows, 3, two_ranks) for name, rows in x.items()}
    local = {name: rows.split(sizes[name], 3)[0] for name, rows in x.items()}
    graphs = []

    def record(traced, _):
        graphs.append(traced)
        return traced.forward

    model.processor.proc[0].compile(dynamic=False, backend=record)
    with integration.install("triton", sharding=False), torch.autocast("cpu", torch.bfloat16):
        out = model(local, model_comm_group=two_ranks, grid_shard_sizes=sizes)
    assert {name: rows.shape[3] for name, rows in out.items()} == {
        name: sizes[name][0] for name in out
    }
    called = {str(node.target) for traced in graphs for node in traced.graph.nodes}
    assert "anemoi_gt.network_triton.default" in called


def allows(model, group, batch=2, ensemble=1):
    try:
        model._assert_valid_sharding(batch, ensemble, in_out_sharded=True, model_comm_group=group)
    except AssertionError:
        return False
    return True


def test_batches_on_ranks_are_refused_where_a_layer_does_not_divide_them(graph, two_ranks):
    model, of_heads = (
        build(graph, make_options(shard_strategy=strategy)) for strategy in ("edges", "heads")
    )
    assert not allows(model, two_ranks)
    with integration.install():
        assert allows(model, two_ranks)
        assert not allows(of_heads, two_ranks)
        integration.swap_layers(model.decoder, sharding=False)
        assert not allows(model, two_ranks)
        assert allows(model, two_ranks, batch=1)
    with integration.install(sharding=False):
        assert not allows(model, two_ranks)


@pytest.mark.parametrize(("owner", "name"), [*SHARDING, *CALLED], ids=str)
def test_another_version_of_a_method_or_function_leaves_anemois_sharding_whole(
    monkeypatch, said, owner, name
):
    monkeypatch.setattr(find(*owner), name, lambda self, everything: everything)
    before = {key: vars(find(*key[0]))[key[1]] for key in SHARDING}
    with integration.install():
        assert not SETTINGS.everywhere.sharding
        replaced = [
            key for key, method in before.items() if vars(find(*key[0]))[key[1]] is not method
        ]
        assert set(replaced) <= set(PATCHES)
    assert f"{owner[-1]}.{name} changed in this version; keeping Anemoi's sharding" in said()


def test_nodes_that_are_not_divided_along_the_grid_are_refused(graph, two_ranks):
    model = build(graph, make_options())
    with integration.install():
        edge_attr, edge_index, sizes = model.processor_graph_provider.get_edges(
            2, model_comm_group=two_ranks
        )
        for nodes, rows, said in (
            ([162, 162], 162, "162 sources and 162 destinations of one copy"),
            ([80, 82], 160, "divided evenly"),
            ([81, 81], 81, "its 81 nodes of each of 2 members"),
        ):
            x = torch.randn(rows, 32)
            with pytest.raises(ValueError, match=said):
                model.processor(
                    x, 2, GraphShardInfo(nodes, sizes), edge_attr, edge_index, two_ranks
                )


def test_edges_of_unknown_origin_run_anemois_own_sharding_which_is_logged(graph, two_ranks, said):
    model = build(graph, make_options())
    with integration.install():
        edge_attr, edge_index, sizes = model.processor_graph_provider.get_edges(
            1, model_comm_group=two_ranks
        )
        shard_info = GraphShardInfo([81, 81], sizes)
        model.processor(
            torch.randn(81, 32), 1, shard_info, edge_attr, edge_index.clone(), two_ranks
        )
    assert any(
        "its edges are not a shard of a StaticGraphProvider's" in message for message in said()
    )
    assert model.processor.proc[0]._cached_halo_info is not None
