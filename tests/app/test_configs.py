"""The configs: each builds its object, choices compose, and other applications can use the groups."""

import re
import warnings
from importlib.resources import files

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.utils import instantiate
from support.own_data import weather_file
from support.pages import ROOT, blocks
from support.weather import hourly_field

from anemoi_gt import KernelConfig
from anemoi_gt.app.command_line import GROUPS, current_spelling
from anemoi_gt.app.datasets import era5_uk
from anemoi_gt.app.datasets.readers import READERS
from anemoi_gt.app.datasets.xarray_reader import read_dataset
from anemoi_gt.app.objects import build
from anemoi_gt.data.grids import regional
from anemoi_gt.kernel_config import BACKENDS
from anemoi_gt.nn import GraphTransformerBaseBlock

CONFIGS = files("anemoi_gt.configs")
TINY_SPHERE = [
    "data.grid_name=O4",
    "data.train_size=2",
    "data.valid_size=1",
    "data.test_size=1",
    "data.lead_time=12",
]
COARSE = {  # graphs that fit the tiny grid
    "graph=icosphere": ["graph.refinement=1"],
    "graph=n320": ["graph.refinement=1", "graph.grid=O4"],
    "graph=o1280": ["graph.refinement=1", "graph.grid=O4"],
    "graph=era5_uk": ["graph.refinement=2", "graph.margin=1000"],
    "graph=limited_area": ["graph.refinement=5"],
    "graph=stretched": ["graph.refinement=1", "graph.area_refinement=2"],
}
SMALL_MODEL = ["model.channels=16", "model.num_layers=1", "model.checkpoint_groups=1"]
FOR_ANEMOI = "anemoi"  # groups for Anemoi's configs, not for this application's


def composed(*overrides):
    with initialize_config_module("anemoi_gt.configs", version_base="1.3"):
        return compose("train", list(overrides))


