"""A recorded step: the numbers of one that is not, what is kept between batches, what is refused, and how a GPU records."""

import weakref

import pytest
import torch
from support.cuda_calls import stub_cuda_graphs
from support.recording import record_in_place
from torch import nn

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.data.datasets import Sample
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.cuda_graph import WARM_UP, RecordedPass, check_recordable, record_cuda_graph
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.step import AUTOCAST

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def make_trainer(splits, make_model, tmp_path):
    """Make a trainer of a small model with dropout, in a folder."""

    def make_trainer(name, **numbers):
        (tmp_path / name).mkdir()
        fixed = {"steps": 6, "batch_size": 2, "warmup_steps": 2, "valid_every": 2, "log_every": 1, "device": "cpu"}
        return Trainer(make_model(), splits, TrainingConfig(**fixed | numbers), tmp_path / name, {})

    return make_trainer


def fit(trainer):
    with MetricsFile(trainer.folder / "metrics.jsonl") as metrics:
        trainer.fit(metrics)
    return metrics.records


class Line(nn.Module):
    """y = a (x + noise), with a parameter that has no part in it."""

    def __init__(self):
        super().__init__()
        self.factor, self.unused = nn.Parameter(torch.tensor([2.0, 3.0])), nn.Parameter(torch.ones(1))

    def forward(self, batch):
        """Leave gradients; the loss."""
        loss = (self.factor * (batch.inputs + torch.rand(2)) - batch.target).square().sum()
        loss.backward()
        return loss.detach()


def batch_of(seed, size=2):
    generator = torch.Generator().manual_seed(seed)
    return Sample(*(torch.randn(size, generator=generator) for _ in range(2)))


def eager(model, batch):
    """Loss and gradients of a pass that is not recorded."""
    model.zero_grad()
    return model(batch), model.factor.grad


@pytest.fixture
def line():
    return Line()


@pytest.fixture
def recorded(line):
    return RecordedPass(line, list(line.parameters()), CPU, record_in_place)


@pytest.mark.parametrize("precision", AUTOCAST)
def test_recorded_steps_give_the_numbers_of_others_bit_by_bit(make_trainer, without_speed, precision):
    plain, recorded = (make_trainer(name, precision=precision) for name in ("plain", "recorded"))
    recorded.learner.record(record_in_place)
    assert without_speed(fit(recorded)) == without_speed(fit(plain))
    ours, theirs = recorded.state_dict(), plain.state_dict()
    for part in ("model", "average"):
        for name, value in theirs[part].items():
            assert torch.equal(ours[part][name], value), f"{part} {name}"
    assert torch.equal(ours["generators"]["torch"], theirs["generators"]["torch"])
    assert ours["scaler"] == theirs["scaler"]


def test_every_batch_has_its_own_loss_and_gradient(line, recorded):
    for seed in range(3):
        torch.manual_seed(seed)
        loss, gradient = eager(line, batch_of(seed))
        torch.manual_seed(seed)
        assert torch.equal(recorded(batch_of(seed)), loss)
        assert torch.equal(line.factor.grad, gradient)


def test_the_first_batch_leaves_the_generators_where_any_other_does(line, recorded):
    states = []
    for call in (line, recorded, recorded):
        torch.manual_seed(5)
        call(batch_of(0))
        states.append(torch.get_rng_state())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def test_gradients_that_others_left_are_not_added_to(line, recorded):
    gradients = []
    for before in (None, torch.full((2,), 1e6)):
        recorded.forget()
        line.factor.grad = before
        torch.manual_seed(5)
        recorded(batch_of(0))
        gradients.append(line.factor.grad.clone())
    assert torch.equal(*gradients)


def test_a_parameter_without_a_gradient_has_none(line, recorded):
    for seed in range(2):
        recorded(batch_of(seed))
        assert line.unused.grad is None and line.factor.grad is not None


@pytest.mark.parametrize("change", ["shortened", "replaced", "taken away"])
def test_what_a_step_does_to_gradients_does_not_reach_the_next(line, recorded, change):
    recorded(batch_of(0))
    if change == "shortened":
        line.factor.grad.mul_(0.1)
    else:
        line.factor.grad = torch.zeros(2) if change == "replaced" else None
    torch.manual_seed(1)
    recorded(batch_of(1))
    replayed = line.factor.grad.clone()
    torch.manual_seed(1)
    assert torch.equal(replayed, eager(line, batch_of(1))[1])


def test_a_loss_stays_when_the_next_batch_comes(recorded):
    first = recorded(batch_of(0))
    value = first.item()
    assert recorded(batch_of(1)).item() != value == first.item()


