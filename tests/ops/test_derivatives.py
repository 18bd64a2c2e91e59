"""Derivatives of edge attention at the edge of what it has: NaN that arrives where no edge does, and forward mode."""

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure
from torch.autograd import forward_ad

from anemoi_gt import AttentionConfig, edge_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of the interpreter


@pytest.fixture(params=["torch", "triton"])
def attend(request, kernel_device):
    """Attention over the graph "isolated" on each backend, of operands by name."""
    graph, config = structure(GRAPHS["isolated"], kernel_device), AttentionConfig(backend=request.param)
    return lambda operands: edge_attention(**operands, graph=graph, config=config)


@pytest.fixture
def operands(kernel_device):
    problem = make_problem(GRAPHS["isolated"], 2, 4, 3)
    return {name: operand.to(kernel_device).requires_grad_() for name, operand in problem.operands().items()}


def test_nan_that_arrives_at_an_isolated_destination_reaches_nothing(attend, operands):
    def gradients(arriving):
        _, lse = attend(operands)
        return torch.autograd.grad(lse, list(operands.values()), arriving.where(lse.isfinite(), missing))

    _, lse = attend(operands)
    arriving = torch.ones_like(lse)
    assert bool(lse.isneginf().any())
    missing = torch.tensor(0.0, device=lse.device)
    expected = gradients(arriving)
    missing = torch.tensor(torch.nan, device=lse.device)  # as the gradient of torch.where(lse.isfinite(), lse * lse, 0)
    for name, gradient, without in zip(operands, gradients(arriving), expected, strict=True):
        assert torch.equal(gradient, without), name


@pytest.mark.parametrize("name", ["query", "value", "edge_bias"])
def test_a_tangent_is_refused_and_not_dropped(attend, operands, name):
    def of_one(operand):
        return attend(operands | {name: operand})[0]

    operand = operands[name].detach()
    message = "forward-mode derivatives are not supported by edge_attention, got an operand with a tangent"
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(of_one, (operand,), (operand,))
    with forward_ad.dual_level():
        of_one(operand)
        with pytest.raises(RuntimeError, match="use torch.autograd.grad"):
            of_one(forward_ad.make_dual(operand, operand))
