"""A captured step: the bits of a launched one, what is kept between batches, refusals, and the capture on a GPU."""

import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.capturing import capture_in_place
from torch import nn

from anemoi_gt.app.datasets.forecast_dataset import Sample
from anemoi_gt.app.training.step import AUTOCAST, REMEDY, check_capturable
from anemoi_gt.cuda_graph import WARM_UP, CUDAGraphedStep, capture_cuda_graph

from ..conftest import assert_same, fit, without_speed

CPU, GPU = torch.device("cpu"), torch.device("cuda")


class Line(nn.Module):
    """y = a (x + noise), with a parameter that takes no part."""

    def __init__(self):
        super().__init__()
        self.factor, self.unused = (
            nn.Parameter(torch.tensor([2.0, 3.0])),
            nn.Parameter(torch.ones(1)),
        )

    def forward(self, batch):
        loss = (self.factor * (batch.inputs + torch.rand(2)) - batch.target).square().sum()
        loss.backward()
        return loss.detach()


def batch_of(seed, size=2):
    generator = torch.Generator().manual_seed(seed)
    return Sample(*(torch.randn(size, generator=generator) for _ in range(2)))


def launched(line, seed):
    torch.manual_seed(seed)
    line.zero_grad()
    return line(batch_of(seed)), line.factor.grad


def replayed(captured, line, seed):
    torch.manual_seed(seed)
    return captured(batch_of(seed)), line.factor.grad.clone()


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def captured(line):
    return CUDAGraphedStep(line, line.parameters(), CPU, capture_in_place, REMEDY)


@pytest.mark.parametrize("precision", AUTOCAST)
def test_captured_steps_have_the_bits_of_launched_ones(make_trainer, precision):
    plain, captured = (make_trainer(name, precision=precision) for name in ("plain", "captured"))
    captured.step.capture(capture_in_place)
    assert without_speed(fit(captured)) == without_speed(fit(plain))
    actual, expected = captured.state_dict(), plain.state_dict()
    for part in ("model", "average", "scaler"):
        assert_same(actual[part], expected[part], part)
    assert torch.equal(actual["generators"]["torch"], expected["generators"]["torch"])


def test_every_batch_has_its_own_gradient_and_loss_that_stays_and_is_not_changed(line, captured):
    losses = []
    for seed in range(3):
        (loss, gradient), batch = launched(line, seed), batch_of(seed)
        torch.manual_seed(seed)
        losses.append((captured(batch), loss))
        assert_same([line.factor.grad, batch, line.unused.grad], [gradient, batch_of(seed), None])
    for loss, expected in losses:
        assert torch.equal(loss, expected)


def test_gradients_from_before_the_capture_are_not_added_to(line, captured):
    gradients = []
    for before in (None, torch.full((2,), 1e6)):
        captured.reset()
        line.factor.grad = before
        gradients.append(replayed(captured, line, 5)[1])
    assert torch.equal(*gradients)


@pytest.mark.parametrize("change", ["scaled", "replaced", "removed"])
def test_changes_of_a_gradient_do_not_reach_the_next_step(line, captured, change):
    captured(batch_of(0))
    if change == "scaled":
        line.factor.grad.mul_(0.1)
    else:
        line.factor.grad = torch.zeros(2) if change == "replaced" else None
    assert torch.equal(replayed(captured, line, 1)[1], launched(line, 1)[1])


@pytest.mark.parametrize(("size", "dtype"), [(1, torch.float32), (2, torch.float64)])
def test_a_batch_of_another_shape_or_dtype_is_refused(captured, size, dtype):
    captured(batch_of(0))
    kinds = [
        rf"inputs \({n},\) {kind}, target \({n},\) {kind}"
        for n, kind in ((2, torch.float32), (size, dtype))
    ]
    said = "shapes and dtypes of the first, {}, .* got {}: .*cuda_graph=false".format(*kinds)
    with pytest.raises(ValueError, match=said):
        captured(Sample(*(part.to(dtype) for part in batch_of(1, size))))


def test_the_memory_that_a_replay_reads_does_not_move(make_trainer):
    trainer = make_trainer(precision="16-mixed")
    step, batches = trainer.step, trainer.batches.since(0)

    def addresses():
        tensors = [
            *step.model.parameters(),
            *step.model.buffers(),
            step.weights,
            step.scaler._scale,
        ]
        return [tensor.data_ptr() for tensor in tensors]

    step.training_step(next(batches))
    before, state = addresses(), step.state_dict()
    step.training_step(next(batches))
    step.load_state_dict(state)
    step.training_step(next(batches))
    assert addresses() == before


