"""Releases of PyTorch and Triton: which are tested, and who is warned about others."""

import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

import anemoi_gt
from anemoi_gt import AttentionConfig, GraphStructure, UntestedVersionsWarning, compatibility, edge_attention, info

ROOT = Path(__file__).parents[1]
GRAPH = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
LOGS = ("torch_versions_cpu.txt", "tests_h200.txt")


@pytest.fixture
def untested(monkeypatch):
    """A process that has not computed attention yet, on releases that are in no table."""
    compatibility._warn.cache_clear()
    for module in (compatibility, info):
        monkeypatch.setattr(module, "installed", lambda: ("9.8", "7.6"))
    yield
    compatibility._warn.cache_clear()


def attend(backend="torch"):
    rows = torch.ones(2, 1, 16)
    return edge_attention(rows, rows, rows, GRAPH, config=AttentionConfig(backend=backend))[0]


def warned(call):
    """Messages of our class that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in caught if issubclass(warning.category, UntestedVersionsWarning)]


def test_untested_releases_are_named_when_attention_is_computed(untested):
    (message,) = warned(attend)
    assert message.startswith("anemoi_gt, backend torch: PyTorch 9.8 has not been tested; tested are 2.10 with 3.6,")


def test_pair_is_named_by_the_backend_that_needs_triton(untested, kernel_device):
    if kernel_device.type == "cuda":
        pytest.skip("attention of tensors on the CPU by Triton takes its interpreter")
    (message,) = warned(lambda: attend("triton"))
    assert message.startswith("anemoi_gt, backend triton: PyTorch 9.8 with Triton 7.6 has not been tested")


def test_one_warning_in_a_process(untested):
    assert len(warned(lambda: [attend() for _ in range(3)])) == 1


def test_compiled_attention_warns_while_it_is_traced(untested):
    torch._dynamo.reset()
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert len(warned(compiled)) == 1


def test_the_warning_can_be_silenced_by_its_class(untested):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=UntestedVersionsWarning)
        attend()


def test_nobody_is_warned_on_tested_releases(untested, monkeypatch):
    monkeypatch.setattr(compatibility, "installed", lambda: compatibility.TESTED[0])
    assert warned(attend) == []


def test_triton_does_not_matter_to_the_torch_backend(untested, monkeypatch):
    monkeypatch.setattr(compatibility, "installed", lambda: (compatibility.TESTED[0][0], "7.6"))
    assert warned(attend) == []


def test_these_tests_run_on_releases_that_are_in_the_table():
    assert compatibility.why_untested(*compatibility.installed()) is None


@pytest.mark.parametrize(
    ("pair", "met"),
    [
        (("2.13", "3.6"), "PyTorch 2.13 with Triton 3.6"),
        (("2.9", None), "PyTorch 2.9"),
        (("2.1", "3.6"), "PyTorch 2.1 "),
    ],
)
def test_a_pair_that_is_not_in_the_table_is_untested(pair, met):
    assert compatibility.why_untested(*pair).startswith(met)


def test_without_triton_the_release_of_torch_decides():
    assert compatibility.why_untested("2.13", None) is None


def test_importing_the_package_looks_no_release_up():
    code = "import importlib.metadata as m, torch\nm.version = lambda name: exit(f'looked up {name}')\nimport anemoi_gt"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_importing_the_package_imports_no_compiler():
    code = "import sys, anemoi_gt\nsys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def test_info_tells_whether_the_pair_was_tested(untested):
    assert "  tested     PyTorch 9.8 with Triton 7.6 has not been tested; tested are 2.10 with 3.6" in info.describe()


def test_info_itself_does_not_warn(untested):
    assert warned(info.describe) == []


def test_every_pair_of_the_table_has_a_log():
    logs = "".join((ROOT / "benchmarks" / "results" / name).read_text() for name in LOGS)
    for pair in compatibility.TESTED:
        numbers = [re.escape(number) for number in pair]
        assert re.search(rf"torch {numbers[0]}\.\S*,? triton {numbers[1]}\.", logs), pair


def test_required_releases_begin_with_the_oldest_that_was_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = min(compatibility.TESTED, key=lambda pair: [int(number) for number in pair[0].split(".")])
    assert f"torch>={oldest[0]}" in project["dependencies"]
    assert project["optional-dependencies"]["triton"] == [f"triton>={oldest[1]}"]


def test_the_documentation_has_the_table():
    page = (ROOT / "docs" / "backends.md").read_text()
    rows = re.findall(r"^\| (\d\.\d+) \| (\d\.\d+) \|", page, re.MULTILINE)
    assert tuple(rows) == compatibility.TESTED


def test_the_warning_is_public():
    assert anemoi_gt.UntestedVersionsWarning is compatibility.UntestedVersionsWarning
