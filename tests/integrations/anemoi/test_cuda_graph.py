"""Steps of Anemoi models replayed from a CUDA graph, in a loop of one's own and in Lightning's: the bits of eager ones."""

import math
import os
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock, patch

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import LambdaCallback
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy, FSDPStrategy
from support.anemoi_model import build, draw, make_options
from support.capturing import capture_in_place
from support.refusals import raises
from support.weather import weather_graph
from torch import nn
from torch.utils.checkpoint import checkpoint

from anemoi_gt.integrations import anemoi
from anemoi_gt.integrations.anemoi.captured_step import indices_on_device
from anemoi_gt.integrations.anemoi.cuda_graph_callback import check_capturable
from anemoi_gt.replay.cuda_graph import checkpoints_without_generator
from anemoi_gt.replay.slots import replaced_values

pytestmark = pytest.mark.application

PREDICTED = [0, 1, 2]  # variables of the model's output
SMALL = {"channels": 16, "heads": 2, "layers": 1, "layer_chunks": 1, "mapper_chunks": 1}
UNCAPTURED = "training batches of other shapes than the captured one run without the CUDA graph"


graph = pytest.fixture(weather_graph, scope="module")  # 30 data points, 11 hidden nodes


@pytest.fixture
def one_rank():
    """Restore the process group and the environment of Lightning's DDP after the test."""
    with patch.dict(os.environ):
        yield
        torch.distributed.destroy_process_group()


class Loss(nn.Module):
    """Mean squared error of the grid points that a mask keeps; the mask is another tensor at every batch, as Anemoi's."""

    def __init__(self, nodes):
        super().__init__()
        self.register_buffer("weights", torch.linspace(0.5, 1.5, nodes)[:, None], persistent=False)
        self.masks = {"nan": torch.ones(nodes, 1)}
        self.indices_by_layout = {"model_output": PREDICTED}

    def forward(self, output, target):
        error = output[..., self.indices_by_layout["model_output"]] - target
        return (error.square() * self.weights * self.masks["nan"]).mean()


class Forecaster(LightningModule):
    """An Anemoi model in a module like Anemoi's: rollout, a checkpointed loss, indices on the host, logs."""

    make_loss = Loss

    def __init__(self, graph):
        super().__init__()
        self.model = build(graph, make_options(**SMALL))
        self.loss = self.make_loss(graph["data"].num_nodes)
        self.rollout, self.calls, self.read = 1, 0, set()

    def training_step(self, batch, batch_idx):
        self.calls += 1
        self.read.add(self.loss.masks["nan"].data_ptr())
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "valid")

    def step(self, batch, split):
        x, loss = batch["data"][:, :2], torch.zeros(1, device=self.device)
        for step in range(self.rollout):
            output = self.model({"data": x})["data"]
            target = batch["data"][:, 2 + step : 3 + step][
                ..., self.model._internal_input_idx["data"]
            ]
            loss = loss + checkpoint(self.loss, output, target, use_reentrant=False)
            x = torch.cat([x[:, 1:], torch.cat([output, x[:, -1:, ..., -1:]], dim=-1)], dim=1)
        loss = loss / self.rollout
        self.log(f"{split}_loss", loss, on_step=True, on_epoch=True, batch_size=1)
        self.log("rollout", float(self.rollout), on_step=False, on_epoch=True, batch_size=1)
        return loss

    def on_train_batch_start(self, batch, batch_idx):
        self.loss.masks["nan"] = batch["mask"][0]

    def on_train_epoch_end(self):
        self.rollout += 1

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Records(Callback):
    """Losses of all batches, the loss scale after each, and what was logged at the end of each epoch."""

    def __init__(self):
        self.losses, self.scales, self.logged = [], [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].item())
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.scales.append(scaler and scaler.get_scale())

    def on_train_epoch_end(self, trainer, pl_module):
        self.logged.append({name: value.item() for name, value in trainer.callback_metrics.items()})


def batches(graph, count=4, sizes=None):
    """Batches of one sample; `sizes` are the numbers of samples of each."""
    drawn = []
    for seed, size in enumerate(sizes or [1] * count):
        parts = [draw(graph, batch=size, seed=10 * seed + part)["data"] for part in range(3)]
        mask = (
            torch.rand(1, graph["data"].num_nodes, 1, generator=torch.Generator().manual_seed(seed))
            > 0.3
        ).float()
        drawn.append({"data": torch.cat(parts, dim=1), "mask": mask})
    return drawn


def precision(name):
    """The plugin of a precision; Lightning itself has no 16-mixed on a CPU."""
    scaler = (
        torch.amp.GradScaler("cpu", init_scale=2.0**30, growth_interval=3)
        if name == "16-mixed"
        else None
    )
    return [] if name == "32" else [MixedPrecision(name, "cpu", scaler=scaler)]


