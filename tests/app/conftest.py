"""Fixtures for the smallest possible runs."""

import shutil
import sys
from functools import partial

import pytest
import torch
from support import applications
from support.own_data import SMALL_RUN, weather_file

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.app.datasets.forecast_dataset import Splits
from anemoi_gt.app.datasets.sphere_advection import sphere
from anemoi_gt.app.training import Trainer, TrainingConfig
from anemoi_gt.app.training.run_files import MetricsFile
from anemoi_gt.data.graphs import icosphere_graph

NUMBERS = {
    "steps": 6,
    "batch_size": 2,
    "warmup_steps": 2,
    "valid_every": 2,
    "log_every": 1,
    "device": "cpu",
}
# options of the application
SMALL = [*applications.SMALL, "training.warmup_steps=1", "training.device=cpu"]


def fit(trainer):
    with MetricsFile(trainer.folder / "metrics.jsonl", until=trainer.step.global_step) as metrics:
        trainer.fit(metrics)
    return metrics.records


def without_speed(records):
    """Return the records of a run without its speed and times, which are not reproducible."""
    reproducible = []
    for record in records:
        values = dict(record)
        values.pop("samples_per_second", None)
        values.pop("time")
        reproducible.append(values)
    return reproducible


def assert_same(actual, expected, name="state"):
    """Assert that nested dicts and lists of tensors and numbers are bitwise equal."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_same(actual[key], value, f"{name}.{key}")
    elif isinstance(expected, list | tuple):
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same(one, other, f"{name}[{i}]")
    elif torch.is_tensor(expected):
        assert torch.equal(actual, expected), name
    else:
        assert actual == expected, name


@pytest.fixture(scope="session")
def splits():
    return sphere("O4", train_size=8, valid_size=3, test_size=3)


@pytest.fixture(scope="session")
def make_model(splits):
    """Return a function that makes a small model for `splits` from a seed."""
    train = splits.train
    graph = icosphere_graph(train.nodes, refinement=1)

    def make(seed=0, **options):
        torch.manual_seed(seed)
        options = {"channels": 8, "heads": 2, "num_layers": 1, "dropout": 0.1} | options
        return EncoderProcessorDecoder(graph, train.in_channels, train.out_channels, **options)

    return make


@pytest.fixture
def make_trainer(splits, make_model, tmp_path):
    """Return a function that makes the trainer of a small model, in a folder with a name."""

    def make_trainer(name="run", train=splits.train, weights_seed=0, **numbers):
        (tmp_path / name).mkdir(exist_ok=True)
        data = Splits(train, *splits[1:])
        config = TrainingConfig(**NUMBERS | numbers)
        return Trainer(make_model(weights_seed), data, config, tmp_path / name, {"a run": True})

    return make_trainer


@pytest.fixture
def run(make_trainer):
    """Return a function that trains a small model in a folder; it returns the trainer and its metrics."""

    def run(name="run", **numbers):
        trainer = make_trainer(name, weights_seed=numbers.get("seed", 0), **numbers)
        return trainer, fit(trainer)

    return run


@pytest.fixture(scope="session")
def weather_run(tmp_path_factory):
    """A folder with weather.nc and the folder `run` of a model trained on it, and a copy of the folder."""
    folder = tmp_path_factory.mktemp("weather")
    weather_file().to_netcdf(folder / "weather.nc")
    applications.train_in(folder, *SMALL_RUN, "hydra.run.dir=run")
    return folder, shutil.copytree(folder, tmp_path_factory.mktemp("copy") / "weather")


@pytest.fixture
def trained(weather_run, monkeypatch, without_pictures):
    """A working directory with weather.nc and `run`, whose checkpoints hold the path of the file."""
    folder, copy = weather_run
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def start(monkeypatch, logging_as_before):
    def start(application, *arguments):
        monkeypatch.setattr(
            sys, "argv", [application.__name__, *applications.last_of_each(arguments)]
        )
        application.main()

    return start


@pytest.fixture
def error_line(capsys):
    return partial(applications.last_error, capsys)
