"""Gradient reduction, clipping, optimiser step and loss on a (data, model) mesh.

    shared parameter     held by every rank of a model, with the gradient of local rows:
                         grad = mean over data of  sum over model of  local grad
    own parameter        rows held by one rank of a model (trainable features of nodes and edges):
                         grad = mean over data of  local grad

A rank's loss is the sum over its nodes divided by the number of nodes of the whole model, not by
its own number. A `mesh` has axes (data, model), as `make_mesh` makes it; functions raise ValueError
for others.

DDP and `fully_shard` over the data axis take the mean over data during backward. DDP's gradients
are equal there, so averaging changes nothing; gradients of `fully_shard` are DTensors, whose local
parts are summed over model only.
"""

import math
from collections.abc import Iterable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from anemoi_gt.distributed.process_group import AXES, check_mesh, world_group

BUCKET_BYTES = 64 * 2**20


def reduce_gradients(
    shared: Iterable[Parameter], own: Iterable[Parameter], mesh: DeviceMesh
) -> None:
    """Reduce the gradients of all ranks, in place. Collective.

    Call it once, between backward and the optimiser step.

    `shared` and `own` are in the same order on all ranks. A missing gradient counts as zero; with
    requires_grad=False it stays None.
    """
    check_mesh(mesh)
    shared = [parameter for parameter in shared if parameter.requires_grad]
    own = [parameter for parameter in own if parameter.requires_grad]
    plain, sharded = _by_layout(shared)
    _reduce(sharded, [mesh.get_group("model")], factor=1.0)
    _reduce(plain, _groups_of_all_ranks(mesh), factor=1.0 / mesh["data"].size())
    average_gradients(_by_layout(own)[0], mesh.get_group("data"))


def average_gradients(parameters: Iterable[Parameter], group: dist.ProcessGroup) -> None:
    """Replace gradients by their mean over a group; a missing one counts as zero. Collective."""
    _reduce(
        [parameter for parameter in parameters if parameter.requires_grad],
        [group],
        factor=1.0 / group.size(),
    )


def clip_gradients(
    shared: Iterable[Parameter], own: Iterable[Parameter], max_norm: float, mesh: DeviceMesh
) -> Tensor:
    """Clip the gradient norm of a whole model, like `torch.nn.utils.clip_grad_norm_`. Collective.

    Call it after `reduce_gradients`; shared parameters count once. Return the norm before clipping,
    a scalar: NaN when it is not finite, and then so are the gradients of all ranks.
    """
    check_mesh(mesh)
    shared, own = list(shared), list(own)
    squares = _squares(own, mesh)
    dist.all_reduce(squares, group=mesh.get_group("model"))
    widest = reduce(torch.promote_types, [p.dtype for p in shared + own] or [torch.float32])
    norm = (squares + _squares(shared, mesh)).sqrt().to(widest)
    norm = torch.where(norm.isfinite(), norm, torch.nan)  # infinity would zero the finite gradients
    for parameters in _by_layout(shared + own):
        clip_grads_with_norm_(parameters, max_norm, norm)
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
        Of these parameters.
    shared, own : iterable of Parameter
        From `ModuleShard.parameters`, with the gradients of one or more backward passes.
    mesh : DeviceMesh
        With axes (data, model).
    max_norm : float
        For `clip_gradients`; infinity leaves finite gradients as they are.
    scaler : GradScaler, optional
        That scaled the loss. All ranks skip the step when a gradient of any of them is not finite,
        and have the same scale after it, which they would not if each had unscaled its own
        gradients. Do not call its methods but `scale`; it waits for the device. None: the step is
        taken, even with NaN.

    Returns
    -------
    Tensor
        The norm of the unscaled gradients before clipping, a scalar; NaN when it is not finite.

    Raises
    ------
    ValueError
        With a scaler, when no parameter to train is shared.
    """
    shared, own = list(shared), list(own)
    reduce_gradients(shared, own, mesh)
    if scaler is None:
        norm = clip_gradients(shared, own, max_norm, mesh)
        optimizer.step()
        return norm
    if not any(parameter.requires_grad for parameter in shared):
        raise ValueError(
            "shared must have a parameter to train with a scaler, which agrees by its gradients, "
            "got none"
        )
    # Before unscaling: gradients that are not finite on one rank become NaN on all, and every
    # rank's scaler finds them.
    scale = scaler.get_scale()
    norm = clip_gradients(shared, own, max_norm * scale, mesh) / scale
    scaler.step(optimizer)
    scaler.update()
    return norm


def sum_loss(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return the loss of the whole batch for logging. Collective, without gradient.

    The sum over model ranks, averaged over data ranks.
    """
    check_mesh(mesh)
    total = loss.detach().clone()
    for group in _groups_of_all_ranks(mesh):
        dist.all_reduce(total, group=group)
    return total / mesh["data"].size()


def _groups_of_all_ranks(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Return the groups over which a sum, one after the other, is that over the mesh.

    One group where it can be: all ranks then get the same bits. Two rows of a mesh could add in
    another order.
    """
    if mesh.size() == dist.get_world_size():
        return [world_group()]
    return [mesh.get_group(axis) for axis in AXES]


def _reduce(parameters: list[Parameter], groups: list[dist.ProcessGroup], factor: float) -> None:
    """Replace gradients by `factor` times their sum over the groups, one group after the other."""
    groups = [group for group in groups if group.size() > 1]
    if not groups:
        return
    for bucket in _buckets(parameters):
        parts = []
        for parameter in bucket:
            gradient = parameter.grad
            if gradient is None:
                gradient = parameter.grad = torch.zeros_like(parameter)
            parts.append(_local(gradient))
        flat = torch.cat([part.flatten() for part in parts])
        for group in groups:
            dist.all_reduce(flat, group=group)
        sums = flat.mul_(factor).split([part.numel() for part in parts])
        for parameter, part, total in zip(bucket, parts, sums, strict=True):
            if isinstance(parameter, DTensor):
                part.copy_(total.view_as(part))  # part is the gradient's own memory
            else:
                parameter.grad = total.view_as(part)


def _squares(parameters: list[Parameter], mesh: DeviceMesh) -> Tensor:
    """Return the sum of squares of gradients, float64 on the mesh's device; 0 without gradients."""
    squares = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
    for same_layout in _by_layout(parameters):
        norm = get_total_norm(
            [parameter.grad for parameter in same_layout if parameter.grad is not None]
        )
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm  # collective over data
        squares += norm.to(squares).square()
    return squares


def _by_layout(parameters: list[Parameter]) -> tuple[list[Parameter], list[Parameter]]:
    """Split parameters into plain tensors and DTensors, which PyTorch's foreach ops cannot mix."""
    plain = [parameter for parameter in parameters if not isinstance(parameter, DTensor)]
    return plain, [parameter for parameter in parameters if isinstance(parameter, DTensor)]


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _buckets(parameters: list[Parameter]) -> Iterable[list[Parameter]]:
    """Yield consecutive parameters of one dtype, `BUCKET_BYTES` at a time."""
    bucket: list[Parameter] = []
    size = 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += _local(parameter).numel() * parameter.element_size()
    if bucket:
        yield bucket
