"""Checkpoints: whole ones, from which the same forecasts come."""

import pytest
import torch

from anemoi_gt.training.checkpoint import load_checkpoint, save_checkpoint
from anemoi_gt.training.scores import model_forecast


def test_a_checkpoint_gives_the_same_forecasts_to_a_model_built_anew(run, make_model, splits):
    trainer, _ = run(seed=1)
    state = load_checkpoint(trainer.folder / "last.pt")
    restored = make_model(seed=2).eval()
    trained = model_forecast(trainer.learner.average.module.eval(), splits.test)
    assert not torch.equal(model_forecast(restored, splits.test)(0), trained(0))
    restored.load_state_dict(state["average"])
    for i in range(len(splits.test)):
        assert torch.equal(model_forecast(restored, splits.test)(i), trained(i))


def test_a_checkpoint_holds_the_whole_state_of_the_run(run):
    trainer, records = run(name="whole")
    state = load_checkpoint(trainer.folder / "last.pt")
    assert set(state) == {
        *("model", "average", "optimizer", "schedule", "scaler", "step", "best_loss", "pending", "generators", "config")
    }
    assert state["step"] == 6 and state["config"] == {"name": "whole"}
    assert state["best_loss"] == min(record["loss"] for record in records if record["split"] == "valid")
    assert state["schedule"]["last_epoch"] == 6
    for name, value in trainer.learner.model.state_dict().items():
        assert torch.equal(state["model"][name], value), name


def test_a_write_that_fails_leaves_the_former_checkpoint_whole(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1})

    def half_a_write(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", half_a_write)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(path, {"step": 2})
    assert load_checkpoint(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_stands_under_the_name_before_the_file_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    write = torch.save

    def watched_write(state, file):
        write(state, file)
        assert not path.exists()

    monkeypatch.setattr(torch, "save", watched_write)
    save_checkpoint(path, {"step": 1})
    assert load_checkpoint(path) == {"step": 1}