def fit(graph, callbacks=(), data=None, name="32", epochs=2, **options):
    """Train; return the module and the records."""
    torch.manual_seed(0)
    module, records = Forecaster(graph), Records()
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "accelerator": "cpu",
    }
    quiet |= {"enable_model_summary": False, "max_epochs": epochs, "plugins": precision(name)}
    trainer = Trainer(callbacks=[*callbacks, records], **quiet | options)
    loaders = [
        torch.utils.data.DataLoader(data or batches(graph), batch_size=None) for _ in range(2)
    ]
    trainer.fit(module, *loaders)
    return module, records


@pytest.fixture(scope="module")
def eager(graph):
    """A fit of one epoch without replays."""
    return fit(graph, epochs=1)


@pytest.fixture(scope="module")
def installed(graph):
    """The same under `install`."""
    with anemoi.install(backend="torch"):
        return fit(graph, epochs=1)


def callback():
    return anemoi.CUDAGraphCallback(capture_in_place)


def assert_same(replayed, eager):
    (module, records), (other, expected) = replayed, eager
    assert all(map(math.isfinite, records.losses))
    assert len(set(records.losses)) > 1
    for kind in ("losses", "scales", "logged"):
        assert getattr(records, kind) == getattr(expected, kind), kind
    for kind in ("named_parameters", "named_buffers"):
        tensors = dict(getattr(other, kind)())
        for name, actual in getattr(module, kind)():
            assert torch.equal(actual, tensors[name]), name
    assert vars(module).keys() == vars(other).keys()


@pytest.mark.parametrize(("name", "accumulated"), [("bf16-mixed", 1), ("16-mixed", 2)])
def test_a_fit_with_replays_has_the_bits_of_one_without(graph, name, accumulated):
    options = {"name": name, "accumulate_grad_batches": accumulated, "gradient_clip_val": 0.1}
    with anemoi.install():
        eager, replayed = fit(graph, **options), fit(graph, [callback()], **options)
    assert_same(replayed, eager)
    if name == "16-mixed":
        assert min(eager[1].scales) < 2.0**30  # a step was left out
    assert replayed[0].rollout == 3
    assert replayed[1].logged[1]["rollout"] == 2


def test_batches_of_another_shape_are_eager(graph, said):
    data, capture = batches(graph, sizes=[2, 1, 2, 1, 1, 1]), Mock(side_effect=capture_in_place)
    options = {"data": data, "epochs": 1, "accumulate_grad_batches": 2}
    eager = fit(graph, **options)
    replayed = fit(graph, [anemoi.CUDAGraphCallback(capture)], **options)
    assert_same(replayed, eager)
    assert capture.call_count == 1
    assert said().count(UNCAPTURED) == 1


def test_one_process_of_ddp_replays_and_launches_single_batches_of_another_shape(graph, one_rank):
    options = {
        "data": batches(graph, sizes=[2, 2, 1, 2]),
        "accumulate_grad_batches": 2,
        "devices": 1,
    }
    runs = [
        fit(graph, callbacks, strategy=DDPStrategy(), **options) for callbacks in ([], [callback()])
    ]
    assert_same(*reversed(runs))
    assert runs[1][0].calls > runs[0][0].calls  # in warm-up passes


class WithUnused(Forecaster):
    """A module with a weight that gets no gradient."""

    def __init__(self, graph):
        super().__init__(graph)
        self.unused = nn.Parameter(torch.ones(2))


class WithUsedInCapture(WithUnused):
    """A weight that gets no gradient in batches of two samples."""

    def step(self, batch, split):
        loss = super().step(batch, split)
        return loss + self.unused.sum() if len(batch["data"]) == 1 else loss


@pytest.mark.parametrize(
    ("change", "broadcasts", "names"),
    [
        (None, True, None),
        ("loss", False, None),
        ("loss", True, "loss.calls, loss.norm.num_batches_tracked, .*running_var"),
        (WithUnused, False, "unused"),
        (WithUsedInCapture, False, "unused"),
    ],
)
def test_several_processes_do_not_replay_what_ddp_would_do_besides(
    graph, monkeypatch, one_rank, change, broadcasts, names
):
    """Lightning says that one process is one of two, which average over their group of one."""
    if change == "loss":
        monkeypatch.setattr(Forecaster, "make_loss", RunningLoss)
    elif change is not None:
        monkeypatch.setitem(globals(), "Forecaster", change)
    two = LambdaCallback(
        on_train_start=lambda *_: monkeypatch.setattr(Trainer, "world_size", 2),
    )
    strategy = DDPStrategy(broadcast_buffers=broadcasts)
    message = f"several processes replay must not change buffers .*, got {names}: remove"
    with nullcontext() if names is None else pytest.raises(ValueError, match=message):
        data = batches(graph, sizes=[1, 1, 2])
        _, records = fit(graph, [two, callback()], data, epochs=1, devices=1, strategy=strategy)
        assert len(records.losses) == 3


