"""Our attention from a config of Anemoi: an entry of its layer kernels with validation on, or targets with it off."""

import traceback
import warnings

import pytest
from anemoi.models.layers.block import GraphTransformerBaseBlock
from anemoi.models.layers.mapper import (
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
)
from anemoi.models.layers.processor import GraphTransformerProcessor
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import InstantiationException
from support.anemoi_model import CONFIG, build, draw, make_options, options_of
from support.same_numbers import assert_same_numbers

from anemoi_gt.integrations.anemoi.settings import SETTINGS

with warnings.catch_warnings(action="ignore"):  # of pydantic, at every field of the schema
    from anemoi.models.schemas.models import BaseModelSchema

APPLICATION = f"""
defaults:
  - {CONFIG.stem}
  - anemoi/layer_kernels@model.layer_kernels: anemoi_gt
  - _self_
hydra:
  searchpath: [pkg://anemoi_gt.configs]
"""


@pytest.fixture
def composed(tmp_path):
    """Compose the small model with our layer kernels, as anemoi-training would with a config of the user's."""

    def make(*overrides):
        (tmp_path / "config.yaml").write_text(APPLICATION)
        (tmp_path / CONFIG.name).write_text(CONFIG.read_text())
        with initialize_config_dir(str(tmp_path), version_base="1.3"):
            return options_of(compose("config", list(overrides)))

    yield make
    GlobalHydra.instance().clear()


def validated(options):
    """Return the options after validation by Anemoi's schema, which raises for unknown ones."""
    return BaseModelSchema(**options).model_dump(by_alias=True)


def test_the_layer_kernel_passes_the_schema_and_installs_us(composed, graph, attentions):
    expected = build(graph, make_options())(draw(graph))["data"]
    options = composed()
    assert options["processor"]["layer_kernels"]["AnemoiGT"]["_target_"] == "builtins.dict"
    model = build(graph, validated(options))
    assert_same_numbers(model(draw(graph))["data"], expected)
    assert len(attentions) == 2 + 2 + 2


def test_the_layer_kernel_accepts_the_options_of_install(composed, graph):
    kernel = "model.layer_kernels.AnemoiGT.install"
    options = (f"{kernel}.backend=torch", f"{kernel}.precision=bf16", f"{kernel}.fusion=none")
    options += (f"{kernel}.sharding=false",)
    build(graph, validated(composed(*options)))
    assert (SETTINGS.everywhere.config.backend, SETTINGS.everywhere.config.precision) == (
        "torch",
        "bf16",
    )
    assert (SETTINGS.everywhere.fusion, SETTINGS.everywhere.sharding) == ("none", False)


def test_a_misspelt_option_stops_the_build(composed, graph):
    with pytest.raises(InstantiationException) as caught:
        build(graph, composed("model.layer_kernels.AnemoiGT.install.backend=cuda"))
    assert "backend must be one of auto, triton, torch, got 'cuda'" in "".join(
        traceback.format_exception(caught.value)
    )


TARGETS = {
    "processor": ("graph_transformer_processor", GraphTransformerProcessor),
    "encoder": ("graph_transformer_forward_mapper", GraphTransformerForwardMapper),
    "decoder": ("graph_transformer_backward_mapper", GraphTransformerBackwardMapper),
}


def component_of(options, name):
    return options["processor"] if name == "processor" else options[f"{name}s"][name]["mapper"]


def test_targets_build_anemois_components_with_our_attention(graph, attentions):
    expected = build(graph, make_options())(draw(graph))["data"]
    options = make_options()
    for name, (target, _) in TARGETS.items():
        component_of(options, name)["_target_"] = f"anemoi_gt.integrations.anemoi.{target}"
    model = build(graph, options)
    assert_same_numbers(model(draw(graph))["data"], expected)
    assert len(attentions) == 2 + 2 + 2
    built = {"processor": model.processor, **model.encoder, **model.decoder}
    assert {name: type(component) for name, component in built.items()} == {
        n: kind for n, (_, kind) in TARGETS.items()
    }


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_swaps_its_own_blocks_with_its_own_options(graph, name):
    options = make_options()
    component_of(options, name).update(
        _target_=f"anemoi_gt.integrations.anemoi.{TARGETS[name][0]}", precision="bf16"
    )
    model = build(graph, options)
    swapped = {
        path.partition(".")[0]: SETTINGS.of(block).config.precision
        for path, block in model.named_modules()
        if isinstance(block, GraphTransformerBaseBlock) and SETTINGS.of(block)
    }
    assert swapped == {name: "bf16"}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_refuses_activation_checkpointing_which_anemoi_would_ignore(graph, name):
    options = make_options()
    component_of(options, name).update(
        _target_=f"anemoi_gt.integrations.anemoi.{TARGETS[name][0]}",
        activation_checkpointing="none",
    )
    with pytest.raises(InstantiationException) as caught:
        build(graph, options)
    assert "activation_checkpointing must be passed to install" in "".join(
        traceback.format_exception(caught.value)
    )


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_every_option_of_swap_layers(graph, name):
    """Anemoi's classes take any keyword argument and ignore those that they do not know."""
    chosen = {"fusion": "attention", "sharding": False, "keep_hidden": False}
    options = make_options()
    component_of(options, name).update(
        _target_=f"anemoi_gt.integrations.anemoi.{TARGETS[name][0]}", backend="torch", **chosen
    )
    model = build(graph, options)
    (settings,) = {
        SETTINGS.of(block)
        for block in model.modules()
        if isinstance(block, GraphTransformerBaseBlock)
    } - {None}
    assert settings.config.backend == "torch"
    assert {option: getattr(settings, option) for option in chosen} == chosen
