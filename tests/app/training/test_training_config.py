"""Hyperparameters of a run, its device and threads."""

import math

import pytest
import torch
from support.refusals import raises, refused

from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.config import choose_device, cpu_threads


@refused(
    *(
        ({"learning_rate": x}, f"training.learning_rate must be positive and finite, got {x}")
        for x in (0.0, math.nan, math.inf)
    ),
    *(
        ({"weight_decay": x}, f"training.weight_decay must be finite and not negative, got {x}")
        for x in (-0.1, math.inf)
    ),
    *(
        ({"seed": seed}, rf"training.seed must be 0 to 2\^64 - 1, got {seed}")
        for seed in (-1, 2**64)
    ),
    ({"average_decay": 1.0}, r"training.average_decay must be in \[0, 1\), got 1.0"),
    ({"threads": 0}, "training.threads must be at least 1, or null, got 0"),
    *(
        ({"cuda_graph": x}, f"training.cuda_graph must be true, false or null, got {x!r}")
        for x in ("yes", 1)
    ),
    *(
        ({"compile": x}, f"training.compile must be true or false, got {x!r}")
        for x in ("default", 0)
    ),
    ({"device": "gpu"}, "training.device must be one of auto, cpu, cuda, got 'gpu'"),
)
def test_an_option_out_of_range_is_named(wrong, message):
    raises(lambda: TrainingConfig(**wrong), message)


def test_a_checkpoint_of_a_run_with_a_cuda_graph_is_evaluated_without_a_gpu():
    assert TrainingConfig(device="cpu", cuda_graph=True).cuda_graph  # training refuses it


def test_auto_selects_a_gpu_if_available_and_cuda_requires_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="finds no CUDA device"):
        choose_device("cuda")


def test_threads_are_set_while_training_and_as_before_afterwards(run, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", calls.append)
    run("one", threads=1)
    assert calls == [1, 7]


def test_threads_are_as_before_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), cpu_threads(before + 1):
        raise KeyError
    assert torch.get_num_threads() == before
