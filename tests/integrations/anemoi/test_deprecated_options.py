"""`blocks` and `fuse_edges`, the options of 0.4 that `fusion` replaces, in code and configs of users."""

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support.anemoi_model import build, make_block, make_options

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi.settings import SETTINGS

FUSIONS = (
    ({"fuse_edges": True}, "auto"),
    ({"blocks": None}, "auto"),
    ({"blocks": None, "fuse_edges": True}, "auto"),
    ({"blocks": True}, "sublayers"),
    ({"blocks": False}, "attention"),
    ({"blocks": False, "fuse_edges": True}, "attention"),
    ({"fuse_edges": False}, "none"),
    ({"blocks": False, "fuse_edges": False}, "none"),
    ({"blocks": True, "fuse_edges": False}, "none"),
)
LAYER_KERNEL = """
AnemoiGT:  # as the page of 0.4 had it
  _target_: builtins.dict
  install:
    _target_: anemoi_gt.integrations.anemoi.install
    backend: torch
    precision: null
    fuse_edges: true
    blocks: false
    activation_checkpointing: null
    keep_hidden: true
    sharding: true
"""


@pytest.mark.parametrize(("options", "fusion"), FUSIONS, ids=str)
def test_deprecated_options_of_install_choose_a_fusion_and_warn(options, fusion, said):
    message = f"since 0.5.0, use fusion='{fusion}'"
    with pytest.warns(DeprecationWarning, match=message) as caught:
        integration.install(**options)
    assert caught[0].filename == __file__
    assert SETTINGS.everywhere.fusion == fusion
    assert [message in line for line in said()] == [True]


def test_deprecated_options_of_swap_layers_choose_a_fusion_and_warn():
    block = make_block()
    with pytest.warns(DeprecationWarning, match="use fusion='attention'"):
        integration.swap_layers(block, blocks=False)
    assert SETTINGS.of(block).fusion == "attention"


def test_a_layer_kernel_of_0_4_installs(graph):
    with pytest.warns(DeprecationWarning, match="use fusion='attention'"):
        instantiate(OmegaConf.create(LAYER_KERNEL))
    assert SETTINGS.everywhere.config.backend == "torch"
    assert SETTINGS.everywhere.fusion == "attention"


def test_a_target_takes_deprecated_options(graph):
    options = make_options()
    target = "anemoi_gt.integrations.anemoi.graph_transformer_processor"
    options["processor"].update(_target_=target, blocks=False, fuse_edges=False)
    with pytest.warns(DeprecationWarning, match="use fusion='none'"):
        model = build(graph, options)
    assert {SETTINGS.of(block).fusion for block in model.processor.proc} == {"none"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"blocks": "yes"}, "blocks must be True, False or None, got 'yes'"),
        ({"fuse_edges": None}, "fuse_edges must be True or False, got None"),
        (
            {"fusion": "none", "blocks": True},
            "fusion must be given alone, got 'none' and blocks=True",
        ),
    ],
)
def test_deprecated_options_that_are_wrong_or_contradict_are_refused(options, expected):
    with pytest.raises(ValueError, match=expected):
        integration.install(**options)
    assert SETTINGS.is_empty
