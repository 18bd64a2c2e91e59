"""Stop and resume: an interrupted run ends with the bits of one that was not."""

import os
import random
import signal
import threading

import numpy as np
import pytest
import torch

from anemoi_gt.data.datasets import Splits
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.checkpoint import load_checkpoint
from anemoi_gt.training.data_loading import TrainingBatches
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.rng import seed_generators
from anemoi_gt.training.signals import Stopped, StopRequest

# Neither records nor validations fall on the step of the stop, so that a mean loss is half collected there.
NUMBERS = {"steps": 9, "batch_size": 3, "warmup_steps": 2, "valid_every": 3, "log_every": 3, "device": "cpu", "seed": 5}
STOP_AFTER = 5


class NoisySamples:
    """Samples disturbed by the global generators of Python, NumPy and PyTorch."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __getattr__(self, name):
        return getattr(self._dataset, name)

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, i):
        sample = self._dataset[i]
        noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return sample._replace(inputs=sample.inputs + float(noise))


class SignalAt:
    """Batches that send this process a signal when that of a step is taken."""

    def __init__(self, batches, step, number):
        self._batches, self._step, self._number = batches, step, number

    def since(self, step):
        for n, batch in enumerate(self._batches.since(step), start=step + 1):
            if n == self._step:
                os.kill(os.getpid(), self._number)
            yield batch


@pytest.fixture
def trainer(splits, make_model, tmp_path):
    """Make the trainer of one and the same run, for a folder."""

    def trainer(folder, dataset=splits.train, weights_seed=0, **numbers):
        (tmp_path / folder).mkdir(exist_ok=True)
        config = TrainingConfig(**NUMBERS | numbers)
        return Trainer(
            make_model(weights_seed), Splits(dataset, *splits[1:]), config, tmp_path / folder, {"a run": True}
        )

    return trainer


def fit(trainer):
    with MetricsFile(trainer.folder / "metrics.jsonl", until=trainer.step.global_step) as metrics:
        trainer.fit(metrics)
    return metrics.records


def stop(trainer, after=STOP_AFTER, number=signal.SIGTERM):
    """Train until a signal comes in a step; return what fit raised."""
    trainer.batches = SignalAt(trainer.batches, after, number)
    with pytest.raises(Stopped) as stopped:
        fit(trainer)
    return stopped.value


def assert_same(actual, expected, name="state"):
    """Nested dicts and lists of tensors and numbers must be equal bit by bit."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), name
        for i, value in enumerate(expected):
            assert_same(actual[i], value, f"{name}[{i}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), name
    else:
        assert actual == expected, name


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_a_run_that_is_stopped_twice_ends_with_the_same_bits(trainer, without_speed, precision):
    whole = trainer("whole", precision=precision)
    records = fit(whole)
    stop(trainer("stopped", precision=precision), after=2)
    for after in (STOP_AFTER, None):
        # Other weights at first, and generators elsewhere: all must come from the checkpoint.
        continued = trainer("stopped", precision=precision, weights_seed=1)
        seed_generators(99)
        continued.load_state_dict(load_checkpoint(continued.folder / "last.pt"))
        if after is not None:
            stop(continued, after)
    assert continued.step.global_step == STOP_AFTER
    assert without_speed(fit(continued)) == without_speed(records)
    for name in ("last.pt", "best.pt"):
        assert_same(load_checkpoint(continued.folder / name), load_checkpoint(whole.folder / name), name)


def test_samples_that_draw_from_global_generators_continue_too(trainer, splits, without_speed):
    noisy = NoisySamples(splits.train)
    records = fit(trainer("whole", noisy))
    assert without_speed(records) != without_speed(fit(trainer("quiet")))
    stop(trainer("stopped", noisy))
    seed_generators(99)
    continued = trainer("stopped", noisy)
    continued.load_state_dict(load_checkpoint(continued.folder / "last.pt"))
    assert without_speed(fit(continued)) == without_speed(records)


def test_a_continued_run_keeps_the_best_weights_that_it_does_not_beat(trainer):
    stop(trainer("run"))
    continued = trainer("run")
    best = continued.folder / "best.pt"
    kept = best.read_bytes()
    state = load_checkpoint(continued.folder / "last.pt")
    continued.load_state_dict(state | {"best_loss": 0.0})
    fit(continued)
    assert best.read_bytes() == kept and load_checkpoint(continued.folder / "last.pt")["best_loss"] == 0.0


def test_a_finished_run_takes_no_step_when_it_is_continued(trainer, without_speed):
    records = fit(trainer("run"))
    before = (trainer("run").folder / "last.pt").read_bytes()
    continued = trainer("run")
    continued.load_state_dict(load_checkpoint(continued.folder / "last.pt"))
    assert fit(continued) == records
    assert (continued.folder / "last.pt").read_bytes() == before


def test_records_after_the_checkpoint_are_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        for step in range(1, 6):
            metrics.write(split="train", step=step, loss=1.0)
    with path.open("a") as file:
        file.write('{"split": "train", "st')  # cut off by a kill
    with MetricsFile(path, until=3) as metrics:
        metrics.write(split="train", step=4, loss=2.0)
    assert [record["step"] for record in metrics.records] == [1, 2, 3, 4]
    with MetricsFile(path, until=9) as read:
        assert read.records == metrics.records


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_run_after_the_step_which_is_saved_and_handlers_are_restored(trainer, number, status):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run = trainer("run")
    stopped = stop(run, number=number)
    assert stopped.exit_status == status
    assert str(stopped) == f"stopped by {number.name} after step {STOP_AFTER}, which is saved"
    assert load_checkpoint(run.folder / "last.pt")["step"] == STOP_AFTER
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_interrupt_does_not_wait():
    with pytest.raises(KeyboardInterrupt), StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.received == signal.SIGINT
        signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            signal.raise_signal(signal.SIGINT)
        assert request.received is None
    finally:
        signal.signal(signal.SIGINT, before)


def test_training_outside_the_main_thread_works(trainer):
    run = trainer("run")
    thread = threading.Thread(target=fit, args=(run,))
    thread.start()
    thread.join()
    assert load_checkpoint(run.folder / "last.pt")["step"] == NUMBERS["steps"]


@pytest.mark.parametrize("where", ["loss", "weights"])
def test_a_stop_saves_no_state_that_is_not_finite(trainer, where):
    run = trainer("run", log_every=9)
    stop(run, after=4)
    before = (run.folder / "last.pt").read_bytes()
    if where == "weights":
        torch.nn.init.constant_(next(run.step.model.parameters()), float("nan"))
        run.step.training_step = lambda batch: torch.tensor(1.0)
    else:
        run.step.training_step = lambda batch: torch.tensor(float("nan"))
    run.batches = SignalAt(run.batches._batches, 5, signal.SIGTERM)
    with pytest.raises(FloatingPointError, match=f"the {where} must stay finite"):
        fit(run)
    assert (run.folder / "last.pt").read_bytes() == before


def test_a_run_does_not_continue_from_a_partial_state(trainer):
    run = trainer("run")
    fit(run)
    state = load_checkpoint(run.folder / "last.pt")
    del state["scaler"], state["generators"]
    with pytest.raises(
        ValueError, match="state must be the last.pt of a run, this checkpoint lacks generators, scaler"
    ):
        run.load_state_dict(state)


def test_batches_follow_from_seed_and_step(splits):
    def numbers(seed, since):
        """Indices of the samples in the batches, by their inputs."""
        known = [splits.train.inputs(i) for i in range(len(splits.train))]
        batches = TrainingBatches(splits.train, 3, steps=6, seed=seed, device=torch.device("cpu"))
        return [
            [next(i for i, inputs in enumerate(known) if torch.equal(inputs, sample)) for sample in batch.inputs]
            for batch in batches.since(since)
        ]

    whole = numbers(seed=1, since=0)
    assert len(whole) == 6 and {len(batch) for batch in whole} == {3}
    for step in (1, 4, 6):
        assert numbers(seed=1, since=step) == whole[step:]
    assert numbers(seed=2, since=0) != whole
