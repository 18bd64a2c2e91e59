"""Edge attention of small graphs: the formulas of `reference` on rows of edges, in half the operations.

For destination i, source j, edge e = (j -> i), m_e the dropout factor:

    x_e  = W a_e + b,   k_e = k_j + x_e,   v_e = v_j + x_e
    s_e  = scale * <q_i, k_e>,   p_e = softmax of s over the in-edges of i,   w_e = m_e p_e
    o_i  = sum_e w_e v_e,   lse_i = log sum_e exp(s_e)

and backward, with upstream gradients do and dlse:

    dp_e = m_e <do_i, v_e>,   ds_e = scale * p_e (dp_e - sum_e p_e dp_e + dlse_i)
    dq_i = sum_e ds_e k_e,   dk_j = sum_e ds_e q_i,   dv_j = sum_e w_e do_i
    dx_e = ds_e q_i + w_e do_i,   da_e = W^T dx_e,   dW = sum_e dx_e a_e^T,   db = sum_e dx_e

Where calling an operation takes longer than computing it, their number decides: this is faster as long as arrays
[E, H, C] stay in the cache, and needs no reverse structure. All batch entries and heads are computed at once, the nodes
and edges of an entry after those of the one before. Every sum has a fixed order: that of the edges, which need not be
sorted; sums over segments of sorted ones are faster, but sorting takes longer than what one call gains.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from anemoi_gt.ops.dropout import keep_factor
from anemoi_gt.ops.operands import Needs


@dataclass(frozen=True)
class EdgeRows:
    """The edges of all batch entries in one order, [B E] below, and the rows at their ends."""

    heads: tuple[int, int]  # H, C
    num_dst: int  # B N_dst
    colptr: Tensor | None  # [B N_dst + 1] in CSC order, None in any other
    dst: Tensor  # [B E]
    src: Tensor  # [B E]
    k: Tensor  # [B E, H C], x included, and so in v
    v: Tensor  # [B E, H C]
    a: Tensor | None  # [B E, D] or [B E, H C]
    keep: Tensor | None  # [B E, H]

    @classmethod
    def of(cls, flat) -> "EdgeRows":
        """Gather the rows of `FlatArguments` in the dtype of the accumulators."""
        batch, num_dst, heads, channels = flat.query.shape
        num_edges, num_src = flat.row.shape[0], flat.key.shape[1]
        dst, colptr = flat.col, flat.colptr
        if colptr is not None:
            dst = torch.repeat_interleave(colptr.diff(), output_size=num_edges)
        dst, src = _fold(dst, batch, num_dst), _fold(flat.row, batch, num_src)
        if batch > 1 and colptr is not None:
            colptr = torch.cat([colptr[:1], _fold(colptr[1:], batch, num_edges)])
        k, v = (rows.view(-1, heads * channels).index_select(0, src) for rows in (flat.key, flat.value))
        a = keep = None
        if flat.edge_attr is not None:
            a = flat.edge_attr if flat.perm is None else flat.edge_attr.index_select(1, flat.perm)
            a = x = a.expand(batch, *a.shape[1:]).reshape(batch * num_edges, a.shape[2:].numel())
            if flat.edge_weight is not None:
                weight = flat.edge_weight.view(heads * channels, -1).t()
                x = a @ weight if flat.edge_bias is None else torch.addmm(flat.edge_bias.flatten(), a, weight)
            k, v = k.add_(x), v.add_(x)
        if flat.seed is not None:
            ids = flat.perm if flat.global_edge_id is None else flat.global_edge_id
            ids = torch.arange(num_edges, device=k.device) if ids is None else ids.long()
            entry, head = (torch.arange(n, device=k.device) for n in (batch, heads))
            keep = keep_factor(flat.seed, entry[:, None, None], ids[:, None], head, flat.dropout_p, k.dtype)
            keep = keep.flatten(0, 1)
        return cls((heads, channels), batch * num_dst, colptr, dst, src, k, v, a, keep)

    def rows_of(self, destinations: Tensor) -> Tensor:
        """Return the rows [B E, H C] of [B, N_dst, H, C] at the destinations of edges."""
        return destinations.reshape(-1, self.heads[0] * self.heads[1]).index_select(0, self.dst)

    def dot(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the dot products of rows [B E, H C], of which `right` is overwritten, by head [B E, H]."""
        return right.mul_(left).view(-1, *self.heads).sum(-1)  # a product with ones rounds a row by where it is

    def scaled(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows [B E, H C], which are overwritten, by weights [B E, H]."""
        rows.view(-1, *self.heads).mul_(weight.unsqueeze(-1))
        return rows

    def softmax(self, score: Tensor) -> tuple[Tensor, Tensor]:
        """Return p [B E, H], in the memory of `score`, and lse [B N_dst, H]."""
        row_max = self.max_of_destinations(score)
        p = score.sub_(row_max.index_select(0, self.dst)).exp_()
        denominator = self.sum_to_destinations(p)
        lse = denominator.log().add_(row_max)
        return p.div_(denominator.clamp_(min=torch.finfo(p.dtype).tiny).index_select(0, self.dst)), lse

    def drop(self, p: Tensor) -> Tensor:
        """Return attention weights after dropout."""
        return p if self.keep is None else p * self.keep

    def max_of_destinations(self, score: Tensor) -> Tensor:
        """Return the finite maximum of scores [B E, H] over the in-edges of each destination [B N_dst, H]."""
        least = torch.finfo(score.dtype).min
        if self.colptr is not None:
            return torch.segment_reduce(score, "max", offsets=self.colptr, axis=0, unsafe=True).clamp_(min=least)
        row_max = score.new_full((self.num_dst, score.shape[1]), least)
        return row_max.scatter_reduce_(0, self.dst[:, None].expand_as(score), score, "amax")

    def sum_to_destinations(self, rows: Tensor) -> Tensor:
        """Return the sum of rows [B E, F] over the in-edges of each destination [B N_dst, F]."""
        if self.colptr is None:
            return _sum_unsorted(rows, self.dst, self.num_dst)
        return _sum(rows, torch.arange(rows.shape[0], dtype=self.colptr.dtype, device=rows.device), self.colptr)

    def sum_to_sources(self, rows: Tensor, flat) -> Tensor:
        """Return the sum of rows [B E, H C] over the out-edges of each source [B N_src, H C]."""
        batch, num_src = flat.key.shape[:2]
        if flat.rowptr is None or batch > 1:
            return _sum_unsorted(rows, self.src, batch * num_src)
        return _sum(rows, flat.csr_to_csc, flat.rowptr)


def attend(flat) -> tuple[Tensor, Tensor, Tensor]:
    """Return out [B N_dst, H C], lse [B N_dst, H] and p [B, E, H] of `FlatArguments` in the dtype of accumulators."""
    edges, (batch, _, heads, _) = EdgeRows.of(flat), flat.query.shape
    score = edges.dot(edges.k, edges.rows_of(flat.query)).mul_(flat.scale)
    p, lse = edges.softmax(score)
    out = edges.sum_to_destinations(edges.scaled(edges.v, edges.drop(p)))
    return out, lse, p.view(batch, flat.row.shape[0], heads)


def differentiate(do: Tensor, dlse: Tensor | None, p: Tensor, flat, needs: Needs) -> list[Tensor | None]:
    """Return the gradients of the six operands of `FlatArguments`, None where none is needed."""
    edges, batch, p = EdgeRows.of(flat), flat.query.shape[0], p.flatten(0, 1)
    q, do = edges.rows_of(flat.query), edges.rows_of(do)
    dp = edges.drop(edges.dot(do, edges.v))
    delta = edges.sum_to_destinations(p * dp)
    delta = delta if dlse is None else delta.sub_(dlse.reshape(delta.shape))
    ds = dp.sub_(delta.index_select(0, edges.dst)).mul_(p).mul_(flat.scale)
    dq = edges.sum_to_destinations(edges.scaled(edges.k, ds)) if needs.query else None
    dk_rows, dv_rows = edges.scaled(q, ds), edges.scaled(do, edges.drop(p))
    dk = edges.sum_to_sources(dk_rows, flat) if needs.key else None
    dv = edges.sum_to_sources(dv_rows, flat) if needs.value else None
    da = dweight = dbias = None
    if needs.edge_attr or needs.edge_weight or needs.edge_bias:
        dx = dk_rows.add_(dv_rows)
        if needs.edge_attr:
            da = dx if flat.edge_weight is None else dx @ flat.edge_weight.flatten(0, 1)
            da = da.view(batch, flat.row.shape[0], da.shape[1])
            da = da.sum(0, keepdim=True) if flat.edge_attr.shape[0] < batch else da
            da = da if flat.perm is None else torch.empty_like(da).index_copy_(1, flat.perm.long(), da)
        dweight = (edges.a.t() @ dx).t().contiguous() if needs.edge_weight else None
        dbias = dx.sum(0) if needs.edge_bias else None
    return [dq, dk, dv, da, dweight, dbias]


def _fold(index: Tensor, batch: int, size: int) -> Tensor:
    """Return `index` [n] into `size` rows for all batch entries, [B n]."""
    if batch == 1:
        return index
    entry = torch.arange(batch, device=index.device, dtype=index.dtype)[:, None]
    return (entry * size + index).flatten()


def _sum(rows: Tensor, index: Tensor, pointers: Tensor) -> Tensor:
    """Return the sum of rows[index] over each segment."""
    return embedding_bag(index, rows, pointers, mode="sum", include_last_offset=True)


def _sum_unsorted(rows: Tensor, index: Tensor, size: int) -> Tensor:
    """Return the sum of the rows of each index [size, F], in their order."""
    return rows.new_zeros(size, rows.shape[1]).index_add_(0, index.long(), rows)  # int32 indices are 4x slower
