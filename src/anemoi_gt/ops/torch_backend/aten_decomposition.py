"""The forward pass of the `torch` backend for export: only PyTorch operators, symbolic sizes.

A process without this library cannot run the custom operator, so `anemoi_gt.export.export_program`
replaces it by this decomposition. The formulas are in `reference`. Tracing would unroll a loop over
batch and heads, so both are folded into nodes and edges instead:

    node i of batch index b and head h is row (b H + h) N + i, edge e is (b H + h) E + e

and one embedding bag computes all sums. Besides the operands this needs B * H weights and indices
per edge; a compiler fuses the gathers of edge rows with the products and sums over them.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from anemoi_gt.ops.dropout import refuse_in_export
from anemoi_gt.ops.torch_backend.edge_attention_torch import (
    edge_attention_torch,
    in_accumulator_dtype,
)


def decompose(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `edge_attention_torch` in an exported program. Raise ValueError with dropout."""
    operands, constants, options = edge_attention_torch.split(arguments)
    query, graph, scale = operands.query, constants.graph, options.scale
    refuse_in_export(constants.seed, options.dropout_p)
    operands = in_accumulator_dtype(operands)
    batch, _, heads, _ = operands.query.shape
    edges = _FoldedEdges((batch, heads), graph.colptr, graph.row, graph.perm)
    q, k, v = (rows.transpose(1, 2) for rows in operands[:3])  # [B, H, N, C]
    _, _, _, attr, weight, bias = operands
    if attr is not None:  # [B or 1, H or 1, E, D or C], in the caller's order
        attr = attr.unsqueeze(1) if weight is not None else attr.transpose(1, 2)

    score = (q.index_select(2, edges.dst) * k.index_select(2, edges.row)).sum(-1)
    if attr is not None:
        u = q if weight is None else q @ weight
        attr_in_csc_order = attr if edges.perm is None else attr.index_select(2, edges.perm)
        score = score + (u.index_select(2, edges.dst) * attr_in_csc_order).sum(-1)
    p, lse, has_edges = edges.softmax(score * scale)

    out = edges.sum(p, v, edges.row)
    if attr is not None:
        order = edges.perm
        if order is None:
            order = torch.arange(edges.num_edges, device=attr.device)
        attr_sum = edges.sum(p, attr, order)
        if weight is not None:
            attr_sum = attr_sum @ weight.transpose(1, 2)
        out = out + attr_sum
    if bias is not None:
        out = out + has_edges * bias[:, None]
        lse = lse + scale * (q * bias[:, None]).sum(-1)
    out = out.to(query.dtype).transpose(1, 2).contiguous()
    lse = lse.transpose(1, 2).contiguous()
    return out.view(query.shape), lse.view(query.shape[:-1]), lse.new_empty(0, dtype=torch.uint8)


class _FoldedEdges:
    """The edges of one graph, repeated for `shape` = (batch, heads).

    Rows are [B, H, nodes or edges, F].
    """

    def __init__(self, shape: tuple[int, int], colptr: Tensor, row: Tensor, perm: Tensor | None):
        self.shape = shape
        self.num_edges = row.shape[0]
        self.colptr = colptr.long()
        self.row = row.long()
        self.perm = None if perm is None else perm.long()
        self.dst = torch.repeat_interleave(self.colptr.diff(), output_size=self.num_edges)

    def softmax(self, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return softmax p [B, H, E], lse [B, H, N_dst] and has_edges [B, H, N_dst, 1], 1 or 0."""
        score = score.flatten(0, 1).T.contiguous()  # [E, B H]: segments are in the first dimension
        row_max = torch.segment_reduce(score, "max", offsets=self.colptr, unsafe=True)
        row_max = torch.where(torch.isneginf(row_max), 0.0, row_max)
        p = torch.exp(score - row_max.index_select(0, self.dst))
        denominator = torch.segment_reduce(p, "sum", offsets=self.colptr, unsafe=True)
        has_edges = denominator != 0
        p = p / torch.where(has_edges, denominator, 1.0).index_select(0, self.dst)
        lse = row_max + torch.log(denominator)
        has_edges = has_edges.to(p.dtype)
        p, lse, has_edges = (rows.T.unflatten(0, self.shape) for rows in (p, lse, has_edges))
        return p, lse, has_edges.unsqueeze(-1)

    def sum(self, p: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """Return sum_e p_e rows[index_e] by one embedding bag over batch and heads.

        `rows` are [B or 1, H or 1, R, F].
        """
        batch, heads = self.shape
        row_batch, row_heads, num_rows, _ = rows.shape
        # Tables of rows, one per batch index and head; stride 0 where they share a table.
        head_stride = 0 if row_heads == 1 else 1
        batch_stride = 0 if row_batch == 1 else row_heads
        of_head = head_stride * torch.arange(heads, device=index.device)
        of_batch = batch_stride * torch.arange(batch, device=index.device)
        table = of_head + of_batch[:, None]  # [B, H]
        index = (table[..., None] * num_rows + index).reshape(-1)

        copies = torch.arange(batch * heads, device=index.device)
        begins = copies[:, None] * self.num_edges + self.colptr[:-1]
        end = index.new_full((1,), 0) + batch * heads * self.num_edges
        out = embedding_bag(
            index,
            rows.reshape(-1, rows.shape[-1]),
            torch.cat([begins.reshape(-1), end]),
            mode="sum",
            per_sample_weights=p.reshape(-1),
            include_last_offset=True,
        )
        return out.unflatten(0, (batch, heads, -1))
