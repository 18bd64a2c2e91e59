"""Sums of edge rows over in-edges: an operator that autograd sees, whose gradients are gathered when they are added."""

import pytest
import torch
from support.opcheck import check_registration

from anemoi_gt import GraphStructure
from anemoi_gt.ops.triton_backend.edge_sums import GatheredRows, edge_gather, edge_sums, sum_edges

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
BATCH, FEATURES = 2, 5
EDGE_INDEX = torch.tensor([[2, 0, 2, 1, 1], [0, 2, 2, 0, 0]])  # 1 has no in-edge
DESTINATIONS = torch.cat([EDGE_INDEX[1], EDGE_INDEX[1] + 3])


def sums_of(edges):
    return sum_edges(edges, GraphStructure.from_edge_index(EDGE_INDEX.to(edges.device), 3), BATCH)


def plain_sums_of(edges):
    zeros = edges.new_zeros(BATCH * 3, FEATURES)
    return zeros.index_add(0, DESTINATIONS.to(edges.device), edges)


def draw(device, dtype=torch.float32):
    rows = torch.randn(BATCH * EDGE_INDEX.shape[1], FEATURES, device=device, dtype=dtype)
    return rows.requires_grad_()


def first(sums, edges):
    return sums.sin().sum() + edges.cos().sum()


def last(sums, edges):
    return edges.cos().sum() + sums.sin().sum()


def twice(sums, edges):
    return (sums.sin() * sums_of(2 * edges)).sum() + sums_of(edges).cos().sum()


def alone(sums, edges):
    return sums.sin().sum()


@pytest.mark.parametrize("use", (first, last, twice, alone))
@pytest.mark.parametrize("observed", ("retain_grad", "hook", "asked", "leaf", "changed"))
def test_the_gradient_of_the_edges_holds_that_of_their_sums(use, observed, kernel_device):
    inputs = draw(kernel_device)

    def gradient(sum_rows):
        leaf = inputs.detach().clone().requires_grad_()
        edges = leaf if observed == "leaf" else 3 * leaf
        seen = []
        sums = sum_rows(edges)
        if observed == "retain_grad":
            edges.retain_grad()
        if observed == "hook":
            edges.register_hook(seen.append)
        if observed == "changed":
            edges.register_hook(lambda grad: 0 * grad)
        result = use(sums, edges)
        if observed == "asked":
            return torch.autograd.grad(result, edges)[0]
        result.backward()
        if observed == "retain_grad":
            return edges.grad
        return seen[0] if observed == "hook" else leaf.grad

    actual = gradient(sums_of)
    assert type(actual) is torch.Tensor
    torch.testing.assert_close(actual, gradient(plain_sums_of))


def test_rows_are_gathered_while_they_are_added_to_those_of_another_use(kernel_device):
    calls = []

    class Watched(GatheredRows):
        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            calls.append(function)
            return super().__torch_dispatch__(function, types, args, kwargs)

    rows = Watched(*gathered_arguments(kernel_device))
    total = torch.randn(rows.shape, device=kernel_device)
    before = total.clone()
    out = total + rows
    assert calls == [torch.ops.aten.add.Tensor]
    assert torch.equal(total, before)
    assert torch.equal(out, before + rows.arguments[0][DESTINATIONS.to(kernel_device)])


def gathered_arguments(device):
    graph = GraphStructure.from_edge_index(EDGE_INDEX.to(device), 3)
    rows = torch.randn(BATCH * 3, FEATURES, device=device)
    return rows, graph.colptr, graph.perm, graph.dst_hubs, graph.num_edges, BATCH


def test_derivatives_of_any_order_exist(kernel_device):
    edges = draw(kernel_device)
    for order in (sums_of, plain_sums_of):
        (gradient,) = torch.autograd.grad(order(edges).pow(3).sum(), edges, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sin().sum(), edges)
        if order is sums_of:
            actual = second
    torch.testing.assert_close(actual, second)


def test_batched_gradients_are_those_of_each_entry(kernel_device):
    edges = draw(kernel_device)
    sums, grads = sums_of(edges), torch.randn(4, BATCH * 3, FEATURES, device=kernel_device)
    (batched,) = torch.autograd.grad(sums, edges, grads, is_grads_batched=True, retain_graph=True)
    for grad, expected in zip(grads, batched, strict=True):
        torch.testing.assert_close(
            torch.autograd.grad(sums, edges, grad, retain_graph=True)[0], expected
        )


def test_both_operators_are_registered(kernel_device):
    edges, (rows, *others) = draw(kernel_device), gathered_arguments(kernel_device)
    check_registration(edge_sums, (edges, *others))
    check_registration(edge_gather, (rows.requires_grad_(), *others))


def test_edges_that_do_not_fit_the_structure_are_refused(kernel_device):
    with pytest.raises(ValueError, match=r"edges must be \[10, features\], got \(9, 5\)"):
        sums_of(draw(kernel_device)[:9])
