"""Gradient reduction, clipping, optimiser step and loss on a (data, model) mesh.

    shared parameter     replicated on every rank of a model; local grad comes from local rows:
                         grad = mean over data of  sum over model of  local grad
    sharded parameter    rows held by one rank of a model (trainable features of nodes and edges):
                         grad = mean over data of  local grad

The loss of a rank is the sum over its nodes divided by the number of nodes of the whole model, not
by the number of its nodes. A `mesh` has axes (data, model), see `make_mesh`; functions raise
ValueError for any other mesh.

DDP over the data axis averages over data during backward. Its gradients are then equal on all data
ranks, so averaging again changes nothing. Gradients of `shard_parameters` are DTensors, which
PyTorch has reduced. What is left is the reduction of replicated parameters, which a captured step
leaves to the end, and of tables; one norm of both; and one decision of all ranks with a scaler.
"""

import math
from collections.abc import Iterable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import Parameter
from torch.nn.utils import get_total_norm
from torch.optim import SGD, Optimizer

from anemoi_gt.distributed.process_group import AXES, check_mesh, world_group

# of gradients in one all-reduce: a copy of this size at a time, and few launches
BUCKET_BYTES = 64 * 2**20


def reduce_gradients(
    shared: Iterable[Parameter], own: Iterable[Parameter], mesh: DeviceMesh
) -> None:
    """Reduce the gradients of all ranks, in place. Collective.

    Call it once, between backward and the optimiser step. `shared` and `own` (the sharded
    parameters) must be in the same order on all ranks. A missing gradient counts as zero;
    parameters with requires_grad=False are skipped, and DTensors of `shard_parameters`, whose
    gradients are reduced in backward. Raises ValueError for a DTensor of fewer ranks.
    """
    check_mesh(mesh)
    plain, divided = _by_layout(shared)
    for parameter in divided:
        if parameter.device_mesh.size() != mesh.size():
            raise ValueError(
                f"shared must be divided among all {mesh.size()} ranks of the mesh, got a DTensor "
                f"of {parameter.device_mesh.size()}: use shard_parameters"
            )
    _reduce(plain, _groups_of_all_ranks(mesh), factor=1.0 / mesh["data"].size())
    average_gradients(own, mesh.get_group("data"))


