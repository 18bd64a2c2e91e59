"""Derivatives of edge attention at the edge of what it has: NaN that arrives where no edge does, and forward mode."""

from functools import partial

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from anemoi_gt import KernelConfig, edge_attention

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture(params=["torch", "triton"])
def attend(request, kernel_device):
    """Attention over the graph "isolated" on each backend, of operands by name."""
    graph = structure(GRAPHS["isolated"], kernel_device)
    config = KernelConfig(backend=request.param)
    return lambda operands: edge_attention(**operands, graph=graph, config=config)


@pytest.fixture
def operands(kernel_device):
    problem = make_problem(GRAPHS["isolated"], 2, 4, 3)
    return {
        name: operand.to(kernel_device).requires_grad_()
        for name, operand in problem.operands().items()
    }


def test_nan_that_arrives_at_an_isolated_destination_reaches_nothing(attend, operands):
    def gradients(arriving):
        _, lse = attend(operands)
        return torch.autograd.grad(
            lse, list(operands.values()), arriving.where(lse.isfinite(), missing)
        )

    _, lse = attend(operands)
    arriving = torch.ones_like(lse)
    assert bool(lse.isneginf().any())
    missing = torch.tensor(0.0, device=lse.device)
    expected = gradients(arriving)
    # as the gradient of torch.where(lse.isfinite(), lse * lse, 0)
    missing = torch.tensor(torch.nan, device=lse.device)
    for name, gradient, without in zip(operands, gradients(arriving), expected, strict=True):
        assert torch.equal(gradient, without), name


@pytest.mark.parametrize("name", ["query", "key", "edge_weight"])
def test_vmap_of_a_forward_computes_every_entry(attend, operands, name):
    operands = {key: operand.detach() for key, operand in operands.items()}

    def of_one(operand):
        return attend(operands | {name: operand})[0]

    batch = torch.stack([operands[name], 2 * operands[name]])
    expected = torch.stack([of_one(entry) for entry in batch])
    torch.testing.assert_close(torch.func.vmap(of_one)(batch), expected)


@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["kept", "recomputed"])
def test_a_batch_of_incoming_gradients_gives_the_gradients_of_each(
    attend, operands, is_checkpointed
):
    """PyTorch's vmap is around the backward pass only, as in `jacobian(vectorize=True)`."""
    forward = partial(checkpoint, attend, use_reentrant=False) if is_checkpointed else attend
    out, _ = forward(operands)
    leaves = list(operands.values())
    incoming = torch.randn(3, *out.shape, generator=torch.Generator().manual_seed(0)).to(out.device)

    def differentiate(rows):
        return torch.autograd.grad(out, leaves, rows, retain_graph=True)

    gradients = [differentiate(rows) for rows in incoming]
    expected = [torch.stack(entries) for entries in zip(*gradients, strict=True)]
    mapped = torch.func.vmap(differentiate)
    torch.testing.assert_close(list(mapped(incoming)), expected)
    batched = torch.autograd.grad(out, leaves, incoming, is_grads_batched=True)
    torch.testing.assert_close(list(batched), expected)


@pytest.mark.parametrize("name", ["query", "value", "edge_bias"])
def test_a_tangent_of_any_operand_is_refused_and_not_dropped(attend, operands, name):
    operand = operands[name].detach()
    with forward_ad.dual_level():
        attend(operands | {name: operand})
        with pytest.raises(RuntimeError, match="use torch.autograd.grad"):
            attend(operands | {name: forward_ad.make_dual(operand, operand)})
