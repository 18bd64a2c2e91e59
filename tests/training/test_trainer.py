"""The loop: what it minimises, how it steps, what it keeps, and that it can be repeated."""

import json
import math
import warnings

import pytest
import torch
from torch.nn.utils import get_total_norm

from anemoi_gt.training.checkpoint import load_checkpoint
from anemoi_gt.training.data_loading import TrainingBatches
from anemoi_gt.training.loss import weighted_mse
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.step import AUTOCAST, Learner, parameter_groups


def gradient_norm(model):
    return get_total_norm([parameter.grad for parameter in model.parameters()])


def test_loss_is_the_mean_square_by_area():
    output = torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]])
    loss = weighted_mse(output, torch.zeros(2, 2, 1), torch.tensor([0.5, 1.5]))
    assert loss.item() == pytest.approx((0.5 * 1 + 1.5 * 4 + 0.5 * 9) / 4)


def test_a_node_of_no_weight_does_not_matter():
    target, weights = torch.randn(2, 3, 1), torch.tensor([1.5, 0.0, 1.5])
    changed = target.clone()
    changed[:, 1] += 100
    assert weighted_mse(changed, target, weights) == 0


def test_two_runs_give_the_same_numbers_bit_by_bit(run, without_speed):
    first, records = run("first", seed=3)
    second, repeated = run("second", seed=3)
    assert without_speed(repeated) == without_speed(records)
    for name, value in first.learner.average.state_dict().items():
        assert torch.equal(value, second.learner.average.state_dict()[name]), name


def test_another_seed_gives_other_numbers(run):
    _, records = run("first", seed=3)
    _, others = run("second", seed=4)
    assert records[0]["loss"] != others[0]["loss"]


def test_training_lowers_the_loss_on_samples_it_has_seen(run):
    _, records = run(steps=60, learning_rate=0.02, valid_every=60)
    losses = [record["loss"] for record in records if record["split"] == "train"]
    assert sum(losses[-8:]) < 0.7 * sum(losses[:8])


@pytest.mark.parametrize("precision", AUTOCAST)
def test_a_long_gradient_is_shortened_to_the_given_norm(run, precision):
    free, _ = run("free", steps=1, warmup_steps=0, clip_norm=1e6, precision=precision)
    clipped, _ = run("clipped", steps=1, warmup_steps=0, clip_norm=1e-3, precision=precision)
    assert gradient_norm(free.learner.model) > 0.01
    assert gradient_norm(clipped.learner.model) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("precision", AUTOCAST)
def test_a_short_gradient_is_left_alone(run, precision):
    free, _ = run("free", steps=1, warmup_steps=0, clip_norm=1e6, precision=precision)
    norm = gradient_norm(free.learner.model).item()
    clipped, _ = run("clipped", steps=1, warmup_steps=0, clip_norm=2 * norm, precision=precision)
    assert gradient_norm(clipped.learner.model) == gradient_norm(free.learner.model)


def test_matrices_decay_and_vectors_do_not(make_model):
    decaying, constant = parameter_groups(make_model(), weight_decay=0.1)
    assert decaying["weight_decay"] == 0.1 and {p.dim() for p in decaying["params"]} == {2}
    assert constant["weight_decay"] == 0.0 and {p.dim() for p in constant["params"]} == {1}


def test_every_sample_comes_once_before_any_comes_twice(run):
    trainer, _ = run(steps=4, batch_size=2)
    inputs = torch.cat([batch.inputs for batch in trainer.batches.since(0)])
    expected = torch.stack([trainer.splits.train.inputs(i) for i in range(8)])
    positions = [int((expected == sample).flatten(1).all(dim=1).nonzero()) for sample in inputs]
    assert sorted(positions) == list(range(8)) and positions != list(range(8))


def test_validation_is_of_the_averaged_weights_in_evaluation_mode(run, splits):
    trainer, records = run(valid_every=6, average_decay=0.5)
    model = trainer.best_model()
    with torch.no_grad():
        losses = [
            weighted_mse(model(sample.inputs[None]), sample.target[None], splits.valid.weights)
            for sample in (splits.valid[i] for i in range(len(splits.valid)))
        ]
    (valid,) = (record for record in records if record["split"] == "valid")
    assert valid["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert not all(
        torch.equal(a, b) for a, b in zip(model.parameters(), trainer.learner.model.parameters(), strict=True)
    )


def test_an_average_over_one_step_is_the_weights_themselves(run):
    trainer, _ = run(average_decay=0.0)
    for averaged, last in zip(trainer.learner.average.parameters(), trainer.learner.model.parameters(), strict=True):
        assert torch.equal(averaged, last)


def test_the_average_has_parameters_of_its_own_and_the_buffers_of_the_model(run):
    learner = run()[0].learner
    for averaged, last in zip(learner.average.module.buffers(), learner.model.buffers(), strict=True):
        assert averaged is last
    for averaged, last in zip(learner.average.parameters(), learner.model.parameters(), strict=True):
        assert averaged.data_ptr() != last.data_ptr()


