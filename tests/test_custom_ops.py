"""Custom operators: arguments that travel as tuples, and assertions with and without PyTorch's private operator."""

import inspect
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt import custom_ops


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
