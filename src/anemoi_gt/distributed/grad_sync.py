"""Gradients on a (data, model) mesh: reduced once, right for every split of the ranks.

    shared parameter     every rank of a model holds it, and knows the part of its gradient that its nodes and edges make:
                         grad = mean over data of  sum over model of  grad here
    own parameter        one rank of a model holds these rows (trained features of its nodes and edges):
                         grad = mean over data of  grad here

The loss of a rank is the sum over its nodes divided by the number of nodes of all ranks of its model, not by its own number.
"""

from collections.abc import Iterable
from datetime import timedelta
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from anemoi_gt.option_checks import check_integer

AXES = ("data", "model")
DEVICE_TYPES = ("cuda", "cpu")
BUCKET_BYTES = 64 * 2**20


def make_mesh(device_type: str, model: int, timeout: timedelta | None = None) -> DeviceMesh:
    """Lay out all ranks on the axes (data, model). Collective.

    Parameters
    ----------
    device_type : str
        "cuda", where every rank has set its device, or "cpu".
    model : int
        Ranks that share one model; neighbours, so that they are on one host where they fit.
    timeout : timedelta, optional
        Of collectives along one axis. None: PyTorch's default.

    Raises
    ------
    ValueError
        For another type of device, or when the number of ranks is not a multiple of `model`.
    """
    world = dist.get_world_size()
    check_device_type(device_type)
    check_integer("sharding.model", model, least=None)
    if model < 1 or world % model:
        raise ValueError(f"sharding.model must divide the number of ranks {world}, got {model}")
    ranks = torch.arange(world).view(-1, model)
    groups = [_group_along(axis, among.tolist(), timeout) for axis, among in zip(AXES, (ranks.T, ranks), strict=True)]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES)


def reduce_gradients(shared: Iterable[Parameter], own: Iterable[Parameter], mesh: DeviceMesh) -> None:
    """Give every rank the whole gradient of what it holds. Collective; call it once, between backward and the optimiser's step.

    Parameters
    ----------
    shared, own : iterables of Parameter
        In the same order on all ranks. A missing gradient counts as zero; what needs none gets none, so no optimiser moves it.
    mesh : DeviceMesh
        With axes (data, model).

    Raises
    ------
    ValueError
        For a mesh with other axes.
    """
    check_mesh(mesh)
    shared, own = ([parameter for parameter in both if parameter.requires_grad] for both in (shared, own))
    _reduce(shared, mesh, "model", factor=1.0)
    _reduce(shared + own, mesh, "data", factor=1.0 / mesh["data"].size())


def clip_gradients(shared: Iterable[Parameter], own: Iterable[Parameter], max_norm: float, mesh: DeviceMesh) -> Tensor:
    """Shorten the gradient of a whole model to `max_norm`, as `torch.nn.utils.clip_grad_norm_` does on one device. Collective.

    Parameters
    ----------
    shared, own : iterables of Parameter
        After `reduce_gradients`; what is shared counts once.
    max_norm : float
    mesh : DeviceMesh
        With axes (data, model).

    Returns
    -------
    Tensor
        Scalar: the length before; NaN when it is not finite, and then so are the gradients of all ranks.

    Raises
    ------
    ValueError
        For a mesh with other axes.
    """
    check_mesh(mesh)
    shared, own = list(shared), list(own)
    squares = _squares(own, mesh)
    dist.all_reduce(squares, group=mesh.get_group("model"))
    norm = (squares + _squares(shared, mesh)).sqrt().to(_widest(shared + own))
    norm = torch.where(norm.isfinite(), norm, torch.nan)  # infinity would make zeros on the ranks that are finite
    clip_grads_with_norm_(shared + own, max_norm, norm)
    return norm


def sum_loss(loss: Tensor, mesh: DeviceMesh) -> Tensor:
    """The loss of the whole batch, for the record: summed over model, averaged over data. Collective, without gradient.

    Raises
    ------
    ValueError
        For a mesh with other axes.
    """
    check_mesh(mesh)
    total = loss.detach().clone()
    for axis in AXES:
        dist.all_reduce(total, group=mesh.get_group(axis))
    return total / mesh["data"].size()


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise unless `mesh` is one as `make_mesh` lays it out."""
    if not isinstance(mesh, DeviceMesh):
        raise ValueError(
            f"mesh must be a DeviceMesh with the axes {AXES}, as make_mesh makes it, got {type(mesh).__name__}"
        )
    if mesh.mesh_dim_names != AXES:
        raise ValueError(f"mesh must have the axes {AXES}, got {mesh.mesh_dim_names}")


def check_device_type(device_type: object) -> None:
    """Raise unless it names where ranks can compute; a device with a number would be one for all of them."""
    if device_type not in DEVICE_TYPES:
        raise ValueError(f"device_type must be one of {', '.join(DEVICE_TYPES)}, got {device_type!r}")


def _group_along(axis: str, ranks: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Make a group of each of these lists of ranks, with all of them; return the one that this rank is in.

    `init_device_mesh` would split them off the group of all ranks, in which PyTorch 2.11 ends with a segmentation fault where a process had
    another group of NCCL before (github.com/pytorch/pytorch/pull/192109).
    """
    if len(ranks) == 1:
        return dist.group.WORLD
    own, _ = dist.new_subgroups_by_enumeration(ranks, timeout, group_desc=f"ranks along {axis}")
    return own


def _reduce(parameters: list[Parameter], mesh: DeviceMesh, axis: str, factor: float) -> None:
    """Replace gradients by `factor` times their sum along an axis."""
    if mesh[axis].size() == 1:
        return
    for bucket in _buckets(parameters):
        flat = torch.cat([_gradient(parameter).flatten() for parameter in bucket])
        dist.all_reduce(flat, group=mesh.get_group(axis))
        parts = flat.mul_(factor).split([parameter.numel() for parameter in bucket])
        for parameter, part in zip(bucket, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def _squares(parameters: list[Parameter], mesh: DeviceMesh) -> Tensor:
    """Sum of squares of gradients, float64 on the mesh's device whatever there is: ranks without any take part too."""
    return get_total_norm(_gradients(parameters)).to(mesh.device_type, torch.float64).square()


def _widest(parameters: list[Parameter]) -> torch.dtype:
    dtypes = [parameter.dtype for parameter in parameters]
    return reduce(torch.promote_types, dtypes) if dtypes else torch.float32


def _gradients(parameters: list[Parameter]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _gradient(parameter: Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _buckets(parameters: list[Parameter]) -> Iterable[list[Parameter]]:
    """Neighbours of one dtype, some megabytes at a time."""
    bucket, size = [], 0
    for parameter in parameters:
        if bucket and (size >= BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
