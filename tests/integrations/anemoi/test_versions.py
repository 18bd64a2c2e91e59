"""Versions of anemoi-models: those that operational checkpoints need, the newest and others, each in its own process.

They are installed in folders of the test environment (Makefile), each put first on the path.
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
    """Return the folder with a version of anemoi-models."""
    folder = Path(sys.prefix) / "anemoi-models" / version
    assert folder.is_dir(), f"{folder} is missing: make test installs it"
    return folder


@pytest.fixture(scope="session")
def reports(tmp_path_factory, worker_id):
    """Results of every version with and without `install`; for `OTHERS`, only one model and blocks."""
    return compute_once("versions", run_versions, tmp_path_factory, worker_id)


def run_versions():
    """Return the reports of all versions, by version or "newest"."""
    command = [sys.executable, str(SCRIPT), "all", *map(str, map(folder_of, VERSIONS))]
    command += ["minor", *map(str, map(folder_of, OTHERS))]
    environment = os.environ | {"PYTHONPATH": TESTS}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    names = [*VERSIONS, *(f"minor {version}" for version in OTHERS)]
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(names, reports, strict=True))


@pytest.fixture(scope="module")
def report(request, reports):
    """Results of the tested version."""
    report = reports[request.param]
    assert request.param in (report["version"], "newest")
    return report


every_version = pytest.mark.parametrize("report", VERSIONS, indirect=True, scope="module")
every_old_version = pytest.mark.parametrize("report", VERSIONS[:-1], indirect=True, scope="module")


@every_old_version
def test_models_compute_the_same_under_install_and_keep_their_states_and_pickles(report):
    for name in MODELS:
        assert report[name]["raw"], f"{name}: anemoi_gt did not compute the attention"
        assert report[name]["same"], name
        assert report[name]["error"] < 2e-6, name


def test_models_of_every_minor_version_compute_the_same_under_install(reports):
    """0.12.0 is tested because a method has the parameters of another version there, but not its body."""
    for version in OTHERS:
        report = reports[f"minor {version}"]
        assert report["version"] == version
        assert report["raw"], f"{version}: edges were embedded"
        assert all(report["raw"]), f"{version}: edges were embedded"
        assert report["same"], version
        assert report["error"] < 2e-6, version
        assert_updated_sources_are_as_anemois(report)
        if "transformers" in report:
            assert_transformers_are_as_anemois(report)
    assert "transformers" in reports["minor 0.14.1"]


def assert_updated_sources_are_as_anemois(report):
    """Assert that a mapper that updates its sources under a condition is fused, or falls back to Anemoi.

    Up to 0.13, Anemoi uses the condition of the destinations for the sources.
    """
    version = tuple(map(int, report["version"].split(".")[:2]))
    result = report["updated sources"]
    if version < (0, 14):
        assert result["error"] == 0
        assert "it updates its sources under the condition of its destinations" in result["outcome"]
    else:
        assert result["outcome"] == "fused", report["version"]
        assert result["error"] < 2e-6, report["version"]


def definitions(version):
    """Return the functions and methods in `anemoi.models` of a version, by name."""
    definitions = {}
    for file in (folder_of(version) / "anemoi" / "models").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                definitions[node.name] = node
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        definitions[f"{node.name}.{method.name}"] = method
    return definitions


def in_versions(listed, version):
    """Return whether a version is in a text such as "0.9.0 to 0.9.5, 0.12.0"."""

    def numbers(text):
        return tuple(map(int, text.split(".")))

    for versions in listed.split(", "):
        first, *last = versions.split(" to ")
        if numbers(first) <= numbers(version) <= numbers(last[0] if last else first):
            return True
    return False


@pytest.mark.parametrize("version", (*VERSIONS[:-1], *OTHERS))
def test_the_replaced_bodies_match_the_versions_named(version):
    upstream = definitions(version)
    for name, bodies in KNOWN.items():
        expected = [digest for digest, listed in bodies.items() if in_versions(listed, version)]
        actual = [hash_of_definition(upstream[name])] if name in upstream else []
        assert expected == [digest for digest in actual if digest in bodies], name


def assert_transformers_are_as_anemois(report):
    """Assert that the feed-forward sub-layer of both transformer blocks is fused and agrees with Anemoi."""
    assert len(report["transformers"]) == 2
    for name, block in report["transformers"].items():
        assert block["outcome"] == "feed-forward only", f"{report['version']}: {name}"
        assert block["same_form"], f"{report['version']}: {name}"
        assert block["error"] < 2e-6, f"{report['version']}: {name}"


@pytest.mark.parametrize("report", ("0.9.3", "0.11.2"), indirect=True, scope="module")
def test_transformer_blocks_of_old_versions_are_fused_with_the_same_numbers(report):
    assert_transformers_are_as_anemois(report)


@every_old_version
def test_blocks_pass_raw_edge_attributes(report):
    for name in MODELS:
        assert all(report[name]["raw"]), name


@every_version
def test_compiled_blocks_call_the_attention_operator(report):
    for kind in ("Processor", "Mapper"):
        assert report["compiled"][kind]["error"] < 1e-6
        assert "anemoi_gt.edge_attention_torch.default" in report["compiled"][kind]["operators"]


@every_version
def test_sources_that_are_updated_under_their_own_condition_are_fused_since_0_14(report):
    assert_updated_sources_are_as_anemois(report)


@every_version
def test_blocks_that_were_built_for_a_gpu_compute_the_same_under_install(report):
    if report["version"] == "0.9.3":
        assert report["triton"] is None
    else:
        assert report["triton"] < 1e-6


@every_version
def test_install_names_the_methods_that_differ_from_known_versions(report):
    *methods, sharding = report["messages"] or [""]
    if report["version"] in ("0.9.3", "0.11.2"):
        (message,) = methods
        assert all(name in message for name in SINCE_0_16)
        assert "GraphTransformerBaseBlock" not in message
        assert message.endswith("slower, same results")
    else:
        assert not methods, f"anemoi-models {report['version']}: {methods}"
    is_named = "target_features.shard_tensor" in sharding
    is_kept = sharding.endswith("Anemoi's sharding is kept")
    is_old = report["version"] in VERSIONS[:-1]
    assert (is_named and is_kept) is is_old, f"anemoi-models {report['version']}: {sharding}"
