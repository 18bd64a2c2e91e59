"""Custom operators: arguments that travel as tuples, and assertions with and without PyTorch's private operator."""

import inspect
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from anemoi_gt import custom_ops

Held = TypeVar("Held")


class Pair(NamedTuple, Generic[Held]):
    """One or two of a kind."""

    first: Held
    second: Held | None


class Line(NamedTuple):
    """A line slope x + offset."""

    slope: Tensor
    offset: Tensor | None
    power: float


def test_a_tuple_becomes_its_fields_and_arrives_as_a_tuple():
    def line(x: Tensor, parameters: Line, strict: bool) -> Tensor:  # noqa: FBT001  as operators
        assert isinstance(parameters, Line)
        assert parameters.power == 2.0
        assert strict
        return x * parameters.slope

    flat = custom_ops.flat_arguments(line)
    assert list(inspect.signature(flat).parameters) == ["x", "slope", "offset", "power", "strict"]
    schema = torch.library.infer_schema(flat, mutates_args=())
    assert schema == "(Tensor x, Tensor slope, Tensor? offset, float power, bool strict) -> Tensor"
    strict = True
    assert flat(torch.tensor(3.0), torch.tensor(2.0), None, 2.0, strict).item() == 6.0


def test_fields_of_a_generic_tuple_have_the_type_that_it_holds():
    def power(x: Pair[Tensor], exponent: float) -> Tensor:
        assert isinstance(x, Pair)
        assert x.second is None
        return x.first**exponent

    def scaled(x: Tensor, factor: Pair[float]) -> Tensor:
        return x * factor.first

    flat = custom_ops.flat_arguments(power)
    schema = torch.library.infer_schema(flat, mutates_args=())
    assert schema == "(Tensor first, Tensor? second, float exponent) -> Tensor"
    assert flat(torch.tensor(3.0), None, 2.0).item() == 9.0
    schema = torch.library.infer_schema(custom_ops.flat_arguments(scaled), mutates_args=())
    assert schema == "(Tensor x, float first, float? second) -> Tensor"
