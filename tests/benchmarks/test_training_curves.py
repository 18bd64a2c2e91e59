"""Training curves of two backends: what is asked of the application, and the verdict."""

from types import SimpleNamespace

import pytest
import training_curves
from hydra import compose, initialize_config_module


@pytest.fixture
def asked(monkeypatch):
    """Train nothing, and note what is asked of the application."""
    overrides = []

    def run(command, **options):
        overrides.append(command[3:])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(training_curves.subprocess, "run", run)
    monkeypatch.setattr(training_curves, "read_metrics", lambda path: path)
    return overrides


@pytest.mark.parametrize(("steps", "warm_up"), [(20, 20), (300, 50)])
def test_a_short_run_is_asked_for_no_longer_a_warm_up(asked, tmp_path, steps, warm_up):
    options = SimpleNamespace(steps=steps, era5=None)
    training_curves.train(tmp_path, ("sphere", "bf16-mixed", "torch", 0), options)
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        config = compose("train", [name for name in asked[0] if not name.startswith("hydra.")])
    assert (config.training.steps, config.training.warmup_steps) == (steps, warm_up)