def test_a_batch_is_not_changed(recorded):
    batches = [batch_of(seed) for seed in range(2)]
    for batch in batches:
        recorded(batch)
    assert all(torch.equal(a, b) for n, batch in enumerate(batches) for a, b in zip(batch, batch_of(n), strict=True))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (batch_of(1, size=1), r"inputs \(1,\) torch.float32, target \(1,\) torch.float32"),
        (Sample(*(part.double() for part in batch_of(1))), r"inputs \(2,\) torch.float64, target \(2,\) torch.float64"),
    ],
)
def test_a_batch_of_another_kind_is_refused_with_both(recorded, other, said):
    recorded(batch_of(0))
    first = r"inputs \(2,\) torch.float32, target \(2,\) torch.float32"
    with pytest.raises(ValueError, match=f"all be like the first, {first}, .* got {said}: .*cuda_graph=false"):
        recorded(other)


def test_what_a_replay_reads_stays_in_its_memory(make_trainer):
    trainer = make_trainer("run", precision="16-mixed")
    learner, batches = trainer.learner, trainer.batches.since(0)

    def places():
        tensors = [*learner.model.parameters(), *learner.model.buffers(), learner.weights, learner.scaler._scale]
        return [tensor.data_ptr() for tensor in tensors]

    learner.learn(next(batches))
    before, state = places(), learner.state_dict()
    learner.learn(next(batches))
    learner.load_state_dict(state)
    learner.learn(next(batches))
    assert places() == before


def test_a_copy_of_a_model_with_recorded_gradients_has_none(make_trainer):
    trainer = make_trainer("run")
    learner = trainer.learner
    learner.record(record_in_place)
    fit(trainer)
    assert {parameter.grad for parameter in learner.model.parameters()} == {None}  # let go of at the end
    learner.learn(next(iter(trainer.batches.since(0))))
    assert {parameter.grad is None for parameter in learner.model.parameters()} == {False}
    assert {parameter.grad for parameter in trainer.best_model().parameters()} == {None}


def test_a_weight_that_is_frozen_after_the_recording_stays_where_it_is(make_trainer):
    trainer = make_trainer("run")
    learner = trainer.learner
    learner.record(record_in_place)
    batches = iter(trainer.batches.since(0))
    learner.learn(next(batches))
    frozen, moved, *_ = learner.model.parameters()
    frozen.requires_grad_(False)
    before = frozen.clone(), moved.clone()
    learner.learn(next(batches))
    assert torch.equal(frozen, before[0]) and not torch.equal(moved, before[1])


@pytest.mark.parametrize("number", [1e-3, float("nan")])
def test_training_lets_go_of_the_recording_when_it_ends(make_trainer, number):
    replays = []

    def recorder(function):
        outputs, replay = record_in_place(function)
        replays.append(weakref.ref(replay))
        return outputs, replay

    trainer = make_trainer("run")
    trainer.learner.record(recorder)
    nn.init.constant_(next(trainer.learner.model.parameters()), number)
    if number == number:
        fit(trainer)
    else:
        with pytest.raises(FloatingPointError):
            fit(trainer)
    assert [replay() for replay in replays] == [None]


def test_a_cpu_is_refused(make_trainer):
    with pytest.raises(ValueError, match="cuda_graph must be false on device cpu, got true: .*device=cuda"):
        make_trainer("run", cuda_graph=True)


def test_layers_that_draw_again_in_backward_are_refused_by_name(splits):
    graph = icosphere_graph(splits.train.nodes, refinement=1)

    def model(**options):
        return EncoderProcessorDecoder(graph, 2, 2, channels=8, heads=2, num_layers=2, **options)

    with pytest.raises(ValueError, match=r"processor, encoder.data, decoder.data: set model.checkpoint_groups=null or"):
        check_recordable(model(checkpoint_groups=2, dropout=0.1), GPU)
    for options in ({"checkpoint_groups": 2}, {"dropout": 0.1}):
        check_recordable(model(**options), GPU)


@pytest.fixture
def order(monkeypatch):
    return stub_cuda_graphs(monkeypatch)


def test_a_pass_is_captured_after_a_warm_up_on_another_stream_and_replayed_without_it(order):
    outputs, replay = record_cuda_graph(lambda: order.append("pass") or len(order))
    warm_up = ["side waits for current", "enter side", *["pass"] * WARM_UP, "leave side", "current waits for side"]
    assert order == [*warm_up, "enter thread_local", "pass", "leave thread_local"]
    assert outputs == len(order) - 1  # of the captured pass
    order.clear()
    replay()
    assert order == ["replay"]


def test_a_warm_up_may_be_another_function(order):
    record_cuda_graph(lambda: order.append("pass"), warm_up=lambda: order.append("warm up"))
    assert (order.count("warm up"), order.count("pass")) == (WARM_UP, 1)


def test_what_cannot_be_captured_says_which_option_captured_it(order, make_trainer):
    def waits(batch):
        if "enter thread_local" in order:
            raise RuntimeError("operation not permitted when stream is capturing")
        return batch.inputs.sum()

    batch = Sample(torch.ones(1), torch.ones(1))
    with pytest.raises(RuntimeError, match="not permitted") as raised:
        RecordedPass(waits, [], torch.device("cpu"), record_cuda_graph)(batch)
    assert "training.cuda_graph=false" in raised.value.__notes__[0]
