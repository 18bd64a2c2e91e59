"""Kernels of graph networks against float64 PyTorch, on rows of less and more than one tile of columns."""

import pytest
import torch
from support.graphs import GRAPHS, HUBS
from support.run import structure
from support.sublayers import ACTIVATIONS, EPS, bare_norm

from anemoi_gt.ops.tensors import NormOptions
from anemoi_gt.ops.triton_backend import row_launches

FEATURES = (3, 67, 600)
NORMS = (NormOptions(EPS), NormOptions(EPS, is_centred=False))
BATCH = 2
PROGRAMS = 2  # few, so that each has several tiles


@pytest.fixture
def draw(kernel_device):
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator).to(kernel_device)


@pytest.fixture
def poisoned(kernel_device):
    return lambda *shape: torch.full(shape, float("nan"), device=kernel_device)


def assert_close(result, expected):
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


def ends_of(graph, edge_index):
    """Return the rows of nodes of a batch at the ends of its edges: source, destination."""
    entry = torch.arange(BATCH, device=edge_index.device)[:, None]
    nodes = (graph.num_src, graph.num_dst)
    return [(end + entry * n).flatten() for end, n in zip(edge_index, nodes, strict=True)]


@pytest.mark.parametrize("name", GRAPHS)
def test_both_ends_of_each_edge_are_found_in_the_callers_order(name, kernel_device):
    graph = structure(GRAPHS[name], kernel_device)
    dst, src = torch.full_like(graph.row, -1), torch.full_like(graph.row, -1)
    launch = row_launches.edge_ends(graph.num_dst, graph.num_edges)
    launch(colptr=graph.colptr, row=graph.row, perm=graph.perm, dst=dst, src=src)
    edge_index, _ = GRAPHS[name]
    assert torch.equal(torch.stack([src, dst]).cpu().long(), edge_index)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_both_ends_are_added_and_activated(features, gated, draw, poisoned):
    width = (1 + gated) * features
    z = draw(BATCH * 64, width)
    graph = structure(GRAPHS["shuffled"], z.device)
    edge_index = GRAPHS["shuffled"][0].to(z.device)
    at_dst, at_src = draw(BATCH * graph.num_dst, width), draw(BATCH * graph.num_src, width)
    source, destination = ends_of(graph, edge_index)
    first, last = 50, 90  # of both batch entries
    p, out = z[first:last].clone(), poisoned(last - first, features)
    launch = row_launches.gather_activation(
        last - first,
        features,
        "silu",
        gated=gated,
        first_row=first,
        num_edges=graph.num_edges,
        num_dst=graph.num_dst,
        num_src=graph.num_src,
        batch=BATCH,
    )
    src, dst = edge_index.to(graph.row.dtype)
    launch(p=p, at_dst=at_dst, at_src=at_src, dst=dst, src=src, out=out)
    total = (z.double() + at_dst.double()[destination] + at_src.double()[source])[first:last]
    assert_close(p, total)
    expected = ACTIVATIONS["silu"](total[:, :features])
    assert_close(out, expected * total[:, features:] if gated else expected)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("norm", NORMS, ids=["layer norm", "RMSNorm"])
@pytest.mark.parametrize("optional", [True, False])
def test_rows_are_normalised_and_added_to_the_residual_connection(
    features, norm, optional, draw, poisoned
):
    r, y = draw(37, features), poisoned(37, features)
    x, scale, shift = draw(37, features), draw(features), draw(features)
    given = (
        {"x": x, "scale": scale, "shift": shift}
        if optional
        else dict.fromkeys(("x", "scale", "shift"))
    )
    row_launches.residual_norm_forward(37, features, norm)(r=r, y=y, **given)
    expected = bare_norm(r.double(), norm)
    if optional:
        expected = x.double() + expected * scale.double() + shift.double()
    assert_close(y, expected)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("norm", [*NORMS, NormOptions()], ids=["layer norm", "RMSNorm", "none"])
