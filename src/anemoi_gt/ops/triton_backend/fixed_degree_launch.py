"""Launches for graphs in which every destination has the same few in-edges: what stands in for two launches of `launch`.

As there, a tile may be given, to measure it; None is the one that is chosen for the sizes.
"""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.kernels import fixed_degree
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.triton_backend.launch import KEPT, LOG2_E, Saved, dropout_scalars
from anemoi_gt.ops.triton_backend.problem import Problem, Sizes
from anemoi_gt.ops.triton_backend.tiles import ROW_ELEMENTS, RowTile, fixed_degree_tile


@lru_cache(KEPT)
def serves(sizes: Sizes) -> bool:
    """Whether these kernels take a problem: a degree that is known and small, no embedded features, rows that fit a program."""
    return not sizes.embedded and fixed_degree_tile(sizes.over_destinations, sizes.fixed_in_degree) is not None


def forward_tile(sizes: Sizes) -> RowTile:
    """Tile of `attend_rows`.

    Measured, decoder at C = 64 / 32: 1.02, 0.60 ms; with pairs 1.10, 0.61.
    """
    return fixed_degree_tile(sizes.over_destinations, sizes.fixed_in_degree)


def destination_tile(sizes: Sizes) -> RowTile:
    """Tile of `differentiate_rows`.

    Measured, decoder at C = 64 / 32: 1.26, 0.98 ms; with pairs 1.31, 0.88.
    """
    tile = fixed_degree_tile(sizes.over_destinations, sizes.fixed_in_degree)
    return replace(tile, pairs=sizes.pairs_possible and tile.heads * tile.channels < ROW_ELEMENTS * tile.num_warps)


def _launch(kernel, sizes: Sizes, tile: RowTile, scale: dict[str, float]) -> Launch:
    scalars = {"num_dst": sizes.num_dst, "num_src": sizes.num_src, "num_edges": sizes.num_edges}
    scalars |= {"attr_stride": sizes.attr_stride, **scale, **dropout_scalars(sizes)}
    constants = {"K": tile.unroll, "H": sizes.heads, "C": sizes.channels, "D": sizes.edge_dim, "BIAS": sizes.bias}
    constants |= {"HEADS": tile.heads, "CHANNELS": tile.channels, "ATTRIBUTES": sizes.columns, "PAIRS": tile.pairs}
    return Launch(kernel, (sizes.destinations,), scalars, constants | {"WIDE": sizes.wide, "num_warps": tile.num_warps})


@lru_cache(KEPT)
def forward_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """What `attend_rows` launches."""
    scale = {"score_scale": sizes.scale * LOG2_E}
    return _launch(fixed_degree.edge_attention_equal_fwd, sizes, tile or forward_tile(sizes), scale)


@lru_cache(KEPT)
def destination_launch(sizes: Sizes, tile: RowTile | None = None) -> Launch:
    """What `differentiate_rows` launches."""
    scale = {"scale": sizes.scale}
    return _launch(fixed_degree.edge_attention_equal_bwd_dst, sizes, tile or destination_tile(sizes), scale)


def _operands(problem: Problem) -> dict[str, Tensor | None]:
    """Tensors that both kernels are given."""
    structure = {name: tensor for name, tensor in problem.structure.items() if name != "colptr"}
    nodes = {"query": problem.query, "key": problem.key, "value": problem.value}
    edge_attr = problem.edge_attr if problem.sizes.edge_dim else None
    return {**nodes, "edge_attr": edge_attr, **structure}


def attend_rows(problem: Problem, projected: Tensor | None, tile: RowTile | None = None) -> tuple[Tensor, ...]:
    """As `launch.attend_rows`."""
    query, sizes = problem.query, problem.sizes
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    inverse, numerators = torch.empty_like(lse), lse.new_empty((sizes.samples, sizes.num_edges, sizes.heads))
    attr_sums = None if projected is None else torch.empty_like(projected)
    forward_launch(sizes, tile)(
        **_operands(problem), projected=projected, out=out, lse=lse, inverse=inverse, numerators=numerators,
        attr_sums=attr_sums,
    )  # fmt: skip
    return out, lse, inverse, numerators, attr_sums


def differentiate_rows(
    problem: Problem,
    saved: Saved,
    projected_grad: Tensor | None,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    dquery: Tensor | None,
    dedge_attr: Tensor | None,
    tile: RowTile | None = None,
) -> tuple[Tensor, tuple[Tensor | None, Tensor | None]]:
    """Fills dquery (without W B) and dedge_attr; returns [m p, ds] of each edge, and A and B of each destination."""
    sizes = problem.sizes
    shape = (sizes.samples, sizes.num_edges, 2, sizes.heads)
    weights = grad_out.new_empty(shape, dtype=scratch_dtype(grad_out.dtype))
    attr_sums, dscore_sums = (None if projected_grad is None else torch.empty_like(projected_grad) for _ in range(2))
    destination_launch(sizes, tile)(
        **_operands(problem), projected=None if dedge_attr is None else saved.projected,
        projected_grad=projected_grad, grad_out=grad_out, grad_lse=grad_lse,
        inverse=saved.inverse, numerators=saved.numerators, dquery=dquery, weights=weights,
        attr_sums=attr_sums, dscore_sums=dscore_sums, dedge_attr=dedge_attr,
    )  # fmt: skip
    return weights, (attr_sums, dscore_sums)
