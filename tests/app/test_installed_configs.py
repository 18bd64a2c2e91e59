"""The configs are package data: another project's Hydra application finds them in a wheel and an editable install."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from support.nightly import nightly

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[2]
SHIPPED = ("src", "configs", "pyproject.toml", "README.md", "LICENSE", "NOTICE")

APPLICATION = """
import runpy
import sys
from importlib.metadata import files

import hydra
import torch
from hydra.utils import instantiate

@hydra.main(version_base="1.3", config_path=".", config_name="config")
def main(config):
    import anemoi_gt
    from anemoi_gt.data.grids import grid

    print(anemoi_gt.__file__)
    kernels = instantiate(config.layers.kernels)
    print(kernels.backend, kernels.precision)
    layer = anemoi_gt.GraphTransformerConv(8, config.channels_per_head, heads=2, config=kernels)
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 0]])
    print(tuple(layer(torch.ones(3, 8), edge_index).shape), layer.config == kernels)
    nodes = grid("N32")  # its row lengths are package data too
    model = instantiate(config.model)(instantiate(config.graph)(nodes), 3, 2, config=kernels)
    print(tuple(model(torch.zeros(1, len(nodes), 3)).shape))

main()
print(*sorted(file.name for file in files("anemoi-gt") if "licenses" in file.parts))
sys.argv[1:] = ["--cfg", "job"]
runpy.run_module("anemoi_gt.train", run_name="__main__")
"""
CONFIG = """
defaults:
  - kernels@layers.kernels: torch
  - graph: icosphere
  - model: graph_transformer
  - _self_
channels_per_head: 4
layers:
  kernels:
    precision: bf16
graph:
  refinement: 1
model:
  channels: 32
  num_layers: 1
hydra:
  searchpath: [pkg://anemoi_gt.configs]
"""


def execute(*command, cwd):
    result = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def source(tmp_path):
    """A copy of a release's content, so that building leaves nothing in the repository."""
    source = tmp_path / "source"
    source.mkdir()
    for name in SHIPPED:
        copy = shutil.copytree if (REPOSITORY / name).is_dir() else shutil.copy
        copy(REPOSITORY / name, source / name)
    return source


@pytest.fixture
def python(tmp_path):
    """A virtual environment with this one's packages except anemoi_gt."""
    venv.create(tmp_path / "environment", with_pip=False)
    python = tmp_path / "environment" / "bin" / "python"
    packages = execute(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    ).strip()
    # Folders in a .pth file are searched, but their own .pth files, which make an editable install
    # work, are not read.
    borrowed = {
        sysconfig.get_path("purelib"),
        *(path for path in sys.path if path.endswith("site-packages")),
    }
    Path(packages, "borrowed.pth").write_text("\n".join(sorted(borrowed)))
    return python


@pytest.mark.parametrize("mode", ["wheel", *nightly("editable")])
def test_another_application_finds_the_configs_of_the_installed_package(
    mode, source, python, tmp_path
):
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    target = ["--editable", source] if mode == "editable" else [source]
    execute(
        sys.executable, "-m", "pip", "--python", python, "install", *options, *target, cwd=tmp_path
    )
    (tmp_path / "application.py").write_text(APPLICATION)
    (tmp_path / "config.yaml").write_text(CONFIG)
    lines = execute(python, "application.py", cwd=tmp_path).splitlines()
    home = source / "src" if mode == "editable" else tmp_path / "environment"
    assert Path(lines[0]).is_relative_to(home)
    assert lines[1:5] == ["torch bf16", "(3, 8) True", "(1, 6114, 2)", "LICENSE NOTICE"]
    assert any("KernelConfig" in line for line in lines[5:])  # the application's own config