def test_the_best_weights_are_those_of_the_lowest_validation_loss(run):
    trainer, records = run(steps=12, learning_rate=0.3, warmup_steps=0, valid_every=1, average_decay=0.0)
    losses = {record["step"]: record["loss"] for record in records if record["split"] == "valid"}
    best = torch.load(trainer.folder / "best.pt", weights_only=True)
    assert best["step"] == min(losses, key=losses.get) != 12
    for name, value in trainer.best_model().state_dict().items():
        assert torch.equal(value, best["average"][name]), name


def test_a_loss_that_is_not_finite_stops_the_run_with_one_sentence(run):
    with pytest.raises(FloatingPointError, match=r"the loss must stay finite, got nan .* lower training.learning_rate"):
        run(steps=50, learning_rate=1e30, warmup_steps=0)


@pytest.mark.parametrize(
    ("part", "reason"), [("average", "the loss must stay finite, got nan"), ("model", "the weights must stay finite")]
)
def test_weights_that_are_not_finite_replace_no_checkpoint(run, part, reason):
    trainer, _ = run()
    checkpoints = [trainer.folder / "best.pt", trainer.folder / "last.pt"]
    before = [path.read_bytes() for path in checkpoints]
    torch.nn.init.constant_(next(getattr(trainer.learner, part).parameters()), float("nan"))
    with (
        MetricsFile(trainer.folder / "metrics.jsonl") as metrics,
        pytest.raises(FloatingPointError, match=f"{reason}.* at step 6"),
    ):
        trainer._validate(metrics)
    assert [path.read_bytes() for path in checkpoints] == before


def test_metrics_are_json_a_line_each(run):
    trainer, records = run(steps=5, valid_every=2)
    lines = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records
    assert [record["step"] for record in records if record["split"] == "train"] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in records if record["split"] == "valid"] == [2, 4, 5]
    assert set(records[0]) == {"split", "step", "loss", "learning_rate", "samples_per_second"}
    assert all(record["samples_per_second"] > 0 for record in records if record["split"] == "train")


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_mixed_precision_trains_nearly_as_float32_does_and_keeps_float32_weights(run, precision):
    trainer, mixed = run("mixed", precision=precision, steps=20)
    _, full = run("full", steps=20)
    assert {parameter.dtype for parameter in trainer.learner.model.parameters()} == {torch.float32}
    assert trainer.learner.scaler.is_enabled() == (precision == "16-mixed")
    last = [records[-1]["loss"] for records in (mixed, full)]
    assert last[0] != last[1]  # it is not float32 under another name
    assert last[0] == pytest.approx(last[1], rel=0.05)


def test_a_step_whose_gradients_overflow_is_left_out_and_the_scale_lowered(run):
    learner = run(precision="16-mixed")[0].learner
    learner.scaler.load_state_dict(learner.scaler.state_dict() | {"scale": 2.0**60})
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    learner.learn(next(run("other")[0].batches.since(0)))
    assert all(torch.equal(now, then) for now, then in zip(learner.model.parameters(), before, strict=True))
    assert learner.scaler.get_scale() == 2.0**59


def test_a_skipped_first_step_warns_of_nothing(run, monkeypatch):
    monkeypatch.setattr("anemoi_gt.training.step.LOSS_SCALE", 2.0**60)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer, _ = run(precision="16-mixed", steps=1, warmup_steps=0)
    assert trainer.learner.scaler.get_scale() == 2.0**59


def test_a_loss_that_waits_to_be_recorded_and_is_not_finite_replaces_no_checkpoint(run, monkeypatch, tmp_path):
    since = TrainingBatches.since

    def overflowing(self, step):
        for n, batch in enumerate(since(self, step), start=step + 1):
            yield batch._replace(inputs=batch.inputs * 1e9) if n == 3 else batch

    monkeypatch.setattr(TrainingBatches, "since", overflowing)
    with pytest.raises(FloatingPointError, match="the loss must stay finite, got nan at step 4"):
        run(precision="16-mixed", valid_every=2, log_every=6)
    state = load_checkpoint(tmp_path / "run" / "last.pt")
    assert state["step"] == 2 and all(math.isfinite(loss) for loss in state["pending"])


@pytest.mark.parametrize("first", ["log_every", "valid_every"])
def test_gradients_that_are_never_finite_end_the_run_with_one_sentence(run, monkeypatch, first):
    loss = Learner.loss

    def loss_without_gradients(self, model, batch):
        value = loss(self, model, batch)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * math.nan)
        return value

    monkeypatch.setattr(Learner, "loss", loss_without_gradients)
    numbers = {"steps": 30, "log_every": 30, "valid_every": 30} | {first: 25}
    with pytest.raises(FloatingPointError, match=r"the gradients must stay finite .* at step 25: .*bf16-mixed"):
        run(precision="16-mixed", **numbers)
