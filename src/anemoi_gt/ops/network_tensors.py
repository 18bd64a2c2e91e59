"""Tensors and options of networks with a norm on their output, and of the edge update, as trees.

    network(u) = norm(W_out act(W_2 act(W_1 u + b_1) + b_2) + b_out)

    network_sublayer        y_n = x_n + network([x_n, m_n])                or network([x_n, m_n])
    interaction_sublayer    e'_e = e_e + network([x_i, x_j, e_e])          edge e from j to i
                            s_i  = sum of e'_e over the in-edges of i

The second layer, the norm and m_n are optional. The first layer of the edge update factors over
nodes: W_1 u = W_e e_e + (W_i x_i + b_1) + W_j x_j. An interaction network (Battaglia et al. 2016,
https://arxiv.org/abs/1612.00222) is both, the second on [x_i, s_i]; GraphCast (Lam et al. 2023,
supplement 3.5 to 3.7) consists of them.

Dimensions: N nodes of a batch entry, B batch entries, E edges of one, F features of a row, K and L
hidden features.
"""

from typing import Generic, NamedTuple

import torch

from anemoi_gt.ops.operands import Held
from anemoi_gt.ops.sublayer_tensors import Linear, Norm, NormOptions


class Layer(NamedTuple, Generic[Held]):
    """A hidden layer: act(W u + b), or gated act(W_gate u + b_gate) (W u + b)."""

    gate: Linear[Held] = Linear()
    value: Linear[Held] = Linear()


class Network(NamedTuple, Generic[Held]):
    """A network of one or two hidden layers."""

    first: Layer[Held]  # [K, inputs]
    second: Layer[Held]  # [L, K]; absent: K = L
    out: Linear[Held]  # [F, L]
    norm: Norm[Held]  # without a condition


class NetworkTensors(NamedTuple, Generic[Held]):
    """Tensors of a network on rows, or what belongs to each of them."""

    x: Held  # [N, F_x]
    more: Held | None  # [N, F_m]: more inputs; None with weights [K, 2 F_x]: x itself
    network: Network[Held]


class InteractionTensors(NamedTuple, Generic[Held]):
    """Tensors of an edge update, or what belongs to each of them."""

    x_src: Held | None  # [B * N_src, F_src]; None where sources are the destinations
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


class InteractionOptions(NamedTuple):
    """Options of an edge update."""

    batch: int
    network: NetworkOptions  # with the residual connection
