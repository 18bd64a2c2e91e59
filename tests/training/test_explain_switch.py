"""`explain` on the command line: which kernels serve a run, written before it, without changing it."""

import json
import sys

import pytest
import torch
from hydra import compose, initialize_config_module

from anemoi_gt import evaluate, train

SMALL = [
    *("data.grid_name=O4", "data.train_size=8", "data.valid_size=2", "data.test_size=3", "graph.refinement=1"),
    *(
        "model.num_layers=1",
        "model.dropout=0.1",
        "training.steps=2",
        "training.warmup_steps=1",
        "training.batch_size=2",
    ),
    *("training.device=cpu", "training.threads=1"),
]


@pytest.fixture
def application(monkeypatch, logging_as_before, tmp_path):
    """Train with arguments in a folder of this name, without a report; return the folder."""
    monkeypatch.setattr(train, "write_report", lambda *_: None)

    def run(name, *arguments):
        folder = tmp_path / name
        monkeypatch.setattr(sys, "argv", ["anemoi_gt.train", *SMALL, *arguments, f"hydra.run.dir={folder}"])
        train.main()
        return folder

    return run


def weights(folder):
    return torch.load(folder / "last.pt", weights_only=True)["model"]


def test_an_explained_run_has_the_weights_of_another(application):
    plain, explained = application("plain"), application("explained", "explain=kernels.json")
    assert not (plain / "kernels.json").exists()
    layers = json.loads((explained / "kernels.json").read_text())["layers"]
    assert [layer["name"] for layer in layers] == ["encoder.data.proc", "processor.proc.0", "decoder.data.proc"]
    assert [pass_["name"] for pass_ in layers[0]["passes"]] == ["forward", "backward"]
    for name, weight in weights(plain).items():
        assert torch.equal(weight, weights(explained)[name]), name


def test_the_table_is_printed_before_training_with_the_precision_of_the_run(application, capsys):
    folder = application("run", "explain=print", "training.precision=bf16-mixed")
    log = (folder / "train.log").read_text()
    assert "bfloat16, cpu" in log and log.index("backend torch") < log.index("training samples")


def test_an_evaluation_explains_forecasts(application, monkeypatch):
    folder = application("run")
    monkeypatch.setattr(evaluate, "evaluate", lambda *_: None)
    results = folder.parent / "results"
    arguments = [f"checkpoint={folder / 'best.pt'}", "explain=kernels.txt", f"hydra.run.dir={results}"]
    monkeypatch.setattr(sys, "argv", ["anemoi_gt.evaluate", *arguments])
    evaluate.main()
    text = (results / "kernels.txt").read_text()
    assert "forward: anemoi_gt::edge_attention_torch" in text and "backward" not in text


@pytest.mark.parametrize("value", ["true", "3", "''"])
def test_a_value_that_names_nothing_is_one_sentence(application, capsys, value):
    with pytest.raises(SystemExit):
        application("run", f"explain={value}")
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("anemoi_gt.train: explain must be null, print or the name of a file, got ")
    )


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setattr(train, "is_launched", lambda: True)
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        config = compose("train", ["explain=print"])
    with pytest.raises(ValueError, match="explain must be null under torchrun"):
        train.prepare(config)
