"""What is said, and done, on a machine without compilers or with folders that cannot be written."""

import errno
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.applications import SMALL
from support.forked import Program
from support.releases import TORCH

from anemoi_gt import toolchain
from anemoi_gt.ops import backends
from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.refusal import permanent

triton_build = pytest.importorskip("triton.runtime.build")
NOWHERE = "/proc/none"  # where no folder can be made, by root neither
# the folder of the compile cache; PyTorch 2.9 makes it when something is compiled
IMPORT_MAKES_FOLDER = TORCH >= (2, 10)


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Triton's own step that compiles C code, with a fresh cache."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    find_compiler = getattr(triton_build, "_find_compiler", None)
    if find_compiler is not None:  # Triton 3.9 remembers the compiler that it finds
        find_compiler.cache_clear()

    def build(source="int unused;"):
        # loading fails: the extension has no Python module in it
        return triton_build.compile_module_from_src(source, "nothing", [], [], [])

    return build


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("PATH", "/nothing", "RuntimeError: Failed to find C compiler. .* CC environment variable"),
        ("CC", "/nothing/gcc", "FileNotFoundError: .*/nothing/gcc"),
        ("TRITON_CACHE_DIR", NOWHERE, f"FileNotFoundError: .*{NOWHERE}"),
    ],
)
def test_a_driver_that_cannot_be_built_quotes_triton_and_names_what_it_needs(
    build, monkeypatch, name, value, error
):
    monkeypatch.setenv(name, value)
    problem = toolchain.build_problem(build)
    assert re.match(f"Triton cannot build or load its driver: {error}", problem)
    assert problem.endswith(
        "; it needs a C compiler (gcc or clang, or one that the environment variable CC names), "
        "Python's headers, and a cache folder that can be written (TRITON_CACHE_DIR)"
    )


def test_a_compiler_that_fails_and_a_library_that_does_not_load_are_quoted(build):
    failed = toolchain.build_problem(lambda: build("#error"))
    assert failed.startswith("Triton cannot build or load its driver: CalledProcessError: ")
    not_loaded = toolchain.build_problem(build)
    assert not_loaded.startswith("Triton cannot build or load its driver: ImportError: ")


def test_what_builds_has_no_problem():
    assert toolchain.build_problem(lambda: None) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_gpu_the_driver_is_what_is_missing():
    assert toolchain.driver_problem().startswith("Triton cannot build or load its driver: ")


def failing(*numbers):
    """Return a launch that raises OSError with each number, then returns "launched"."""
    errors = [OSError(number, os.strerror(number), "tmp.pid_1") for number in numbers]

    def launch():
        if errors:
            raise errors.pop(0)
        return "launched"

    return launch


def test_a_launch_whose_removal_of_a_folder_raced_is_repeated():
    launch = failing(errno.EBUSY, errno.ENOTEMPTY, errno.ESTALE)
    assert toolchain.with_cache(launch) == "launched"


@pytest.mark.parametrize("numbers", [[errno.EROFS], [errno.EBUSY] * 20], ids=["read-only", "busy"])
def test_a_launch_that_cannot_write_the_cache_names_the_variable(numbers):
    with pytest.raises(OSError, match=r"^Triton's cache must be .*tmp.pid_1.* TRITON_CACHE_DIR, "):
        toolchain.with_cache(failing(*numbers))


def test_auto_says_once_why_it_computes_slowly_on_a_gpu(monkeypatch, caplog):
    reason = "Triton needs a C compiler, found none"
    stub = backends.BACKENDS["triton"]._replace(why_not=lambda *call: permanent(reason))
    monkeypatch.setitem(backends.BACKENDS, "triton", stub)
    with caplog.at_level(logging.WARNING, "anemoi_gt.ops.backends"):
        call = ({}, Dtypes(torch.float32), torch.device("cuda"))
        chosen = [backends.choose_backend("auto", *call) for _ in range(3)]
    assert all(backend is backends.BACKENDS["torch"] for backend in chosen)
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "'torch' computes on a GPU" in record.getMessage()


def test_a_compile_cache_that_cannot_be_written_is_named_with_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", NOWHERE)
    problem = toolchain.compile_problem(torch.device("cpu"))
    assert problem.startswith("the environment variable TORCHINDUCTOR_CACHE_DIR must name")
    assert problem.endswith(f"got {NOWHERE}: No such file or directory")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    assert toolchain.compile_cache_problem() is None


def test_without_a_cpp_compiler_one_sentence_names_cxx(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("CXX", "/nothing/g++")
    assert toolchain.compile_problem(torch.device("cpu")) == (
        "torch.compile needs a C++ compiler on a CPU, found no /nothing/g++; install g++, or name "
        "one in the environment variable CXX"
    )


def run(*arguments, **variables):
    # with PyTorch 2.15, importing torch-geometric prints one
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::FutureWarning", **variables}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.process
def test_info_names_a_compile_cache_that_cannot_be_made_among_the_rest():
    result = run("anemoi_gt", "info", TORCHINDUCTOR_CACHE_DIR=NOWHERE)
    assert (result.returncode, result.stderr) == (0, "")
    assert "cpu  does not run: the environment variable TORCHINDUCTOR_CACHE_DIR" in result.stdout
    install = f"not possible: [Errno 2] No such file or directory: '{NOWHERE}'"
    assert (install in result.stdout) == IMPORT_MAKES_FOLDER


@pytest.mark.process
@pytest.mark.skipif(not IMPORT_MAKES_FOLDER, reason="imports need no compile cache")
def test_a_command_that_cannot_be_imported_says_so_in_one_sentence():
    result = run("anemoi_gt", "train", TORCHINDUCTOR_CACHE_DIR=NOWHERE)
    assert result.returncode == 1
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("anemoi_gt.train: the environment variable TORCHINDUCTOR_CACHE_DIR")


@pytest.mark.process
def test_compiled_training_is_refused_where_nothing_can_be_compiled(tmp_path):
    # a folder that is made, but not written: rights do not stop root
    folder = Path("/proc/self/fdinfo")
    options = [*SMALL, "training.compile=true", "training.device=cpu", "hydra.run.dir=run"]
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    process = Program("-m", "anemoi_gt.train", *options, folder=tmp_path, environment=environment)
    status, _, error = process.finish(timeout=120)
    assert status == 1
    (line,) = error.splitlines()
    assert line.startswith("anemoi_gt.train: training.compile must be false here, got true: the ")
    assert f"got {folder}: " in line
