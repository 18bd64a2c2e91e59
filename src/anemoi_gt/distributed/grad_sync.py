"""Gradient reduction, clipping and loss on a (data, model) mesh.

    shared parameter     held by every rank of a model, each with the gradient from its own nodes and edges:
                         grad = mean over data of  sum over model of  local grad
    own parameter        rows that one rank of a model holds (trainable features of its nodes and edges):
                         grad = mean over data of  local grad

A rank's loss is the sum over its nodes divided by the number of nodes of the whole model, not by its own number. A
`mesh` has axes (data, model), as `make_mesh` makes it; functions raise ValueError for others.
"""

from collections.abc import Iterable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from anemoi_gt.distributed.process_group import AXES, check_mesh

BUCKET_BYTES = 64 * 2**20


def reduce_gradients(shared: Iterable[Parameter], own: Iterable[Parameter], mesh: DeviceMesh) -> None:
    """Reduce the gradients of all ranks, in place. Collective; call it once, between backward and the optimiser's step.

    `shared` and `own` are in the same order on all ranks. A missing gradient counts as zero; with requires_grad=False
    it stays None.
    """
    check_mesh(mesh)
    shared, own = ([parameter for parameter in both if parameter.requires_grad] for both in (shared, own))
    _reduce(shared, mesh.get_group("model"), factor=1.0)
    average_gradients(shared + own, mesh.get_group("data"))


def average_gradients(parameters: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over the ranks of a group; a missing one counts as zero. Collective."""
    _reduce([parameter for parameter in parameters if parameter.requires_grad], group, factor=1.0 / group.size())


def clip_gradients(shared: Iterable[Parameter], own: Iterable[Parameter], max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Clip the gradient norm of a whole model, as `torch.nn.utils.clip_grad_norm_` does on one device. Collective.

    Call it after `reduce_gradients`; shared parameters count once. Return the norm before clipping, a scalar: NaN when
    it is not finite, and then so are the gradients of all ranks.
    """
    check_mesh(mesh)
    shared, own = list(shared), list(own)
    squares = _squares(own, mesh)
    dist.all_reduce(squares, group=mesh.get_group("model"))
    widest = reduce(torch.promote_types, [p.dtype for p in shared + own] or [torch.float32])
    norm = (squares + _squares(shared, mesh)).sqrt().to(widest)
    norm = torch.where(norm.isfinite(), norm, torch.nan)  # infinity would zero the finite gradients
    clip_grads_with_norm_(shared + own, max_norm, norm)
    return norm


def sum_loss(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the loss of the whole batch for logging: sum over model, mean over data. Collective, without gradient."""
    check_mesh(mesh)
    total = loss.detach().clone()
    for axis in AXES:
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total / mesh["data"].size()


def _reduce(parameters: list[Parameter], group: dist.ProcessGroup, factor: float) -> None:
    """Replace gradients by `factor` times their sum over the ranks of a group."""
    if group.size() == 1:
        return
    for bucket in _buckets(parameters):
        flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in bucket])
        dist.all_reduce(flat, group=group)
        parts = flat.mul_(factor).split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _squares(parameters: list[Parameter], mesh: DeviceMesh) -> Tensor:
    """Return the sum of squares of gradients, float64 on the mesh's device, also on ranks without any."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients).to(mesh.device_type, torch.float64).square()


def _buckets(parameters: list[Parameter]) -> Iterable[list[Parameter]]:
    """Yield consecutive parameters of one dtype, `BUCKET_BYTES` at a time."""
    bucket, size = [], 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
