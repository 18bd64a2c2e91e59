"""Launches of the edge attention kernels: grids, tiles, scratch memory. One function per kernel, tensors in and out."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from anemoi_gt.kernels import attributes, backward, forward
from anemoi_gt.kernels.tile import (
    ContractionTile,
    RowTile,
    attribute_columns,
    attribute_warps,
    contraction_tile,
    destination_tile,
    forward_tile,
    next_power_of_two,
    source_tile,
)
from anemoi_gt.ops.dropout import drop_threshold
from anemoi_gt.ops.dtypes import scratch_dtype

LOG2_E = 1.4426950408889634
PARTIALS = 64  # programs that share the sum of dW; fixed, so that its order never changes


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Make the device of `tensor` current while kernels are launched."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


@dataclass(frozen=True)
class Problem:
    """Contiguous operands of one call, and the sizes that every launch needs."""

    query: Tensor  # [B, N_dst, H, C]
    key: Tensor  # [B, N_src, H, C]
    value: Tensor  # [B, N_src, H, C]
    edge_attr: Tensor | None  # [1 or B, E, D] or [1 or B, E, H, C]
    edge_weight: Tensor | None  # [H * C, D]
    edge_bias: Tensor | None  # [H * C]
    colptr: Tensor
    row: Tensor
    perm: Tensor | None
    edge_id: Tensor | None
    order: Tensor | None
    seed: Tensor | None
    scale: float
    dropout_p: float

    @property
    def embedded(self) -> bool:
        """Whether edge_attr is [E, H, C]."""
        return self.edge_attr is not None and self.edge_weight is None

    @property
    def attributes(self) -> int:
        """Columns of W, the bias among them; 0 without raw attributes."""
        return 0 if self.edge_weight is None else self.edge_weight.shape[1] + (self.edge_bias is not None)

    @property
    def columns(self) -> int:
        """Columns of what passes between kernels: `attributes` padded, at least the 16 of a matrix product."""
        return attribute_columns(self.attributes)

    def sizes(self) -> dict:
        """Sizes and constants that the row kernels over destinations share."""
        _, num_dst, heads, channels = self.query.shape
        return {
            "num_dst": num_dst,
            "num_src": self.key.shape[1],
            "num_edges": self.row.shape[0],
            "H": heads,
            "C": channels,
            "WIDE": self.wide(),
        }

    def edge_sizes(self) -> dict:
        """What the kernels that read edge attributes share."""
        raw = self.edge_weight is not None
        per_sample = self.edge_attr is not None and self.edge_attr.shape[0] > 1
        return {
            "attr_stride": self.row.shape[0] if per_sample else 0,
            "D": self.edge_weight.shape[1] if raw else 0,
            "BIAS": int(self.edge_bias is not None),
            "ATTRIBUTES": self.columns,
        }

    def row_shape(self) -> tuple[int, int]:
        """Heads and channels."""
        return self.query.shape[2], self.query.shape[3]

    def degree(self, num_nodes: int) -> float:
        """Mean number of edges of `num_nodes` nodes of a sample."""
        return self.row.shape[0] / max(num_nodes, 1)

    def dropout(self) -> dict:
        """Where the mask drops, and by how much survivors grow."""
        survivor = 1.0 / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else 0.0
        return {"drop_below": drop_threshold(self.dropout_p), "survivor": survivor}

    def structure(self) -> dict:
        """Index tensors that the row kernels over destinations share."""
        names = ("colptr", "row", "perm", "edge_id", "order", "seed")
        return {name: getattr(self, name) for name in names}

    def wide(self) -> bool:
        """Whether an offset passes 2^31, so that 64-bit arithmetic is needed."""
        samples, num_dst, heads, channels = self.query.shape
        edges = samples * self.row.shape[0] * heads * (channels if self.embedded else 2)
        attributes_size = self.columns
        nodes = samples * max(num_dst, self.key.shape[1]) * heads * max(channels, attributes_size)
        return max(edges, nodes, samples * self.row.shape[0] * attributes_size) >= 2**31


def _grid(problem: Problem, num_nodes: int, tile: RowTile) -> tuple[tuple[int, int], dict]:
    """Grid and constants of a row kernel over `num_nodes` nodes a sample."""
    samples, _, heads, _ = problem.query.shape
    grid = (samples * -(-num_nodes // tile.nodes), -(-heads // tile.heads))
    constants = {"HEADS": tile.heads, "CHANNELS": tile.channels, "UNROLL": tile.unroll, "num_warps": tile.num_warps}
    return grid, constants


def _contraction(problem: Problem, rows_: Tensor) -> tuple[ContractionTile, dict]:
    """Tile and sizes of a contraction of rows [B, N, H, C] with W."""
    samples, num_nodes, heads, channels = rows_.shape
    tile = contraction_tile(channels, problem.attributes)
    return tile, {
        "num_nodes": samples * num_nodes,
        "H": heads,
        "C": channels,
        "D": problem.edge_weight.shape[1],
        "BIAS": int(problem.edge_bias is not None),
        "CHANNELS": tile.channels,
        "ATTRIBUTES": tile.attributes,
        "NODES": tile.nodes,
        "PRECISION": _precision(rows_.dtype),
        "WIDE": problem.wide(),
        "num_warps": tile.num_warps,
    }


def _precision(dtype: torch.dtype) -> str:
    """How products are rounded: not at all for float32; tf32 holds 16-bit numbers exactly, but not every AMD GPU has it."""
    return "ieee" if dtype == torch.float32 or torch.version.hip else "tf32"


def _map_nodes(kernel, problem: Problem, rows_: Tensor, other: dict[str, Tensor]) -> None:
    """Launch a contraction that maps the rows of each node."""
    tile, options = _contraction(problem, rows_)
    programs = -(-options["num_nodes"] // (tile.nodes * tile.tiles)) * options["H"]
    if programs:
        weight = {"edge_weight": problem.edge_weight, "edge_bias": problem.edge_bias}
        kernel[(programs,)](rows=rows_, **other, **weight, TILES=tile.tiles, **options)


def project(problem: Problem, rows_: Tensor) -> Tensor:
    """W^T of rows [B, N_dst, H, C]: [B, N_dst, H, columns]."""
    projected = rows_.new_empty((*rows_.shape[:3], problem.columns), dtype=scratch_dtype(rows_.dtype))
    _map_nodes(attributes.project, problem, rows_, {"projected": projected})
    return projected


def embed(problem: Problem, sums: Tensor, rows_: Tensor) -> None:
    """Add W sums [B, N_dst, H, columns] to rows [B, N_dst, H, C]."""
    _map_nodes(attributes.embed, problem, rows_, {"sums": sums})


def attend_rows(problem: Problem, projected: Tensor | None) -> tuple[Tensor, ...]:
    """Forward over destinations: out without W A, lse, inverse, numerators and A."""
    query = problem.query
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    inverse = torch.empty_like(lse)
    numerators = lse.new_empty(query.shape[0], problem.row.shape[0], query.shape[2])
    attr_sums = None if projected is None else torch.empty_like(projected)
    tile = forward_tile(*problem.row_shape(), problem.degree(query.shape[1]), problem.attributes)
    grid, constants = _grid(problem, query.shape[1], tile)
    if grid[0]:
        forward.edge_attention_fwd[grid](
            query=query, key=problem.key, value=problem.value, edge_attr=problem.edge_attr, projected=projected,
            **problem.structure(), out=out, lse=lse, inverse=inverse, scores=torch.empty_like(numerators), numerators=numerators, attr_sums=attr_sums,
            score_scale=problem.scale * LOG2_E, EMBEDDED=problem.embedded,
            **problem.sizes(), **problem.edge_sizes(), **problem.dropout(), **constants,
        )  # fmt: skip
    return out, lse, inverse, numerators, attr_sums


@dataclass(frozen=True)
class Saved:
    """What the forward keeps for the backward."""

    inverse: Tensor  # [B, N_dst, H]
    numerators: Tensor  # [B, E, H]
    projected: Tensor | None  # [B, N_dst, H, columns]


def differentiate_rows(
    problem: Problem,
    saved: Saved,
    projected_grad: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    dquery: Tensor | None,
    dedge: Tensor | None,
) -> Tensor:
    """Backward over destinations: fills dquery (without W B) and dedge; returns [m p, ds] of each edge, [B, E, 2, H]."""
    samples, num_dst, heads, _ = problem.query.shape
    num_edges = problem.row.shape[0]
    weights = grad_out.new_empty((samples, num_edges, 2, heads), dtype=scratch_dtype(grad_out.dtype))
    dweights = torch.empty_like(saved.numerators)
    tile = destination_tile(*problem.row_shape(), problem.degree(num_dst), problem.attributes)
    grid, constants = _grid(problem, num_dst, tile)
    if grid[0]:
        backward.edge_attention_bwd_dst[grid](
            query=problem.query, key=problem.key, value=problem.value, edge_attr=problem.edge_attr,
            projected=projected_grad, grad_out=grad_out, grad_lse=grad_lse,
            inverse=saved.inverse, numerators=saved.numerators, **problem.structure(),
            dquery=dquery, dedge=dedge, weights=weights, products=torch.empty_like(dweights), dweights=dweights,
            scale=problem.scale, EMBEDDED=problem.embedded,
            **problem.sizes(), **problem.edge_sizes(), **problem.dropout(), **constants,
        )  # fmt: skip
    return weights


def differentiate_sources(
    problem: Problem,
    weights: Tensor,
    grad_out: Tensor,
    rowptr: Tensor,
    col: Tensor,
    csr_to_csc: Tensor,
    dkey: Tensor | None,
    dvalue: Tensor | None,
) -> None:
    """Backward over sources: fills dkey and dvalue."""
    num_src = problem.key.shape[1]
    tile = source_tile(*problem.row_shape(), problem.degree(num_src))
    grid, constants = _grid(problem, num_src, tile)
    if grid[0]:
        backward.edge_attention_bwd_src[grid](
            query=problem.query, grad_out=grad_out, weights=weights, rowptr=rowptr, col=col, csr_to_csc=csr_to_csc,
            dkey=dkey, dvalue=dvalue, NODES=tile.nodes, **problem.sizes(), **constants,
        )  # fmt: skip


def differentiate_attributes(
    problem: Problem, weights: Tensor, saved: Saved, projected_grad: Tensor, dedge_attr: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A and B of each destination [B, N_dst, H, columns]; fills dedge_attr [B, E, D]."""
    samples, num_dst, heads, _ = problem.query.shape
    attr_sums, dscore_sums = torch.empty_like(projected_grad), torch.empty_like(projected_grad)
    sizes, edge_sizes = problem.sizes(), problem.edge_sizes()
    if samples * num_dst:
        attributes.attribute_bwd[(samples * num_dst,)](
            weights=weights, edge_attr=problem.edge_attr, projected=saved.projected, projected_grad=projected_grad,
            colptr=problem.colptr, perm=problem.perm, attr_sums=attr_sums, dscore_sums=dscore_sums, dedge_attr=dedge_attr,
            num_dst=num_dst, num_edges=sizes["num_edges"], H=heads, HEADS=next_power_of_two(heads), WIDE=sizes["WIDE"],
            num_warps=attribute_warps(heads, problem.attributes), **edge_sizes,
        )  # fmt: skip
    return attr_sums, dscore_sums


def differentiate_weight(problem: Problem, grad_out: Tensor, attr_sums: Tensor, dscore_sums: Tensor) -> Tensor:
    """Gradient of W with the bias as its last column, [H, C, D + BIAS], float32."""
    tile, options = _contraction(problem, problem.query)
    heads, channels = options["H"], options["C"]
    partials = max(1, min(PARTIALS, -(-options["num_nodes"] // tile.nodes)))
    partial = grad_out.new_empty((partials, heads, channels, problem.attributes), dtype=torch.float32)
    attributes.weight_bwd[(partials, heads, -(-channels // tile.channels))](
        query=problem.query, grad_out=grad_out, attr_sums=attr_sums, dscore_sums=dscore_sums, partial=partial, **options
    )
    return partial.sum(0)
