"""Custom operators: arguments that travel as tuples, and gradients with and without the dispatcher's private parts."""

import inspect
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from anemoi_gt import GraphStructure, custom_ops, edge_attention


class Line(NamedTuple):
    """A line slope x + offset."""

    slope: Tensor
    offset: Tensor | None
    power: float


def test_a_tuple_becomes_its_fields_and_arrives_as_a_tuple():
    def line(x: Tensor, parameters: Line, strict: bool) -> Tensor:
        assert isinstance(parameters, Line) and parameters.power == 2.0 and strict
        return x * parameters.slope

    flat = custom_ops.flat_arguments(line)
    assert list(inspect.signature(flat).parameters) == ["x", "slope", "offset", "power", "strict"]
    schema = torch.library.infer_schema(flat, mutates_args=())
    assert schema == "(Tensor x, Tensor slope, Tensor? offset, float power, bool strict) -> Tensor"
    assert flat(torch.tensor(3.0), torch.tensor(2.0), None, 2.0, True).item() == 6.0


@pytest.mark.parametrize("private", [True, False], ids=["private dispatcher", "public fallback"])
def test_an_operator_has_the_gradient_it_is_given(private, monkeypatch):
    if not private:
        monkeypatch.setattr(custom_ops, "_DISPATCHER", None)

    def multiply(x: Tensor, y: Tensor | None, factor: float) -> Tensor:
        return x * factor if y is None else x * y * factor

    multiply.__name__ = f"multiply_{'privately' if private else 'publicly'}"
    operator = custom_ops.define_operator(multiply)
    torch.library.register_fake(operator.name())(lambda x, y, factor: torch.empty_like(x))

    def setup_context(ctx, inputs, output):
        x, y, ctx.factor = inputs
        ctx.save_for_backward(x, y)

    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        assert ctx.needs_input_grad[:2] == (True, True)
        return *(custom_ops.call_unrecorded(operator, gradient, other, ctx.factor) for other in (y, x)), None

    custom_ops.define_gradient(operator, setup_context, backward)
    x, y = torch.tensor([2.0, 3.0], requires_grad=True), torch.tensor([5.0, 7.0], requires_grad=True)
    operator(x, y, 0.5).sum().backward()
    assert (x.grad.tolist(), y.grad.tolist()) == ([2.5, 3.5], [1.0, 1.5])
    assert not operator(x.detach(), None, 2.0).requires_grad
    torch.library.opcheck(operator, (x, y, 0.5))


def test_gradients_are_the_same_where_transforms_cannot_be_asked_for(monkeypatch):
    graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), 2)
    query, key, value = torch.linspace(-1, 1, 24).view(3, 2, 2, 2).requires_grad_().unbind()

    def gradients():
        out, _ = edge_attention(query, key, value, graph)
        return torch.autograd.grad(out.sin().sum(), (query, key, value))

    expected = gradients()
    monkeypatch.setattr(custom_ops, "_HAS_TRANSFORMS", lambda: True)
    assert all(map(torch.equal, gradients(), expected))


def test_a_missing_private_part_is_no_error(monkeypatch):
    monkeypatch.delattr(torch._C, "_AutoDispatchBelowAutograd")
    assert custom_ops._private_dispatcher() is None


@pytest.mark.parametrize("private", [True, False], ids=["private operator", "public fallback"])
def test_an_assertion_raises_with_its_claim(private, monkeypatch):
    if not private:
        monkeypatch.setattr(custom_ops, "_ASSERT_ASYNC", None)
    custom_ops.assert_async(torch.tensor(True), "true")
    with pytest.raises(RuntimeError, match="one must be two"):
        custom_ops.assert_async(torch.tensor(1) == 2, "one must be two")
