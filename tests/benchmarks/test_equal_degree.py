"""The prototype for equal degrees is as accurate as the kernels it is to stand for, on what it serves."""

from dataclasses import replace

import pytest
import torch
from support import cases
from support.poison import poisoned_memory

from anemoi_gt.ops.triton_backend import launch, op

SERVED = [replace(case, graph="nearest") for case in cases.pairwise_cases() if case.form != "embedded"]
CASES = SERVED[:: 1 if torch.cuda.is_available() else 3]  # all 31 pass on a CPU too, in a minute


@pytest.fixture
def prototype(monkeypatch):
    """The prototype in place of the package's kernels, and a graph it takes: 13 destinations of 3 edges."""
    from prototypes import equal_degree_launch

    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(39, generator=generator)
    edges = torch.stack([torch.randint(7, (39,), generator=generator), torch.arange(39) // 3])[:, shuffled]
    monkeypatch.setitem(cases.GRAPHS, "nearest", (edges, (7, 13)))
    monkeypatch.setattr(launch, "attend_rows", equal_degree_launch.attend_rows)
    monkeypatch.setattr(op, "_gradients", equal_degree_launch.gradients)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of the interpreter
@pytest.mark.parametrize("case", CASES, ids=str)
def test_outputs_and_gradients_are_as_accurate_as_plain_pytorch(case, kernel_device, prototype):
    with poisoned_memory():
        cases.judge(case, cases.run(case, "triton", kernel_device))
