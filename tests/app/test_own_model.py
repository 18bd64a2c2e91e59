"""The graph network on the page on training, trained and evaluated by the application."""

import json
import sys

import pytest
from support.applications import SMALL, train_in
from support.pages import FILE, ROOT, blocks

from anemoi_gt.app import evaluate_command

pytestmark = pytest.mark.application

PAGE = ROOT / "docs" / "training.md"
CONFIG = "# conf/model/graph_network.yaml\n"
RUN = ["model.channels=8", "model.num_layers=1", "training.steps=4", "training.valid_every=2"]


@pytest.mark.parametrize(
    "compiled", ("false", pytest.param("true", marks=[pytest.mark.compiled, pytest.mark.nightly]))
)
def test_the_model_of_ones_own_is_trained_and_evaluated(compiled, tmp_path, monkeypatch, capsys):
    (code,) = [code for code in blocks(PAGE, "python") if FILE.match(code)]
    (tmp_path / FILE.match(code)[1]).write_text(code)
    (config,) = [code for code in blocks(PAGE, "text") if code.startswith(CONFIG)]
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "graph_network.yaml").write_text(config)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    arguments = ("model=graph_network", *RUN, *SMALL, "training.device=cpu", "hydra.run.dir=run")
    arguments = (*arguments, f"training.compile={compiled}")
    train_in(tmp_path, "--config-dir", str(tmp_path / "conf"), *arguments)
    assert "parameters" in capsys.readouterr().out
    trained = json.loads((tmp_path / "run" / "scores.json").read_text())
    monkeypatch.chdir(tmp_path)
    checkpoint = "checkpoint=run/best.pt"
    monkeypatch.setattr(sys, "argv", ["anemoi_gt.evaluate", checkpoint, "hydra.run.dir=again"])
    evaluate_command.main()
    assert json.loads((tmp_path / "again" / "scores.json").read_text()) == trained
