"""The application that exports: from a checkpoint to a package that runs in Python and in C++, and how it refuses."""

import json
import logging
import subprocess
import sys
from copy import copy
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module

from anemoi_gt import __main__ as command_line
from anemoi_gt import export, hydra_app
from anemoi_gt.training.checkpoint import save_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples" / "run_package"
SMALL = [
    *("data.grid_name=O4", "data.train_size=4", "data.valid_size=2", "data.test_size=3", "graph.refinement=1"),
    *("model.num_layers=1", "model.channels=16", "model.heads=2", "training.device=cpu", "attention.backend=torch"),
]


@pytest.fixture(scope="module", autouse=True)
def logging_put_back():
    """Undo what the application does to logging, after all tests of this file."""
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((root, "handlers"), (root, "level"), (logging, "raiseExceptions")):
            patch.setattr(place, name, copy(getattr(place, name)))  # so that they are put back
        yield


@pytest.fixture(scope="module")
def run():
    """The model and data of a small run, with weights that nobody trained."""
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        config = compose("train", SMALL)
    return hydra_app.build(config), hydra_app.describe(config)


@pytest.fixture(scope="module")
def checkpoint(run, tmp_path_factory):
    (_, model, _), config = run
    path = tmp_path_factory.mktemp("run") / "best.pt"
    save_checkpoint(path, {"average": model.state_dict(), "step": 12, "config": config})
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Run `python -m anemoi_gt export` in this process, with its files in a folder of their own."""

    def started(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv[:])
            command_line.main(["export", *arguments, f"hydra.run.dir={tmp_path_factory.mktemp('export')}"])

    return started


@pytest.fixture(scope="module")
def package(checkpoint, started):
    path = checkpoint.with_name("model.pt2")
    started(f"checkpoint={checkpoint}", f"out={path}", "max_batch=4")
    return path


@pytest.fixture
def example(run, tmp_path):
    """Inputs in a file, where the output goes, and what it must be."""
    (splits, model, _), _ = run
    x = torch.stack([splits.valid[i].inputs for i in (0, 1, 0)])
    torch.save(x, tmp_path / "x.pt")
    with torch.no_grad():
        return tmp_path / "x.pt", tmp_path / "change.pt", model.eval()(x)


def test_the_package_runs_in_python_where_our_code_is_not(package, example, without_our_code):
    x, change, expected = example
    said = without_our_code(EXAMPLES / "run_package.py", package, x, change)
    assert '"channels": ["tracer", "wind x"' in said
    torch.testing.assert_close(torch.load(change), expected)


def test_the_package_runs_in_cpp(package, example, tmp_path):
    x, change, expected = example
    torch_folder, program = Path(torch.__file__).parent, tmp_path / "run_package"
    libraries = torch_folder / "lib"
    compiler = ["g++", "-std=c++20", "-O0", f"-I{torch_folder / 'include'}", EXAMPLES / "main.cpp", "-o", program]
    linker = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([*compiler, *linker], check=True, capture_output=True, timeout=300)
    result = subprocess.run([program, package, x, change], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert "forecast: reference + mean + change * std" in result.stdout
    torch.testing.assert_close(torch.load(change), expected)


def test_a_loader_is_told_what_the_package_wants_and_gives(package, run):
    (splits, *_), _ = run
    metadata = torch._inductor.aoti_load_package(str(package)).get_metadata()
    (inputs,), (outputs,) = (json.loads(metadata[name]) for name in ("inputs", "outputs"))
    assert inputs["shape"] == ["1 to 4", 208, 9] and inputs["channels"] == list(splits.train.input_names)
    assert outputs["variables"] == ["tracer"] and outputs["units"] == ["kg/kg"]
    assert outputs["std"] == splits.train.change_std.tolist()
    assert metadata["lead_time_hours"] == "12" and metadata["backend"] == "torch" and metadata["step"] == "12"
    assert metadata["device"] == "cpu" and metadata["precision"] == "32-true"


def test_nothing_but_the_package_is_left_beside_it(package):
    assert sorted(path.name for path in package.parent.iterdir()) == ["best.pt", "model.pt2"]


@pytest.fixture
def refusal(started, capsys):
    """Start the application with arguments that it refuses; returns the last line that it says."""

    def refusal(*arguments):
        with pytest.raises(SystemExit) as exit_:
            started(*arguments)
        assert exit_.value.code == 1
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error.splitlines()[-1]

    return refusal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["checkpoint=nowhere.pt", "out={folder}/m.pt2"], "no checkpoint nowhere.pt: give the last.pt or best.pt"),
        (["out={folder}/m.pt2"], "checkpoint must be given, as checkpoint=VALUE"),
        (["checkpoint={checkpoint}"], "out must be given, as out=VALUE"),
        (["checkpoint={checkpoint}", "out=5"], "out must be the name of a file, as model.pt2, got 5"),
        (["checkpoint={checkpoint}", "out="], "out must be the name of a file, as model.pt2, got ''"),
        (["checkpoint={checkpoint}", "out={folder}/m.so"], "must have a name that ends in .pt2"),
        (["checkpoint={checkpoint}", "out={folder}/none/m.pt2"], "could not write {folder}/none/m.pt2: No such file"),
        (
            ["checkpoint={checkpoint}", "out={folder}/m.pt2", "max_batch=0"],
            "max_batch must be a whole number of samples, ",
        ),
        (
            ["checkpoint={checkpoint}", "out={folder}/m.pt2", "precision=fp8"],
            "precision must be one of 32-true, bf16-mixed, ",
        ),
        (
            ["checkpoint={checkpoint}", "out={folder}/m.pt2", "model.channels=32"],
            "the checkpoint's weights must be those of",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message, checkpoint, refusal, tmp_path):
    places = {"checkpoint": checkpoint, "folder": tmp_path}
    sentence = refusal(*(argument.format(**places) for argument in arguments))
    assert sentence.startswith("anemoi_gt.export: ") and message.format(**places) in sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="the backend runs here")
def test_a_backend_that_cannot_run_on_the_device_is_refused(checkpoint, refusal, tmp_path, monkeypatch):
    monkeypatch.setattr("anemoi_gt.ops.triton_backend.device.interpreted", lambda: False)
    arguments = (f"checkpoint={checkpoint}", f"out={tmp_path / 'm.pt2'}", "attention.backend=triton")
    assert "attention backend 'triton' cannot run here: its kernels run on a GPU" in refusal(*arguments)


def test_kernels_of_the_interpreter_are_refused_before_anything_is_exported(
    checkpoint, refusal, tmp_path, kernel_device
):
    if kernel_device.type == "cuda":
        pytest.skip("the kernels are compiled here")
    arguments = (f"checkpoint={checkpoint}", f"out={tmp_path / 'm.pt2'}", "attention.backend=triton")
    assert "kernels of Triton's interpreter cannot be exported; unset TRITON_INTERPRET" in refusal(*arguments)


def test_a_package_that_gives_other_numbers_is_not_left_behind(run, monkeypatch, tmp_path):
    (splits, model, training), _ = run
    monkeypatch.setattr(export, "export_model", lambda *_: None)
    monkeypatch.setattr(export, "write_package", lambda _, path, __: path.write_bytes(b"whatever"))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda _: lambda x: torch.ones(len(x), 208, 1))
    wanted = export.Wanted(tmp_path / "model.pt2", 4, "32-true")
    with pytest.raises(FloatingPointError, match="must give the numbers of the model"):
        export.export(hydra_app.Run(splits, model, training), wanted, {})
    assert not list(tmp_path.iterdir())