def options(folder=CONFIGS, group=""):
    """Every option of every group of the application, as an override."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir() and entry.name != FOR_ANEMOI:
            yield from options(entry, f"{group}/{entry.name}" if group else entry.name)
        elif group and entry.name.endswith(".yaml"):
            yield f"{group}={entry.name.removesuffix('.yaml')}"


def test_there_are_the_groups_that_the_documentation_names_and_every_backend():
    groups = {option.split("=")[0] for option in options()}
    assert groups == {"sharding", *GROUPS}
    assert {f"kernels={name}" for name in BACKENDS} <= {*options()}


@pytest.mark.application
@pytest.mark.parametrize("option", list(options()))
def test_every_config_builds_its_object(option, monkeypatch):
    # on every fourth point
    month = hourly_field(nodes=regional(np.arange(58.0, 49, -1), np.arange(-10.0, 3)))
    monkeypatch.setattr(era5_uk, "read_era5_uk", lambda path: month)
    needed = ["data=era5_uk"] if "limited" in option else [] if "era5" in option else TINY_SPHERE
    if option in ("data=xarray", "data=anemoi"):
        needed = [f"data.path={__file__}"]
        read = "any file", lambda path: read_dataset(weather_file())
        monkeypatch.setitem(READERS, option.partition("=")[2], read)
    needed = [*needed, *SMALL_MODEL] if "o1280" in option else needed
    config = composed(*needed, option, *COARSE.get(option, []))
    if option == "kernels=triton":
        assert instantiate(config.kernels) == KernelConfig(backend="triton")
        return
    splits, model, _ = build(config)
    sample = splits.train[0]
    assert model(sample.inputs[None])[0].shape == sample.target.shape


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ("", KernelConfig()),
        ("kernels.precision=null", KernelConfig()),
        ("kernels=triton", KernelConfig("triton")),
        ("kernels.backend=triton", KernelConfig("triton")),
        ("kernels=torch kernels.precision=bf16", KernelConfig("torch", "bf16")),
        ("kernels.precision=fp16", KernelConfig(precision="fp16")),
        ("kernels.stable_sort=false", KernelConfig(stable_sort=False)),
    ],
)
def test_kernels_are_chosen_by_group_or_by_value(overrides, expected):
    assert instantiate(composed(*overrides.split()).kernels) == expected


@pytest.mark.parametrize(
    ("former", "current"),
    [
        ("attention/backend=torch", "kernels.backend=torch"),
        ("+attention/precision=null", "kernels.precision=null"),
        ("attention.stable_sort=false", "kernels.stable_sort=false"),
        ("attention=default", "kernels=auto"),
    ],
)
def test_a_former_spelling_is_accepted_and_the_new_one_is_named(former, current):
    with pytest.warns(FutureWarning, match=re.escape(f"{former} will be refused in 0.6.0: write ")):
        assert current_spelling(former) == current
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert current_spelling(current) == current


def test_graph_model_and_training_follow_the_data_unless_chosen():
    config = composed("data=era5_uk")
    assert config.graph._target_.endswith("limited_area_graph")
    assert (
        config.training
        == composed("data=era5_uk", "training=era5_uk").training
        != composed().training
    )
    assert composed("data=era5_uk", "model=graph_transformer").model.channels == 128


def test_a_graph_for_a_grid_brings_the_data_onto_it_and_its_model_and_training_unless_chosen():
    config = composed("graph=o1280")
    assert (config.data.grid_name, config.model.channels, config.training.batch_size) == (
        "O1280",
        1024,
        1,
    )
    assert config.training == composed("training=o1280").training != composed("graph=n320").training
    assert composed("graph=o1280", "model=sphere").model == composed().model
    assert composed("graph=n320").data.grid_name == "N320"
    assert composed().data.grid_name == "O16"


def test_graphs_have_the_options_of_anemoi():
    config = composed("graph=n320").graph
    assert (config.refinement, config.cutoff, config.nearest) == (6, 0.6, 3)


def test_a_graph_for_another_grid_is_refused():
    with pytest.raises(
        ValueError, match=r"the data must be on grid N320, .* of 542080 nodes, got 208 nodes"
    ):
        build(composed("graph=n320", *TINY_SPHERE))


def test_your_own_data_use_the_default_graph_model_and_training(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text("_target_: my.splits\n")
    config = composed("data=mine", f"hydra.searchpath=[{tmp_path}]")
    default = composed("data=xarray")
    assert config.data == {"_target_": "my.splits"}
    assert all(config[group] == default[group] for group in ("graph", "model", "training"))
    assert config.graph._target_.endswith("limited_area_graph")
    assert config.graph.refinement is None
    (tmp_path / "graph").mkdir()
    for text in blocks(ROOT / "docs" / "own_data.md", "text"):
        if text.startswith("# conf/"):
            (tmp_path / text.splitlines()[0].removeprefix("# conf/")).write_text(text)
    config = composed("data=mine", f"hydra.searchpath=[{tmp_path}]")
    assert config.data == {
        **composed("data=xarray", "data.path=a").data,
        "path": "weather.nc",
        "diagnostics": ["tp"],
    }
    expected = composed("graph=limited_area", "graph.refinement=5").graph
    assert config.graph == expected
    assert config.model == default.model


def test_the_kernel_config_reaches_every_layer():
    model = build(composed(*TINY_SPHERE, "kernels=torch", "kernels.precision=bf16")).model
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    assert len(blocks) > 2
    assert {block.config for block in blocks} == {KernelConfig("torch", "bf16")}


def test_the_seed_draws_the_weights():
    one, same, other = (
        build(composed(*TINY_SPHERE, f"training.seed={seed}")).model for seed in (1, 1, 2)
    )
    weights = [model.encoder["data"].emb_nodes_src.weight for model in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


FOREIGN = """
defaults:
  - kernels: auto
  - model@networks.small: sphere
  - graph: icosphere
  - _self_
hydra:
  searchpath: [pkg://anemoi_gt.configs]
learning: fast
"""


def test_a_foreign_application_uses_the_groups(tmp_path):
    (tmp_path / "config.yaml").write_text(FOREIGN)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("config", ["kernels=torch", "graph.refinement=1"])
    kernels = instantiate(config.kernels)
    assert kernels == KernelConfig(backend="torch")
    assert config.learning == "fast"
    assert set(config) == {"kernels", "networks", "graph", "learning"}
    nodes = regional(np.arange(-80.0, 90, 20), np.arange(0.0, 360, 20))
    model = instantiate(config.networks.small)(
        instantiate(config.graph)(nodes), 3, 2, config=kernels
    )
    assert model(torch.zeros(1, len(nodes), 3)).shape == (1, len(nodes), 2)
