"""The definition of edge attention in plain PyTorch, one head of one sample at a time.

For destination i, source j, edge e = (j -> i), with W [C, D] the head's slice of the embedding and m_e the dropout factor:

    u_i   = W^T q_i                                     [D], instead of W a_e for each edge
    s_e   = scale * (<q_i, k_j> + <u_i, a_e>)           the rest of the score, scale <q_i, b>, is the same for all e of i
    p_e   = softmax of s over the in-edges of i,        w_e = m_e p_e
    lse_i = log sum_e exp(s_e) + scale <q_i, b>
    o_i   = sum_e w_e v_j + W sum_e w_e a_e + b sum_e w_e

and backward, with do, dlse the gradients that arrive and g_i = W^T do_i:

    dp_e  = m_e (<do_i, v_j> + <g_i, a_e> + <do_i, b>)
    ds_e  = p_e (dp_e - delta_i + dlse_i),              delta_i = sum_e p_e dp_e / sum_e p_e
    B_i   = sum_e ds_e a_e
    dq_i  = scale * (sum_e ds_e k_j + W B_i + dlse_i b)
    dk_j  = scale * sum_e ds_e q_i                      over the out-edges of j
    dv_j  = sum_e w_e do_i                              over the out-edges of j
    da_e  = sum_h (w_e g_i + scale * ds_e u_i)
    dW    = sum_i do_i (sum_e w_e a_e)^T + scale * q_i B_i^T
    db    = sum_i (sum_e w_e) do_i + scale * dlse_i q_i

Embedded features are the case W = 1, b = 0 with a_e of C numbers. Three primitives carry it: `_dot` along edges,
`weighted_sum` into nodes (an embedding bag: no edge-sized rows, no atomics) and the softmax. Edge-sized memory is a few
numbers per edge, for one head at a time, forward and backward; backward recomputes the rest.

Shapes in this file: N_dst, N_src nodes, E edges in CSC order, C channels, D edge attributes, all of one head.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

PIECE = 8192  # edges whose rows are gathered at a time; they stay in the cache


@dataclass(frozen=True)
class Edges:
    """The edges as the primitives read them; index tensors in CSC order unless they say otherwise."""

    colptr: Tensor  # [N_dst + 1]
    row: Tensor  # [E]
    dst: Tensor  # [E]
    attr: Tensor  # [E], where the edge's attributes are in the caller's order
    number: Tensor  # [E], key of dropout


@dataclass(frozen=True)
class Head:
    """The operands of one head of one sample, in the dtype of the accumulators."""

    q: Tensor  # [N_dst, C]
    k: Tensor  # [N_src, C]
    v: Tensor  # [N_src, C]
    a: Tensor | None  # [E, D] raw, or [E, C] embedded
    weight: Tensor | None  # [C, D], only with raw attributes
    bias: Tensor | None  # [C]
    keep: Tensor | None  # [E], dropout factors
    scale: float

    def project(self, rows: Tensor) -> Tensor:
        """W^T of rows [N, C]: [N, D]."""
        return rows if self.weight is None else rows @ self.weight

    def embed(self, sums: Tensor) -> Tensor:
        """W of sums [N, D]: [N, C]."""
        return sums if self.weight is None else sums @ self.weight.T

    def drop(self, p: Tensor) -> Tensor:
        """Attention weights after dropout."""
        return p if self.keep is None else p * self.keep


def _dot(left: Tensor, right: Tensor, dst: Tensor, index: Tensor) -> Tensor:
    """<left[dst_e], right[index_e]> for every edge: [E]."""
    pieces = [
        (left.index_select(0, to) * right.index_select(0, origin)).sum(1)
        for to, origin in zip(dst.split(PIECE), index.split(PIECE), strict=True)
    ]
    return torch.cat(pieces)


def weighted_sum(weight: Tensor, rows: Tensor, index: Tensor, pointers: Tensor) -> Tensor:
    """sum_e weight_e rows[index_e] over the run of edges of each node: [N, C]."""
    return embedding_bag(index, rows, pointers, mode="sum", per_sample_weights=weight, include_last_offset=True)


def _segment_sum(values: Tensor, pointers: Tensor) -> Tensor:
    """The sum over the run of edges of each node: [N]."""
    return torch.segment_reduce(values, "sum", offsets=pointers, unsafe=True)


def _softmax(score: Tensor, edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over in-edges: p [E], lse [N_dst] (-inf where nothing is finite), and 1 where p sums to one [N_dst]."""
    high = torch.segment_reduce(score, "max", offsets=edges.colptr, unsafe=True)
    pivot = torch.where(torch.isneginf(high), 0.0, high)
    p = torch.exp(score - pivot[edges.dst])
    total = _segment_sum(p, edges.colptr)
    occupied = total != 0
    lse = pivot + torch.log(total)
    return p / torch.where(occupied, total, 1.0)[edges.dst], lse, occupied.to(score.dtype)


