"""Private names of PyTorch, and what holds without them."""

from typing import NamedTuple

import pytest
import torch

from anemoi_gt import torch_compat


@pytest.mark.parametrize("private", [True, False], ids=["private operator", "public fallback"])
def test_an_assertion_raises_with_its_claim(private, monkeypatch):
    if not private:
        monkeypatch.setattr(torch_compat, "_assert_async", None)
    torch_compat.assert_async(torch.tensor(2) == 2, "true")
    with pytest.raises(RuntimeError, match="one must be two"):
        torch_compat.assert_async(torch.tensor(1) == 2, "one must be two")


class Pair(NamedTuple):
    weight: torch.Tensor
    is_kept: bool = True


def keep_less(x, weight):
    pair = torch_compat.replace_fields(Pair(weight), is_kept=False)
    torch._dynamo.graph_break()
    return x + pair.weight if not pair.is_kept else x


@pytest.mark.compiled
def test_a_tuple_with_replaced_fields_crosses_a_break_in_a_compiled_graph():
    compiled = torch.compile(keep_less, backend="eager")
    assert compiled(torch.ones(2), torch.ones(2)).tolist() == [2, 2]


def test_replacing_an_unknown_field_raises():
    with pytest.raises(TypeError, match="unknown"):
        torch_compat.replace_fields(Pair(torch.ones(2)), unknown=1)
