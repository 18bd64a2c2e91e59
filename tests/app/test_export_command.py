"""The export application: from a checkpoint to a package that runs in Python and C++, and its errors."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_module
from support import applications
from support.applications import last_error, logging_as_before
from support.once import compute_once

from anemoi_gt import __main__ as command_line
from anemoi_gt.app import export_command as application
from anemoi_gt.app import objects
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.datasets.sphere_advection import SphereDataset
from anemoi_gt.app.scores import model_forecast
from anemoi_gt.app.training.run_files import save_checkpoint

pytestmark = [pytest.mark.compiled, pytest.mark.process]

EXAMPLES = Path(__file__).parents[2] / "examples" / "run_package"
SMALL = [
    *applications.SMALL,
    *("model.channels=16", "model.heads=2", "training.device=cpu", "kernels.backend=torch"),
]


@pytest.fixture(scope="module", autouse=True)
def restore_logging(unoptimised_packages):
    with logging_as_before():
        yield


@pytest.fixture(scope="module")
def run():
    """The model and data of a small run, untrained, and its config."""
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        config = compose("train", SMALL)
    return objects.build(config), objects.describe(config)


@pytest.fixture(scope="module")
def checkpoint(run, tmp_path_factory):
    path, (_, model, _), config = tmp_path_factory.mktemp("run") / "best.pt", *run
    save_checkpoint(path, {"average": model.state_dict(), "step": 12, "config": config})
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Run `anemoi-gt export` in this process, with a folder for its files."""

    def started(*arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", sys.argv[:])
            command_line.main(
                ["export", *arguments, f"hydra.run.dir={tmp_path_factory.mktemp('export')}"]
            )

    return started


@pytest.fixture(scope="module")
def package(checkpoint, started, tmp_path_factory, worker_id):
    def export():
        path = checkpoint.with_name("model.pt2")
        started(f"checkpoint={checkpoint}", f"out={path}", "max_batch=4")
        return str(path)

    return Path(compute_once("package", export, tmp_path_factory, worker_id))


@pytest.fixture
def example(run, tmp_path):
    """A file of physical fields, the path of the output, and the forecast of the application."""
    (splits, model, _), _ = run
    valid = splits.valid
    fields = torch.stack([valid.physical_sample(i)[0] for i in (0, 1, 0)])
    torch.save(fields, tmp_path / "fields.pt")
    expected = torch.stack([model_forecast(model.eval(), valid)(i) for i in (0, 1, 0)])
    return tmp_path / "fields.pt", tmp_path / "forecast.pt", expected


def test_package_runs_in_python_without_this_library(package, example, run_without_library):
    fields, forecast, expected = example
    output = run_without_library(EXAMPLES / "run_package.py", package, fields, forecast)
    assert '"channels": ["tracer", "wind x"' in output
    torch.testing.assert_close(torch.load(forecast), expected)


def compile_program(program):
    """Compile the example in C++; return its path."""
    torch_folder = Path(torch.__file__).parent
    libraries = torch_folder / "lib"
    compiler = [
        "g++",
        "-std=c++20",
        "-O0",
        f"-I{torch_folder / 'include'}",
        EXAMPLES / "main.cpp",
        "-o",
        program,
    ]
    linker = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run([*compiler, *linker], check=True, capture_output=True, timeout=300)
    return str(program)


@pytest.fixture(scope="module")
def cpp_program(tmp_path_factory, worker_id):
    compile_it = partial(compile_program, tmp_path_factory.mktemp("cpp") / "run")
    return Path(compute_once("program in C++", compile_it, tmp_path_factory, worker_id))


DTYPE = r"unmatched dtype, expected: 6\(at::kFloat\), but got: 7"
WRONG_FIELDS = {
    "another dtype": (torch.Tensor.double, DTYPE),
    "a transposed view": (lambda x: x.mT.contiguous().mT, "stride value at 1, expected: 5, .* 1"),
    "a missing channel": (lambda x: x[..., :4].contiguous(), "dim value at 2, expected: 5, .* 4"),
    "a missing node": (lambda x: x[:, :207].contiguous(), "dim value at 1, expected: 208, .* 207"),
    "no batch": (lambda x: x[0], "dim value is too large at 0, expected to be <= 4, .* 208"),
    "too large a batch": (lambda x: torch.cat([x, x]), "too large at 0, .* <= 4, but got: 6"),
}


@pytest.mark.parametrize(("change", "got"), WRONG_FIELDS.values(), ids=WRONG_FIELDS)
def test_package_refuses_wrong_fields_in_python(package, example, change, got, capfd, monkeypatch):
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    loaded = torch._inductor.aoti_load_package(str(package))
    wrong = change(torch.load(example[0]))
    with pytest.raises(RuntimeError):
        loaded(wrong)
    assert re.search(rf"^Error: input_handles\[0\]: .*{got}$", capfd.readouterr().err, re.M)


@pytest.mark.nightly  # compiling the program takes ten seconds
def test_package_refuses_wrong_fields_in_cpp(package, example, cpp_program):
    fields, forecast, _ = example
    torch.save(torch.load(fields).double(), fields)
    result = subprocess.run(
        [cpp_program, package, fields, forecast], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1
    assert not forecast.exists()
    assert re.search(rf"^Error: input_handles\[0\]: {DTYPE}", result.stderr, re.M), result.stderr
    assert "run_package: " in result.stderr


@pytest.mark.nightly
def test_package_runs_in_cpp(package, example, cpp_program):
    fields, forecast, expected = example
    result = subprocess.run(
        [cpp_program, package, fields, forecast], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert "forecast: physical values in, physical values out" in result.stdout
    torch.testing.assert_close(torch.load(forecast), expected)


def test_metadata_describes_inputs_outputs_and_origin(package, run):
    (splits, *_), _ = run
    metadata = torch._inductor.aoti_load_package(str(package)).get_metadata()
    (inputs,), (outputs,) = (json.loads(metadata[name]) for name in ("inputs", "outputs"))
    assert inputs["shape"] == ["1 to 4", 208, 5]
    assert inputs["channels"] == list(splits.train.input_names[:5])
    assert inputs["units"] == ["kg/kg", "m/s", "m/s", "m/s", "m/s"]
    assert outputs["variables"] == ["tracer"]
    assert outputs["units"] == ["kg/kg"]
    assert json.loads(metadata["normalisation"])["change_std"] == splits.train.statistics.change_std
    expected = {
        "lead_time_hours": "12",
        "backend": "torch",
        "step": "12",
        "device": "cpu",
        "precision": "32-true",
    }
    assert expected.items() <= metadata.items()
    # and no other file
    assert sorted(path.name for path in package.parent.iterdir()) == ["best.pt", "model.pt2"]


@pytest.fixture
def error_line(started, capsys):
    return partial(last_error, capsys, started)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{checkpoint}", "out must be given, as out=VALUE"),
        ("{checkpoint} out=5", "must end in .pt2, which PyTorch's loader requires, got 5"),
        ("{checkpoint} out=", "the name of a package must end in .pt2"),
        ("{checkpoint} out={folder}/m.so", "must end in .pt2"),
        (
            "{checkpoint} out={folder}/none/m.pt2",
            "could not write {folder}/none/m.pt2: No such file",
        ),
        ("{checkpoint} out={folder}/m.pt2 max_batch=0", "max_batch must be at least 1, got 0"),
        (
            "{checkpoint} out={folder}/m.pt2 precision=fp8",
            "precision must be one of 32-true, bf16-mixed, ",
        ),
    ],
)
def test_invalid_arguments_end_with_one_sentence(
    arguments, message, checkpoint, error_line, tmp_path
):
    places = {"checkpoint": f"checkpoint={checkpoint}", "folder": tmp_path}
    sentence = error_line(*arguments.format(**places).split())
    assert sentence.startswith("anemoi_gt.export: ")
    assert message.format(**places) in sentence
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled and run here")
def test_kernels_that_cannot_run_or_are_interpreted_raise_before_export(
    checkpoint, error_line, tmp_path, monkeypatch
):
    arguments = (f"checkpoint={checkpoint}", f"out={tmp_path / 'm.pt2'}", "kernels.backend=triton")
    assert (
        "kernels cannot be exported under Triton's interpreter: unset TRITON_INTERPRET"
        in error_line(*arguments)
    )
    monkeypatch.setattr("anemoi_gt.ops.triton_backend.device.interpreted", lambda: False)
    assert "attention backend 'triton' cannot run here: its kernels run on a GPU" in error_line(
        *arguments
    )


def test_package_that_disagrees_with_the_model_is_removed(run, monkeypatch, tmp_path):
    (splits, model, training), _ = run
    monkeypatch.setattr(application, "export_model", lambda *_: None)
    monkeypatch.setattr(application, "write_package", lambda _, path, __: path.write_bytes(b"any"))
    monkeypatch.setattr(
        torch._inductor, "aoti_load_package", lambda _: lambda x: torch.ones(len(x), 208, 1)
    )
    with pytest.raises(FloatingPointError, match="must agree with the model"):
        application.export(
            objects.Run(splits, model, training),
            tmp_path / "model.pt2",
            4,
            {"precision": "32-true"},
        )
    assert not list(tmp_path.iterdir())


def test_a_data_set_without_physical_inputs_is_refused(
    checkpoint, error_line, tmp_path, monkeypatch
):
    monkeypatch.setattr(SphereDataset, "physical_inputs", ForecastDataset.physical_inputs)
    sentence = error_line(f"checkpoint={checkpoint}", f"out={tmp_path / 'm.pt2'}")
    assert "a package needs a data set that implements physical_inputs()" in sentence
