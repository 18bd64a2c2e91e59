"""The application on the command line: the files of a run, and its errors."""

import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from omegaconf import OmegaConf

from anemoi_gt.app import train_command as train
from anemoi_gt.app.objects import check_types
from anemoi_gt.app.training.run_files import save_checkpoint
from anemoi_gt.app.training.run_folder import ONE_PROCESS
from anemoi_gt.app.training.step import TrainingStep
from anemoi_gt.ops import backends
from anemoi_gt.refusal import permanent

from . import conftest
from .test_configs import composed

pytestmark = pytest.mark.application

SMALL = [*conftest.SMALL, "training.steps=4", "training.batch_size=2"]


@pytest.fixture
def application(monkeypatch, start, tmp_path):
    """Run the application with arguments in a new folder; return the folder of the run."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        start(train, *arguments)
        (folder,) = (tmp_path / "outputs").glob("*/*")
        return folder

    return run


@pytest.fixture
def refusal(application, error_line):
    return partial(error_line, application)


def test_a_run_leaves_checkpoints_metrics_scores_and_a_plot(application, capsys):
    folder = application(*SMALL)
    assert folder.parent.name == "sphere"
    names = {
        "best.pt",
        "last.pt",
        "metrics.jsonl",
        "scores.json",
        "forecast.png",
        "train.log",
        ".hydra",
    }
    assert {path.name for path in folder.iterdir()} == names
    scores = json.loads((folder / "scores.json").read_text())
    assert [score["forecast"] for score in scores] == ["model", "persistence"]
    output = capsys.readouterr()
    assert re.search(rf"persistence +{scores[1]['rmse']:.4f}", output.out)
    assert f"written: {folder / 'forecast.png'}" in output.out
    assert "samples/s" in output.err
    assert "loss=" in output.err


TINY_9_KM = [
    "graph=o1280",
    "data=sphere",
    *SMALL,
    "graph.grid=O4",
    "model.channels=16",
    "model.checkpoint_groups=1",
    "training.compile=false",
    "training.steps=1",
]


def test_the_9_km_recipe_trains(application, without_pictures):
    folder = application(*TINY_9_KM, "model.mapper_chunks=2")
    assert "trained" in (folder / "train.log").read_text()
    assert (folder / "scores.json").exists()


@pytest.mark.parametrize("phase", ["__init__", "training_step"])
def test_a_gpu_that_is_too_small_ends_with_the_sentence_of_pytorch(refusal, monkeypatch, phase):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 13.50 GiB.")

    monkeypatch.setattr(TrainingStep, phase, fail)
    message = "anemoi_gt.train: CUDA out of memory. Tried to allocate 13.50 GiB."
    assert refusal(*SMALL) == message


def test_a_backend_that_cannot_run_is_refused_with_its_reason_before_training(
    refusal, monkeypatch, tmp_path
):
    unable = backends.BACKENDS["triton"]._replace(why_not=lambda *call: permanent("no reason"))
    monkeypatch.setitem(backends.BACKENDS, "triton", unable)
    message = "anemoi_gt.train: attention backend 'triton' cannot run here: no reason"
    for choice in ("kernels=triton", "kernels.backend=triton"):
        assert refusal(*SMALL, choice) == message
    assert not list(tmp_path.rglob("metrics.jsonl"))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("training.steps=0", "training.steps must be at least 1, got 0"),
        (
            "training.cuda_graph=true",
            "training.cuda_graph must be null or false, got true: device cpu has no CUDA graphs",
        ),
        ("training.steps=many", "training.steps must be int, got 'many'"),
        ("training.threads=1.5", "training.threads must be int | None, got 1.5"),
        ("training.learning_rate=true", "training.learning_rate must be float, got True"),
        ("data.grid_name=[O4]", "data.grid_name must be str, got ['O4']"),
        ("resume=maybe", "resume must be true or false, got 'maybe'"),
        ("explain=true", "explain must be print or the name of a file, got True"),
        ("training.seed=???", "training.seed must be given, as training.seed=VALUE"),
        ("+model.width=7", "unexpected keyword argument 'width'"),
        (
            "training.batch_size=9",
            "training.batch_size must be at most 8, the number of training samples, got 9",
        ),
        ("graph.refinement=5", "the graph must fit the data, 9998 of its 10242 hidden nodes"),
        ("init_from=nowhere.pt", "no checkpoint nowhere.pt"),
        (
            "data=era5_uk data.path=nowhere.grib",
            "no file nowhere.grib: give the data as data.path=FILE",
        ),
        ("data=xarray", "data.path must be given, as data.path=VALUE"),
        (
            "data=xarray data.path=a data.train=2020",
            "data.train must be list[str] | None, got 2020",
        ),
        ("data.flows=[shear]", "flows must be one or more of rotation, deformation, got ['shear']"),
        ("~model", "Key 'model' is not in struct"),
        ("++data._target_=os.system", "Target 'os.system' is blocklisted"),
        (
            "training.learning_rate=1e30 training.steps=8 training.log_every=8",
            "got nan at step 8: lower training.learning_rate",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence(refusal, without_pictures, argument, message):
    options = argument.split(" ")
    if not options[0].startswith(("data=", "~")):
        options = [*SMALL, *options]
    sentence = refusal(*options)
    assert sentence.startswith("anemoi_gt.train: ")
    assert message in sentence


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("training.stpes=3", "there is no option training.stpes"),
        (
            "model=resnet",
            "Could not find 'model/resnet' Available options in 'model': default era5_uk",
        ),
        ("kernels=cuda", "Could not find 'kernels/cuda' Available options in 'kernels': auto"),
        ("training.steps=[", "no viable alternative at input '['"),
    ],
)
def test_an_error_of_hydra_is_one_sentence_with_a_pointer_to_help(
    application, capsys, argument, problem
):
    with pytest.raises(SystemExit, match="^1$"):
        application(*SMALL, argument)
    (error,) = capsys.readouterr().err.splitlines()
    end = ": nothing was started; anemoi-gt train --help lists all groups and options"
    assert error.startswith("anemoi_gt.train: ")
    assert problem in error
    assert error.endswith(end)


def test_an_option_that_is_given_twice_is_refused(monkeypatch, capsys):
    """As bash writes data.path={2019,2020}.nc, of which Hydra takes the last."""
    words = ["anemoi_gt.train", "data=xarray", "data.path=2019.nc", "data.path=2020.nc"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="^1$"):
        train.main()
    message = 'data.path must be given once, got data.path=2019.nc and data.path=2020.nc: several values are a list in quotes, "data.path=[...]"'
    assert capsys.readouterr().err == f"anemoi_gt.train: {message}\n"


def test_a_path_in_the_home_folder_is_found(refusal):
    sentence = refusal("data=xarray", "data.path=~/nowhere.nc")
    assert f"no file {Path.home() / 'nowhere.nc'}" in sentence
    sentence = refusal("data=xarray", "data.path=[~/nowhere.nc,b.nc]")
    assert f"no file {Path.home() / 'nowhere.nc'}" in sentence


def test_a_name_in_place_of_a_list_gets_a_remedy(refusal):
    sentence = refusal("data=xarray", "data.path=a.nc", "data.diagnostics=tp")
    assert sentence.endswith("got 'tp': write \"data.diagnostics=[tp]\"")


def test_a_folder_that_holds_a_run_is_not_overwritten(application, refusal, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.pt").write_bytes(b"a run")
    sentence = refusal(*SMALL, f"hydra.run.dir={tmp_path / 'run'}")
    holds = f"{tmp_path / 'run'} holds a run"
    assert (
        sentence
        == f"anemoi_gt.train: {holds}: resume=true continues it, another hydra.run.dir starts a "
        "new one"
    )
    assert (tmp_path / "run" / "last.pt").read_bytes() == b"a run"


def test_an_interrupt_before_training_is_one_sentence(application, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("anemoi_gt.app.objects.build_data", interrupted)
    with pytest.raises(SystemExit, match="^130$"):
        application(*SMALL)
    assert capsys.readouterr().err == "anemoi_gt.train: interrupted\n"


def test_a_bug_keeps_its_traceback(application, monkeypatch):
    def broken(*_):
        raise ValueError("broken")

    monkeypatch.setattr(train, "train", broken)
    with pytest.raises(ValueError, match="broken"):
        application(*SMALL)


BEGUN = {
    "training": {"steps": 4, "device": "cuda", "compile": False, "cuda_graph": False},
    "data": {"path": "a"},
    "kernels": {"backend": "triton"},
}
FASTER = {
    "training": {"steps": 4, "device": "cpu", "compile": True, "cuda_graph": True},
    "data": {"path": "b"},
    "kernels": {"backend": "torch"},
}


def test_a_run_continues_on_another_device_with_its_own_config(tmp_path):
    resume = partial(train.checkpoint_to_resume, tmp_path, writer=ONE_PROCESS, resume=True)
    assert resume(BEGUN) is None  # begins in an empty folder
    with_default = BEGUN | {"training": BEGUN["training"] | {"cuda_graph": None}}
    # compile and cuda_graph are switched off, and on, or to the default
    for config, other in (
        (FASTER, BEGUN),
        (BEGUN, FASTER),
        (BEGUN, with_default),
        (with_default, FASTER),
    ):
        save_checkpoint(tmp_path / "last.pt", {"config": config})
        assert resume(other) == {"config": config}


@pytest.mark.parametrize("option", ["data.train_size", "data.valid_size", "data.path_of_masks"])
def test_an_option_whose_name_begins_like_one_that_may_differ_may_not(tmp_path, option):
    name = option.removeprefix("data.")
    save_checkpoint(tmp_path / "last.pt", {"config": {"data": {name: 8}}})
    resume = partial(train.checkpoint_to_resume, tmp_path, writer=ONE_PROCESS, resume=True)
    with pytest.raises(ValueError, match=f"was written with {option}=8, not 4$"):
        resume({"data": {name: 4}})


def test_a_run_without_a_checkpoint_starts_again_with_its_own_config(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("model:\n  channels: 8\n")
    resume = partial(train.checkpoint_to_resume, tmp_path, writer=ONE_PROCESS, resume=True)
    assert resume({"model": {"channels": 8}}) is None
    with pytest.raises(ValueError, match="config.yaml was written with model.channels=8, not 16$"):
        resume({"model": {"channels": 16}})


def test_the_log_of_a_run_on_a_cpu_has_no_word_on_cuda_graphs(application, without_pictures):
    folder = application(*SMALL, "training.device=auto")
    log = (folder / "train.log").read_text()
    assert "trained" in log
    assert ("CUDA graph" in log) == torch.cuda.is_available()


@pytest.mark.parametrize("package", ["hydra", "tqdm", "matplotlib", "scipy"])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, monkeypatch, refusal):
    monkeypatch.setitem(sys.modules, package, None)
    assert re.fullmatch(
        rf"anemoi_gt.train: {package} .*pip install 'anemoi-gt\[train\]'", refusal()
    )


def test_a_sweep_leaves_a_folder_for_each_run(application, without_pictures):
    sweep = application("-m", *SMALL, "training.seed=0,1")
    losses = [
        json.loads((sweep / run / "metrics.jsonl").read_text().splitlines()[0])["loss"]
        for run in "01"
    ]
    assert losses[0] != losses[1]


def test_a_sweep_under_torchrun_is_refused(refusal, monkeypatch):
    monkeypatch.setattr(train, "is_launched", lambda: True)
    monkeypatch.setattr(train, "exit_without_finalization", sys.exit)
    monkeypatch.setenv("RANK", "0")
    sentence = (
        "explain and --multirun must be left out under torchrun, which trains one run on parts of the "
        "graph"
    )
    assert refusal("-m", *SMALL, "training.seed=0,1") == f"[rank0]: anemoi_gt.train: {sentence}"


def test_help_has_every_group_and_every_option_with_its_value(start, capsys):
    with pytest.raises(SystemExit, match="^0$"):
        start(train, "--help", "training.steps=7")
    groups, _, values = capsys.readouterr().out.partition("Options, with the values")
    assert "kernels: auto, torch, triton" in groups
    shown = yaml.safe_load(values.partition("\n")[2].partition("\nhydra.verbose=true")[0])
    expected = OmegaConf.to_container(composed())
    expected["training"]["steps"] = 7
    assert shown == expected


def fields_of(
    years: list[int], area: tuple[float, float] | None = None, files: str | list[str] = ""
):
    """Options of a data set."""


def test_lists_are_checked_and_types_unknown_to_omegaconf_are_not(monkeypatch):
    monkeypatch.setattr(train, "fields_of", fields_of, raising=False)
    values = {
        "_target_": "anemoi_gt.app.train_command.fields_of",
        "years": [1, "2"],
        "area": [1.0, 2.0],
        "files": ["a"],
    }
    config = OmegaConf.create({"data": values})
    wrong = OmegaConf.create({"data": values | {"years": ["two"]}})
    check_types(config, "data")
    assert config.data.years == [1, 2]
    with pytest.raises(ValueError, match=r"data.years must be list\[int\], got \['two'\]"):
        check_types(wrong, "data")


@pytest.mark.parametrize(
    ("torchruns", "message"),
    [
        (None, "several tasks of srun must train one run by torchrun, got 2 tasks without it"),
        ("1", "must share one job, got 2 tasks with a job each: give torchrun --nnodes=2"),
    ],
)
def test_several_tasks_of_slurm_without_one_torchrun_are_refused(monkeypatch, torchruns, message):
    monkeypatch.setattr(train, "is_launched", lambda: torchruns is not None)
    environment = {"SLURM_STEP_NUM_TASKS": "2"}
    if torchruns is not None:
        environment["GROUP_WORLD_SIZE"] = torchruns
    with pytest.raises(ValueError, match=message):
        train.check_slurm_tasks(environment)


@pytest.mark.parametrize("environment", [{}, {"SLURM_NTASKS": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}])
def test_one_task_of_slurm_may_train(environment):
    train.check_slurm_tasks(environment)
