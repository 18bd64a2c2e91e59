"""Anemoi computes with its own code before and after every test; a small graph; what our attention was called with."""

import logging

import pytest
import torch
from support.anemoi_model import graph_of
from support.weather import KINDS, weather_graph

from anemoi_gt import GraphStructure
from anemoi_gt.integrations.anemoi import blocks, report


@pytest.fixture(autouse=True)
def every_test_leaves_anemoi_as_it_is(anemoi_as_it_is):
    """Uninstall after each test."""


@pytest.fixture(scope="session")
def graph():
    """544 data points, 162 hidden nodes."""
    return graph_of("O8", 2)


@pytest.fixture(scope="session")
def small_graph():
    """7 data points, 5 hidden nodes: the interpreter runs them one by one."""
    return weather_graph({"data": 7, "hidden": 5}, dict.fromkeys(KINDS, 13))


@pytest.fixture
def attentions(monkeypatch):
    """Operands of every call of our attention: query, key, value, graph, edges, and weight and bias of raw edges."""
    calls, attend = [], blocks.edge_attention

    def record(*operands, **options):
        calls.append(operands)
        return attend(*operands, **options)

    monkeypatch.setattr(blocks, "edge_attention", record)
    return calls


@pytest.fixture
def said(caplog):
    """Return a function that returns the log messages of anemoi_gt in this test; all can be logged again."""
    report._log_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="anemoi_gt")

    def messages():
        records = (record for record in caplog.records if record.name.startswith("anemoi_gt"))
        return [record.message for record in records]

    return messages


class Traced(dict):
    """The nodes of one traced graph by the name of their target."""

    def __init__(self, module):
        super().__init__()
        for submodule in module.modules():  # the body of a checkpoint is a module of its own
            if not isinstance(submodule, torch.fx.GraphModule):
                continue
            for node in submodule.graph.nodes:
                self.setdefault(str(node.target), []).append(node)


@pytest.fixture
def traced():
    """A backend of torch.compile, and the graphs that it was given."""
    torch.compiler.reset()
    graphs = []

    def backend(module, inputs):
        graphs.append(Traced(module))
        return module.forward

    return backend, graphs


@pytest.fixture
def sorts(monkeypatch):
    """Shapes of the edge lists that are sorted."""
    shapes, sort = [], GraphStructure.from_edge_index.__func__

    def record(cls, edge_index, *arguments, **options):
        shapes.append(tuple(edge_index.shape))
        return sort(cls, edge_index, *arguments, **options)

    monkeypatch.setattr(GraphStructure, "from_edge_index", classmethod(record))
    return shapes
