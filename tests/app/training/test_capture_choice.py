"""Choice between replayed and launched steps: the table, the reasons in words, and what is logged."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.capture_choice import replays_steps

CPU, GPU = torch.device("cpu"), torch.device("cuda")
REPLAYED = "training steps are replayed from a CUDA graph"
LAUNCHED = "training steps are launched, not replayed from a CUDA graph: "
CHECKPOINTED = {"checkpoint_groups": 2, "dropout": 0.1}
REASONS = {
    "cpu": "device cpu has no CUDA graphs; set training.device=cuda",
    "checkpointed": (
        "activation checkpointing of layers with dropout cannot be captured, got processor, "
        "encoder.data, decoder.data; set model.checkpoint_groups=null or model.dropout=0"
    ),
    "gloo": "the ranks of a model must communicate by NCCL, got cpu:gloo,cuda:gloo",
}


@pytest.fixture
def mesh_of(monkeypatch):
    """Return a mesh whose ranks communicate by these backends; None for one device."""
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: group)

    def mesh_of(backends):
        if backends is None:
            return None
        return SimpleNamespace(get_group={"model": backends}.__getitem__)

    return mesh_of


@pytest.fixture
def choose(make_model, mesh_of, caplog):
    """Return the choice for a run; a model may replace that of `options`."""
    caplog.set_level(logging.DEBUG)

    def choose(cuda_graph, device=GPU, backends=None, model=None, **options):
        config = TrainingConfig(cuda_graph=cuda_graph)
        model = model or make_model(num_layers=2, **options)
        return replays_steps(config, model, device, mesh_of(backends))

    return choose


@pytest.mark.parametrize("cuda_graph", [None, True, False])
@pytest.mark.parametrize("backends", [None, "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"checkpoint_groups": 2, "dropout": 0.0}], ids=str
)
def test_a_gpu_replays_what_can_be_captured_unless_it_must_not(
    choose, caplog, cuda_graph, backends, options
):
    replays = cuda_graph is not False
    assert choose(cuda_graph, backends=backends, **options) == replays
    assert [record.getMessage() for record in caplog.records] == [REPLAYED] * replays


OBSTACLES = [
    ("cpu", {"device": CPU}),
    ("checkpointed", CHECKPOINTED),
    ("gloo", {"backends": "cpu:gloo,cuda:gloo"}),
]


@pytest.mark.parametrize(("name", "options"), OBSTACLES)
def test_what_cannot_be_captured_is_launched_with_one_line_of_the_log_on_a_gpu(
    choose, caplog, name, options
):
    assert not choose(None, **options)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([] if name == "cpu" else [LAUNCHED + REASONS[name]])


@pytest.mark.parametrize(("name", "options"), OBSTACLES)
def test_true_refuses_what_cannot_be_captured_with_the_reason(choose, caplog, name, options):
    with pytest.raises(ValueError, match="training.cuda_graph must be null or false") as raised:
        choose(True, **options)
    assert str(raised.value).endswith(f", got true: {REASONS[name]}")
    assert not caplog.records


@pytest.mark.parametrize(("name", "options"), OBSTACLES)
def test_false_launches_and_asks_nothing(choose, caplog, name, options):
    assert not choose(False, **options)
    assert not caplog.records


def test_anomaly_detection_is_a_reason(choose, caplog):
    with torch.autograd.set_detect_anomaly(True):
        assert not choose(None)
        with pytest.raises(ValueError, match="switch torch.autograd.set_detect_anomaly off"):
            choose(True)
    assert "anomaly detection reads back from the device" in caplog.text


class Limited(nn.Linear):
    """A layer whose Python code could count its calls."""


def test_modules_of_other_packages_are_captured_only_if_asked_for(choose, make_model, caplog):
    model = make_model()
    model.processor.proc[0].projection = Limited(8, 8)
    assert not choose(None, model=model)
    (record,) = caplog.records
    path = (
        rf"the Python code of processor.proc.0.projection \({re.escape(__name__)}.Limited\) would"
    )
    assert re.match(re.escape(LAUNCHED) + path, record.getMessage())
    assert choose(True, model=model)
    assert not choose(None, model=Limited(8, 8))
    assert "code of the model (" in caplog.text


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_are_captured_only_if_asked_for(choose, make_model, caplog, register):
    model = make_model()
    getattr(model.encoder, register)(lambda *_: None)
    assert not choose(None, model=model)
    assert "hooks of encoder (torch.nn.modules.container.ModuleDict) would run" in caplog.text
    assert choose(True, model=model)
