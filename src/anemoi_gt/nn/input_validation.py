"""Checks of the inputs of layers: features, their rows, conditions and graphs."""

from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import check_shape, have_size


def stored_parameter(module: nn.Module) -> Tensor | None:
    """Return a tensor that a linear map or network of any class holds, in the dtype of its weights.

    Checks do not read `linear.weight`: adapters may have none, and a parametrised one is computed
    at each access, where spectral norm takes a step of its power iteration. None without one, as in
    a quantised module.
    """
    for parameter in module._parameters.values():
        if parameter is not None:
            return parameter
    for child in module._modules.values():  # `parameters()` takes ten times as long
        stored = None if child is None else stored_parameter(child)
        if stored is not None:
            return stored
    return module.__dict__.get("weight")  # replicas of DataParallel hold plain tensors


def check_features(name: str, features: Tensor, channels: int | None, like: Tensor | None) -> None:
    """Raise unless `features` is [N, channels] or [B, N, channels], in a dtype fit for `like`.

    None is any number of channels.
    """
    number = "F" if channels is None else channels
    check_shape(
        name,
        features,
        f"[N, {number}] or [B, N, {number}]",
        lambda x: x.dim() in (2, 3) and (channels is None or x.shape[-1] == channels),
    )
    check_dtype(name, features, like)


def check_dtype(name: str, features: Tensor, like: Tensor | None) -> None:
    """Raise unless `features` is floating point, and float64 if and only if weights `like` are."""
    if not features.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {features.dtype}; cast it first")
    if like is None:
        return
    if (features.dtype == torch.float64) != (like.dtype == torch.float64):
        raise ValueError(
            f"{name} must have the dtype of the weights, {like.dtype}, got {features.dtype}; cast "
            "it, or the module by .to(dtype)"
        )


def sides_of(value: Any) -> tuple[Any, Any]:
    """Return the values of sources and of destinations, of which one may serve both."""
    if not isinstance(value, (tuple, list)):
        return value, value
    src, dst = value
    return src, dst


def check_sides(x: tuple, channels: tuple[int, int], like: Tensor | None) -> tuple:
    """Return (x_src, x_dst) as a tuple; raise unless both have these channels.

    Each is a tensor or a tuple of its columns.
    """
    _check_pair("x must be a pair of tensors (x_src, x_dst)", x)
    for name, features, expected in zip(("x_src", "x_dst"), x, channels, strict=True):
        if isinstance(features, tuple):
            _check_columns(name, features, expected, like)
        else:
            check_features(name, features, expected, like)
    return tuple(x)


def _check_columns(
    name: str, columns: tuple[Tensor, ...], channels: int, like: Tensor | None
) -> None:
    """Raise unless `columns`, [N, F] or [B, N, F] of the same nodes, have `channels` in all."""
    shapes = [
        tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        for column in columns
    ]
    fit = all(isinstance(column, Tensor) and column.dim() in (2, 3) for column in columns)
    # sizes may be symbols, which have no hash
    fit = fit and all(shape[:-1] == shapes[0][:-1] for shape in shapes)
    if not fit or sum(shape[-1] for shape in shapes) != channels:
        raise ValueError(
            f"{name} must be tensors of the same nodes with {channels} features in all, got "
            f"{shapes}"
        )
    for column in columns:
        check_dtype(name, column, like)


def check_nodes(graph: GraphStructure, x_src: Tensor, x_dst: Tensor) -> None:
    """Raise unless both sides have one row per node of the graph and the same batch."""
    check_batch(x_src, x_dst)
    names = ("x", "x") if x_src is x_dst else ("x_src", "x_dst")
    if not have_size(x_src.shape[-2], graph.num_src):
        raise _wrong_rows(names[0], x_src, "source", graph.num_src)
    if not have_size(x_dst.shape[-2], graph.num_dst):
        raise _wrong_rows(names[1], x_dst, "destination", graph.num_dst)


def _wrong_rows(name: str, x: Tensor, kind: str, number: int) -> ValueError:
    return ValueError(
        f"{name} must have {number} rows, one per {kind} of the graph, got {tuple(x.shape)}"
    )


def check_batch(x_src: Tensor, x_dst: Tensor) -> None:
    """Raise unless features of both sides have the same batch dimension, or none."""
    if x_src.shape[:-2] != x_dst.shape[:-2]:
        raise ValueError(
            "x_src and x_dst must have the same batch dimension, or none, got "
            f"{tuple(x_src.shape)} and {tuple(x_dst.shape)}"
        )


def check_conditions(
    cond: tuple[Tensor | None, Tensor | None] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """Return (cond_src, cond_dst), or two None; raise unless `cond` is a pair or None."""
    if cond is None:
        return None, None
    _check_pair("cond must be a pair (cond_src, cond_dst), of sources and of destinations", cond)
    cond_src, cond_dst = cond
    return cond_src, cond_dst


def _check_pair(message: str, pair: object) -> None:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        got = f"{len(pair)} elements" if isinstance(pair, (tuple, list)) else type(pair).__name__
        raise ValueError(f"{message}, got {got}")


def check_rows(sizes: tuple[int, int, int], **rows: Tensor | tuple[Tensor, ...] | None) -> None:
    """Raise unless x_src, x_dst and edge_attr have the rows of a chunked graph.

    Conditions must have the same rows, or one.

    PyTorch slices and gathers from tensors with too many rows silently, which would drop the
    others. `sizes` are the sources, destinations and edges of the whole graph; `rows` are [...,
    rows, features] or None.
    """
    kinds = {
        "src": ("source", sizes[0]),
        "dst": ("destination", sizes[1]),
        "attr": ("edge", sizes[2]),
    }
    for name, tensor in rows.items():
        if isinstance(tensor, tuple) and name.startswith("x_"):
            tensor = tensor[0]  # columns of the same nodes
        if tensor is None:
            continue
        kind, number = kinds[name.rpartition("_")[2]]
        expected = f"{number} rows, one per {kind} of the whole graph"
        allowed: tuple[int, ...] = (number,)
        if name.startswith("cond"):
            expected += ", or one for all"
            allowed = (number, 1)
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor of {expected}, got {type(tensor).__name__}")
        if tensor.dim() < 2 or tensor.shape[-2] not in allowed:
            raise ValueError(f"{name} must have {expected}, got {tuple(tensor.shape)}")
