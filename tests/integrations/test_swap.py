"""The front door: `anemoi_gt.install`, and one `swap_layers` for layers of Anemoi, PyG, or both in one model."""

import json
from inspect import signature

import pytest
from anemoi.models.layers.block import GraphTransformerProcessorBlock
from support.anemoi_model import block_inputs, differentiate_block, make_block
from support.same_numbers import assert_same_numbers
from test_house import OPTIONAL, run_without
from torch import nn
from torch_geometric.nn import TransformerConv

import anemoi_gt
from anemoi_gt import GraphTransformerConv, KernelConfig
from anemoi_gt.integrations import anemoi, pyg
from anemoi_gt.integrations.anemoi.settings import SETTINGS


@pytest.fixture(autouse=True)
def every_test_leaves_anemoi_as_it_is(anemoi_as_it_is):
    """Uninstall after each test."""


class Mixed(nn.Module):
    """A block of Anemoi before a layer of PyG."""

    def __init__(self):
        super().__init__()
        self.block = make_block()
        self.conv = TransformerConv(16, 4)

    def forward(self, x, edge_attr, edge_index, *rest):
        x, edge_attr = self.block(x, edge_attr, edge_index, *rest)
        return self.conv(x, edge_index), edge_attr


def test_layers_of_both_libraries_in_one_model_are_swapped():
    model, inputs = Mixed(), block_inputs(GraphTransformerProcessorBlock)
    expected = differentiate_block(model, inputs)
    assert anemoi_gt.swap_layers(model, "torch", stable_sort=False, fusion="attention") is model
    assert isinstance(model.conv, GraphTransformerConv)
    assert model.conv.config == KernelConfig("torch", stable_sort=False)
    settings = SETTINGS.of(model.block)
    assert (settings.config.backend, settings.fusion) == ("torch", "attention")
    assert SETTINGS.of(make_block()) is None
    assert_same_numbers(differentiate_block(model, inputs), expected)


def test_a_model_of_one_library_is_swapped_with_its_options():
    block = anemoi_gt.swap_layers(make_block(), fusion="none", sharding=False, keep_hidden=False)
    settings = SETTINGS.of(block)
    assert (settings.fusion, settings.sharding, settings.keep_hidden) == ("none", False, False)

    class Own(TransformerConv):
        pass

    layers = anemoi_gt.swap_layers(
        nn.ModuleList([Own(4, 4)]), precision="bf16", stable_sort=False, subclasses=(Own,)
    )
    assert layers[0].config == KernelConfig(precision="bf16", stable_sort=False)


REFUSED = {
    "no layer": (
        lambda: nn.Linear(1, 1),
        {},
        "a TransformerConv of PyG, or a block of Anemoi's .*, got Linear without one",
    ),
    "an option of Anemoi for PyG": (
        lambda: nn.ModuleList([TransformerConv(4, 4)]),
        {"fusion": "none"},
        "fusion, sharding and keep_hidden must be left out without blocks of Anemoi, got fusion='none'",
    ),
    "an option of PyG for Anemoi": (
        make_block,
        {"stable_sort": False},
        "stable_sort and subclasses must be left out without layers of PyG, got stable_sort=False",
    ),
    "a value": (Mixed, {"fusion": "all"}, "fusion must be one of"),
    "a backend": (Mixed, {"backend": "cuda"}, "backend must be one of"),
    "a bare layer": (lambda: TransformerConv(4, 4), {}, "got a bare TransformerConv"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_swapped_is_refused_before_anything_is(case):
    make, options, expected = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=expected):
        anemoi_gt.swap_layers(model, **options)
    assert SETTINGS.is_empty
    if isinstance(model, Mixed):
        assert type(model.conv) is TransformerConv


def test_the_options_and_defaults_are_those_of_both_integrations():
    ours = signature(anemoi_gt.swap_layers).parameters
    theirs = signature(anemoi.swap_layers).parameters | signature(pyg.swap_layers).parameters
    assert {name: option.default for name, option in ours.items()} == {
        name: option.default for name, option in theirs.items()
    }


def test_install_is_that_of_the_integration_and_old_names_stay():
    for name in ("install", "installed", "uninstall"):
        assert getattr(anemoi_gt, name) is getattr(anemoi, name)
    with anemoi_gt.install("torch"):
        assert anemoi_gt.installed().config.backend == "torch"
    assert anemoi_gt.installed() is None


LOADED = """
import json, sys, torch
import anemoi_gt
names = ("anemoi_gt.integrations", "torch_geometric", "anemoi.models", "torch")
before = [name for name in names[:3] if name in sys.modules]
from torch_geometric.nn import TransformerConv
anemoi_gt.swap_layers(torch.nn.ModuleList([TransformerConv(4, 4)]))
print(json.dumps([before, "anemoi_gt.integrations.anemoi" in sys.modules]))
"""


@pytest.mark.process
def test_the_front_door_imports_an_integration_only_for_its_layers():
    result = run_without(OPTIONAL - {"tqdm"}, LOADED)
    assert json.loads(result.stdout) == [[], False], result.stderr
