"""What the tests of training share: the smallest runs that are still runs."""

import pytest
import torch

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.sphere import sphere
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.metrics import MetricsFile


@pytest.fixture(scope="session")
def splits():
    """Advection on a grid of 208 points."""
    return sphere("O4", train_size=8, valid_size=3, test_size=3)


@pytest.fixture(scope="session")
def make_model(splits):
    """Make a small model for `splits` from a seed."""
    graph = icosphere_graph(splits.train.nodes, refinement=1)

    def make(seed=0):
        torch.manual_seed(seed)
        train = splits.train
        return EncoderProcessorDecoder(
            graph, train.in_channels, train.out_channels, channels=8, heads=2, num_layers=1, dropout=0.1
        )

    return make


@pytest.fixture
def run(splits, make_model, tmp_path):
    """Train a small model in a folder; returns the trainer and the records of its metrics."""

    def run(name="run", **numbers):
        config = TrainingConfig(
            **(
                {"steps": 6, "batch_size": 2, "warmup_steps": 2, "valid_every": 2, "log_every": 1, "device": "cpu"}
                | numbers
            )
        )
        folder = tmp_path / name
        folder.mkdir()
        trainer = Trainer(make_model(config.seed), splits, config, folder, {"name": name})
        with MetricsFile(folder / "metrics.jsonl") as metrics:
            trainer.fit(metrics)
        return trainer, metrics.records

    return run


@pytest.fixture
def without_pictures(monkeypatch):
    """Leave an empty file where a run draws its forecast, which takes longer than a small run."""
    monkeypatch.setattr("anemoi_gt.training.report.draw_training_plot", lambda path, *_: path.touch())


@pytest.fixture
def without_speed():
    """What must repeat of a run's records: all but how fast it was."""

    def without_speed(records):
        return [{name: value for name, value in record.items() if name != "samples_per_second"} for record in records]

    return without_speed