def test_gradients_that_are_zeroed_in_place_belong_to_the_batch(graph, monkeypatch):
    zero = lambda self, epoch, batch_idx, optimizer: optimizer.zero_grad(set_to_none=False)  # noqa: E731
    monkeypatch.setattr(Forecaster, "optimizer_zero_grad", zero)
    assert_same(fit(graph, [callback()], epochs=1), fit(graph, epochs=1))


class RunningLoss(Loss):
    """Counts its calls, and divides by a running mean of errors."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.norm = nn.BatchNorm1d(1, affine=False)

    def forward(self, output, target):
        self.calls += 1
        error = super().forward(output, target)
        self.norm(error.detach().expand(2, 1))
        return error / (1 + self.norm.running_var.detach().sum())


class TalliedLoss(Loss):
    """Counts its calls, and divides by a running mean of errors, in attributes."""

    def __init__(self, nodes):
        super().__init__(nodes)
        self.calls, self.mean = torch.zeros(()), torch.zeros(())

    def forward(self, output, target):
        self.calls += 1
        error = super().forward(output, target)
        self.mean = 0.9 * self.mean + error.detach()
        return error / (self.calls + self.mean)


@pytest.mark.parametrize("loss", [RunningLoss, TalliedLoss])
def test_tensors_that_a_step_changes_count_each_batch_once(graph, monkeypatch, loss):
    monkeypatch.setattr(Forecaster, "make_loss", loss)
    replayed, eager = fit(graph, [callback()]), fit(graph)
    assert_same(replayed, eager)
    assert replayed[0].loss.calls == eager[0].loss.calls > 0


def test_a_replay_reads_what_a_loss_holds_from_one_place(graph, eager):
    replayed = fit(graph, [callback()], epochs=1)
    assert (len(replayed[0].read), len(eager[0].read)) == (1, 4)


def test_a_step_is_captured_again_when_a_weight_has_moved(graph, eager):
    def move(trainer, module, batch, batch_idx):
        if batch_idx == 2:
            weight = next(module.parameters())
            weight.data = weight.data.clone()

    moved, capture = LambdaCallback(on_train_batch_start=move), Mock(side_effect=capture_in_place)
    assert_same(fit(graph, [anemoi.CUDAGraphCallback(capture), moved], epochs=1), eager)
    assert capture.call_count == 2


def test_an_exception_restores_the_replaced_methods(graph, eager):
    replays = callback()
    failing = LambdaCallback(on_train_batch_end=Mock(side_effect=RuntimeError("the disk is full")))
    with pytest.raises(RuntimeError, match="disk is full"):
        fit(graph, [replays, failing], epochs=1)
    assert_same(fit(graph, [replays], epochs=1), eager)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ("capture", {}, "must compute on a GPU, got device cpu"),
        ("a loop", {}, "must compute on a GPU, got device cpu"),
        ("anomaly", {"detect_anomaly": True}, "need diagnostics.debug.anomaly_detection=false"),
        (
            "manual",
            {},
            "need automatic optimisation, got Forecaster with manual: remove CUDAGraphCallback",
        ),
        ("none", {}, "training_step must return a loss to be captured, got None"),
    ],
)
def test_what_cannot_be_captured_is_refused(graph, monkeypatch, change, options, message):
    if change == "manual":
        monkeypatch.setattr(Forecaster, "automatic_optimization", False)
    if change == "none":
        monkeypatch.setattr(Forecaster, "training_step", lambda self, batch, batch_idx: None)
    with pytest.raises(ValueError, match=message):
        if change == "a loop":
            anemoi.capture_step(print, build(graph, make_options(**SMALL)))
        fit(
            graph,
            [anemoi.CUDAGraphCallback() if change == "capture" else callback()],
            epochs=1,
            **options,
        )


def test_one_callback_installs_and_replays_with_the_bits_of_eager_steps(graph, installed):
    captures = []

    def capture(*arguments):
        captures.append(arguments)
        return capture_in_place(*arguments)

    try:
        both = anemoi.InstallCallback(capture=capture, backend="torch")
        assert anemoi.installed().config.backend == "torch"
        replayed = fit(graph, [both], epochs=1)
    finally:
        anemoi.uninstall()
    assert_same(replayed, installed)
    assert captures


def test_one_callback_runs_steps_that_cannot_be_captured_and_says_so_once(graph, installed, caplog):
    threads = []

    class Threads(Callback):
        def on_before_backward(self, *arguments):
            threads.append(torch._C._is_multithreading_enabled())

    try:
        eager = fit(graph, [anemoi.InstallCallback(backend="torch"), Threads()], epochs=1)
    finally:
        anemoi.uninstall()
    assert_same(eager, installed)
    assert threads
    assert not any(threads)  # backward runs on the thread that asks for it
    assert torch._C._is_multithreading_enabled()
    said = [record.message for record in caplog.records if "CUDA graph disabled" in record.message]
    assert said == [
        "CUDA graph disabled: a step that is captured in a CUDA graph must "
        "compute on a GPU, got device cpu"
    ]


def check_compiled(graph, mode):
    """Check steps of a module whose processor was compiled with a mode, which compiles nothing yet."""
    module = Forecaster(graph)
    module.model.processor.compile(mode=mode)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    check_capturable(trainer, module, capture_in_place, "launch them")
    anemoi.capture_step(print, module.model, capture_in_place)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modules_that_are_compiled_to_replay_cuda_graphs_are_refused(graph, mode):
    message = (
        "must not replay CUDA graphs of torch.compile, got model.processor compiled with mode .*: "
        'compile it with "max-autotune-no-cudagraphs", or launch them'
    )
    with pytest.raises(ValueError, match=message):
        check_compiled(graph, mode)


@pytest.mark.parametrize("mode", [None, "default", "max-autotune-no-cudagraphs"])
def test_modules_that_are_compiled_without_cuda_graphs_are_captured(graph, mode):
    check_compiled(graph, mode)


def test_a_strategy_that_divides_parameters_is_refused():
    trainer = SimpleNamespace(strategy=FSDPStrategy())
    message = "on one device or DDP, got FSDPStrategy: set training"
    raises(lambda: check_capturable(trainer, None, capture_in_place), message)


def own_loop(model, data, scaler, make):
    """Losses and last weights of a loop of one's own; `make` makes the function of a batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward_backward(batch):
        with torch.autocast("cpu", torch.float16):
            error = model({"data": batch["data"][:, :2]})["data"] - batch["data"][:, 2:3, ..., :3]
        loss = (error.square() * batch["mask"]).mean()
        scaler.scale(loss).backward()
        return {"loss": loss.detach(), "error": error.detach().abs().amax()}

    step, results = make(forward_backward), []
    for batch in data:
        optimizer.zero_grad()
        results.append(step(batch))
        scaler.step(optimizer)
        scaler.update()
    return results, [parameter.detach().clone() for parameter in model.parameters()]


