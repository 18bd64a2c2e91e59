"""The definition of edge attention in plain PyTorch, for a group of heads at one batch index.

For destination i, source j and edge e = (j -> i), with the head's slice W [C, D] of the embedding
weight and the dropout factor m_e:

    u_i   = W^T q_i                                     [D], instead of W a_e for each edge
    s_e   = scale * (<q_i, k_j> + <u_i, a_e>)           scale <q_i, b> is left out: constant over e
    p_e   = softmax of s over the in-edges of i,        w_e = m_e p_e
    lse_i = log sum_e exp(s_e) + scale <q_i, b>
    o_i   = sum_e w_e v_j + W sum_e w_e a_e + b sum_e w_e

and backward, with upstream gradients do, dlse and g_i = W^T do_i:

    dp_e  = m_e (<do_i, v_j> + <g_i, a_e> + <do_i, b>)
    ds_e  = p_e (dp_e - delta_i + dlse_i),              delta_i = sum_e p_e dp_e / sum_e p_e
    B_i   = sum_e ds_e a_e
    dq_i  = scale * (sum_e ds_e k_j + W B_i + dlse_i b)
    dk_j  = scale * sum_e ds_e q_i                      over the out-edges of j
    dv_j  = sum_e w_e do_i                              over the out-edges of j
    da_e  = sum_h (w_e g_i + scale * ds_e u_i)
    dW    = sum_i do_i (sum_e w_e a_e)^T + scale * q_i B_i^T
    db    = sum_i (sum_e w_e) do_i + scale * dlse_i q_i

Embedded features are the case W = 1, b = 0 with C elements in a_e. There are three primitives:
`_dots` over edges, `weighted_sum` into nodes (an embedding bag: no [E, C] rows, no atomics) and the
softmax. Forward and backward need a few elements of memory per edge and head of the group; p is
saved for the backward pass.

Shapes in this file: N_dst destinations, N_src sources, E edges in CSC order, G heads, C channels,
D edge attributes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from anemoi_gt.ops.tensors import AttentionOperands

CHUNK = 2**18  # elements gathered at a time, so that they stay in the cache
# rows of a matrix product; a chunk of a graph that starts at a multiple is rounded as in the whole
NODE_CHUNK = 8192


@dataclass(frozen=True)
class Segments:
    """Rows to be summed into nodes: one segment per node, head by head."""

    index: Tensor  # [G * E] row of the node at the other end, among [N * G]
    pointers: Tensor  # [G * N + 1] first position of each segment

    @classmethod
    def of_heads(
        cls, heads: int, index: Tensor, pointers: Tensor, *, is_shared: bool = False
    ) -> "Segments":
        """Return the segments of `heads` heads from index [E] and pointers [N + 1].

        With `is_shared`, all heads read the same rows.
        """
        if heads == 1:
            return cls(index, pointers)
        head = torch.arange(heads, dtype=index.dtype, device=index.device)[:, None]
        index_of_heads = index.expand(heads, -1) if is_shared else index * heads + head
        ends = pointers[1:] + head.to(pointers.dtype) * index.shape[0]
        return cls(index_of_heads.flatten(), torch.cat([pointers[:1], ends.flatten()]))


@dataclass(frozen=True)
class Edges:
    """The edges in CSC order, in the form that the primitives read."""

    heads: int  # G, heads in a group
    colptr: Tensor  # [N_dst + 1]
    row: Tensor  # [E]
    dst: Tensor  # [E]
    attr: Tensor  # [E] position of the edge's attributes, which are in the caller's order
    global_edge_id: Tensor  # [E], determines dropout
    sources: Segments  # the source rows of each destination
    attributes: Segments  # the attribute rows of each destination


@dataclass(frozen=True)
class OutEdges:
    """The edges in CSR order, over which gradients of key and value are summed."""

    destinations: Segments  # the destination rows of each source
    csr_to_csc: Tensor  # [E]

    def sum(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Return sum_e weight_e rows_e per source.

        `weight` is [E, G] in CSC order, `rows` [N_dst, G, C].
        """
        weight_in_csr_order = weight.index_select(0, self.csr_to_csc)
        return weighted_sum(by_head(weight_in_csr_order), rows, self.destinations)


