"""A captured step: the bits of an eager one, what is kept between batches, refusals, and the capture on a GPU."""

import logging
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.capturing import capture_in_place
from torch import nn
from torch.utils._pytree import tree_leaves

from anemoi_gt.app.datasets.forecast_dataset import Sample
from anemoi_gt.app.training.step import AUTOCAST, REMEDY
from anemoi_gt.replay.cuda_graph import WARM_UP, CUDAGraphedStep, capture_cuda_graph

from ..conftest import assert_same, fit, without_speed

pytestmark = pytest.mark.application

CPU = torch.device("cpu")


class Line(nn.Module):
    """y = a (x + noise), with a parameter that takes no part."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, batch):
        loss = (self.factor * (batch.inputs + torch.rand(2)) - batch.target).square().sum()
        loss.backward()
        return loss.detach()


def batch_of(seed, size=2):
    generator = torch.Generator().manual_seed(seed)
    return Sample(*(torch.randn(size, generator=generator) for _ in range(2)))


def eager(line, seed):
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
    return CUDAGraphedStep(line, line, CPU, capture_in_place, REMEDY)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_captured_steps_have_the_bits_of_eager_ones(make_trainer, precision):
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
        (loss, gradient), batch = eager(line, seed), batch_of(seed)
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
    assert torch.equal(replayed(captured, line, 1)[1], eager(line, 1)[1])


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
    frozen.requires_grad_(requires_grad=False)
    before = frozen.clone(), trained.clone()
    trainer.step.training_step(next(batches))
    assert torch.equal(frozen, before[0])
    assert not torch.equal(trained, before[1])


def test_a_weight_that_is_trained_since_the_capture_moves_as_in_eager_steps(make_trainer):
    weights = []
    for captured in (False, True):
        trainer = make_trainer()
        step = trainer.step
        if captured:
            step.capture(capture_in_place)
        frozen = next(step.model.parameters())
        frozen.requires_grad_(requires_grad=False)
        first, second = list(trainer.batches.since(0))[:2]
        torch.manual_seed(3)
        step.training_step(first)
        before = frozen.clone()
        frozen.requires_grad_()
        step.training_step(second)
        assert not torch.equal(frozen, before)
        weights.append([parameter.detach() for parameter in step.model.parameters()])
    assert_same(*weights)


class Count(nn.Module):
    """Counts and averages its inputs, in buffers that one part shares and another lacks."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((3,), float("nan")), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("constant", torch.eye(3).to_sparse())
        self.part = nn.Module()
        self.part.register_buffer("shared", self.mean)

    def forward(self, x):
        self.part.shared.nan_to_num_().lerp_(x.detach().mean(0), 0.1)
        self.calls += 1
        return torch.sparse.mm(self.constant, x.T).T + self.mean * self.calls


class Decaying(nn.Linear):
    """Shrinks its weights in place at each call."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Tally(nn.Module):
    """Writes into tensors in attributes, and assigns others that the next call reads or does not."""

    def __init__(self):
        super().__init__()
        self.calls = torch.zeros((), dtype=torch.int64)
        self.norms = {"mean": torch.zeros(3), "sums": {"x": torch.zeros(3)}}
        self.last = torch.zeros(2, 3)
        self.mean, self.variance = torch.zeros(3), torch.ones(3)
        self.cached = self.constant = None
        self.stash = {"first": torch.zeros(5, 3), "gone": torch.zeros(3)}

    def forward(self, x):
        self.stash = {"first": x.detach() + 0}
        if self.constant is None:
            self.constant = torch.linspace(1.0, 2.0, 3)
        self.calls += 1
        x = nn.functional.batch_norm(x, self.mean, self.variance, training=True)
        self.norms["sums"]["x"].add_(x.detach().sum(0))
        self.norms["mean"] = 0.9 * self.norms["mean"] + x.detach().mean(0)
        self.last = self.cached = x.detach().clone()
        return (x * self.calls + self.norms["mean"] - self.norms["sums"]["x"]) * self.constant


def weight_norm_after_validation():
    """A layer whose weight is an attribute that each pass assigns, without a gradient in the last one."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        layer = nn.utils.weight_norm(nn.Linear(3, 3))
    with torch.no_grad():
        layer(torch.ones(1, 3))
    return layer


