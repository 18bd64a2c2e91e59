"""Tensors and options of networks and of the edge update, as trees.

    network(u) = norm(W_out act(W_2 act(W_1 u + b_1) + b_2) + b_out)

    network_sublayer        y_n = x_n + network([norm_in(x_n), m_n])       or without x_n
    interaction_sublayer    e'_e = e_e + network([x_i, x_j, e_e])          or without e_e
    sum_edges               s_i  = sum of e'_e over the in-edges of i      edge e from j to i

Hidden layers, both norms and m_n are optional: the feed-forward sub-layer of a transformer is
x + network(norm_in(x)) without the outer norm, a linear layer network(x) without hidden layers. The
first layer of the edge update factors over nodes: W_1 u = W_e e_e + (W_i x_i + b_1) + W_j x_j. An
interaction network (Battaglia et al. 2016, https://arxiv.org/abs/1612.00222) is both, the second on
[x_i, s_i]. Anemoi's graph networks consist of them; GraphCast (Lam et al. 2023, supplement 3.5 to
3.7) sums the networks, not e'_e.

Dimensions: N nodes of a batch entry, B batch entries, E edges of one, R halo rows, F features of a
row, K and L hidden features.
"""

from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import have_size
from anemoi_gt.ops.operands import Held
from anemoi_gt.ops.sublayer_tensors import Linear, Norm, NormOptions


class Layer(NamedTuple, Generic[Held]):
    """A hidden layer: act(W u + b), or gated act(W_gate u + b_gate) (W u + b)."""

    gate: Linear[Held] = Linear()
    value: Linear[Held] = Linear()


class Network(NamedTuple, Generic[Held]):
    """A network of at most two hidden layers; K or L are its inputs where a layer is absent."""

    first: Layer[Held]  # [K, inputs]
    second: Layer[Held]  # [L, K]
    out: Linear[Held]  # [F, L]
    norm: Norm[Held]


class NetworkTensors(NamedTuple, Generic[Held]):
    """Tensors of a network on rows, or what belongs to each of them."""

    x: Held  # [N, F_x]
    more: Held | None  # [N, F_m]: more inputs
    norm_in: Norm[Held]  # of x before the network
    network: Network[Held]


class InteractionTensors(NamedTuple, Generic[Held]):
    """Tensors of an edge update, or what belongs to each of them.

    The halo, sources of other ranks, follows a rank's own sources in each batch entry.
    """

    x_src: Held | None  # [B * N_src, F_src]; None where sources are the destinations
    halo: Held | None  # [B * R, F_src]
    x_dst: Held  # [B * N_dst, F_dst]
    edges: Held  # [B * E, F]
    network: Network[Held]


class NetworkOptions(NamedTuple):
    """Options of a network."""

    norm: NormOptions  # eps 0 for an absent norm
    activation: str  # of hidden layers, or of their gates; see `anemoi_gt.ops.activations`
    gemm_dtype: torch.dtype
    out_dtype: torch.dtype
    residual: bool  # whether x is added
    repeats_x: bool = False  # whether x takes the place of `more` too
    norm_in: NormOptions = NormOptions()  # eps 0 for an absent norm
    keep_hidden: bool = True  # rows before activations, which are else computed again


class InteractionOptions(NamedTuple):
    """Options of an edge update."""

    batch: int
    network: NetworkOptions  # without a residual connection, the update of e_e is returned

    @property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype of the operands of matrix products."""
        return self.network.gemm_dtype


def check_network(t: NetworkTensors[Tensor], options: NetworkOptions) -> None:
    """Raise ValueError unless rows and parameters of a network fit together: kernels rely on it."""
    inputs = t.x.shape[1]
    if t.more is not None:
        _check_rows("more", t.more, t.x.shape[0])
        inputs += t.more.shape[1]
    elif options.repeats_x:
        inputs *= 2
    # compared here, because a call of a function in every call of a block costs time
    network = t.network
    first, out = network.first.value.weight, network.out.weight
    if (out if first is None else first).shape[1] != inputs:
        _refuse_inputs(network, inputs)
    if options.residual and t.x.shape[1] != out.shape[0]:
        _refuse_residual(network, "x", t.x)


def check_interaction(
    t: InteractionTensors[Tensor], graph: GraphStructure, options: InteractionOptions
) -> None:
    """Raise ValueError unless rows, parameters and structure of an edge update fit together."""
    batch = options.batch
    x_src = t.x_dst if t.x_src is None else t.x_src
    own_sources = batch * graph.num_src
    if t.halo is not None:
        _check_halo(t.halo, x_src.shape[1], batch)
        own_sources -= t.halo.shape[0]
    _check_rows("x_dst", t.x_dst, batch * graph.num_dst)
    _check_rows("x_src", x_src, own_sources)
    _check_rows("edges", t.edges, batch * graph.num_edges)
    inputs = t.x_dst.shape[1] + x_src.shape[1] + t.edges.shape[1]
    if t.network.first.value.weight.shape[1] != inputs:
        _refuse_inputs(t.network, inputs)
    if t.edges.shape[1] != t.network.out.weight.shape[0]:
        _refuse_residual(t.network, "edges", t.edges)


def check_edge_sums(edges: Tensor, graph: GraphStructure, batch: int) -> None:
    """Raise ValueError unless rows of edges fit the structure."""
    _check_rows("edges", edges, batch * graph.num_edges)


def _check_rows(name: str, rows: Tensor, number: int) -> None:
    if rows.dim() != 2 or not have_size(rows.shape[0], number):
        raise ValueError(f"{name} must be [{number}, features], got {tuple(rows.shape)}")


def _check_halo(halo: Tensor, features: int, batch: int) -> None:
    is_entries = halo.dim() == 2 and have_size(halo.shape[0] % batch, 0)
    if not is_entries or halo.shape[1] != features:
        raise ValueError(
            f"halo must be [{batch} * R, {features}], rows of each batch entry with the features "
            f"of x_src, got {tuple(halo.shape)}"
        )


def _refuse_inputs(network: Network[Tensor], inputs: int) -> None:
    weight = network.first.value.weight
    if weight is None:
        weight = network.out.weight
    raise ValueError(
        f"the first layer must take the {inputs} features of its inputs, side by side, got a "
        f"weight {tuple(weight.shape)}"
    )


def _refuse_residual(network: Network[Tensor], name: str, rows: Tensor) -> None:
    raise ValueError(
        f"{name} must have the {network.out.weight.shape[0]} features that the network returns "
        f"(residual connection), got {tuple(rows.shape)}"
    )
