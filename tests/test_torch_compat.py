"""Private names of PyTorch, and what holds without them."""

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
