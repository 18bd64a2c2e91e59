"""Choice between replayed and eager steps: the table, the reasons in words, and what is logged."""

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.capture_choice import replays_steps
from anemoi_gt.app.training.step import TrainingStep
from anemoi_gt.nn import GNNMapper, GNNProcessor

CPU = torch.device("cpu")
GPU = torch.device("cuda")
REPLAYED = "training steps are replayed from a CUDA graph"
DISABLED = "CUDA graph disabled: "
CHECKPOINTED = {"checkpoint_groups": 2, "dropout": 0.1}
REASONS = {
    "cpu": "device cpu has no CUDA graphs; set training.device=cuda",
    "checkpointed": (
        "activation checkpointing of layers with dropout cannot be captured, got processor; "
        "set model.checkpoint_groups=null or model.dropout=0"
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
    """Return a function that chooses for a run; it makes a model from `options` unless a model is passed."""
    caplog.set_level(logging.DEBUG)

    def choose(
        cuda_graph, device=GPU, backends=None, model=None, step_class=TrainingStep, **options
    ):
        config = TrainingConfig(cuda_graph=cuda_graph)
        model = model or make_model(num_layers=2, **options)
        return replays_steps(config, model, device, mesh_of(backends), step_class)

    return choose


@pytest.mark.parametrize("cuda_graph", [None, True, False])
@pytest.mark.parametrize("backends", [None, "cpu:gloo,cuda:nccl"])
@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.1},
        {"checkpoint_groups": 2, "dropout": 0.0},
        {"processor": GNNProcessor, "mapper": GNNMapper, "heads": 8, "dropout": 0.0},
    ],
    ids=["dropout", "checkpoints", "graph network"],
)
def test_a_gpu_replays_what_can_be_captured_unless_it_must_not(
    choose, caplog, cuda_graph, backends, options
):
    replays = cuda_graph is not False
    assert choose(cuda_graph=cuda_graph, backends=backends, **options) == replays
    assert [record.getMessage() for record in caplog.records] == [REPLAYED] * replays


OBSTACLES = [
    ("cpu", {"device": CPU}),
    ("checkpointed", CHECKPOINTED),
    ("gloo", {"backends": "cpu:gloo,cuda:gloo"}),
]


@pytest.mark.parametrize(("name", "options"), OBSTACLES)
def test_what_cannot_be_captured_is_eager_with_one_line_of_the_log_on_a_gpu(
    choose, caplog, name, options
):
    assert not choose(cuda_graph=None, **options)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ([] if name == "cpu" else [DISABLED + REASONS[name]])


@pytest.mark.parametrize(("name", "options"), OBSTACLES)
def test_true_refuses_what_cannot_be_captured_with_the_reason(choose, caplog, name, options):
    with pytest.raises(ValueError, match="training.cuda_graph must be null or false") as raised:
        choose(cuda_graph=True, **options)
    assert str(raised.value).endswith(f", got true: {REASONS[name]}")
    assert not caplog.records


@pytest.mark.parametrize(("name", "options"), OBSTACLES)
def test_false_launches_and_asks_nothing(choose, caplog, name, options):
    assert not choose(cuda_graph=False, **options)
    assert not caplog.records


class Limited(nn.Linear):
    """A layer whose Python code could count its calls."""


def test_modules_of_other_packages_are_captured_only_if_asked_for(choose, make_model, caplog):
    model = make_model()
    model.processor.proc[0].projection = Limited(8, 8)
    assert not choose(cuda_graph=None, model=model)
    (record,) = caplog.records
    path = (
        rf"the Python code of processor.proc.0.projection \({re.escape(__name__)}.Limited\) would"
    )
    assert re.match(re.escape(DISABLED) + path, record.getMessage())
    assert choose(cuda_graph=True, model=model)
    assert not choose(cuda_graph=None, model=Limited(8, 8))
    assert "code of the model (" in caplog.text


@pytest.mark.parametrize("register", ["register_forward_hook", "register_full_backward_hook"])
def test_hooks_are_captured_only_if_asked_for(choose, make_model, caplog, register):
    model = make_model()
    getattr(model.encoder, register)(lambda *_: None)
    assert not choose(cuda_graph=None, model=model)
    assert "hooks of encoder (torch.nn.modules.container.ModuleDict) would run" in caplog.text
    assert choose(cuda_graph=True, model=model)


def set_forward(model):
    model.encoder.forward = model.encoder.forward


def hook_a_gradient(model):
    next(model.parameters()).register_hook(lambda gradient: None)


def hook_an_accumulated_gradient(model):
    next(model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (set_forward, r"encoder \(torch.nn.modules.container.ModuleDict\)"),
        (hook_a_gradient, "[a-z_.]+"),
        (hook_an_accumulated_gradient, "[a-z_.]+"),
    ],
)
def test_a_forward_on_an_instance_and_hooks_of_a_weight_are_captured_only_if_asked_for(
    choose, make_model, caplog, change, path
):
    model = make_model()
    change(model)
    assert not choose(cuda_graph=None, model=model)
    assert re.search(f"hooks of {path} would run at capture only", caplog.text)
    assert choose(cuda_graph=True, model=model)


def test_hooks_on_all_modules_are_captured_only_if_asked_for(choose, caplog):
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not choose(cuda_graph=None)
        assert "hooks on all modules would run at capture only" in caplog.text
        assert choose(cuda_graph=True)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("wrap", "package"),
    [(torch.fx.symbolic_trace, "torch.fx.graph_module"), (nn.DataParallel, "torch.nn.parallel")],
)
def test_modules_of_pytorch_that_wrap_others_are_captured_only_if_asked_for(
    choose, caplog, wrap, package
):
    model = wrap(nn.Sequential(nn.Linear(2, 2)))
    assert not choose(cuda_graph=None, model=model)
    assert f"the Python code of the model ({package}." in caplog.text
    assert choose(cuda_graph=True, model=model)


def test_modules_that_change_buffers_are_captured(choose):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert choose(cuda_graph=None, model=model)


class ScheduledStep(TrainingStep):
    """A step whose loss could depend on the number of steps taken."""


def test_a_step_of_another_package_is_captured_only_if_asked_for(choose, caplog):
    assert not choose(cuda_graph=None, step_class=ScheduledStep)
    assert f"the Python code of {__name__}.ScheduledStep would run at capture only" in caplog.text
    assert choose(cuda_graph=True, step_class=ScheduledStep)
