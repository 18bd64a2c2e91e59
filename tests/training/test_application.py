"""The application as its users meet it: what it leaves, and how it refuses."""

import json
import os
import re
import subprocess
import sys

import pytest

from anemoi_gt import train
from anemoi_gt.ops import backends

SMALL = [
    *("data.grid_name=O4", "data.train_size=8", "data.valid_size=2", "data.test_size=3", "graph.refinement=1"),
    *("training.steps=4", "training.warmup_steps=1", "training.batch_size=2", "training.device=cpu"),
]


@pytest.fixture
def application(monkeypatch, logging_as_before, tmp_path):
    """Run the application with arguments, in its own folder; returns that folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["anemoi_gt.train", *arguments])
        train.main()
        (folder,) = (tmp_path / "outputs").glob("*/*")
        return folder

    return run


def refusal(application, *arguments):
    """What the application exits with."""
    with pytest.raises(SystemExit) as exit_:
        application(*SMALL, *arguments)
    return exit_.value.code


def test_a_run_leaves_checkpoints_metrics_scores_and_a_picture(application, capsys):
    folder = application(*SMALL)
    assert folder.parent.name == "sphere"
    assert {path.name for path in folder.iterdir()} == {
        *("best.pt", "last.pt", "metrics.jsonl", "scores.json", "forecast.png", "train.log", ".hydra")
    }
    scores = json.loads((folder / "scores.json").read_text())
    assert [score["forecast"] for score in scores] == ["model", "persistence"]
    output = capsys.readouterr()
    assert re.search(rf"persistence +{scores[1]['rmse']:.4f}", output.out)
    assert f"written: {folder / 'forecast.png'}" in output.out
    assert "samples/s" in output.err and "loss=" in output.err


def test_a_backend_that_cannot_run_is_refused_with_its_reason_before_training(application, monkeypatch, tmp_path):
    unable = backends.BACKENDS["triton"]._replace(why_not=lambda query: "it is Sunday")
    monkeypatch.setitem(backends.BACKENDS, "triton", unable)
    for choice in ("attention/backend=triton", "attention.backend=triton"):
        message = "anemoi_gt.train: attention backend 'triton' cannot run here: it is Sunday"
        assert refusal(application, choice) == message
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_without_a_gpu_the_triton_kernels_say_why_they_cannot_run(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-m", "anemoi_gt.train", *SMALL, "attention/backend=triton"],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert re.fullmatch(r"anemoi_gt.train: attention backend 'triton' cannot run here: [^\n]+\n", result.stderr)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("attention.backend=cuda", "backend must be one of auto, triton, torch, got 'cuda'"),
        ("training.steps=0", "training.steps must be at least 1, got 0"),
        ("model.channels=7", "channels must be a multiple of heads, got 7 channels and"),
        ("+model.width=7", "unexpected keyword argument 'width'"),
        ("data.grid_name=N3", "grid must be"),
        ("data.flows=[shear]", "flows must be one or more of rotation, deformation, got ['shear']"),
    ],
)
def test_a_wrong_value_is_one_sentence(application, argument, message):
    code = refusal(application, argument)
    assert code.startswith("anemoi_gt.train: ") and message in code and "\n" not in code


def test_a_missing_file_is_one_sentence(application):
    with pytest.raises(SystemExit) as exit_:
        application("data=era5_uk", "data.path=nowhere.grib")
    assert re.fullmatch(r"anemoi_gt.train: no file nowhere.grib: [^\n]+", exit_.value.code)


def test_a_loss_that_explodes_is_one_sentence(application):
    code = refusal(application, "training.learning_rate=1e30", "training.steps=50", "training.log_every=50")
    assert re.fullmatch(r"anemoi_gt.train: the loss must stay finite, got nan at step [^\n]+", code)


def test_an_unknown_option_names_the_known_ones(application, capsys):
    assert refusal(application, "attention/backend=cuda") == 1
    error = capsys.readouterr().err
    assert "Could not find 'attention/backend/cuda'" in error and "Traceback" not in error
    for known in ("auto", "torch", "triton"):
        assert f"\t{known}\n" in error


@pytest.mark.parametrize("package", ["hydra", "tqdm", "matplotlib", "scipy"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as exit_:
        train.main()
    assert exit_.value.code.startswith(f"anemoi_gt.train: {package} ")
    assert exit_.value.code.endswith("pip install 'anemoi-gt[train]'")


def test_a_sweep_leaves_a_folder_for_each_run(application):
    sweep = application("-m", *SMALL, "training.seed=0,1")
    losses = [json.loads((sweep / run / "metrics.jsonl").read_text().splitlines()[0])["loss"] for run in "01"]
    assert losses[0] != losses[1]


def test_a_bare_null_chooses_the_precision_that_arrives(application):
    folder = application(*SMALL, "attention/precision=null")
    assert "precision: null" in (folder / ".hydra" / "config.yaml").read_text()
    assert "attention/precision: 'null'" in (folder / ".hydra" / "hydra.yaml").read_text()


def test_help_lists_groups_and_values_on_the_command_line():
    result = subprocess.run(
        [sys.executable, "-m", "anemoi_gt.train", "--help"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "attention/backend: auto, torch, triton" in result.stdout
    assert "learning_rate: " in result.stdout
