"""The forward pass of the `torch` backend for export: PyTorch's own operators alone, in which all sizes may be symbols.

A process without our Python code cannot run our operator, of which it knows only the name; an export takes this instead, by
decomposition (`anemoi_gt.export.export_program`). The formulas are those of `heads`. Samples and heads are not looped over,
for a loop has as many steps as there are samples, but folded into the numbers of nodes and edges:

    node i of sample b and head h is row (b H + h) N + i, edge e is (b H + h) E + e

so that one embedding bag sums over all. Beside the operands it takes B * H numbers and places for each edge; a compiler fuses
what gathers rows of edges with the products and sums over them.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from anemoi_gt.ops.dtypes import accumulator_dtype


def decompose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
    colptr: Tensor,
    row: Tensor,
    perm: Tensor | None,
    global_edge_id: Tensor | None,
    rowptr: Tensor | None,
    col: Tensor | None,
    csr_to_csc: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
) -> tuple[Tensor, Tensor]:
    """What `edge_attention_torch` is in an exported program: its arguments and results.

    Raises
    ------
    ValueError
        When something is to be dropped: programs are exported for inference.
    """
    if seed is not None:
        raise ValueError(f"a program is exported for inference, got dropout_p={dropout_p}; call model.eval() first")
    dtype, (heads, channels) = accumulator_dtype(query.dtype), query.shape[2:]
    folded = _Folded(query.shape[0], heads, colptr, row, perm)
    q, k, v = (rows.to(dtype).transpose(1, 2) for rows in (query, key, value))  # [B, H, N, C]
    weight = None if edge_weight is None else edge_weight.to(dtype).reshape(heads, channels, -1)
    bias = None if edge_bias is None else edge_bias.to(dtype).reshape(heads, 1, channels)
    attr = edge_attr
    if attr is not None:  # [B or 1, H or 1, E, D or C], in the caller's order
        attr = attr.to(dtype).unsqueeze(1) if weight is not None else attr.to(dtype).transpose(1, 2)

    score = (folded.at_destinations(q) * folded.at_sources(k)).sum(-1)
    if attr is not None:
        projected = q if weight is None else q @ weight  # u
        score = score + (folded.at_destinations(projected) * folded.in_order(attr)).sum(-1)
    p, lse, occupied = folded.softmax(score * scale)

    out = folded.sum_of_sources(p, v)
    if attr is not None:
        sums = folded.sum_of_edges(p, attr)  # A
        out = out + (sums if weight is None else sums @ weight.transpose(1, 2))
    if bias is not None:
        out = out + occupied * bias
        lse = lse + scale * (q * bias).sum(-1)
    return out.transpose(1, 2).to(query.dtype).contiguous(), lse.transpose(1, 2).contiguous()


class _Folded:
    """Edges of one graph under B samples of H heads. Its rows are [B, H, nodes or edges, features]."""

    def __init__(self, samples: int, heads: int, colptr: Tensor, row: Tensor, perm: Tensor | None):
        self.shape, self.num_edges = (samples, heads), row.shape[0]
        self.colptr, self.row, self.perm = colptr.long(), row.long(), None if perm is None else perm.long()
        self.dst = torch.repeat_interleave(self.colptr.diff(), output_size=self.num_edges)

    def at_destinations(self, rows: Tensor) -> Tensor:
        """The rows of the edges' destinations."""
        return rows.index_select(2, self.dst)

    def at_sources(self, rows: Tensor) -> Tensor:
        """The rows of the edges' sources."""
        return rows.index_select(2, self.row)

    def in_order(self, attr: Tensor) -> Tensor:
        """Attributes of edges by destination."""
        return attr if self.perm is None else attr.index_select(2, self.perm)

    def softmax(self, score: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Softmax over in-edges: p [B, H, E], lse [B, H, N_dst], and 1 where there is one to sum to [B, H, N_dst, 1]."""
        score = score.flatten(0, 1).T.contiguous()  # [E, B H]: segments are of the first dimension
        high = torch.segment_reduce(score, "max", offsets=self.colptr, unsafe=True)
        pivot = torch.where(torch.isneginf(high), 0.0, high)
        p = torch.exp(score - pivot.index_select(0, self.dst))
        total = torch.segment_reduce(p, "sum", offsets=self.colptr, unsafe=True)
        occupied = total != 0
        p = p / torch.where(occupied, total, 1.0).index_select(0, self.dst)
        lse, occupied = (pivot + torch.log(total)).T, occupied.to(p.dtype).T
        return (
            p.T.unflatten(0, self.shape),
            lse.unflatten(0, self.shape),
            occupied.unflatten(0, self.shape).unsqueeze(-1),
        )

    def sum_of_sources(self, p: Tensor, rows: Tensor) -> Tensor:
        """sum_e p_e rows[row_e] over the in-edges of each destination."""
        return self._sum(p, rows, self.row)

    def sum_of_edges(self, p: Tensor, attr: Tensor) -> Tensor:
        """sum_e p_e attr_e over the in-edges of each destination; a dimension of 1 is shared."""
        order = torch.arange(self.num_edges, device=attr.device) if self.perm is None else self.perm
        return self._sum(p, attr, order)

    def _sum(self, p: Tensor, rows: Tensor, index: Tensor) -> Tensor:
        """sum_e p_e rows[index_e] with rows [B or 1, H or 1, R, F]: an embedding bag over all samples and heads."""
        samples, heads = self.shape
        tables, size = rows.shape[:2], rows.shape[2]
        table = self._number(tables[1], 1) * torch.arange(heads, device=index.device)  # of the head; 0 where they share
        table = table + (self._number(tables[0], tables[1]) * torch.arange(samples, device=index.device))[:, None]
        index = (table[..., None] * size + index).reshape(-1)
        begins = torch.arange(samples * heads, device=index.device)[:, None] * self.num_edges + self.colptr[:-1]
        ends = index.new_full((1,), 0) + samples * heads * self.num_edges
        out = embedding_bag(
            index, rows.reshape(-1, rows.shape[-1]), torch.cat([begins.reshape(-1), ends]),
            mode="sum", per_sample_weights=p.reshape(-1), include_last_offset=True,
        )  # fmt: skip
        return out.unflatten(0, (samples, heads, -1))

    @staticmethod
    def _number(tables: int, stride: int) -> int:
        """Tables from one sample or head to the next: 0 where all share one."""
        return 0 if tables == 1 else stride
