"""Stop and resume: an interrupted run ends with the bits of one that was not."""

import os
import random
import re
import signal
import threading
from functools import partial

import numpy as np
import pytest
import torch
from support.capturing import capture_in_place

from anemoi_gt.app.datasets.forecast_dataset import Splits, TrainingBatches
from anemoi_gt.app.datasets.forecast_dataset import load as load_batches
from anemoi_gt.app.datasets.sphere_advection import sphere
from anemoi_gt.app.training.progress import Stopped, StopRequest
from anemoi_gt.app.training.run_files import MetricsFile, load_checkpoint, save_checkpoint
from anemoi_gt.app.training.trainer import describe_samples

from ..conftest import assert_same, fit, without_speed

pytestmark = pytest.mark.application

# Neither records nor validations fall on the step of the stop, so that a mean loss is half
# collected there.
NUMBERS = {"steps": 6, "batch_size": 3, "valid_every": 2, "log_every": 2, "seed": 5}
STOP_AFTER = 3


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
    """Batches that send this process a signal when the batch of a step is taken."""

    def __init__(self, batches, step, number):
        self._batches, self._step, self._number = batches, step, number

    def since(self, step):
        for n, batch in enumerate(self._batches.since(step), start=step + 1):
            if n == self._step:
                os.kill(os.getpid(), self._number)
            yield batch


