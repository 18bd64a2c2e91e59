"""Edge attention of the package with the kernels of `prototypes.equal_degree` in place of its own, in the process that asks for it."""

from functools import lru_cache, partial

import torch
from torch import Tensor

from anemoi_gt.kernels.launcher import Launch
from anemoi_gt.kernels.tile import attribute_columns, next_power_of_two
from anemoi_gt.ops.dropout import drop_threshold
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.triton_backend import launch, op
from anemoi_gt.ops.triton_backend.problem import Problem, Sizes
from prototypes.equal_degree import equal_bwd_dst, equal_fwd

ROW_ELEMENTS = 1024  # heads x channels of a warp
MOST_DEGREE = 8  # edges of a program, all in flight


def take_over(forward_warps: int = 1, backward_warps: int = 1) -> None:
    """Let every later call in this process use the prototype; its graphs must have equal degrees, which is not checked."""
    launch.attend_rows = partial(attend_rows, warps=forward_warps)
    op._gradients = partial(gradients, warps=backward_warps)


def _constants(sizes: Sizes, pairs: bool, warps: int) -> dict:
    """What both kernels are compiled for."""
    heads, channels = next_power_of_two(sizes.heads), next_power_of_two(sizes.channels)
    widest = heads * max(channels, sizes.columns if sizes.attributes else 1)
    constants = {"K": sizes.num_edges // sizes.num_dst, "H": sizes.heads, "C": sizes.channels}
    constants |= {"D": sizes.edge_dim, "BIAS": sizes.bias, "ATTRIBUTES": attribute_columns(sizes.attributes)}
    constants |= {"HEADS": heads, "CHANNELS": channels, "PAIRS": pairs, "WIDE": sizes.wide}
    return constants | {"num_warps": max(warps, min(8, widest // ROW_ELEMENTS))}


@lru_cache(128)
def _launch(kernel, sizes: Sizes, pairs: bool, warps: int, factor: tuple[str, float]) -> Launch:
    survivor = 1.0 / (1.0 - sizes.dropout_p) if sizes.dropout_p < 1.0 else 0.0
    scalars = {"num_dst": sizes.num_dst, "num_src": sizes.num_src, "num_edges": sizes.num_edges}
    scalars |= {"attr_stride": sizes.attr_stride, factor[0]: factor[1]}
    scalars |= {"drop_below": drop_threshold(sizes.dropout_p), "survivor": survivor}
    return Launch(kernel, (sizes.samples * sizes.num_dst, 1), scalars, _constants(sizes, pairs, warps))


def _pairs(*rows: Tensor | None) -> bool:
    """Whether rows can be read as 32-bit pairs of bfloat16."""
    rows = [tensor for tensor in rows if tensor is not None]
    return all(t.dtype == torch.bfloat16 and t.shape[-1] % 2 == 0 and t.data_ptr() % 4 == 0 for t in rows)


def _shared(problem: Problem) -> dict[str, Tensor | None]:
    """Tensors that both kernels read."""
    structure = {name: tensor for name, tensor in problem.structure.items() if name != "colptr"}
    return {"key": problem.key, "value": problem.value, "edge_attr": problem.edge_attr, **structure}


def attend_rows(problem: Problem, projected: Tensor | None, warps: int = 1) -> tuple[Tensor, ...]:
    """As `launch.attend_rows`."""
    query, sizes = problem.query, problem.sizes
    out, lse = torch.empty_like(query), query.new_empty(query.shape[:-1], dtype=torch.float32)
    inverse, numerators = torch.empty_like(lse), lse.new_empty((sizes.samples, sizes.num_edges, sizes.heads))
    attr_sums = None if projected is None else torch.empty_like(projected)
    pairs = _pairs(query, problem.key, problem.value, out)
    _launch(equal_fwd, sizes, pairs, warps, ("score_scale", sizes.scale * launch.LOG2_E))(
        query=query, projected=projected, **_shared(problem), out=out, lse=lse, inverse=inverse,
        numerators=numerators, attr_sums=attr_sums,
    )  # fmt: skip
    return out, lse, inverse, numerators, attr_sums


def gradients(launch, problem, saved, grad_out, grad_lse, reverse, needs: list[bool], warps: int = 1) -> list[Tensor]:
    """As `op._gradients`; A, B and the gradient of edge_attr come out of the kernel over destinations."""
    need_query, need_key, need_value, need_attr, need_weight, need_bias = needs
    raw, dweight, dbias = problem.edge_weight is not None, None, None
    dquery = torch.empty_like(problem.query) if need_query else None
    dattr = op._attribute_gradient(problem) if need_attr else None
    projected_grad = launch.project(problem, grad_out) if raw else None
    sums = [torch.empty_like(projected_grad) if raw else None for _ in range(2)]
    sizes = problem.sizes
    shape = (sizes.samples, sizes.num_edges, 2, sizes.heads)
    weights = grad_out.new_empty(shape, dtype=scratch_dtype(grad_out.dtype))
    pairs = _pairs(grad_out, problem.key, problem.value, dquery)
    _launch(equal_bwd_dst, sizes, pairs, warps, ("scale", sizes.scale))(
        query=problem.query, projected=saved.projected, projected_grad=projected_grad, grad_out=grad_out, grad_lse=grad_lse,
        inverse=saved.inverse, numerators=saved.numerators, **_shared(problem), dquery=dquery, weights=weights,
        attr_sums=sums[0], dscore_sums=sums[1], dedge_attr=dattr,
    )  # fmt: skip
    if raw and need_query:
        launch.embed(problem, sums[1], dquery)
    if raw and (need_weight or need_bias):
        dweight, dbias = op._weight_and_bias(
            launch.differentiate_weight(problem, grad_out, *sums), problem, need_weight, need_bias
        )
    dkey = torch.empty_like(problem.key) if need_key else None
    dvalue = torch.empty_like(problem.value) if need_value else None
    if need_key or need_value:
        launch.differentiate_sources(problem, weights, grad_out, *reverse, dkey, dvalue)
    if need_attr and problem.shares_attributes:
        dattr = dattr.sum(0, keepdim=True).to(problem.edge_attr.dtype)
    every = (dquery, dkey, dvalue, dattr, dweight, dbias)
    return [gradient for gradient, need in zip(every, needs, strict=True) if need]
