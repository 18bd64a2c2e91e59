"""Fused sub-layers by name: tensors and cases of each, computed by its operator and in plain PyTorch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from anemoi_gt.ops.tensors import (
    AttentionTensors,
    IndexTensors,
    InteractionTensors,
    NetworkTensors,
)
from anemoi_gt.ops.tree import leaf_types, leaves
from anemoi_gt.ops.triton_backend.edge_sums import sum_edges
from anemoi_gt.ops.triton_backend.formulas import (
    attention_sublayer,
    attention_triton,
    interaction_sublayer,
    interaction_triton,
    network_sublayer,
    network_triton,
)
from support import networks, sublayers


class Problem(NamedTuple):
    """Tensors of a call by name and gradients of its outputs, and two functions of such tensors."""

    named: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    plainly: Callable  # returns the outputs by name
    ours: Callable  # the same, by the operator
    kind: Any  # of the tree of tensors
    operator: Any
    options: Any
    graph: Any = None

    @property
    def index(self):
        """Constants of the operator, for both passes."""
        return () if self.graph is None else tuple(IndexTensors.of(self.graph.with_reverse()))

    def inputs(self):
        """Return tensors and constants of the operator."""
        return (*leaves(sublayers.fill(self.kind, self.named)), *self.index)

    def plans(self):
        """Return the plans of the operator."""
        return self.operator.passes(self.inputs(), self.options)

    def needs(self, names):
        """Return which leaves need a gradient: those of some names."""
        return tuple(name in names for name in leaf_types(self.kind))

    def backward_plan(self, names):
        """Return the plan of the backward pass for gradients of some names."""
        return self.plans().backward_plan(self.needs(names), (True,))[0]


def network(named, options):
    return {"out": network_sublayer(sublayers.fill(NetworkTensors, named), options)}


def interaction(named, graph, options):
    tensors = sublayers.fill(InteractionTensors, named)
    edges = interaction_sublayer(tensors, graph, options)
    return {"edges": edges, "sums": sum_edges(edges, graph, options.batch)}


def attention(named, graph, options):
    return {"out": attention_sublayer(sublayers.fill(AttentionTensors, named), graph, options)}


def _on_rows(draw, device, dtype=torch.float32, **case):
    named, grads, options = draw(device, dtype=dtype, **case)
    plainly = partial(networks.network_sublayer, options=options)
    ours = partial(network, options=options)
    return Problem(named, grads, plainly, ours, NetworkTensors, network_triton, options)


def _on_graph(draw, plainly, ours, kind, operator, device, dtype=torch.float32, **case):
    named, grads, graph, edge_index, options = draw(device, dtype=dtype, **case)
    plainly = partial(plainly, edge_index=edge_index, options=options)
    ours = partial(ours, graph=graph, options=options)
    return Problem(named, grads, plainly, ours, kind, operator, options, graph)


OF_EDGES = (networks.interaction_sublayer, interaction, InteractionTensors, interaction_triton)
OF_ATTENTION = (sublayers.attention, attention, AttentionTensors, attention_triton)
# draw(device, dtype, **case) returns a Problem
DRAW = {
    "feed-forward": partial(_on_rows, networks.draw_feed_forward),
    "linear": partial(_on_rows, networks.draw_linear),
    "network": partial(_on_rows, networks.draw_network),
    "interaction": partial(_on_graph, networks.draw_interaction, *OF_EDGES),
    "attention": partial(_on_graph, sublayers.draw_attention, *OF_ATTENTION),
}
CASES = {
    "feed-forward": networks.FEED_FORWARD_CASES,
    "linear": networks.LINEAR_CASES,
    "network": networks.NETWORK_CASES,
    "interaction": networks.INTERACTION_CASES,
    "attention": sublayers.ATTENTION_CASES,
}
# a case with as many kinds of tensors as there are
CASE = {
    "feed-forward": {"norm": 4, "gated": True},
    "linear": {"columns": 11},
    "network": {"inputs": "x and more", "hidden": "two gated"},
    "interaction": {"batch": 2, "segment": 2, "halo": 3, "hidden": "two gated"},
    "attention": {"norm": 4, "batch": 2, "halo": 3, "feed_forward": "gated"},
}


def results_of(problem, dtype=None, compute=None):
    """Return outputs and gradients by name, of `compute` or else the operator."""
    return networks.results_of(compute or problem.ours, problem.named, problem.grads, dtype)
