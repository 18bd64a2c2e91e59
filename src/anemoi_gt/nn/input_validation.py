"""Checks of the inputs of layers: features, their rows, conditions, edge attributes and graphs."""

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.validation import have_size


def check_features(name: str, features: Tensor, channels: int, like: Tensor) -> None:
    """Raise unless `features` is a tensor [N, channels] or [B, N, channels] in a dtype for the weights `like`."""
    if not isinstance(features, Tensor):
        raise ValueError(
            f"{name} must be a tensor [N, {channels}] or [B, N, {channels}], got {type(features).__name__}"
        )
    if features.dim() not in (2, 3) or features.shape[-1] != channels:
        raise ValueError(f"{name} must have shape [N, {channels}] or [B, N, {channels}], got {tuple(features.shape)}")
    check_dtype(name, features, like)


def check_dtype(name: str, features: Tensor, like: Tensor) -> None:
    """Raise unless `features` is floating point, and float64 if and only if the weights `like` are."""
    if not features.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {features.dtype}; cast it first")
    if (features.dtype == torch.float64) != (like.dtype == torch.float64):
        raise ValueError(
            f"{name} must have the dtype of the weights, {like.dtype}, got {features.dtype}; "
            "cast it, or the module by .to(dtype)"
        )


def check_sides(x: tuple[Tensor, Tensor], channels: tuple[int, int], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x_src, x_dst) as a tuple; raise unless they are two tensors with these channels."""
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        got = f"{len(x)} elements" if isinstance(x, (tuple, list)) else type(x).__name__
        raise ValueError(f"x must be a pair of tensors (x_src, x_dst), got {got}")
    for name, features, expected in zip(("x_src", "x_dst"), x, channels, strict=True):
        check_features(name, features, expected, like)
    return tuple(x)


def check_nodes(graph: object, x_src: Tensor, x_dst: Tensor) -> None:
    """Raise unless `graph` is a GraphStructure, and both sides have one row per node and the same batch."""
    check_structure(graph)
    check_batch(x_src, x_dst)
    names = ("x", "x") if x_src is x_dst else ("x_src", "x_dst")
    sizes = ("source", graph.num_src), ("destination", graph.num_dst)
    for name, x, (kind, number) in zip(names, (x_src, x_dst), sizes, strict=True):
        if not have_size(x.shape[-2], number):
            raise ValueError(f"{name} must have {number} rows, one per {kind} of the graph, got {tuple(x.shape)}")


def check_batch(x_src: Tensor, x_dst: Tensor) -> None:
    """Raise unless features of both sides have the same batch dimension, or none."""
    if x_src.shape[:-2] != x_dst.shape[:-2]:
        raise ValueError(
            "x_src and x_dst must have the same batch dimension, or none, "
            f"got {tuple(x_src.shape)} and {tuple(x_dst.shape)}"
        )


def check_conditions(cond: object) -> tuple[Tensor | None, Tensor | None]:
    """Return (cond_src, cond_dst), a pair of None without a condition; raise unless `cond` is a pair or None."""
    if cond is None:
        return None, None
    if not isinstance(cond, (tuple, list)) or len(cond) != 2:
        got = f"{len(cond)} elements" if isinstance(cond, (tuple, list)) else type(cond).__name__
        raise ValueError(f"cond must be a pair (cond_src, cond_dst), of sources and of destinations, got {got}")
    return tuple(cond)


def check_attributes(edge_attr: object, edge_dim: int) -> None:
    """Raise unless `edge_attr` is a tensor with `edge_dim` attributes per edge; the attention checks its rows."""
    wanted = f"[E, {edge_dim}] or [B, E, {edge_dim}]"
    if not isinstance(edge_attr, Tensor):
        raise ValueError(f"edge_attr must be a tensor {wanted}, raw attributes, got {type(edge_attr).__name__}")
    if edge_attr.dim() not in (2, 3) or edge_attr.shape[-1] != edge_dim:
        raise ValueError(f"edge_attr must have shape {wanted}, raw attributes, got {tuple(edge_attr.shape)}")


def check_structure(graph: object) -> None:
    """Raise unless `graph` is a GraphStructure."""
    if not isinstance(graph, GraphStructure):
        raise ValueError(
            f"graph must be a GraphStructure, got {type(graph).__name__}; build one from an edge_index, once, with "
            "GraphStructure.from_edge_index"
        )


def check_rows(sizes: tuple[int, int, int], **rows: Tensor | None) -> None:
    """Raise unless x_src, x_dst, edge_attr have the rows of a graph in chunks; cond_src, cond_dst these, or one.

    PyTorch slices and gathers from tensors with too many rows silently, which would drop the others.

    Parameters
    ----------
    sizes : (int, int, int)
        Sources, destinations and edges of the whole graph.
    **rows : Tensor [..., rows, features], or None
    """
    num_src, num_dst, num_edges = sizes
    kinds = {"src": ("source", num_src), "dst": ("destination", num_dst), "attr": ("edge", num_edges)}
    for name, tensor in rows.items():
        kind, number = kinds[name.rpartition("_")[2]]
        allowed = (number, 1) if name.startswith("cond") else (number,)
        if tensor is None:
            continue
        or_one = ", or one for all" if len(allowed) > 1 else ""
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name} must be a tensor of {number} rows, one per {kind} of the whole graph{or_one}, "
                f"got {type(tensor).__name__}"
            )
        if tensor.dim() < 2 or tensor.shape[-2] not in allowed:
            raise ValueError(
                f"{name} must have {number} rows, one per {kind} of the whole graph{or_one}, got {tuple(tensor.shape)}"
            )
