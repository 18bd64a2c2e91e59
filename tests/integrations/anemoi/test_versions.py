"""Versions of anemoi-models: those that operational checkpoints need, the pinned one, and in `make nightly` the others.

Each is loaded in a process of its own.
"""

import ast
import itertools
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.once import compute_once
from support.upstream import NEWEST, OLD, OTHERS, PINNED, each, folder_of

from anemoi_gt.integrations.anemoi import versions

SCRIPT = Path(__file__).parents[2] / "support" / "anemoi_reports.py"
TESTS = str(SCRIPT.parents[1])
MODELS = ("AIFS", "graph transformer")
SINCE_0_16 = ("GraphPartition.materialise", "StaticGraphProvider._get_edges_impl")


@pytest.fixture(scope="session")
def reports(tmp_path_factory, worker_id, request):
    """Results with and without `install` of the versions in the selected tests; only one model and blocks for `OTHERS`."""
    selected = set()
    for item in request.session.items:
        if "report" in item.fixturenames:
            selected.add(item.callspec.params["report"])
    return compute_once("versions", partial(run_versions, selected), tmp_path_factory, worker_id)


def run_versions(selected):
    """Return the reports by version or "newest"."""
    whole = [version for version in (*OLD, PINNED, NEWEST) if version in selected]
    minor = [version for version in OTHERS if version in selected]
    command = [sys.executable, str(SCRIPT), "all", *map(str, map(folder_of, whole))]
    command += ["minor", *map(str, map(folder_of, minor))]
    environment = os.environ | {"PYTHONPATH": TESTS}
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = [json.loads(line) for line in result.stdout.splitlines()]
    return dict(zip(whole + minor, reports, strict=True))


@pytest.fixture(scope="module")
def report(request, reports):
    """Results of the tested version."""
    report = reports[request.param]
    assert request.param in (report["version"], NEWEST)
    return report


def of_versions(*versions):
    """Parametrise a test over the reports of versions."""
    return pytest.mark.parametrize("report", each(*versions), indirect=True, scope="module")


every_version = of_versions(*OLD, PINNED, NEWEST)
every_old_version = of_versions(*OLD)


@every_old_version
def test_models_compute_the_same_under_install_and_keep_their_states_and_pickles(report):
    for name in MODELS:
        assert report[name]["raw"], f"{name}: anemoi_gt did not compute the attention"
        assert report[name]["same"], name
        assert report[name]["error"] < 2e-6, name


@every_old_version
def test_a_second_pass_sorts_no_edges_of_mappers(report):
    assert report["AIFS"]["sorted again"] == 0  # its processor is a transformer


@of_versions("0.9.3", "0.11.2")
def test_edges_that_were_written_are_not_taken_for_those_of_an_earlier_pass(report):
    assert report["changed edges"] < 2e-6


@of_versions(*OTHERS)
def test_models_of_minor_versions_compute_the_same_under_install(report):
    """0.12.0 is tested because a method has the parameters of another version there, but not its body."""
    assert report["raw"], "edges were embedded"
    assert all(report["raw"]), "edges were embedded"
    assert report["same"]
    assert report["error"] < 2e-6
    assert_updated_sources_are_as_anemois(report)
    assert_layers_of_mappers_are_fused(report)
    assert_graph_networks_are_fused(report)
    assert_windows_need_no_mask_and_no_flash_attn(report)
    if release_of(report) < (0, 15):
        assert_transformers_are_as_anemois(report)


def release_of(report):
    """Return the first two numbers of the version."""
    return tuple(map(int, report["version"].split(".")[:2]))


def assert_updated_sources_are_as_anemois(report):
    """Assert that a mapper that updates its sources under a condition is fused, or falls back to Anemoi.

    Up to 0.13, Anemoi uses the condition of the destinations for the sources.
    """
    result = report["updated sources"]
    if release_of(report) < (0, 14):
        assert result["error"] == 0
        assert "it updates its sources under the condition of its destinations" in result["outcome"]
    else:
        assert result["outcome"] == "fused", report["version"]
        assert result["error"] < 2e-6, report["version"]


def assert_layers_of_mappers_are_fused(report):
    """Assert that embeddings and output layer are fused, and agree with Anemoi."""
    layers = report["mapper layers"]
    assert layers["fused"] == 4, report["version"]
    assert layers["error"] < 2e-6, report["version"]


