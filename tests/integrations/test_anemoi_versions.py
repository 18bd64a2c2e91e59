"""Old versions of anemoi-models, those that operational checkpoints need, and the newest, each in a process of its own.

They lie in folders beside the test environment (Makefile), and go first on the path.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "support" / "anemoi_versions.py"
VERSIONS = ("0.9.3", "0.11.2", "0.16.0", "newest")
MODELS = ("AIFS", "one chunk", "heads", "graph transformer")
SINCE_0_16 = ("GraphPartition.materialise", "StaticGraphProvider._get_edges_impl")


@pytest.fixture(scope="module")
def report(request, tmp_path_factory):
    """What the version of this test does without us and with us."""
    folder = Path(sys.prefix) / "anemoi-models" / request.param
    assert folder.is_dir(), f"{folder} is missing: make test installs it"
    environment = os.environ | {"PYTHONPATH": str(folder), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("c"))}
    result = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=300, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert request.param in (report["version"], "newest")
    return report


every_version = pytest.mark.parametrize("report", VERSIONS, indirect=True, scope="module")
every_old_version = pytest.mark.parametrize("report", VERSIONS[:-1], indirect=True, scope="module")


@every_old_version
def test_models_compute_the_same_with_us_and_keep_their_states_and_pickles(report):
    for name in MODELS:
        assert report[name]["raw"], f"{name}: we did not attend"
        assert report[name]["same"] and report[name]["error"] < 2e-6, name


@every_old_version
def test_mappers_hand_over_raw_edges(report):
    assert all(report["AIFS"]["raw"] + report["one chunk"]["raw"])


@every_version
def test_compiled_blocks_have_our_operator(report):
    for kind in ("Processor", "Mapper"):
        assert report["compiled"][kind]["error"] < 1e-6
        assert "anemoi_gt.edge_attention_torch.default" in report["compiled"][kind]["operators"]


@every_version
def test_blocks_that_were_built_for_a_gpu_compute_with_us(report):
    assert report["triton"] is None if report["version"] == "0.9.3" else report["triton"] < 1e-6


@every_version
def test_install_names_the_methods_that_are_not_as_in_the_versions_we_know(report):
    *methods, sharding = report["said"] or [""]
    if report["version"] in ("0.9.3", "0.11.2"):
        (message,) = methods
        assert all(name in message for name in SINCE_0_16) and "GraphTransformerBaseBlock" not in message
        assert message.endswith("expect less speed, not other results")
    else:
        assert not methods, f"anemoi-models {report['version']}: {methods}"
    named = "_forward_edges_shard_strategy" in sharding and sharding.endswith("its own sharding is kept")
    assert named is (report["version"] in VERSIONS[:-1]), f"anemoi-models {report['version']}: {sharding}"
