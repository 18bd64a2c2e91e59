"""Commands of the README and the documentation: all exist and compose; commands that can run here run in order."""

import os
import re
import subprocess
import sys
import time
import tomllib
from functools import cache

import pytest
from hydra import compose, initialize_config_module
from support import applications
from support.applications import last_of_each
from support.forked import Program
from support.pages import FILE, PAGES, ROOT, blocks, commands, name_of

from anemoi_gt import __main__ as command_line
from anemoi_gt.app import train_command as train

pytestmark = pytest.mark.pages

SMALL = [
    *applications.SMALL,
    "model.channels=16",
    "training.steps=4",
    "training.warmup_steps=1",
    "training.batch_size=2",
    "training.device=cpu",
]
SMALL_ON_FILES = [
    "model.num_layers=1",
    "model.channels=8",
    "training.steps=4",
    "training.device=cpu",
]
# Commands that need a file, a GPU, four cores, or a minute of a C++ compiler are only composed.
NOT_HERE = {
    "data=era5_uk",
    "data=anemoi",
    "data.path=other.nc",
    "data.path=FILE",
    "checkpoint=runs/mine/best.pt",
    "data.path=uk.grib",
    "checkpoint=runs/uk/best.pt",
    "graph=o1280",
    "kernels=triton",
    "--nproc-per-node=4",
    "export",
}
WITH_COMMANDS = [page for page in PAGES if commands(page)]


def runs_here(words):
    return not {word.removeprefix("anemoi_gt.") for word in words} & NOT_HERE


def overrides(words):
    """Return application and overrides of `anemoi-gt NAME` or `-m anemoi_gt.NAME`, else None."""
    name, *values = re.split(r"^anemoi-gt |-m anemoi_gt\.", " ".join(words))[-1].split()
    return (name, values) if name in command_line.APPLICATIONS else None


@cache
def options_of(application):
    """Return the names of the options that an application has of its own."""
    return frozenset(compose(application))


@cache  # pages repeat commands, and a composition takes up to a second
def understand(application, values):
    """Compose the config of an application with its own overrides, and the config of a run with the others."""
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        options = options_of(application)
        application_values = []
        run_values = []
        for value in values:
            if "=" not in value or value == "data=mine":
                continue
            if re.split("[.=/]", value)[0] in options:
                application_values.append(value)
            else:
                run_values.append(value)
        compose(application, application_values)
        compose("train", run_values)  # a run that is resumed has groups, too


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_every_command_exists(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    files = {FILE.match(code)[1] for code in blocks(page, "python") if FILE.match(code)}
    for words in filter(None, commands(page)):
        line = " ".join(words)
        if words[0] == "make":
            assert words[1] in targets, line
        elif words[:2] == ["pip", "install"]:
            assert set(re.findall(r"\[(\w+)\]", line)) <= set(extras), line
        elif overrides(words):
            if not runs_here(words):  # others are composed when they run, below
                application, values = overrides(words)
                understand(application, tuple(values))
        elif words[0] == "anemoi-gt":
            assert words[1:] == ["info"], line  # run below
        elif words[1].startswith("benchmarks/"):
            # their options: tests/benchmarks/test_pages.py
            assert (ROOT / words[1]).exists(), line
        else:
            assert words[0] in ("python", "torchrun"), f"no test knows this command: {line}"
            assert words[-1] in files, f"no test knows this command: {line}"


@pytest.fixture
def workdir(tmp_path, monkeypatch, logging_as_before, without_pictures):
    """The working directory of commands."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(words, workdir, monkeypatch):
    """Run a command with small sizes: applications in this process, torchrun and scripts in a new one."""
    application, values = overrides(words) or ("", [])
    small = []
    if application == "train":
        folders = [word.partition("=")[2] for word in words if word.startswith("hydra.run.dir=")]
        continues = any((workdir / folder / "last.pt").exists() for folder in folders)
        small = SMALL_ON_FILES if continues or "data=xarray" in words else SMALL
    if words[0] == "torchrun" or words[1].endswith(".py"):
        program = ["-m", "torch.distributed.run", "--standalone"] if words[0] == "torchrun" else []
        process = Program(*program, *last_of_each([*words[1:], *small]), folder=workdir)
        status, _, error = process.finish(timeout=120)
        assert status == 0, error
    else:
        monkeypatch.setattr(sys, "argv", sys.argv)  # restored later: applications replace it
        options = last_of_each([*values, *small])
        command_line.main([application, *options] if application else words[1:])


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_commands_run_in_the_order_of_the_page(page, workdir, monkeypatch, capsys):
    for code in blocks(page, "python"):
        match = FILE.match(code)
        if match:
            (workdir / match[1]).write_text(code)
    for words in filter(None, commands(page)):
        is_program = words[0] in ("python", "torchrun", "anemoi-gt")
        is_benchmark = words[1].startswith("benchmarks/")
        if is_program and not is_benchmark and runs_here(words):
            start(words, workdir, monkeypatch)


@pytest.fixture
def slurm_job(tmp_path):
    """Return a function that starts the Slurm job of the page with another `srun`, and the file of a requeue."""
    texts = blocks(ROOT / "docs" / "training.md", "text")
    (job,) = (code for code in texts if code.startswith("#!/bin/bash"))
    (tmp_path / "job.sh").write_text(job)
    requeued = tmp_path / "requeued"

    def start(srun):
        scripts = {"srun": srun, "scontrol": f'echo "$@" > {requeued}'}
        for name, code in scripts.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
            (tmp_path / name).chmod(0o755)
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        process = subprocess.Popen(["bash", tmp_path / "job.sh"], env=environment, cwd=tmp_path)
        return process, requeued

    return start


def test_the_slurm_job_is_requeued_after_the_signal_though_torchrun_exits_with_1(
    slurm_job, tmp_path
):
    process, requeued = slurm_job("trap 'kill $!; exit 1' TERM\nsleep 60 &\ntouch started\nwait $!")
    deadline = time.monotonic() + 60
    while not (tmp_path / "started").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.terminate()
    process.wait(60)
    assert requeued.read_text() == "requeue 7\n"


@pytest.mark.parametrize("status", [0, 1, 143])
def test_the_slurm_job_that_ends_by_itself_has_the_exit_status_of_the_run(slurm_job, status):
    process, requeued = slurm_job(f"exit {status}")
    assert process.wait(60) == status
    assert not requeued.exists()


def refusals():
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| `([^|`]+=[^|`]+)`[^|]*\| `(.+)` \|$", page, re.MULTILINE)
    assert rows
    return rows


@pytest.mark.parametrize(("options", "message"), refusals())
def test_the_errors_page_quotes_the_messages(options, message, workdir, monkeypatch, capsys):
    arguments = [*SMALL, "model.channels=32", *options.split()]  # channels: the default, as quoted
    monkeypatch.setattr(sys, "argv", ["anemoi_gt.train", *last_of_each(arguments)])
    with pytest.raises(SystemExit):
        train.main()
    assert capsys.readouterr().err.splitlines()[-1] == f"anemoi_gt.train: {message}"
