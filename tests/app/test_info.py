"""`anemoi-gt info`: versions, devices and available backends."""

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from anemoi.models.layers.graph_provider import StaticGraphProvider
from anemoi.utils.checkpoints import save_metadata
from support.anemoi_model import OwnConv, build, make_family_options, make_options
from support.upstream import folder_of
from support.weather import weather_graph
from test_house import OPTIONAL, run_without

import anemoi_gt
from anemoi_gt import __main__ as command_line
from anemoi_gt.app import info
from anemoi_gt.integrations.anemoi import installation
from anemoi_gt.ops import backends
from anemoi_gt.refusal import permanent

ROOT = Path(__file__).parents[2]
RUN = "import runpy, sys\nsys.argv = ['anemoi_gt', 'info']\nrunpy.run_module('anemoi_gt', run_name='__main__')"
USE_OPERATION = """
import torch, anemoi_gt
graph = anemoi_gt.GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
x = torch.ones(2, 1, 4, requires_grad=True)
out, lse = anemoi_gt.edge_attention(x, x, x, graph)
out.sum().backward()
print(tuple(x.grad.shape))
"""


def rows(section):
    block = next(
        block for block in info.describe().split("\n\n") if block.startswith(f"{section}\n")
    )
    return dict(re.fullmatch(r"  (.+?)  +(.+)", line).groups() for line in block.splitlines()[1:])


def test_the_command_prints_all_sections(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["anemoi_gt", "info"])
    runpy.run_module("anemoi_gt", run_name="__main__")
    sections = [block.splitlines()[0] for block in capsys.readouterr().out.strip().split("\n\n")]
    assert sections == [
        "versions",
        "packages",
        "devices",
        "attention backends",
        "torch.compile",
        "anemoi-models",
    ]