def test_gradients_of_rows_pass_the_norm(features, norm, draw, poisoned):
    rows = 40
    r, scale = (draw(rows, features), draw(features)) if norm.eps else (None, None)
    grad = draw(rows, features)
    dr, dx = poisoned(rows, features), poisoned(rows, features)
    partial = torch.zeros(PROGRAMS, 3 * features + 5, device=grad.device)
    launch = row_launches.residual_norm_backward(
        rows,
        features,
        norm,
        programs=PROGRAMS,
        sums=3 * features + 5,
        first_sum=5,
        is_first=True,
    )
    launch(r=r, grad=grad, scale=scale, dr=dr, dx=dx, partial=partial)

    dy = grad.double()
    expected, sums = dy, [torch.zeros_like(dy[0]), torch.zeros_like(dy[0])]
    if norm.eps:
        leaf = r.double().requires_grad_()
        normed = bare_norm(leaf, norm)
        (expected,) = torch.autograd.grad(normed * scale.double(), leaf, dy)
        sums = [(dy * normed.detach()).sum(0), dy.sum(0)]
    assert_close(dx, dy)
    assert_close(dr, expected)
    assert_close(partial.sum(0)[5:], torch.cat([*sums, expected.sum(0)]))
    assert not partial[:, :5].any()


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("graph_name", [*HUBS, "isolated", "shuffled", "no_edges"])
def test_every_edge_gets_the_row_of_its_destination(graph_name, adds, features, draw, poisoned):
    edge_index, sizes = (GRAPHS | HUBS)[graph_name]
    num_edges = edge_index.shape[1]
    graph = structure((edge_index, sizes), draw(1).device)
    x, out = draw(BATCH * graph.num_dst, features), poisoned(BATCH * num_edges, features)
    options = {"num_dst": graph.num_dst, "num_edges": num_edges, "batch": BATCH}
    addend = draw(BATCH * num_edges, features) if adds else None
    launch = row_launches.gather_to_edges(features, **options)
    launch(x=x, addend=addend, colptr=graph.colptr, perm=graph.perm, out=out)
    _, destination = ends_of(graph, edge_index.to(x.device))
    assert torch.equal(out, x[destination] + addend if adds else x[destination])


@pytest.mark.parametrize("side", ["destinations", "sources"])
@pytest.mark.parametrize("segment", [None, 1, 2])
@pytest.mark.parametrize("graph_name", [*HUBS, "isolated", "shuffled", "no_edges"])
def test_edge_rows_are_summed_over_the_edges_of_each_node(
    graph_name, segment, side, draw, poisoned
):
    assert_sums(graph_name, segment, side, 67, draw, poisoned)


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("side", ["destinations", "sources"])
def test_rows_of_more_than_one_tile_are_summed(features, side, draw, poisoned):
    assert_sums("both", 1, side, features, draw, poisoned)


def assert_sums(name, segment, side, features, draw, poisoned):
    """Assert that rows of two batch entries are summed over in-edges or out-edges, hubs in segments."""
    edge_index, sizes = (GRAPHS | HUBS)[name]
    num_edges = edge_index.shape[1]
    rows = draw(BATCH * num_edges, features)
    graph = structure((edge_index, sizes), rows.device).with_reverse()
    source, destination = ends_of(graph, edge_index.to(rows.device))
    pointers, order, num_nodes, ends = graph.colptr, None, graph.num_dst, destination
    if side == "sources":
        pointers, order, num_nodes, ends = graph.rowptr, graph.csr_to_csc, graph.num_src, source
    out = poisoned(BATCH * num_nodes, features)
    segments = None
    options = {"num_nodes": num_nodes, "num_edges": num_edges, "batch": BATCH}
    options["segment"] = segment or 0
    if segment:
        segments = poisoned(BATCH * -(-num_edges // segment), features)
    launch = row_launches.segment_sum(features, **options)
    launch(x=rows, pointers=pointers, order=order, perm=graph.perm, out=out, segments=segments)
    if segment:
        launch = row_launches.join_segment_sums(features, **options)
        launch(segments=segments, pointers=pointers, out=out)
    expected = torch.zeros(BATCH * num_nodes, features, dtype=torch.float64, device=rows.device)
    assert_close(out, expected.index_add(0, ends, rows.double()))
