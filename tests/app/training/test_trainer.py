"""The training loop: its steps, its state, and its reproducibility."""

import copy
import json
import math

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from anemoi_gt.app.datasets.forecast_dataset import TrainingBatches
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.run_files import curve, load_checkpoint
from anemoi_gt.app.training.step import (
    AUTOCAST,
    LOSS_SCALE,
    TrainingStep,
    warmup_cosine,
    weighted_mse,
)

from ..conftest import NUMBERS, assert_same

pytestmark = pytest.mark.application

CPU = torch.device("cpu")


def test_loss_is_the_mean_square_by_area():
    loss = weighted_mse(
        torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]]),
        torch.zeros(2, 2, 1),
        torch.tensor([0.5, 1.5]),
    )
    assert loss.item() == pytest.approx((0.5 * 1 + 1.5 * 4 + 0.5 * 9) / 4)


@pytest.mark.parametrize(
    ("warmup_steps", "steps", "rates"),
    [
        (4, 100, {step: (step + 1) / 5 for step in range(5)}),  # warm-up
        (
            10,
            110,
            {
                s: (1 + math.cos(math.pi * p)) / 2
                for s, p in ((10, 0), (35, 0.25), (60, 0.5), (110, 1))
            },
        ),
        (0, 10, {0: 1.0}),
        (10, 10, {9: 10 / 11}),
    ],
)
def test_the_rate_is_a_linear_warm_up_and_half_a_cosine(warmup_steps, steps, rates):
    assert {step: warmup_cosine(step, warmup_steps, steps) for step in rates} == pytest.approx(
        rates
    )