STATEFUL = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "own": Count,
    "attributes": Tally,
    "weight norm": weight_norm_after_validation,
    "weights": lambda: Decaying(3, 3),
}


def steps_of(part, *, captured):
    """Return losses and states of four steps, with a reset before the last one."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 3), part())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def forward_backward(x):
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    step = forward_backward
    if captured:
        step = CUDAGraphedStep(forward_backward, model, CPU, capture_in_place, REMEDY)
    results = []
    for number in range(4):
        optimizer.zero_grad()
        if captured and number == 3:
            step.reset()
        results.append(step(torch.randn(5, 3)))
        optimizer.step()
        state = [*model[0].parameters(), *tree_leaves([vars(held) for held in model[1].modules()])]
        tensors = [tensor for tensor in state if isinstance(tensor, torch.Tensor)]
        results += [tensor.detach().to_dense().clone() for tensor in tensors]
    return results


def test_a_captured_step_names_what_it_changes():
    line = Line()
    line.register_buffer("missing", torch.full((2,), float("nan")))
    line.count = Count()
    step = CUDAGraphedStep(lambda batch: line.count(batch), line, CPU, capture_in_place, REMEDY)
    step(torch.ones(5, 3))
    assert step.changed == {"count.calls", "count.mean"}


@pytest.mark.parametrize("part", STATEFUL)
def test_a_capture_puts_back_what_its_passes_change_in_tensors_that_a_module_holds(part):
    assert_same(
        steps_of(STATEFUL[part], captured=True), steps_of(STATEFUL[part], captured=False), part
    )


class Misused(nn.Module):
    """Changes a buffer as no replay would."""

    def __init__(self, change):
        super().__init__()
        self.register_buffer("buffer", torch.zeros(2))
        self.change = change

    def forward(self, x):
        self.change(self)
        return (x + self.buffer).sum()


def replace(module):
    module.buffer = module.buffer + 1


def create(module):
    if not hasattr(module, "made"):
        module.register_buffer("made", torch.zeros(2))
    module.made += 1


def create_unregistered(module):
    if not hasattr(module, "made"):
        module.made = torch.zeros(2)
    module.made += 1


def move(module):
    module.buffer.data = module.buffer.data + 1


@pytest.mark.parametrize(
    ("change", "name"),
    [(replace, "buffer"), (create, "made"), (create_unregistered, "made"), (move, "buffer")],
)
def test_state_that_a_pass_creates_and_buffers_that_it_replaces_are_refused(change, name):
    module = Misused(change)
    step = CUDAGraphedStep(module, module, CPU, capture_in_place, REMEDY)
    message = f"in place, got others for {name}: .*, or set training"
    with pytest.raises(ValueError, match=message):
        step(torch.ones(2))


@pytest.mark.parametrize("kind", ["parameter", "assigned", "buffer"])
def test_a_step_is_captured_again_with_a_tensor_that_replaces_another(line, kind):
    line.register_buffer("buffer", torch.ones(2))
    captures = []

    def capture(function):
        captures.append(function)
        return capture_in_place(function)

    captured = CUDAGraphedStep(line, line, CPU, capture, REMEDY)
    replayed(captured, line, 1)
    replayed(captured, line, 2)
    assert len(captures) == 1
    if kind == "parameter":
        line.factor = nn.Parameter(torch.tensor([5.0, 7.0]))
    elif kind == "buffer":
        line.buffer = torch.zeros(2)
    else:
        state = {name: tensor.clone() for name, tensor in line.state_dict().items()}
        line.load_state_dict(state, assign=True)
    assert_same(replayed(captured, line, 3), eager(line, 3))
    assert len(captures) == 2


class Weighted(nn.Module):
    """A loss with weights in attributes."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(2))
        self.weights, self.masks = torch.ones(2), {"sea": torch.ones(2)}

    def forward(self, x):
        loss = (self.factor * x).square().mul(self.weights * self.masks["sea"]).sum()
        loss.backward()
        return loss.detach()