@dataclass(frozen=True)
class HeadGroup:
    """The operands of a group of heads at one batch index, contiguous, in the accumulator dtype."""

    q: Tensor  # [N_dst, G, C]
    k: Tensor  # [N_src, G, C]
    v: Tensor  # [N_src, G, C]
    a: Tensor | None  # [E, D] raw, or [E, G, C] embedded
    weight: Tensor | None  # [G, C, D], only with raw attributes
    bias: Tensor | None  # [G, C]
    dropout: Tensor | None  # [E, G], dropout factors
    scale: float

    @property
    def projects(self) -> bool:
        """True if <W^T q_i, a_e> has fewer terms than <q_i, W a_e>."""
        return self.weight is not None and self.weight.shape[2] < self.weight.shape[1]

    def project(self, rows: Tensor) -> Tensor:
        """Return W^T of rows [N, G, C]: [N, G, D]."""
        if self.weight is None:
            return rows
        weight = self.weight.transpose(1, 2).contiguous()  # D last is 4x slower
        chunks = [
            torch.bmm(weight, chunk.permute(1, 2, 0)).permute(2, 0, 1)
            for chunk in rows.split(NODE_CHUNK)
        ]
        return torch.cat(chunks).contiguous()

    def embed(self, sums: Tensor) -> Tensor:
        """Return W of sums [N, G, D]: [N, G, C]."""
        if self.weight is None:
            return sums
        weight = self.weight.transpose(1, 2)
        chunks = [
            torch.bmm(chunk.transpose(0, 1), weight).transpose(0, 1)
            for chunk in sums.split(NODE_CHUNK)
        ]
        return chunks[0] if len(chunks) == 1 else torch.cat(chunks)

    def embed_shared(self, rows: Tensor) -> Tensor:
        """Return W of rows [P, D] shared by all heads: [P, G, C].

        Rows [P, G, C] are already embedded and returned unchanged.
        """
        if self.weight is None:
            return rows
        return (rows @ self.weight.flatten(0, 1).t()).unflatten(1, self.weight.shape[:2])

    def drop(self, p: Tensor) -> Tensor:
        """Return attention weights after dropout."""
        return p if self.dropout is None else p * self.dropout