def average_gradients(parameters: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """Average gradients over a group, in place; a missing one counts as zero. Collective."""
    _reduce(parameters, [group], factor=1.0 / group.size())


@torch.no_grad()
def clip_gradients(
    shared: Iterable[Parameter], own: Iterable[Parameter], max_norm: float, mesh: DeviceMesh
) -> Tensor:
    """Clip the gradient norm of a whole model, like `torch.nn.utils.clip_grad_norm_`. Collective.

    Call it after `reduce_gradients`. Shared parameters count once. Return the norm before clipping,
    a scalar. If it is not finite, the norm and the gradients of all ranks become NaN.
    """
    check_mesh(mesh)
    plain, divided = _by_layout(shared)
    own = list(own)
    # Of local shards, each counted once in a sum over all ranks: operations on DTensors would take
    # milliseconds of Python.
    squares = _squares(divided, mesh) + _squares(own, mesh) / mesh["data"].size()
    for group in _groups_of_all_ranks(mesh):
        dist.all_reduce(squares, group=group)
    parameters = [*plain, *divided, *own]
    dtypes = [parameter.dtype for parameter in parameters] or [torch.float32]
    norm = (squares + _squares(plain, mesh)).sqrt().to(reduce(torch.promote_types, dtypes))
    # Dividing by an infinite norm would set the finite gradients to 0.
    norm = torch.where(norm.isfinite(), norm, torch.nan)
    gradients = _gradients(parameters)
    if gradients:
        torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def optimizer_step(
    optimizer: Optimizer,
    shared: Iterable[Parameter],
    own: Iterable[Parameter],
    mesh: DeviceMesh,
    *,
    max_norm: float = math.inf,
    scaler: GradScaler | None = None,
) -> Tensor:
    """Reduce and clip gradients and step the optimiser, on all ranks or on none. Collective.

    Parameters
    ----------
    optimizer : Optimizer
        The optimiser of these parameters.
    shared, own : iterable of Parameter
        Shared and sharded parameters, as `ModuleShard.parameters` returns them, with the gradients
        of one or more backward passes.
    mesh : DeviceMesh
        With axes (data, model).
    max_norm : float
        See `clip_gradients`; infinity disables clipping.
    scaler : GradScaler, optional
        The scaler that scaled the loss. If a gradient of any rank is not finite, all ranks skip the
        step and keep the same scale; they would diverge if each rank unscaled its own gradients.
        Call only `scaler.scale` yourself, and give each optimiser a scaler of its own, whose scale
        this function updates. With a scaler, this function synchronises with the device. Without,
        or disabled, the step is always taken, even with NaN.

    Returns
    -------
    Tensor
        The norm of the unscaled gradients before clipping, a scalar; NaN if it is not finite.
    """
    shared = list(shared)
    own = list(own)
    reduce_gradients(shared, own, mesh)
    if scaler is None or not scaler.is_enabled():
        norm = clip_gradients(shared, own, max_norm, mesh)
        _step(optimizer)
        return norm
    # GradScaler cannot unscale DTensors and plain tensors together. It decides by the norm, which
    # is NaN on all ranks if a gradient of any rank is not finite.
    scale = scaler.get_scale()
    norm = clip_gradients(shared, own, max_norm * scale, mesh) / scale
    decided = Parameter(torch.zeros_like(norm))
    decided.grad = norm * scale
    scaler.step(SGD([decided]))
    if norm.isfinite():
        torch._foreach_div_(_gradients(shared + own), scale)
        _step(optimizer)
    scaler.update()
    return norm


def _step(optimizer: Optimizer) -> None:
    """Step an optimiser of DTensors and of tables, which are plain tensors with local rows."""
    with implicit_replication():
        optimizer.step()


def sum_loss(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the loss of the whole batch, without gradient, for logging. Collective.

    It is the sum over model ranks, averaged over data ranks.
    """
    check_mesh(mesh)
    total = loss.detach().clone()
    for group in _groups_of_all_ranks(mesh):
        dist.all_reduce(total, group=group)
    return total / mesh["data"].size()


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _groups_of_all_ranks(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return groups such that sums over them, one after the other, are sums over the mesh.

    A single group, if possible, gives all ranks the same bits. With two, rows of the mesh could add
    in different orders.
    """
    if mesh.size() == dist.get_world_size():
        return [world_group()]
    return [mesh.get_group(axis) for axis in AXES]


def _reduce(
    parameters: Iterable[Parameter], groups: list[dist.ProcessGroup], factor: float
) -> None:
    """Replace gradients by `factor` times their sum over the ranks of all groups."""
    groups = [group for group in groups if group.size() > 1]
    if not groups:
        return
    for bucket in _buckets(parameter for parameter in parameters if parameter.requires_grad):
        gradients = []
        for parameter in bucket:
            if parameter.grad is None:  # all ranks must reduce the same bytes
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        for group in groups:
            dist.all_reduce(flat, group=group)
        sums = flat.mul_(factor).split([gradient.numel() for gradient in gradients])
        for parameter, total in zip(bucket, sums, strict=True):
            parameter.grad = total.view_as(parameter)


def _squares(parameters: list[Parameter], mesh: DeviceMesh) -> Tensor:
    """Return the sum of squared gradients of this rank in float64, on the device of the mesh."""
    # float64: a squared norm of gradients with a scaled loss may exceed the range of float32
    norm = get_total_norm(_gradients(parameters))  # 0 without gradients
    return norm.to(mesh.device_type, torch.float64).square()


def _gradients(parameters: list[Parameter]) -> list[Tensor]:
    """Return the gradients that this rank holds."""
    return [local_shard(parameter.grad) for parameter in parameters if parameter.grad is not None]


def _by_layout(parameters: Iterable[Parameter]) -> tuple[list[Parameter], list[Any]]:
    """Split parameters into plain tensors and DTensors, which PyTorch's foreach ops cannot mix."""
    plain: list[Parameter] = []
    sharded: list[Any] = []  # parameters with the attributes of a DTensor
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            sharded.append(parameter)
        else:
            plain.append(parameter)
    return plain, sharded


def _buckets(parameters: Iterable[Parameter]) -> Iterable[list[Parameter]]:
    """Yield buckets of consecutive parameters of one dtype, of about `BUCKET_BYTES`."""
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
            size = 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