@every_version
def test_sub_layers_of_blocks_are_read_with_their_conditions_gates_and_norms(report):
    assert len(report["sub-layers"]) == 8  # two kinds of blocks, of norms and of networks
    has_gates = release_of(report) >= (0, 16)
    for name, descriptions in report["sub-layers"].items():
        kind, norm, implementation = name.split()
        condition = " condition" if norm == "conditional" else ""
        gated = " gated" if implementation == "swiglu" and has_gates else ""
        expected = {
            "attention": f"parts{condition} qk-norm",
            "feed_forward": f"parts{condition}{gated}",
        }
        if kind == "Mapper":
            expected["sources"] = expected["feed_forward"]
        assert descriptions == expected, name


def assert_windows_need_no_mask_and_no_flash_attn(report):
    """Assert that attention within a window agrees with Anemoi, built with and without flash-attn, and read."""
    results = report["window"]
    assert not results.pop("keeps a mask"), report["version"]
    assert set(results) == {"mask", "after a pass", "flash", "read"}
    for name, error in results.items():
        assert error < 1e-12, f"{report['version']}: {name}"


@every_version
def test_attention_within_a_window_needs_no_mask_and_no_flash_attn(report):
    assert_windows_need_no_mask_and_no_flash_attn(report)


@every_old_version
def test_a_checkpoint_of_aifs_that_names_flash_attn_is_read_and_computed_without(report):
    assert report["without flash-attn"]["named"]
    assert report["without flash-attn"]["error"] < 2e-6


@every_old_version
def test_embeddings_and_output_layers_of_mappers_are_fused_with_the_same_numbers(report):
    assert_layers_of_mappers_are_fused(report)


def assert_graph_networks_are_fused(report):
    """Assert that blocks of graph networks are fused, also with gathered nodes unless these are many, and agree with Anemoi."""
    results = report["graph networks"]
    assert len(results) == 4  # two kinds of blocks, on one rank and on two
    release = tuple(map(int, report["version"].split(".")[:2]))
    for name, result in results.items():
        assert result["outcome"] == result["many edges"] == ["fused", None], name
        assert result["error"] < 3e-6, name
        if name.endswith("on 2"):
            outcome, reason = result["few edges"]
            assert outcome == "networks only", name  # Anemoi's forward, whose MLPs are fused
            assert "gathers more than two nodes for each edge" in reason
            # what Anemoi itself cannot differentiate; elsewhere gradients are compared
            assert result["trainable"] == (not (0, 13) <= release <= (0, 15)), name
        else:
            assert result["trainable"], name
            assert result["few edges"] == ["fused", None], name


@every_version
def test_blocks_of_graph_networks_are_fused_with_the_same_numbers_on_one_rank_and_on_several(
    report,
):
    assert_graph_networks_are_fused(report)


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


def release(version):
    """Return a version as numbers, without what follows them (0.20.0.dev1, 0.19.0+local)."""
    numbers = itertools.takewhile(str.isdigit, version.split("+", maxsplit=1)[0].split("."))
    return tuple(map(int, numbers))


def bodies_of(version):
    """Return the hashes of the bodies of a release by name."""
    bodies = {}
    for first, changed in versions.GENERATIONS.items():
        if release(first) <= release(version):
            bodies |= changed
    return {name: digest for name, digest in bodies.items() if digest is not None}


@pytest.mark.parametrize("version", each(*OLD, PINNED, *OTHERS))
def test_the_bodies_of_a_version_are_those_of_its_generation(version):
    upstream = definitions(version)
    expected = bodies_of(version)
    for name, bodies in versions.KNOWN.items():
        actual = versions.hash_of_definition(upstream[name]) if name in upstream else None
        known = actual if actual in bodies else None
        assert known == expected.get(name), name


def test_the_newest_version_is_the_pinned_one():
    assert versions.NEWEST == PINNED
    assert bodies_of(f"{PINNED}.post1+local") == bodies_of(PINNED)


def assert_transformers_are_as_anemois(report):
    """Assert that the feed-forward sub-layer of both transformer blocks is fused and agrees with Anemoi."""
    assert len(report["transformers"]) == 2
    for name, block in report["transformers"].items():
        assert block["outcome"] == "feed-forward only", f"{report['version']}: {name}"
        assert block["same_form"], f"{report['version']}: {name}"
        assert block["error"] < 2e-6, f"{report['version']}: {name}"


@of_versions("0.9.3", "0.11.2")
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
        assert message.endswith("results are the same, slower")
    else:
        assert not methods, f"anemoi-models {report['version']}: {methods}"
    is_named = "target_features.shard_tensor" in sharding
    is_kept = sharding.endswith("keeping Anemoi's sharding")
    is_old = report["version"] in OLD
    assert (is_named and is_kept) is is_old, f"anemoi-models {report['version']}: {sharding}"