def _score(head: Head, u: Tensor, edges: Edges) -> Tensor:
    score = _dot(head.q, head.k, edges.dst, edges.row)
    if head.a is not None:
        score += _dot(u, head.a, edges.dst, edges.attr)
    return score * head.scale


def attend_head(head: Head, edges: Edges) -> tuple[Tensor, Tensor]:
    p, lse, _ = _softmax(_score(head, head.project(head.q), edges), edges)
    w = head.drop(p)
    out = weighted_sum(w, head.v, edges.row, edges.colptr)
    if head.a is not None:
        out += head.embed(weighted_sum(w, head.a, edges.attr, edges.colptr))
    if head.bias is not None:
        out += _segment_sum(w, edges.colptr)[:, None] * head.bias
        lse = lse + head.scale * (head.q @ head.bias)
    return out, lse


class Needs(NamedTuple):
    """Which operands need a gradient."""

    query: bool
    key: bool
    value: bool
    edge_attr: bool
    edge_weight: bool
    edge_bias: bool


@dataclass(frozen=True)
class HeadGradient:
    """Gradients of one head's operands, and what only their neighbours need: w and ds of each edge."""

    dq: Tensor  # [N_dst, C]
    da: Tensor | None  # [E, D] raw or [E, C] embedded, CSC order
    dweight: Tensor | None  # [C, D]
    dbias: Tensor | None  # [C]
    w: Tensor  # [E]
    ds: Tensor  # [E], scaled


def differentiate_head(head: Head, do: Tensor, dlse: Tensor, edges: Edges, needs: Needs) -> HeadGradient:
    """Everything but dk and dv, which sum over out-edges."""
    u, g = head.project(head.q), head.project(do)
    p, _, occupied = _softmax(_score(head, u, edges), edges)
    w = head.drop(p)
    dlse = dlse * occupied

    dp = _dot(do, head.v, edges.dst, edges.row)
    if head.a is not None:
        dp += _dot(g, head.a, edges.dst, edges.attr)
    if head.bias is not None and head.keep is not None:
        dp += (do @ head.bias)[edges.dst]
    dp = head.drop(dp)
    delta = _segment_sum(p * dp, edges.colptr) / torch.where(occupied > 0, _segment_sum(p, edges.colptr), 1.0)
    ds = head.scale * p * (dp - delta[edges.dst] + dlse[edges.dst])

    dq = weighted_sum(ds, head.k, edges.row, edges.colptr)
    da = dweight = dbias = None
    if head.a is not None:
        attr_sum = weighted_sum(ds, head.a, edges.attr, edges.colptr)
        dq += head.embed(attr_sum)
        if needs.edge_attr:
            da = w[:, None] * g[edges.dst] + ds[:, None] * u[edges.dst]
        if needs.edge_weight:
            dweight = do.T @ weighted_sum(w, head.a, edges.attr, edges.colptr) + head.q.T @ attr_sum
    if head.bias is not None:
        dlse = head.scale * dlse
        dq += dlse[:, None] * head.bias
        dbias = _segment_sum(w, edges.colptr) @ do + dlse @ head.q
    return HeadGradient(dq, da, dweight, dbias, w, ds)
