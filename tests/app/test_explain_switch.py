"""`explain` on the command line: which kernels serve a run, written before it, without changing it."""

import json

import pytest
import torch
from hydra import compose, initialize_config_module

from anemoi_gt.app import evaluate_command as evaluate
from anemoi_gt.app import train_command as train

from . import conftest

pytestmark = pytest.mark.application

TRAINING = "training.steps=2", "training.batch_size=2", "training.threads=1"
SMALL = [*conftest.SMALL, "model.dropout=0.1", *TRAINING]


@pytest.fixture
def application(monkeypatch, start, tmp_path):
    """Train with arguments in a folder of this name, without a report; return the folder."""
    monkeypatch.setattr(train, "write_report", lambda *_: None)

    def run(name, *arguments):
        start(train, *SMALL, *arguments, f"hydra.run.dir={tmp_path / name}")
        return tmp_path / name

    return run


def test_an_explained_run_has_the_weights_of_another(application):
    plain, explained = application("plain"), application("explained", "explain=kernels.json")
    assert not (plain / "kernels.json").exists()
    layers = json.loads((explained / "kernels.json").read_text())["layers"]
    assert [layer["name"] for layer in layers] == [
        "encoder.data.proc",
        "processor.proc.0",
        "decoder.data.proc",
    ]
    assert [pass_["name"] for pass_ in layers[0]["passes"]] == ["forward", "backward"]
    conftest.assert_same(
        *(
            torch.load(folder / "last.pt", weights_only=True)["model"]
            for folder in (plain, explained)
        )
    )


def test_the_table_is_printed_before_training_with_the_precision_of_the_run(application, capsys):
    folder = application("run", "explain=print", "training.precision=bf16-mixed")
    log = (folder / "train.log").read_text()
    assert "bfloat16, cpu" in log
    assert log.index("backend torch") < log.index("training samples")


def test_an_evaluation_explains_forecasts(application, start, monkeypatch):
    folder = application("run")
    monkeypatch.setattr(evaluate, "write_report", lambda *_: None)
    start(
        evaluate,
        f"checkpoint={folder / 'best.pt'}",
        "explain=kernels.txt",
        f"hydra.run.dir={folder}_results",
    )
    text = folder.with_name("run_results").joinpath("kernels.txt").read_text()
    assert "forward: anemoi_gt::edge_attention_torch" in text
    assert "backward" not in text


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setattr(train, "is_launched", lambda: True)
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        config = compose("train", ["explain=print"])
    with pytest.raises(ValueError, match="explain and --multirun must be left out under torchrun"):
        train.prepare(config)
