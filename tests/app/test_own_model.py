"""Graph networks, and the processor on the page on training, trained and evaluated by the application."""

import json
import sys

import pytest
from support.applications import SMALL, train_in
from support.pages import FILE, ROOT, blocks

from anemoi_gt.app import evaluate_command
from anemoi_gt.app.training.run_files import load_checkpoint

pytestmark = pytest.mark.application

PAGE = ROOT / "docs" / "training.md"
CONFIG = "# conf/model/own.yaml\n"
RUN = ["model.channels=8", "model.num_layers=1", "training.steps=4", "training.valid_every=2"]


@pytest.mark.parametrize(
    "compiled", ("false", pytest.param("true", marks=[pytest.mark.compiled, pytest.mark.nightly]))
)
def test_the_model_of_ones_own_is_trained_and_evaluated(
    compiled, tmp_path, monkeypatch, capsys, without_pictures
):
    (code,) = [code for code in blocks(PAGE, "python") if FILE.match(code)]
    (tmp_path / FILE.match(code)[1]).write_text(code)
    (config,) = [code for code in blocks(PAGE, "text") if code.startswith(CONFIG)]
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "own.yaml").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    arguments = ("--config-dir", str(tmp_path / "conf"), "model=own")
    train_and_evaluate(tmp_path, monkeypatch, *arguments, f"training.compile={compiled}")
    assert "parameters" in capsys.readouterr().out


def test_graph_networks_are_trained_and_evaluated(tmp_path, monkeypatch, without_pictures):
    train_and_evaluate(tmp_path, monkeypatch, "model=graph_network", "model.mapper_chunks=2")
    model = load_checkpoint(tmp_path / "run" / "best.pt")["model"]
    assert "processor.proc.0.conv.edge_mlp.mlp.0.weight" in model


def train_and_evaluate(tmp_path, monkeypatch, *arguments):
    """Check that the scores of a checkpoint are those at the end of training."""
    train_in(tmp_path, *arguments, *RUN, *SMALL, "training.device=cpu", "hydra.run.dir=run")
    trained = json.loads((tmp_path / "run" / "scores.json").read_text())
    monkeypatch.chdir(tmp_path)
    checkpoint = "checkpoint=run/best.pt"
    monkeypatch.setattr(sys, "argv", ["anemoi_gt.evaluate", checkpoint, "hydra.run.dir=again"])
    evaluate_command.main()
    assert json.loads((tmp_path / "again" / "scores.json").read_text()) == trained