def _dots(
    heads: HeadGroup, edges: Edges, left: Tensor, right: Tensor, projected: Tensor | None
) -> Tensor:
    """Return < left_i , right_j + x_e > of every edge [E, G], with x_e = W a_e.

    `left` is [N_dst, G, C], `right` [N_src, G, C], `projected` W^T left or None.
    """
    dots = []
    step = max(1, CHUNK // max(left[0:1].numel(), 1))
    chunks = zip(edges.dst.split(step), edges.row.split(step), edges.attr.split(step), strict=True)
    for dst, src, attr in chunks:
        a = None if heads.a is None else heads.a.index_select(0, attr)
        rows = right.index_select(0, src)
        if a is not None and projected is None:
            rows.add_(heads.embed_shared(a))
        dot = rows.mul_(left.index_select(0, dst)).sum(-1)
        if a is not None and projected is not None:
            dot += torch.bmm(projected.index_select(0, dst), a.unsqueeze(2)).squeeze(2)
        dots.append(dot)
    return torch.cat(dots)


def by_head(weight: Tensor) -> Tensor:
    """Return weights [E, G] in the layout [G, E] of `weighted_sum`."""
    return weight.t().contiguous()


def weighted_sum(weight: Tensor, rows: Tensor, segments: Segments) -> Tensor:
    """Return sum_e weight_e rows_e per node, [N, G, C].

    `weight` is [G, E], `rows` [M, G, C] or [M, C].
    """
    sums = embedding_bag(
        segments.index,
        rows.flatten(0, -2),
        segments.pointers,
        mode="sum",
        per_sample_weights=weight.flatten(),
        include_last_offset=True,
    )
    return sums.unflatten(0, (weight.shape[0], -1)).transpose(0, 1)


def _segment_sum(values: Tensor, pointers: Tensor) -> Tensor:
    """Return the sum over the edges of each node: [N, G]."""
    return torch.segment_reduce(values, "sum", offsets=pointers, axis=0, unsafe=True)


def _softmax(score: Tensor, edges: Edges) -> tuple[Tensor, Tensor]:
    """Return the softmax over in-edges: p [E, G] and lse [N_dst, G], -inf if p sums to 0."""
    row_max = torch.segment_reduce(score, "max", offsets=edges.colptr, axis=0, unsafe=True)
    row_max = torch.where(torch.isneginf(row_max), 0.0, row_max)
    p = (score - row_max.index_select(0, edges.dst)).exp_()
    denominator = _segment_sum(p, edges.colptr)
    lse = row_max + torch.log(denominator)
    return p.div_(torch.where(denominator != 0, denominator, 1.0).index_select(0, edges.dst)), lse


def attend_heads(heads: HeadGroup, edges: Edges) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [N_dst, G, C], lse [N_dst, G] and p [E, G]."""
    u = heads.project(heads.q) if heads.projects else None
    score = _dots(heads, edges, heads.q, heads.k, u)
    p, lse = _softmax(score.mul_(heads.scale), edges)
    w = heads.drop(p)
    weight = by_head(w)
    out = weighted_sum(weight, heads.v, edges.sources)
    if heads.a is not None:
        out += heads.embed(weighted_sum(weight, heads.a, edges.attributes))
    if heads.bias is not None:
        out.addcmul_(_segment_sum(w, edges.colptr)[..., None], heads.bias)
        lse = lse + heads.scale * (heads.q * heads.bias).sum(-1)
    return out, lse, p


def differentiate_heads(
    heads: HeadGroup,
    do: Tensor,
    dlse: Tensor,
    p: Tensor,
    edges: Edges,
    out_edges: OutEdges | None,
    needs: AttentionOperands[bool],
) -> AttentionOperands[Tensor | None]:
    """Return the gradients that are needed, and dq; da [E, ..] in CSC order.

    `p` is [E, G]. `out_edges` is None where neither dk nor dv is needed.
    """
    g = heads.project(do) if heads.projects else None
    w = heads.drop(p)
    dp = _dots(heads, edges, do, heads.v, g)
    if heads.bias is not None and heads.dropout is not None:
        dp += (do * heads.bias).sum(-1).index_select(0, edges.dst)
    dp = heads.drop(dp)
    p_sum = _segment_sum(p, edges.colptr)
    # Where lse is -inf no gradient flows, even if the incoming one is NaN.
    dlse = torch.where(p_sum != 0, dlse, 0.0)
    delta = _segment_sum(p * dp, edges.colptr) / torch.where(p_sum > 0, p_sum, 1.0)
    ds = (dp - (delta - dlse).index_select(0, edges.dst)).mul_(p).mul_(heads.scale)

    weight = by_head(ds)
    dq = weighted_sum(weight, heads.k, edges.sources)
    da = dweight = dbias = None
    if heads.a is not None:
        attr_sum = weighted_sum(weight, heads.a, edges.attributes)
        dq += heads.embed(attr_sum)
        if heads.weight is not None and needs.edge_weight:
            w_attr_sum = weighted_sum(by_head(w), heads.a, edges.attributes)
            dweight = _outer(do, w_attr_sum) + _outer(heads.q, attr_sum)
        if needs.edge_attr:
            if g is None:
                da = _attribute_gradient(heads, edges, heads.a, (w, do), (ds, heads.q))
            else:
                u = heads.project(heads.q)
                da = _attribute_gradient(heads, edges, heads.a, (w, g), (ds, u))
    if heads.bias is not None:
        dlse = heads.scale * dlse
        dq.addcmul_(dlse[..., None], heads.bias)
        if needs.edge_bias:
            w_sum = p_sum if heads.dropout is None else _segment_sum(w, edges.colptr)
            dbias = (_outer(do, w_sum[..., None]) + _outer(heads.q, dlse[..., None])).squeeze(2)
    dk = dv = None
    if out_edges is not None and needs.key:
        dk = out_edges.sum(ds, heads.q)
    if out_edges is not None and needs.value:
        dv = out_edges.sum(w, do)
    return AttentionOperands(dq, dk, dv, da, dweight, dbias)


def _attribute_gradient(
    heads: HeadGroup,
    edges: Edges,
    a: Tensor,
    w_and_g: tuple[Tensor, Tensor],
    ds_and_u: tuple[Tensor, Tensor],
) -> Tensor:
    """Return w_e g_i + ds_e u_i: [E, G, C] if embedded, [E, D] summed over heads if raw.

    w and ds are [E, G]; g and u are [N_dst, G, D], or [N_dst, G, C] before W^T is applied.
    """
    w, g = w_and_g
    ds, u = ds_and_u
    da = torch.empty_like(a)
    step = max(1, CHUNK // max(g[0:1].numel(), 1))
    weight = None if heads.weight is None else heads.weight.flatten(0, 1).t().contiguous()
    chunks = zip(da.split(step), edges.dst.split(step), w.split(step), ds.split(step), strict=True)
    for da_chunk, dst, w_chunk, ds_chunk in chunks:
        g_rows = g.index_select(0, dst)
        u_rows = u.index_select(0, dst)
        if heads.projects:
            w_g = torch.bmm(w_chunk.unsqueeze(1), g_rows)
            ds_u = torch.bmm(ds_chunk.unsqueeze(1), u_rows)
            da_chunk.copy_((w_g + ds_u).squeeze(1))
            continue
        dx = g_rows.mul_(w_chunk.unsqueeze(2)).addcmul_(ds_chunk.unsqueeze(2), u_rows)
        da_chunk.copy_(dx if weight is None else (weight @ dx.flatten(1).t()).t())
    return da


def _outer(left: Tensor, right: Tensor) -> Tensor:
    """Return sum_i left_i right_i^T [G, C, D] of left [N, G, C] and right [N, G, D], D < C."""
    # D last is 4x slower
    return torch.bmm(right.permute(1, 2, 0), left.transpose(0, 1)).transpose(1, 2)
