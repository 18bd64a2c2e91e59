"""Versions of anemoi-models, those that operational checkpoints need, the newest and others, each in a process of its own.

They lie in folders beside the test environment (Makefile), and go first on the path.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.once import compute_once

from anemoi_gt.integrations.anemoi.bodies import KNOWN, hash_of_definition

SCRIPT = Path(__file__).parents[2] / "support" / "anemoi_reports.py"
TESTS = str(SCRIPT.parents[1])
VERSIONS = ("0.9.3", "0.11.2", "0.16.0", "newest")
OTHERS = ("0.10.0", "0.12.0", "0.12.1", "0.13.1", "0.14.1", "0.15.1", "0.17.0", "0.18.0", "0.19.0")
MODELS = ("AIFS", "one chunk", "heads", "graph transformer")
SINCE_0_16 = ("GraphPartition.materialise", "StaticGraphProvider._get_edges_impl")


def folder_of(version):
    """The folder with a version of anemoi-models."""
    folder = Path(sys.prefix) / "anemoi-models" / version
    assert folder.is_dir(), f"{folder} is missing: make test installs it"
    return folder


@pytest.fixture(scope="session")
def reports(tmp_path_factory, worker_id):
    """Results of every version without and with `install`; of `OTHERS` only of one model and of blocks."""
    return compute_once("versions", run_versions, tmp_path_factory, worker_id)


def run_versions():
    """Return the reports of all versions, by version or "newest"."""
    command = [sys.executable, str(SCRIPT), "all", *map(str, map(folder_of, VERSIONS))]
    command += ["minor", *map(str, map(folder_of, OTHERS))]
    environment = os.environ | {"PYTHONPATH": TESTS}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    found = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip((*VERSIONS, *(f"minor {version}" for version in OTHERS)), found, strict=True))


@pytest.fixture(scope="module")
def report(request, reports):
    """Results of the tested version."""
    report = reports[request.param]
    assert request.param in (report["version"], "newest")
    return report


every_version = pytest.mark.parametrize("report", VERSIONS, indirect=True, scope="module")
every_old_version = pytest.mark.parametrize("report", VERSIONS[:-1], indirect=True, scope="module")


@every_old_version
def test_models_compute_the_same_with_us_and_keep_their_states_and_pickles(report):
    for name in MODELS:
        assert report[name]["raw"], f"{name}: we did not attend"
        assert report[name]["same"] and report[name]["error"] < 2e-6, name


def test_models_of_every_minor_version_compute_the_same_with_us(reports):
    """The parameters of a method are those of another version in 0.12.0, where its body is not."""
    for version in OTHERS:
        report = reports[f"minor {version}"]
        assert report["version"] == version
        assert report["raw"] and all(report["raw"]), f"{version}: edges were embedded"
        assert report["same"] and report["error"] < 2e-6, version
        assert_updated_sources_are_as_anemois(report)
        if "transformers" in report:
            assert_transformers_are_as_anemois(report)
    assert "transformers" in reports["minor 0.14.1"]


def assert_updated_sources_are_as_anemois(report):
    """Assert that a mapper that updates its sources under a condition is fused, or left to Anemoi.

    Up to 0.13 Anemoi takes the condition of the destinations for them.
    """
    version = tuple(map(int, report["version"].split(".")[:2]))
    found = report["updated sources"]
    if version < (0, 14):
        assert found["error"] == 0
        assert "it updates its sources under the condition of its destinations" in found["outcome"]
    else:
        assert found["outcome"] == "fused" and found["error"] < 2e-6, report["version"]


def definitions(version):
    """Methods and functions of a version of anemoi-models by name, those of its models and layers."""
    found = {}
    for file in (folder_of(version) / "anemoi" / "models").rglob("*.py"):
        tree = ast.parse(file.read_text())
        owners = [
            ("", tree),
            *((f"{node.name}.", node) for node in tree.body if isinstance(node, ast.ClassDef)),
        ]
        for prefix, owner in owners:
            functions = [node for node in owner.body if isinstance(node, ast.FunctionDef)]
            found |= {f"{prefix}{node.name}": node for node in functions}
    return found


def in_versions(listed, version):
    """Return whether a version is named by a text such as "0.9.0 to 0.9.5, 0.12.0"."""
    number = lambda text: tuple(map(int, text.split(".")))  # noqa: E731
    ranges = [[number(each) for each in part.split(" to ")] for part in listed.split(", ")]
    return any(each[0] <= number(version) <= each[-1] for each in ranges)


@pytest.mark.parametrize("version", (*VERSIONS[:-1], *OTHERS))
def test_the_replaced_bodies_match_the_versions_named(version):
    found = definitions(version)
    for name, bodies in KNOWN.items():
        expected = [digest for digest, listed in bodies.items() if in_versions(listed, version)]
        actual = [hash_of_definition(found[name])] if name in found else []
        assert expected == [digest for digest in actual if digest in bodies], name


def assert_transformers_are_as_anemois(report):
    """Assert that the feed-forward sub-layer of both transformer blocks is fused, with Anemoi's numbers."""
    assert len(report["transformers"]) == 2
    for name, block in report["transformers"].items():
        assert block["outcome"] == "feed-forward only", f"{report['version']}: {name}"
        assert block["same_form"] and block["error"] < 2e-6, f"{report['version']}: {name}"


@pytest.mark.parametrize("report", ("0.9.3", "0.11.2"), indirect=True, scope="module")
def test_transformer_blocks_of_old_versions_are_fused_with_the_same_numbers(report):
    assert_transformers_are_as_anemois(report)


@every_old_version
def test_blocks_hand_over_raw_edges(report):
    assert all(raw for name in MODELS for raw in report[name]["raw"])


@every_version
def test_compiled_blocks_have_our_operator(report):
    for kind in ("Processor", "Mapper"):
        assert report["compiled"][kind]["error"] < 1e-6
        assert "anemoi_gt.edge_attention_torch.default" in report["compiled"][kind]["operators"]


@every_version
def test_sources_that_are_updated_under_a_condition_are_fused_with_theirs_since_0_14(report):
    assert_updated_sources_are_as_anemois(report)


@every_version
def test_blocks_that_were_built_for_a_gpu_compute_with_us(report):
    assert report["triton"] is None if report["version"] == "0.9.3" else report["triton"] < 1e-6


@every_version
def test_install_names_the_methods_that_differ_from_known_versions(report):
    *methods, sharding = report["said"] or [""]
    if report["version"] in ("0.9.3", "0.11.2"):
        (message,) = methods
        assert (
            all(name in message for name in SINCE_0_16)
            and "GraphTransformerBaseBlock" not in message
        )
        assert message.endswith("slower, same results")
    else:
        assert not methods, f"anemoi-models {report['version']}: {methods}"
    named = "target_features.shard_tensor" in sharding and sharding.endswith(
        "Anemoi's sharding is kept"
    )
    assert named is (report["version"] in VERSIONS[:-1]), (
        f"anemoi-models {report['version']}: {sharding}"
    )