def plain_steps(model, batches, weights, config):
    """Losses, weights and their average after the steps of a plain PyTorch loop, whose loss scale nothing overflows."""
    groups = [
        [p for p in model.parameters() if (p.dim() > 1) == is_matrix] for is_matrix in (True, False)
    ]
    decays = [
        {"params": groups[0], "weight_decay": config.weight_decay},
        {"params": groups[1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(decays)
    scale = LOSS_SCALE if config.precision == "16-mixed" else 1.0
    losses, average = [], None
    for n, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * warmup_cosine(n, config.warmup_steps, config.steps)
        optimizer.zero_grad()
        with torch.autocast(
            "cpu", dtype=AUTOCAST[config.precision], enabled=config.precision != "32-true"
        ):
            error = (model(batch.inputs) - batch.target).square()
            loss = (error.mean((0, 2)) * weights).mean()
        (loss * scale).backward()
        for parameter in model.parameters():
            parameter.grad /= scale
        clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        losses.append(loss.detach())
        now = [parameter.detach().clone() for parameter in model.parameters()]
        average = [
            a.lerp(w, 1 - config.average_decay) for a, w in zip(average or now, now, strict=True)
        ]
    return [torch.stack(losses), *now, *average]


@pytest.mark.parametrize("clip_norm", [1e-3, 1e3])
@pytest.mark.parametrize("precision", AUTOCAST)
def test_steps_equal_a_plain_loop_bitwise(make_model, splits, precision, clip_norm):
    options = {"weight_decay": 0.5, "clip_norm": clip_norm, "precision": precision}
    config = TrainingConfig(**NUMBERS | {"steps": 4} | options)
    batches = list(TrainingBatches(splits.train, 2, 4, seed=0, device=CPU).since(0))
    model = make_model()
    torch.manual_seed(3)
    expected = plain_steps(copy.deepcopy(model), batches, splits.train.weights, config)
    step = TrainingStep(model, splits.train.weights, config, CPU)
    torch.manual_seed(3)
    losses = torch.stack([step.training_step(batch) for batch in batches])
    assert_same([losses, *step.model.parameters(), *step.average.module.parameters()], expected)
    assert (get_total_norm([p.grad for p in step.model.parameters()]) <= 1e-3 * (1 + 1e-5)) == (
        clip_norm == 1e-3
    )


def test_backward_runs_on_the_thread_that_asks_for_it(make_model, splits):
    step = TrainingStep(make_model(), splits.train.weights, TrainingConfig(device="cpu"), CPU)
    threads = []
    next(step.model.parameters()).register_hook(
        lambda grad: threads.append(torch._C._is_multithreading_enabled())
    )
    step.training_step(next(iter(TrainingBatches(splits.train, 2, 1, seed=0, device=CPU).since(0))))
    assert threads == [False]
    assert torch._C._is_multithreading_enabled()


def test_validation_is_of_the_averaged_weights_in_evaluation_mode(run, splits):
    trainer, records = run(valid_every=6, average_decay=0.5)
    model, inputs, target = trainer.best_model(), *map(torch.stack, zip(*splits.valid, strict=True))
    with torch.no_grad():
        expected = weighted_mse(model(inputs), target, splits.valid.weights)
    (valid,) = (record for record in records if record["split"] == "valid")
    torch.testing.assert_close(torch.tensor(valid["loss"]), expected)


def test_the_average_copies_the_parameters_and_shares_the_buffers_of_the_model(make_model, splits):
    step = TrainingStep(make_model(), splits.train.weights, TrainingConfig(device="cpu"), CPU)
    average = step.average.module
    for buffer, model_buffer in zip(average.buffers(), step.model.buffers(), strict=True):
        assert buffer is model_buffer
    pointers = [parameter.data_ptr() for parameter in average.parameters()]
    model_pointers = [parameter.data_ptr() for parameter in step.model.parameters()]
    assert len(pointers) == len(model_pointers)
    assert not set(pointers) & set(model_pointers)


def test_the_best_weights_have_the_lowest_validation_loss(run):
    trainer, records = run(
        steps=12, learning_rate=0.3, warmup_steps=0, valid_every=1, average_decay=0.0
    )
    losses = {record["step"]: record["loss"] for record in records if record["split"] == "valid"}
    best = torch.load(trainer.folder / "best.pt", weights_only=True)
    assert best["step"] == min(losses, key=losses.get) != 12
    assert_same(trainer.best_model().state_dict(), best["average"])


def test_metrics_are_json_a_line_each(run):
    trainer, records = run(steps=5, valid_every=2)
    lines = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records
    steps = {"train": [1, 2, 3, 4, 5], "valid": [2, 4, 5]}
    assert {split: curve(records, split)[0] for split in steps} == steps
    assert set(records[0]) == {
        *("split", "step", "time"),
        *("loss", "learning_rate", "samples_per_second"),
    }
    assert all(record["samples_per_second"] > 0 for record in records if record["split"] == "train")


@pytest.mark.parametrize(
    ("part", "reason"),
    [("average", "the loss .*, got nan at step 6"), ("model", "the weights .* at step 6")],
)
def test_weights_that_are_not_finite_replace_no_checkpoint(run, part, reason):
    trainer, _ = run()
    checkpoints = [trainer.folder / "best.pt", trainer.folder / "last.pt"]
    before = [path.read_bytes() for path in checkpoints]
    torch.nn.init.constant_(next(getattr(trainer.step, part).parameters()), float("nan"))
    trainer._metrics = None
    with pytest.raises(FloatingPointError, match=reason):
        trainer._validate()
    assert [path.read_bytes() for path in checkpoints] == before


@pytest.mark.filterwarnings("error")  # a skipped first step warns of nothing
def test_a_step_whose_gradients_overflow_is_skipped_and_the_scale_lowered(make_model, splits):
    step = TrainingStep(
        make_model(), splits.train.weights, TrainingConfig(precision="16-mixed", device="cpu"), CPU
    )
    step.scaler.load_state_dict(step.scaler.state_dict() | {"scale": 2.0**60})
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step.training_step(next(TrainingBatches(splits.train, 2, 1, seed=0, device=CPU).since(0)))
    assert all(map(torch.equal, step.model.parameters(), before))
    assert step.scaler.get_scale() == 2.0**59


def test_a_loss_that_waits_to_be_recorded_and_is_not_finite_replaces_no_checkpoint(
    run, monkeypatch, tmp_path
):
    since = TrainingBatches.since

    def overflowing(self, step):
        for n, batch in enumerate(since(self, step), start=step + 1):
            yield batch._replace(inputs=batch.inputs * 1e9) if n == 3 else batch

    monkeypatch.setattr(TrainingBatches, "since", overflowing)
    with pytest.raises(FloatingPointError, match="the loss must stay finite, got nan at step 4"):
        run(precision="16-mixed", valid_every=2, log_every=6)
    state = load_checkpoint(tmp_path / "run" / "last.pt")
    assert state["step"] == 2
    assert all(math.isfinite(loss) for loss in state["pending"])


@pytest.mark.parametrize("first", ["log_every", "valid_every"])
def test_gradients_that_are_never_finite_end_the_run_with_one_sentence(run, monkeypatch, first):
    loss = TrainingStep.own_loss

    def loss_without_gradients(self, model, batch):
        value = loss(self, model, batch)
        if value.requires_grad:
            value.register_hook(lambda gradient: gradient * math.nan)
        return value

    monkeypatch.setattr(TrainingStep, "own_loss", loss_without_gradients)
    numbers = {"steps": 30, "log_every": 30, "valid_every": 30} | {first: 25}
    with pytest.raises(
        FloatingPointError, match=r"the gradients must stay finite .* at step 25: .*bf16-mixed"
    ):
        run(precision="16-mixed", **numbers)