def test_a_copy_of_a_model_with_captured_gradients_has_none(make_trainer):
    trainer = make_trainer()
    trainer.step.capture(capture_in_place)
    fit(trainer)
    # released at the end
    assert {parameter.grad for parameter in trainer.step.model.parameters()} == {None}
    trainer.step.training_step(next(iter(trainer.batches.since(0))))
    assert {parameter.grad is None for parameter in trainer.step.model.parameters()} == {False}
    assert {parameter.grad for parameter in trainer.best_model().parameters()} == {None}


def test_a_weight_that_is_frozen_after_the_capture_does_not_move(make_trainer):
    trainer = make_trainer()
    trainer.step.capture(capture_in_place)
    batches = iter(trainer.batches.since(0))
    trainer.step.training_step(next(batches))
    frozen, trained, *_ = trainer.step.model.parameters()
    frozen.requires_grad_(False)
    before = frozen.clone(), trained.clone()
    trainer.step.training_step(next(batches))
    assert torch.equal(frozen, before[0]) and not torch.equal(trained, before[1])


@pytest.mark.parametrize("number", [1e-3, float("nan")])
def test_training_releases_the_captured_step_at_the_end_and_after_an_error(make_trainer, number):
    replays = []

    def capture(function):
        outputs, replay = capture_in_place(function)
        replays.append(weakref.ref(replay))
        return outputs, replay

    trainer = make_trainer()
    trainer.step.capture(capture)
    nn.init.constant_(next(trainer.step.model.parameters()), number)
    with nullcontext() if number == number else pytest.raises(FloatingPointError):
        fit(trainer)
    assert [replay() for replay in replays] == [None]


def test_a_cpu_is_refused(make_trainer):
    with pytest.raises(
        ValueError, match="cuda_graph must be false on device cpu, got true: set .*device=cuda"
    ):
        make_trainer(cuda_graph=True)


def test_checkpointed_layers_with_dropout_are_refused_by_name(make_model):
    with pytest.raises(
        ValueError,
        match=r"processor, encoder.data, decoder.data: set model.checkpoint_groups=null or",
    ):
        check_capturable(make_model(num_layers=2, checkpoint_groups=2, dropout=0.1), GPU)
    for options in ({"checkpoint_groups": 2, "dropout": 0.0}, {"dropout": 0.1}):
        check_capturable(make_model(num_layers=2, **options), GPU)


@pytest.fixture
def order(monkeypatch):
    """Calls of PyTorch for CUDA graphs, in their order; stubs take their place."""
    done = []

    @contextmanager
    def within(name):
        done.append(f"enter {name}")
        yield
        done.append(f"leave {name}")

    def stream(name):
        return SimpleNamespace(
            name=name, wait_stream=lambda other: done.append(f"{name} waits for {other.name}")
        )

    current, graph = stream("current"), SimpleNamespace(replay=lambda: done.append("replay"))

    def capture(captured, capture_error_mode):
        return within(capture_error_mode) if captured is graph else None

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("free"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream("side"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: within(stream.name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return done


def test_a_pass_is_captured_after_a_warm_up_on_a_side_stream_and_replayed_without(order):
    outputs, replay = capture_cuda_graph(lambda: order.append("pass") or len(order))
    before, after = (
        ["free", "side waits for current", "enter side"],
        ["leave side", "current waits for side"],
    )
    warm_up = [*before, *["pass"] * WARM_UP, *after]
    assert order == [*warm_up, "enter thread_local", "pass", "leave thread_local"]
    assert outputs == len(order) - 1  # of the captured pass
    order.clear()
    replay()
    assert order == ["replay"]
    order.clear()  # a warm-up may be another function
    capture_cuda_graph(lambda: order.append("pass"), warm_up=lambda: order.append("warm up"))
    assert (order.count("warm up"), order.count("pass")) == (WARM_UP, 1)


def test_an_error_during_capture_names_the_option(order):
    def waits(batch):
        if "enter thread_local" in order:
            raise RuntimeError("operation not permitted when stream is capturing")
        return batch.inputs.sum()

    with pytest.raises(RuntimeError, match="not permitted") as raised:
        CUDAGraphedStep(waits, [], CPU, capture_cuda_graph, REMEDY)(batch_of(0))
    assert "training.cuda_graph=false" in raised.value.__notes__[0]