def replace_dictionary(module):
    module.masks = {"sea": torch.zeros(2)}


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda module: setattr(module, "weights", torch.tensor([3.0, 4.0])), 1),
        (lambda module: module.masks.update(sea=torch.zeros(2)), 1),
        (replace_dictionary, 1),
        (lambda module: setattr(module, "weights", torch.tensor(5.0)), 2),
        (lambda module: setattr(module, "weights", 6.0), 2),
    ],
)
def test_a_replay_reads_the_tensors_that_attributes_hold_now(change, count):
    module, captures = Weighted(), []

    def capture(function):
        captures.append(function)
        return capture_in_place(function)

    step = CUDAGraphedStep(module, module, CPU, capture, REMEDY)
    x, held = torch.tensor([1.0, 2.0]), module.weights
    assert step(x) == 5
    before = held.clone()
    change(module)
    for _ in range(2):
        loss = step(x)
        gradient = module.factor.grad.clone()
        module.zero_grad()
        assert_same([loss, gradient], [module(x), module.factor.grad])
    assert len(captures) == count
    module.weights = held  # which no step has written into
    module.masks["sea"] = torch.ones(2)
    assert torch.equal(held, before)
    assert step(x) == 5


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
    with pytest.raises(ValueError, match="got true: device cpu has no CUDA graphs; set .*cuda"):
        make_trainer(cuda_graph=True)


def test_a_cpu_launches_by_default_and_logs_nothing_of_it(make_trainer, caplog):
    caplog.set_level(logging.DEBUG)
    assert make_trainer().config.cuda_graph is None
    assert make_trainer().step._captured is None
    assert not caplog.records


@pytest.mark.parametrize("precision", AUTOCAST if torch.cuda.is_available() else ["32-true"])
def test_the_default_has_the_bits_of_eager_steps(make_trainer, precision, kernel_device):
    """The default replays on a GPU, and launches on a CPU."""
    options = {"device": kernel_device.type, "precision": precision, "batch_size": 3}
    default = make_trainer("default", **options)
    eager = make_trainer("eager", cuda_graph=False, **options)
    assert (default.step._captured is not None) == (kernel_device.type == "cuda")
    assert eager.step._captured is None
    assert without_speed(fit(default)) == without_speed(fit(eager))
    for part in ("model", "average"):
        assert_same(default.state_dict()[part], eager.state_dict()[part], part)


def test_a_run_that_chooses_so_replays_every_step(make_trainer, monkeypatch):
    expected = without_speed(fit(make_trainer("eager")))
    captures = []

    def capture(function):
        captures.append(function)
        return capture_in_place(function)

    monkeypatch.setattr("anemoi_gt.app.training.step.replays_steps", lambda *_: True)
    monkeypatch.setattr("anemoi_gt.app.training.step.capture_cuda_graph", capture)
    assert without_speed(fit(make_trainer("replayed"))) == expected
    assert len(captures) == 1


@pytest.mark.parametrize("captured", [False, True])
def test_a_pass_replaces_the_gradients_of_the_pass_before(make_trainer, captured):
    trainer = make_trainer()
    step = trainer.step
    if captured:
        step.capture(capture_in_place)
    first, second = list(trainer.batches.since(0))[:2]
    gradients = []
    for batches in ([second], [first, second]):
        for batch in batches:
            torch.manual_seed(3)
            step.forward_backward(batch)
        gradients.append([parameter.grad.clone() for parameter in step.model.parameters()])
    assert_same(*gradients)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_a_replay_computes_the_pass_on_what_its_inputs_hold_now_without_calling_it():
    inputs = torch.ones(3, device="cuda")
    calls = []

    def double():
        calls.append("pass")
        return 2 * inputs

    outputs, replay = capture_cuda_graph(double)
    assert len(calls) == WARM_UP + 1
    inputs.fill_(5.0)
    replay()
    assert outputs.tolist() == [10.0] * 3
    assert len(calls) == WARM_UP + 1


def test_an_error_during_capture_names_the_option():
    def capture(function):
        function()
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted") as raised:
        CUDAGraphedStep(lambda batch: batch.inputs.sum(), nn.Module(), CPU, capture, REMEDY)(
            batch_of(0)
        )
    assert "training.cuda_graph=false" in raised.value.__notes__[0]