def test_a_loop_of_ones_own_with_replays_has_the_bits_of_one_without(graph):
    runs = []
    for replays in (False, True):
        model = build(graph, make_options(**SMALL))
        replayed = partial(anemoi.capture_step, module=model, capture=capture_in_place)
        make = replayed if replays else lambda function: function
        runs.append(own_loop(model, batches(graph), torch.amp.GradScaler("cpu"), make))
    (eager, weights), (replayed, others) = runs
    assert replayed == eager
    assert all(map(torch.equal, others, weights))


def test_indices_on_the_host_are_replaced_and_restored(graph):
    module = Forecaster(graph)
    indices = indices_on_device(module, torch.device("meta"))
    before = [holder[key] for (holder, key), _ in indices]
    host_indices = {id(value) for value in before}
    model = module.model
    for index in (
        model._internal_output_idx["data"],
        model.data_indices["data"].data.input.full,
        PREDICTED,
    ):
        assert id(index) in host_indices
    assert not host_indices & {id(tensor) for tensor in (*module.buffers(), *module.parameters())}
    with replaced_values(indices):
        assert model.data_indices["data"].data.input.full.device.type == "meta"
        assert module.loss.indices_by_layout["model_output"].device.type == "meta"
    assert [id(holder[key]) for (holder, key), _ in indices] == [id(value) for value in before]


@pytest.mark.parametrize("position", ["before", "inside"])
def test_random_numbers_in_a_checkpoint_are_refused_and_before_it_are_not(monkeypatch, position):
    """The test has its own generator state, because PyTorch restores the state of the CPU generator."""
    drawn = torch.zeros(1)
    x = torch.ones(3, requires_grad=True)
    # otherwise PyTorch does not read the state of the device; which one depends on its release
    checkpoints = torch.utils.checkpoint
    device = checkpoints._get_device_module(checkpoints._infer_device_type(x))
    monkeypatch.setattr(device, "_initialized", True, raising=False)

    def draw_inside(x):
        drawn.add_(position == "inside")
        return x.sin().exp()

    message = "dropout or noise must not be checkpointed in a step that is captured"
    refusal = pytest.raises(ValueError, match=message) if position == "inside" else nullcontext()
    with refusal, checkpoints_without_generator(drawn.clone):
        drawn.add_(1)
        y = checkpoint(draw_inside, x, use_reentrant=False)
        drawn.add_(1)
        checkpoint(draw_inside, y, use_reentrant=False).sum().backward()
    assert torch.utils.checkpoint.get_device_states.__module__ == "torch.utils.checkpoint"
