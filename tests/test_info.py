"""`python -m anemoi_gt info`: what is installed here, and what would run."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from test_house import OPTIONAL, run_without

import anemoi_gt
from anemoi_gt import __main__ as command_line
from anemoi_gt import info
from anemoi_gt.ops import backends

ROOT = Path(__file__).parents[1]
RUN = "import runpy, sys\nsys.argv = ['anemoi_gt', 'info']\nrunpy.run_module('anemoi_gt', run_name='__main__')"


def rows(section):
    """Name and text of each row of a section."""
    block = next(block for block in info.describe().split("\n\n") if block.startswith(f"{section}\n"))
    return dict(re.fullmatch(r"  (.+?)  +(.+)", line).groups() for line in block.splitlines()[1:])


def test_the_command_prints_it():
    result = subprocess.run([sys.executable, "-m", "anemoi_gt", "info"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    sections = [block.splitlines()[0] for block in result.stdout.strip().split("\n\n")]
    assert sections == ["versions", "packages", "devices", "attention backends"]


def test_versions_are_those_of_what_runs():
    versions = rows("versions")
    assert versions["anemoi_gt"] == anemoi_gt.__version__
    assert versions["torch"].startswith(f"{torch.__version__}, built ")
    assert versions["python"].startswith(sys.version.split()[0])
    assert rows("packages")["hydra-core"] == importlib.metadata.version("hydra-core")


def test_with_torch_alone_everything_else_is_named_missing():
    modules = OPTIONAL | set(info.PACKAGES)
    result = run_without(modules, RUN)
    assert result.returncode == 0, result.stderr
    for package, extra in info.PACKAGES.values():
        brought_by = "anemoi-gt" if extra is None else rf"anemoi-gt\[{extra}\]"
        assert re.search(rf"^  {package} +missing: pip install '{brought_by}'$", result.stdout, re.MULTILINE), package
    assert re.search(r"^  cpu torch +runs, auto takes it$", result.stdout, re.MULTILINE)
    assert re.search(r"^  cpu triton +does not run: the package triton is missing", result.stdout, re.MULTILINE)


def test_every_package_of_an_extra_is_listed_with_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {None: project["dependencies"], **project["optional-dependencies"]}
    for extra in (None, "triton", "graphs", "hydra", "train", "era5"):
        names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed[extra]} - {"torch", "anemoi-gt"}
        assert names == {package for package, brought_by in info.PACKAGES.values() if brought_by == extra}, extra


def test_each_backend_answers_for_itself(monkeypatch):
    unable = backends.BACKENDS["triton"]._replace(
        unsupported_reason=lambda query: f"no {query.device}", auto_unsupported_reason=lambda query: "no"
    )
    monkeypatch.setitem(backends.BACKENDS, "triton", unable)
    answers = rows("attention backends")
    assert answers["cpu triton"] == "does not run: no cpu"
    assert answers["cpu torch"] == "runs, auto takes it"
    able = unable._replace(unsupported_reason=lambda query: None, auto_unsupported_reason=lambda query: None)
    monkeypatch.setitem(backends.BACKENDS, "triton", able)
    answers = rows("attention backends")
    assert (answers["cpu triton"], answers["cpu torch"]) == ("runs, auto takes it", "runs")


def test_every_device_is_asked():
    devices = rows("devices")
    assert set(devices) == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    assert set(rows("attention backends")) == {f"{device} {name}" for device in devices for name in backends.BACKENDS}


@pytest.mark.parametrize("arguments", [[], ["inform"]])
def test_an_unknown_command_names_the_known_one(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        command_line.main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "usage: python -m anemoi_gt" in error and "info" in error


def test_the_version_is_an_option_of_the_command(capsys):
    with pytest.raises(SystemExit) as end:
        command_line.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"{anemoi_gt.__version__}\n")


def test_the_changelog_has_the_version():
    assert re.search(
        rf"^## \[{re.escape(anemoi_gt.__version__)}\] - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.M
    )


def test_the_module_prints_it_too():
    result = subprocess.run([sys.executable, "-m", "anemoi_gt.info"], capture_output=True, text=True, timeout=120)
    assert result.stdout.startswith("versions\n"), result.stderr
