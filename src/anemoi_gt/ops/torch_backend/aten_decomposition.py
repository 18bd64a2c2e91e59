"""The forward pass of the `torch` backend for export: only PyTorch operators, symbolic sizes.

A process without this library cannot run our operator, so `anemoi_gt.export.export_program`
replaces it by this decomposition. The formulas are in `reference`. A loop over batch and heads
would be unrolled, so both are folded into nodes and edges instead:

    node i of batch index b and head h is row (b H + h) N + i, edge e is (b H + h) E + e

and one embedding bag sums over all. Besides the operands it needs B * H weights and indices per
edge; a compiler fuses the gathers of edge rows with the products and sums over them.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from anemoi_gt.ops.torch_backend.edge_attention_torch import FlatArguments


def decompose(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `edge_attention_torch` in an exported program; raise with dropout."""
    flat = FlatArguments(*arguments)
    if flat.seed is not None:
        raise ValueError(
            f"a program is exported for inference, got dropout_p={flat.dropout_p}; call "
            "model.eval() first"
        )
    query, flat = flat.query, flat.in_accumulator_dtype()
    edges = _FoldedEdges(
        (flat.query.shape[0], flat.query.shape[2]), flat.colptr, flat.row, flat.perm
    )
    q, k, v = (rows.transpose(1, 2) for rows in flat[:3])  # [B, H, N, C]
    attr, weight, bias, scale = flat.edge_attr, flat.edge_weight, flat.edge_bias, flat.scale
    if attr is not None:  # [B or 1, H or 1, E, D or C], in the caller's order
        attr = attr.unsqueeze(1) if weight is not None else attr.transpose(1, 2)

    score = (q.index_select(2, edges.dst) * k.index_select(2, edges.row)).sum(-1)
    if attr is not None:
        projected = q if weight is None else q @ weight  # u
        attr_in_csc_order = attr if edges.perm is None else attr.index_select(2, edges.perm)
        score = score + (projected.index_select(2, edges.dst) * attr_in_csc_order).sum(-1)
    p, lse, occupied = edges.softmax(score * scale)

    out = edges.sum(p, v, edges.row)
    if attr is not None:
        order = (
            torch.arange(edges.num_edges, device=attr.device) if edges.perm is None else edges.perm
        )
        sums = edges.sum(p, attr, order)  # A
        out = out + (sums if weight is None else sums @ weight.transpose(1, 2))
    if bias is not None:
        out = out + occupied * bias[:, None]
        lse = lse + scale * (q * bias[:, None]).sum(-1)
    out, lse = (rows.transpose(1, 2).contiguous() for rows in (out.to(query.dtype), lse))
    return out.view(query.shape), lse.view(query.shape[:-1]), lse.new_empty(0)


class _FoldedEdges:
    """The edges of one graph for batch and heads, `shape`. Rows are [B, H, nodes or edges, F]."""

    def __init__(self, shape: tuple[int, int], colptr: Tensor, row: Tensor, perm: Tensor | None):
        self.shape, self.num_edges = shape, row.shape[0]
        self.colptr, self.row, self.perm = (
            colptr.long(),
            row.long(),
            None if perm is None else perm.long(),
        )
        self.dst = torch.repeat_interleave(self.colptr.diff(), output_size=self.num_edges)

    def softmax(self, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return softmax p [B, H, E], lse [B, H, N_dst], and its sum, 1 or 0, [B, H, N_dst, 1]."""
        score = score.flatten(0, 1).T.contiguous()  # [E, B H]: segments are of the first dimension
        row_max = torch.segment_reduce(score, "max", offsets=self.colptr, unsafe=True)
        row_max = torch.where(torch.isneginf(row_max), 0.0, row_max)
        p = torch.exp(score - row_max.index_select(0, self.dst))
        denominator = torch.segment_reduce(p, "sum", offsets=self.colptr, unsafe=True)
        occupied = denominator != 0
        p = p / torch.where(occupied, denominator, 1.0).index_select(0, self.dst)
        lse, occupied = row_max + torch.log(denominator), occupied.to(p.dtype)
        p, lse, occupied = (rows.T.unflatten(0, self.shape) for rows in (p, lse, occupied))
        return p, lse, occupied.unsqueeze(-1)

    def sum(self, p: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """Return sum_e p_e rows[index_e] by one embedding bag over batch and heads.

        `rows` are [B or 1, H or 1, R, F].
        """
        (batch, heads), (b_tables, h_tables, size, _) = self.shape, rows.shape
        # 0 where all share one
        table = (0 if h_tables == 1 else 1) * torch.arange(heads, device=index.device)
        table = (
            table
            + ((0 if b_tables == 1 else h_tables) * torch.arange(batch, device=index.device))[
                :, None
            ]
        )
        index = (table[..., None] * size + index).reshape(-1)
        begins = (
            torch.arange(batch * heads, device=index.device)[:, None] * self.num_edges
            + self.colptr[:-1]
        )
        ends = index.new_full((1,), 0) + batch * heads * self.num_edges
        out = embedding_bag(
            index,
            rows.reshape(-1, rows.shape[-1]),
            torch.cat([begins.reshape(-1), ends]),
            mode="sum",
            per_sample_weights=p.reshape(-1),
            include_last_offset=True,
        )
        return out.unflatten(0, (batch, heads, -1))