@pytest.fixture(autouse=True)
def heeded_interrupts():
    """SIGINT as in the foreground: a shell script's `&` starts processes that ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def trainer(make_trainer):
    return partial(make_trainer, **NUMBERS)


def load(trainer):
    trainer.load_state_dict(load_checkpoint(trainer.folder / "last.pt"))
    return trainer


def stop(trainer, after=STOP_AFTER, number=signal.SIGTERM):
    """Train until a signal comes in a step; return what fit raised."""
    trainer.batches = SignalAt(trainer.batches, after, number)
    with pytest.raises(Stopped) as stopped:
        fit(trainer)
    return stopped.value


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_a_run_that_is_stopped_twice_ends_with_the_same_bits(trainer, precision):
    whole = trainer("whole", precision=precision)
    records = fit(whole)
    stop(trainer("stopped", precision=precision), after=1)
    for after in (STOP_AFTER, None):
        # Other weights at first, and generators elsewhere: all must come from the checkpoint.
        continued = trainer("stopped", precision=precision, weights_seed=1)
        torch.manual_seed(99)
        load(continued)
        if after is not None:
            stop(continued, after)
    assert continued.step.global_step == STOP_AFTER
    assert without_speed(fit(continued)) == without_speed(records)
    for name in ("last.pt", "best.pt"):
        assert_same(
            load_checkpoint(continued.folder / name), load_checkpoint(whole.folder / name), name
        )


@pytest.mark.parametrize("captured_first", [True, False])
def test_a_cuda_graph_that_is_switched_off_or_on_at_a_stop_changes_no_bit(trainer, captured_first):
    records, parts = fit(trainer("whole")), [trainer("run"), trainer("run", weights_seed=1)]
    parts[not captured_first].step.capture(capture_in_place)
    stop(parts[0])
    assert without_speed(fit(load(parts[1]))) == without_speed(records)


def test_samples_that_draw_from_global_generators_continue_too(trainer, splits):
    noisy = NoisySamples(splits.train)
    records = fit(trainer("whole", noisy))
    assert without_speed(records) != without_speed(fit(trainer("quiet")))
    stop(trainer("stopped", noisy))
    torch.manual_seed(99)
    assert without_speed(fit(load(trainer("stopped", noisy)))) == without_speed(records)


@pytest.mark.parametrize("since", [0, 2])
def test_what_samples_draw_follows_from_seed_and_step_on_any_number_of_data_ranks(splits, since):
    def inputs(dataset, rank=0, ranks=1, seed=5):
        batches = TrainingBatches(dataset, 4, 4, seed, torch.device("cpu"), rank, ranks)
        return [batch.inputs for batch in batches.since(since)]

    noisy, before = NoisySamples(splits.train), torch.get_rng_state()
    whole = inputs(noisy)
    assert len(whole) == 4 - since
    np.random.seed(1)  # noqa: NPY002
    for first, second, both in zip(inputs(noisy, 0, 2), inputs(noisy, 1, 2), whole, strict=True):
        assert torch.equal(torch.cat([first, second]), both)
    amounts = []
    for seed in (5, 6):
        noise = torch.cat(inputs(noisy, seed=seed)) - torch.cat(inputs(splits.train, seed=seed))
        amounts += noise.mean(dim=(1, 2)).tolist()
    differences = np.diff(sorted(amounts))
    assert differences.min() > 1e-4  # no amount comes twice
    assert 0.3 < np.std(amounts) < 0.8  # of sums of three numbers between 0 and 1
    assert torch.equal(torch.get_rng_state(), before)  # from which dropout draws


def test_validations_draw_the_same(splits):
    first, second = (
        list(load_batches(NoisySamples(splits.valid), 2, torch.device("cpu"))) for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.inputs, other.inputs)


def test_a_continued_run_keeps_the_best_weights_that_it_does_not_beat(trainer):
    stop(trainer("run"))
    continued = trainer("run")
    best, last = continued.folder / "best.pt", continued.folder / "last.pt"
    save_checkpoint(best, load_checkpoint(best) | {"best_loss": 0.0})
    kept = best.read_bytes()
    continued.load_state_dict(load_checkpoint(last) | {"best_loss": 0.0})
    fit(continued)
    assert best.read_bytes() == kept
    assert load_checkpoint(last)["best_loss"] == 0.0


@pytest.mark.parametrize(
    ("change", "after", "said"),
    [
        ("dates", STOP_AFTER, "data.valid=None, and are .*data.valid=.'2020-01', '2020-02'."),
        ("dates", None, "data.valid=None, and are .*data.valid=.'2020-01', '2020-02'."),
        ("file", STOP_AFTER, "number=3, .*, and are number=4, "),
        (
            "dates, 0.5.0",
            STOP_AFTER,
            "data.valid=None, and are .*data.valid=.'2020-01', '2020-02'.",
        ),
    ],
)
def test_with_other_validation_samples_the_best_weights_are_chosen_again(
    trainer, caplog, change, after, said
):
    """Also if the run has ended, and takes no step more."""
    if after is None:
        fit(trainer("run"))
    else:
        stop(trainer("run"), after)
    continued = trainer("run")
    best, last = continued.folder / "best.pt", continued.folder / "last.pt"
    save_checkpoint(best, load_checkpoint(best) | {"best_loss": 0.0})
    if change.startswith("dates"):
        continued.description["data"] = {"valid": ["2020-01", "2020-02"]}
    elif change == "file":  # that has grown; the dates are the same
        continued.splits = Splits(*sphere("O4", train_size=8, valid_size=4, test_size=3))
        continued.valid = describe_samples(continued.splits.valid)
    state = load_checkpoint(last) | {"best_loss": 0.0}
    if change.endswith("0.5.0"):  # its checkpoints have the option only
        del state["valid"]
    with caplog.at_level("INFO"):
        continued.load_state_dict(state)
    losses = [
        record["loss"]
        for record in fit(continued)
        if record["split"] == "valid" and record["step"] >= state["step"]
    ]
    if after is None:
        losses = losses[1:]  # the first is of the former dates
    assert re.search(f"the validation samples were .*{said}.*: best.pt starts again", caplog.text)
    assert load_checkpoint(best)["best_loss"] == continued.best_loss == min(losses)
    assert load_checkpoint(last)["config"] == continued.description


def test_the_best_weights_of_other_dates_are_replaced_even_if_their_loss_was_lower(trainer):
    """As after a kill between last.pt with the loss of the new dates, and best.pt."""
    fit(trainer("run"))
    continued = trainer("run")
    best = continued.folder / "best.pt"
    expected = load_checkpoint(best)["best_loss"]
    save_checkpoint(best, load_checkpoint(best) | {"step": 2, "best_loss": 0.0})
    fit(load(continued))
    assert load_checkpoint(best)["step"] == NUMBERS["steps"]
    assert load_checkpoint(best)["best_loss"] == continued.best_loss == expected


@pytest.mark.parametrize("valid_every", [2, 3])
def test_a_run_that_ended_between_its_last_and_its_best_checkpoint_writes_the_best_one(
    trainer, valid_every
):
    whole = trainer("whole", steps=3, valid_every=valid_every)
    fit(whole)
    ended = trainer("ended", steps=3, valid_every=valid_every)
    fit(ended)
    best = ended.folder / "best.pt"  # the last step is the best one
    if valid_every == 3:
        best.unlink()
    else:
        save_checkpoint(best, load_checkpoint(best) | {"step": 2, "best_loss": 9.0})
    fit(load(trainer("ended", steps=3, valid_every=valid_every)))
    assert_same(load_checkpoint(best), load_checkpoint(whole.folder / "best.pt"))


def test_weights_of_a_later_step_are_not_saved_as_the_best_ones_of_a_lost_file(trainer, caplog):
    stop(trainer("run"), after=5)  # validated at steps 2 and 4
    continued = trainer("run")
    best = continued.folder / "best.pt"
    best.unlink()
    state = load_checkpoint(continued.folder / "last.pt") | {"best_loss": 0.0}
    with caplog.at_level("INFO"):
        continued.load_state_dict(state)
    assert "has lost the best weights of the run: best.pt starts again" in caplog.text
    records = fit(continued)
    losses = {record["step"]: record["loss"] for record in records if record["split"] == "valid"}
    assert load_checkpoint(best)["best_loss"] == min(losses[5], losses[6]) > 0
    assert losses[load_checkpoint(best)["step"]] == load_checkpoint(best)["best_loss"]


def test_a_finished_run_takes_no_step_when_it_is_continued(trainer):
    finished = trainer("run")
    records, before = fit(finished), (finished.folder / "last.pt").read_bytes()
    assert fit(load(trainer("run"))) == records
    assert (finished.folder / "last.pt").read_bytes() == before


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
def test_a_signal_ends_the_run_after_the_step_which_is_saved_and_handlers_are_restored(
    trainer, number, status
):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run = trainer("run")
    stopped = stop(run, number=number)
    assert stopped.exit_status == status
    assert str(stopped) == f"stopped by {number.name} after step {STOP_AFTER}, which is saved"
    assert load_checkpoint(run.folder / "last.pt")["step"] == STOP_AFTER
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_second_interrupt_does_not_wait_and_an_ignored_signal_stays_ignored():
    with pytest.raises(KeyboardInterrupt), StopRequest() as request:
        signal.raise_signal(signal.SIGINT)
        assert request.received == signal.SIGINT
        signal.raise_signal(signal.SIGINT)
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
    run = trainer("run", log_every=6)
    stop(run, after=4)
    before = (run.folder / "last.pt").read_bytes()
    if where == "weights":
        torch.nn.init.constant_(next(run.step.model.parameters()), float("nan"))
    run.step.training_step = lambda batch: torch.tensor(float("nan") if where == "loss" else 1.0)
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
        ValueError, match="must be the last.pt of a run, this checkpoint lacks generators, scaler"
    ):
        run.load_state_dict(state)


def test_batches_follow_from_seed_and_step_and_every_sample_comes_once_before_any_comes_twice(
    splits,
):
    def numbers(seed, since):
        """Indices of the samples in the batches, by their inputs."""
        known = torch.stack([splits.train.inputs(i) for i in range(len(splits.train))])
        batches = TrainingBatches(
            splits.train, 3, steps=6, seed=seed, device=torch.device("cpu")
        ).since(since)
        return [
            [int((known == x).flatten(1).all(1).nonzero()) for x in batch.inputs]
            for batch in batches
        ]

    whole = numbers(seed=1, since=0)
    assert len(whole) == 6
    assert {len(batch) for batch in whole} == {3}
    order = [sample for batch in whole for sample in batch]
    assert sorted(order[:8]) == sorted(order[8:16]) == list(range(8))
    assert list(range(8)) != order[:8] != order[8:16]
    for step in (1, 4, 6):
        assert numbers(seed=1, since=step) == whole[step:]
    assert numbers(seed=2, since=0) != whole
