"""Launches of the edge attention kernels: grids, tiles, scratch memory. One function per kernel, tensors in and out.

Beside each stands what its launch is for given sizes, which is worked out once: a graph is static, its sizes come again at
every step. What is kept holds numbers and compiled kernels, no tensors. A tile may be given, to measure it; None is the one
that is chosen for the sizes.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.kernels import backward, edge_features, forward
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dropout import drop_threshold
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.triton_backend.availability import interpreted
from anemoi_gt.ops.triton_backend.problem import Problem, Sizes
from anemoi_gt.ops.triton_backend.tiles import (
    PRODUCT,
    ContractionTile,
    RowTile,
    attribute_edges,
    attribute_heads,
    attribute_warps,
    destination_tile,
    embed_tile,
    forward_tile,
    project_tile,
    source_tile,
    weight_tile,
)

LOG2_E = 1.4426950408889634
PROGRAMS = 528  # that share the sum of dW, all heads; fixed, so that its order never changes
KEPT = 128  # launches of each kernel that are kept: graphs times layers of different sizes in use at a time


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Make the device of `tensor` current while kernels are launched."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def _row_launch(kernel, sizes: Sizes, num_nodes: int, tile: RowTile, scalars: dict, constants: dict) -> Launch:
    """Launch of a kernel that gathers rows, over `num_nodes` nodes of each sample."""
    grid = (sizes.samples * -(-num_nodes // tile.nodes), -(-sizes.heads // tile.heads))
    counts = {"num_dst": sizes.num_dst, "num_src": sizes.num_src, "num_edges": sizes.num_edges}
    shape = {"H": sizes.heads, "C": sizes.channels, "WIDE": sizes.wide}
    shape |= {"HEADS": tile.heads, "CHANNELS": tile.channels, "UNROLL": tile.unroll, "num_warps": tile.num_warps}
    return Launch(kernel, grid, counts | scalars, shape | constants)


def _attribute_constants(sizes: Sizes) -> dict:
    """What the kernels that contract over attributes are compiled for."""
    constants = {"D": sizes.edge_dim, "BIAS": sizes.bias, "ATTRIBUTES": sizes.columns}
    return constants | {"PRECISION": _precision(sizes.dtype)}


def dropout_scalars(sizes: Sizes) -> dict:
    """Where the mask drops, and by how much survivors grow."""
    survivor = 1.0 / (1.0 - sizes.dropout_p) if sizes.dropout_p < 1.0 else 0.0
    return {"drop_below": drop_threshold(sizes.dropout_p), "survivor": survivor}


def _contraction_launch(kernel, sizes: Sizes, tile: ContractionTile, grid: tuple[int, ...], constants: dict) -> Launch:
    """Launch of a contraction of rows with W, over all destinations."""
    shape = {"H": sizes.heads, "C": sizes.channels, "CHANNELS": tile.channels, "NODES": tile.nodes, "WIDE": sizes.wide}
    shape |= {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **_attribute_constants(sizes)}
    return Launch(kernel, grid, {"num_nodes": sizes.destinations}, shape | constants)


def _precision(dtype: torch.dtype) -> str:
    """To what the operands of matrix products are rounded; 16-bit numbers stay as they are.

    tf32 holds them exactly, but not every AMD GPU has it. The interpreter knows no bfloat16 products.
    """
    if dtype == torch.float32 or torch.version.hip:
        return "ieee"
    return "bf16" if dtype == torch.bfloat16 and not interpreted() else "tf32"


def _node_map_launch(kernel, sizes: Sizes, tile: ContractionTile) -> Launch:
    """Launch of a contraction that maps the rows of each node."""
    grid = (-(-sizes.destinations // (tile.nodes * tile.tiles)) * sizes.heads,)
    return _contraction_launch(kernel, sizes, tile, grid, {"TILES": tile.tiles})


@lru_cache(KEPT)
def project_launch(sizes: Sizes, tile: ContractionTile | None = None) -> Launch:
    """What `project` launches."""
    return _node_map_launch(edge_features.project, sizes, tile or project_tile(sizes.channels, sizes.attributes))


def project(problem: Problem, rows: Tensor, tile: ContractionTile | None = None) -> Tensor:
    """W^T of rows [B, N_dst, H, C]: [B, N_dst, H, columns]."""
    projected = rows.new_empty((*rows.shape[:-1], problem.sizes.columns), dtype=scratch_dtype(rows.dtype))
    weight = {"edge_weight": problem.edge_weight, "edge_bias": problem.edge_bias}
    problem.launch(project_launch, tile)(rows=rows, **weight, projected=projected)
    return projected


@lru_cache(KEPT)
def embed_launch(sizes: Sizes, tile: ContractionTile | None = None) -> Launch:
    """What `embed` launches."""
    return _node_map_launch(edge_features.embed, sizes, tile or embed_tile(sizes.channels, sizes.attributes))


def embed(problem: Problem, sums: Tensor, rows: Tensor, tile: ContractionTile | None = None) -> None:
    """Add W sums [B, N_dst, H, columns] to rows [B, N_dst, H, C]."""
    weight = {"edge_weight": problem.edge_weight, "edge_bias": problem.edge_bias}
    problem.launch(embed_launch, tile)(sums=sums, **weight, rows=rows)


@lru_cache(KEPT)
def forward_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """What `attend_rows` launches."""
    tile = tile or forward_tile(sizes.over_destinations)
    scalars = {"attr_stride": sizes.attr_stride, "score_scale": sizes.scale * LOG2_E, **dropout_scalars(sizes)}
    constants = {"EMBEDDED": sizes.embedded, "PAIRS": tile.pairs, **_attribute_constants(sizes)}
    constants["EDGES"] = attribute_edges(sizes.degree(sizes.num_dst))
    return _row_launch(forward.edge_attention_fwd, sizes, sizes.num_dst, tile, scalars, constants)


def attend_rows(problem: Problem, projected: Tensor | None, tile: RowTile | None = None) -> tuple[Tensor, ...]:
    """Forward over destinations: out without W A, lse, inverse, numerators and A."""
    query, sizes = problem.query, problem.sizes
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    inverse, numerators = torch.empty_like(lse), lse.new_empty((sizes.samples, sizes.num_edges, sizes.heads))
    attr_sums = None if projected is None else torch.empty_like(projected)
    problem.launch(forward_launch, tile)(
        query=query, key=problem.key, value=problem.value, edge_attr=problem.edge_attr, projected=projected,
        **problem.structure, out=out, lse=lse, inverse=inverse, scores=torch.empty_like(numerators),
        numerators=numerators, attr_sums=attr_sums,
    )  # fmt: skip
    return out, lse, inverse, numerators, attr_sums


@dataclass(frozen=True)
class Saved:
    """What the forward keeps for the backward."""

    inverse: Tensor  # [B, N_dst, H]
    numerators: Tensor  # [B, E, H]
    projected: Tensor | None  # [B, N_dst, H, columns]


@lru_cache(KEPT)
def destination_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """What `differentiate_rows` launches."""
    tile = tile or destination_tile(sizes.over_destinations)
    scalars = {"attr_stride": sizes.attr_stride, "scale": sizes.scale, **dropout_scalars(sizes)}
    constants = {"EMBEDDED": sizes.embedded, "PAIRS": tile.pairs, **_attribute_constants(sizes)}
    constants["EDGES"] = attribute_edges(sizes.degree(sizes.num_dst))
    return _row_launch(backward.edge_attention_bwd_dst, sizes, sizes.num_dst, tile, scalars, constants)


def differentiate_rows(
    problem: Problem,
    saved: Saved,
    projected_grad: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    dquery: Tensor | None,
    dedge: Tensor | None,
    tile: RowTile | None = None,
) -> Tensor:
    """Backward over destinations: fills dquery (without W B) and dedge; returns [m p, ds] of each edge, [B, E, 2, H]."""
    sizes = problem.sizes
    shape = (sizes.samples, sizes.num_edges, 2, sizes.heads)
    weights = grad_out.new_empty(shape, dtype=scratch_dtype(grad_out.dtype))
    destination_launch(sizes, tile)(
        query=problem.query, key=problem.key, value=problem.value, edge_attr=problem.edge_attr,
        projected=projected_grad, grad_out=grad_out, grad_lse=grad_lse,
        inverse=saved.inverse, numerators=saved.numerators, **problem.structure, dquery=dquery, dedge=dedge, weights=weights,
        products=torch.empty_like(saved.numerators), dweights=torch.empty_like(saved.numerators),
    )  # fmt: skip
    return weights


@lru_cache(KEPT)
def source_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """What `differentiate_sources` launches."""
    tile = tile or source_tile(sizes.over_sources)
    return _row_launch(backward.edge_attention_bwd_src, sizes, sizes.num_src, tile, {}, {"NODES": tile.nodes})


def differentiate_sources(
    problem: Problem,
    weights: Tensor,
    grad_out: Tensor,
    rowptr: Tensor,
    col: Tensor,
    csr_to_csc: Tensor,
    dkey: Tensor | None,
    dvalue: Tensor | None,
    tile: RowTile | None = None,
) -> None:
    """Backward over sources: fills dkey and dvalue."""
    source_launch(problem.sizes, tile)(
        query=problem.query, grad_out=grad_out, weights=weights, rowptr=rowptr, col=col, csr_to_csc=csr_to_csc,
        dkey=dkey, dvalue=dvalue,
    )  # fmt: skip


@lru_cache(KEPT)
def attribute_launch(sizes: Sizes) -> Launch:
    """What `differentiate_attributes` launches."""
    scalars = {"num_dst": sizes.num_dst, "num_edges": sizes.num_edges, "attr_stride": sizes.attr_stride}
    constants = {"H": sizes.heads, "HEADS": attribute_heads(sizes.heads), "EDGES": PRODUCT, "WIDE": sizes.wide}
    constants |= {"num_warps": attribute_warps(sizes.heads, sizes.attributes), **_attribute_constants(sizes)}
    return Launch(edge_features.attribute_bwd, (sizes.destinations,), scalars, constants)


def differentiate_attributes(
    problem: Problem, weights: Tensor, saved: Saved, projected_grad: Tensor, dedge_attr: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A and B of each destination [B, N_dst, H, columns]; fills dedge_attr [B, E, D]."""
    attr_sums, dscore_sums = torch.empty_like(projected_grad), torch.empty_like(projected_grad)
    attribute_launch(problem.sizes)(
        weights=weights, edge_attr=problem.edge_attr, projected=saved.projected, projected_grad=projected_grad,
        colptr=problem.colptr, perm=problem.perm, attr_sums=attr_sums, dscore_sums=dscore_sums, dedge_attr=dedge_attr,
    )  # fmt: skip
    return attr_sums, dscore_sums


@lru_cache(KEPT)
def weight_launch(sizes: Sizes, tile: ContractionTile | None = None) -> tuple[Launch, int]:
    """What `differentiate_weight` launches, and the number of its partial sums."""
    tile = tile or weight_tile(sizes.channels, sizes.attributes)
    partials = max(1, min(-(-PROGRAMS // sizes.heads), -(-sizes.destinations // tile.nodes)))
    grid = (partials * sizes.heads, -(-sizes.channels // tile.channels))
    return _contraction_launch(edge_features.weight_bwd, sizes, tile, grid, {}), partials


def differentiate_weight(
    problem: Problem, grad_out: Tensor, attr_sums: Tensor, dscore_sums: Tensor, tile: ContractionTile | None = None
) -> Tensor:
    """Gradient of W with the bias as its last column, [H * C, D + BIAS], float32."""
    sizes = problem.sizes
    launch, partials = weight_launch(sizes, tile)
    shape = (partials, sizes.heads * sizes.channels, sizes.attributes)
    partial = grad_out.new_empty(shape, dtype=torch.float32)
    launch(query=problem.query, grad_out=grad_out, attr_sums=attr_sums, dscore_sums=dscore_sums, partial=partial)
    return partial.sum(0)
