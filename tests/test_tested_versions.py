"""Tested releases of PyTorch and Triton, and the warning about others."""

import re
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
from test_house import run_without

from anemoi_gt import (
    GraphStructure,
    InteractionConv,
    KernelConfig,
    UntestedVersionsWarning,
    edge_attention,
    tested_versions,
)
from anemoi_gt.app import info

ROOT = Path(__file__).parents[1]
GRAPH = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
LOGS = ("torch_versions_cpu.txt", "tests_h200.txt")


@pytest.fixture
def untested(monkeypatch):
    """A process that has not computed attention yet, on unknown releases."""
    tested_versions._warn.cache_clear()
    for module in (tested_versions, info):
        monkeypatch.setattr(module, "installed", lambda: ("9.8", "7.6"))
    yield
    tested_versions._warn.cache_clear()


def attend(backend="torch"):
    rows = torch.ones(2, 1, 16)
    return edge_attention(rows, rows, rows, GRAPH, config=KernelConfig(backend=backend))[0]


def warned(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [
        str(warning.message)
        for warning in caught
        if issubclass(warning.category, UntestedVersionsWarning)
    ]


def test_untested_releases_are_named_once_per_process(untested):
    (message,) = warned(lambda: [attend() for _ in range(3)])
    assert message.startswith(
        "anemoi_gt, backend torch: PyTorch 9.8 has not been tested; tested are 2.9 with 3.5,"
    )


def test_triton_is_named_by_its_backend(untested, kernel_device):
    if kernel_device.type == "cuda":
        pytest.skip("Triton attends over tensors on a CPU only in its interpreter")
    (message,) = warned(lambda: attend("triton"))
    assert message.startswith(
        "anemoi_gt, backend triton: PyTorch 9.8 with Triton 7.6 has not been tested"
    )


def test_fused_networks_warn_as_attention_does(untested, kernel_device):
    config = KernelConfig(backend="triton")
    conv = InteractionConv(16, 16, config=config).to(kernel_device)
    graph, rows = GRAPH.to(kernel_device), torch.ones(2, 16, device=kernel_device)
    (message,) = warned(lambda: [conv(rows, graph, rows) for _ in range(2)])
    assert message.startswith("anemoi_gt, backend triton: PyTorch 9.8 with Triton 7.6")


@pytest.mark.compiled
def test_compiled_attention_warns_while_it_is_traced(untested):
    torch._dynamo.reset()
    assert len(warned(torch.compile(attend, backend="eager", fullgraph=True))) == 1


@pytest.mark.parametrize("triton", [tested_versions.TESTED[0][1], "7.6"])
def test_the_torch_backend_does_not_warn_on_a_tested_torch_with_any_triton(
    untested, monkeypatch, triton
):
    monkeypatch.setattr(
        tested_versions, "installed", lambda: (tested_versions.TESTED[0][0], triton)
    )
    assert warned(attend) == []


def test_these_tests_run_on_tested_releases():
    assert tested_versions.why_untested(*tested_versions.installed()) is None


@pytest.mark.parametrize(
    ("torch_release", "triton", "message"),
    [
        ("2.13", "3.6", "PyTorch 2.13 with Triton 3.6 has not been tested"),
        ("2.8", None, "PyTorch 2.8 has not been tested"),
        ("2.1", "3.6", "PyTorch 2.1 with"),
        ("2.13", None, "None"),
    ],
)
def test_pairs_outside_the_table_are_untested_and_without_triton_torch_decides(
    torch_release, triton, message
):
    assert str(tested_versions.why_untested(torch_release, triton)).startswith(message)


@pytest.mark.process
def test_importing_the_package_looks_up_no_release_and_imports_no_compiler():
    code = "import importlib.metadata as m, sys, torch\nm.version = lambda name: exit(f'looked up {name}')\n"
    result = run_without((), code + "import anemoi_gt\nsys.exit('torch._dynamo' in sys.modules)")
    assert result.returncode == 0, result.stderr


def test_info_states_whether_the_pair_is_tested_without_a_warning(untested):
    assert (
        "  tested     PyTorch 9.8 with Triton 7.6 has not been tested; tested are 2.9 with 3.5"
        in info.describe()
    )
    assert warned(info.describe) == []


def test_every_pair_of_the_table_has_a_log():
    logs = "".join((ROOT / "benchmarks" / "results" / name).read_text() for name in LOGS)
    for pair in tested_versions.TESTED:
        releases = [re.escape(release) for release in pair]
        assert re.search(rf"torch {releases[0]}\.\S*,? triton {releases[1]}\.", logs), pair


def test_required_releases_begin_with_the_oldest_tested_ones():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = min(
        tested_versions.TESTED, key=lambda pair: [int(number) for number in pair[0].split(".")]
    )
    assert f"torch>={oldest[0]}" in project["dependencies"]
    assert project["optional-dependencies"]["triton"] == [f"triton>={oldest[1]}"]


def test_the_documentation_has_the_table():
    page = (ROOT / "docs" / "backends.md").read_text()
    assert (
        tuple(re.findall(r"^\| (\d\.\d+) \| (\d\.\d+) \|", page, re.MULTILINE))
        == tested_versions.TESTED
    )