def test_a_reader_that_stops_reading_is_no_error(monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    monkeypatch.setattr(info, "describe", lambda checkpoint: "text")
    with os.fdopen(writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        command_line.main(["info"])  # and Python flushes once more when it exits, as `with` does


def test_versions_are_the_installed_ones():
    versions = rows("versions")
    assert versions["anemoi_gt"] == anemoi_gt.__version__
    assert versions["torch"].startswith(f"{torch.__version__}, built ")
    assert versions["python"].startswith(sys.version.split()[0])
    assert rows("packages")["hydra-core"] == importlib.metadata.version("hydra-core")


def test_the_entry_that_replays_training_steps_is_named():
    assert "InstallCallback" in rows("anemoi-models")["training steps"]


@pytest.mark.process
def test_with_only_torch_the_operation_runs_and_everything_else_is_reported_missing():
    result = run_without(OPTIONAL | set(info.PACKAGES), USE_OPERATION + RUN)
    assert result.stdout.startswith("(2, 1, 4)\n"), result.stderr
    assert result.returncode == 0, result.stderr
    for package, extra in info.PACKAGES.values():
        requirement = "anemoi-gt" if extra is None else rf"anemoi-gt\[{extra}\]"
        assert re.search(
            rf"^  {package} +missing: pip install '{requirement}'$", result.stdout, re.MULTILINE
        ), package
    assert re.search(r"^  install +not possible: ", result.stdout, re.MULTILINE)
    assert re.search(r"^  cpu torch +runs, chosen by auto$", result.stdout, re.MULTILINE)
    assert re.search(
        r"^  cpu triton +does not run: the package triton is missing", result.stdout, re.MULTILINE
    )


def test_every_package_of_an_extra_is_listed_with_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {None: project["dependencies"], **project["optional-dependencies"]}
    for extra in (None, "triton", "graphs", "hydra", "train", "xarray", "era5"):
        names = {re.match(r"[\w-]+", requirement)[0] for requirement in needed[extra]} - {
            "torch",
            "anemoi-gt",
        }
        assert names == {
            package for package, its_extra in info.PACKAGES.values() if its_extra == extra
        }, extra


def test_each_backend_reports_for_itself(monkeypatch):
    cases = (
        (False, "does not run: no cpu", "runs, chosen by auto"),
        (True, "runs, chosen by auto", "runs"),
    )
    for runs, triton, torch_backend in cases:
        why_not = lambda *call, runs=runs: None if runs else permanent(f"no {call[-1]}")  # noqa: E731
        stub = backends.BACKENDS["triton"]._replace(why_not=why_not)
        monkeypatch.setitem(backends.BACKENDS, "triton", stub)
        answers = rows("attention backends")
        assert (answers["cpu triton"], answers["cpu torch"]) == (triton, torch_backend)


def test_every_device_is_listed_with_every_backend():
    devices = rows("devices")
    assert set(devices) == {"cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))}
    assert set(rows("attention backends")) == {
        f"{device} {name}" for device in devices for name in backends.BACKENDS
    }


def test_what_install_would_replace_is_listed_with_the_reason_where_it_would_not(
    monkeypatch, anemoi_as_it_is
):
    listed = rows("anemoi-models")
    assert listed.pop("version") == importlib.metadata.version("anemoi-models")
    assert listed.pop("training steps")
    assert {"GraphTransformerProcessorBlock.forward", "NoiseConditioning.forward"} <= set(listed)
    assert set(listed.values()) == {"replaced by install"}
    with installation.install():
        assert rows("anemoi-models").items() >= listed.items()
    monkeypatch.setattr(GraphTransformerProcessorBlock, "forward", lambda self, x: None)
    monkeypatch.setattr(GraphTransformerMapperBlock, "get_qkve", lambda self: None)
    monkeypatch.delattr(StaticGraphProvider, "_get_edges_impl")
    listed = rows("anemoi-models")
    processor, mapper = (
        listed[f"GraphTransformer{kind}Block.forward"] for kind in ("Processor", "Mapper")
    )
    assert processor == "stays upstream's: its source cannot be read"
    assert mapper.endswith("GraphTransformerMapperBlock, whose get_qkve was replaced")
    assert (
        listed["StaticGraphProvider._get_edges_impl"]
        == "stays upstream's: it has no _get_edges_impl"
    )
    assert (
        listed["NoiseConditioning.forward"]
        == "stays upstream's: sharding is replaced as a whole, or not at all"
    )


@pytest.fixture
def list_blocks(tmp_path, capsys, anemoi_as_it_is):
    """Return what the command lists of a model, by the path of each block."""

    def call(model):
        torch.save(model, tmp_path / "inference-last.ckpt")
        command_line.main(["info", "--checkpoint", str(tmp_path / "inference-last.ckpt")])
        section = capsys.readouterr().out.split("\n\n")[-1]
        lines = section.splitlines()[1:]
        return dict(re.fullmatch(r"  (.+?)  +(.+)", line).groups() for line in lines)

    return call


def test_a_checkpoint_is_listed_block_by_block(list_blocks):
    model = build(weather_graph(), make_options(channels=16, heads=2))
    model.processor.proc[1].conv = OwnConv(model.processor.proc[1].conv)
    listed = list_blocks(model)
    reason = "its conv is a support.anemoi_model.OwnConv, and Anemoi's attention is needed"
    assert listed["processor.proc.1"] == f"upstream: {reason}"
    fused = "attention only: sub-layers are fused under 16-bit autocast where the backend of the attention has them"
    assert listed["processor.proc.0"] == listed["encoder.encoder.proc"] == fused
    assert f"1 upstream (processor.proc.1: {reason})" in listed["blocks"]


def test_a_checkpoint_of_a_graph_network_is_listed_block_by_block(list_blocks):
    model = build(weather_graph(), make_family_options("graph network", channels=16))
    assert installation.count_blocks(model) == 4
    listed = list_blocks(model)
    assert listed["processor.proc.0"].startswith("upstream: sub-layers are fused under 16-bit")
    assert len(listed) == 1 + 4


@pytest.mark.usefixtures("anemoi_as_it_is")
def test_the_version_that_wrote_a_checkpoint_is_listed(tmp_path):
    path = tmp_path / "inference-last.ckpt"
    torch.save(build(weather_graph(), make_options(channels=16, heads=2)), path)
    versions = {"module_versions": {"anemoi.models": "0.9.3"}}
    save_metadata(str(path), {"provenance_training": versions})
    assert "written by" in info.describe(str(path))
    assert "anemoi-models 0.9.3; models run with the version" in info.describe(str(path))


def test_a_checkpoint_without_a_model_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="checkpoint must hold a whole model, .* got dict"):
        info.describe(str(tmp_path / "last.ckpt"))


def under(version, code):
    """Run code with another version of anemoi-models."""
    path = os.pathsep.join([str(folder_of(version)), str(ROOT / "tests")])
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


BUILD = "import torch; from support import anemoi_versions; model = anemoi_versions.build('GraphTransformer')"
INFO = "from anemoi_gt.__main__ import main; main(['info', '--checkpoint', '{}'])"


@pytest.mark.upstream
@pytest.mark.nightly
def test_a_model_of_another_version_that_runs_is_listed(tmp_path):
    path = tmp_path / "model.ckpt"
    under("0.17.0", f"{BUILD}; torch.save(model, '{path}')")
    result = under("0.18.0", INFO.format(path))
    assert "attention only: sub-layers are fused under 16-bit autocast" in result.stdout


@pytest.mark.upstream
@pytest.mark.nightly
def test_a_model_with_classes_that_the_installed_version_lacks_is_refused(tmp_path):
    path = tmp_path / "model.ckpt"
    torch.save(build(weather_graph(), make_options(channels=16, heads=2)), path)
    result = under("0.18.0", INFO.format(path))
    (line,) = result.stderr.splitlines()[-1:]
    assert result.returncode == 1
    assert line.startswith("anemoi-gt info: checkpoint must be of a version like the installed ")
    assert line.endswith("refers to: No module named 'anemoi.models.layers.aggregator'")


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["inform"], 2)])
def test_no_command_help_and_an_unknown_one_name_the_known_ones(arguments, status, capsys):
    with pytest.raises(SystemExit, match=f"^{status}$"):
        command_line.main(arguments)
    text = "".join(capsys.readouterr())
    assert "usage: anemoi-gt " in text
    assert "{info,train,evaluate,rollout,export}" in text


def test_the_version_is_an_option_and_in_the_changelog(capsys):
    version = anemoi_gt.__version__
    with pytest.raises(SystemExit, match="^0$"):
        command_line.main(["--version"])
    assert capsys.readouterr().out == f"{version}\n"
    heading = rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
