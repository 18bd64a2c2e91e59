"""What the operands of edge attention must be. The only place that words these errors; metadata only, no device sync."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.validation import check_index, have_size
from anemoi_gt.option_checks import check_number, check_probability


class AttentionOperands(NamedTuple):
    """The floating-point operands of one call of edge attention, as `edge_attention` documents them."""

    query: Tensor  # [N_dst, H, C] or [B, N_dst, H, C]
    key: Tensor  # [N_src, H, C] or [B, N_src, H, C]
    value: Tensor  # [N_src, H, C] or [B, N_src, H, C]
    edge_attr: Tensor | None = None  # raw [.., E, D] with edge_weight, else embedded [.., E, H, C]
    edge_weight: Tensor | None = None  # [H * C, D]
    edge_bias: Tensor | None = None  # [H * C]


def check_operands(operands: AttentionOperands, graph: GraphStructure) -> None:
    """Raise ValueError unless all operands of `edge_attention` fit together and fit `graph`."""
    query, key, value, edge_attr, edge_weight, edge_bias = operands
    if not isinstance(graph, GraphStructure):
        raise ValueError(
            f"graph must be a GraphStructure, got {type(graph).__name__}; make one, once, with "
            "GraphStructure.from_edge_index(edge_index, (num_src, num_dst))"
        )
    of_edges = {"edge_attr": edge_attr, "edge_weight": edge_weight, "edge_bias": edge_bias}
    given = {name: operand for name, operand in of_edges.items() if operand is not None}
    for name, operand in {"query": query, "key": key, "value": value, **given}.items():
        _check_tensor(name, operand, graph)
    _check_nodes(query, key, value, graph)
    _check_edges(query, graph, edge_attr, edge_weight, edge_bias)


def check_dropout(dropout_p: float, seed: Tensor | None, graph: GraphStructure) -> None:
    """Raise ValueError unless `dropout_p` is a probability, and the seed a whole number where the graph is."""
    check_probability("dropout_p", dropout_p)
    if seed is not None:
        check_index("dropout_seed", seed, like=graph.colptr, dtypes=(torch.int64,))
        if seed.shape[0] != 1:
            raise ValueError(f"dropout_seed must have 1 entry, got {seed.shape[0]}")


def check_scale(scale: float | None) -> None:
    """Raise ValueError unless `scale` is a finite number, or None."""
    if scale is None:
        return
    check_number("scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, or None for 1 / sqrt(channels), got {scale}")


def check_parts(**parts: Tensor) -> None:
    """Raise ValueError unless all are floating-point tensors on one device."""
    device = None
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(part).__name__}")
        if not part.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {part.dtype}")
        if device not in (None, part.device):
            raise ValueError(f"all tensors must be on one device, got {name} on {part.device} and others on {device}")
        device = part.device


def _check_tensor(name: str, operand: Tensor, graph: GraphStructure) -> None:
    if not isinstance(operand, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(operand).__name__}")
    if not operand.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {operand.dtype}; cast it first")
    if operand.device != graph.device:
        raise ValueError(
            f"{name} must be on the device of the graph, {graph.device}, got {operand.device}; "
            "move the graph once with graph.to(device)"
        )


def _check_nodes(query: Tensor, key: Tensor, value: Tensor, graph: GraphStructure) -> None:
    if query.dim() not in (3, 4):
        raise ValueError(f"query must have shape [N_dst, H, C] or [B, N_dst, H, C], got {tuple(query.shape)}")
    for name, operand in (("key", key), ("value", value)):
        if operand.dim() != query.dim():
            raise ValueError(f"{name} must have the {query.dim()} dimensions of query, got {tuple(operand.shape)}")
        if operand.shape[-2:] != query.shape[-2:] or operand.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{name} must have the batch, heads and channels of query {tuple(query.shape)}, got {tuple(operand.shape)}"
            )
        if not have_size(operand.shape[-3], graph.num_src):
            raise ValueError(f"{name} must have {graph.num_src} rows, one per source node, got {tuple(operand.shape)}")
    if not have_size(query.shape[-3], graph.num_dst):
        raise ValueError(f"query must have {graph.num_dst} rows, one per destination node, got {tuple(query.shape)}")
    if query.shape[-2] == 0 or query.shape[-1] == 0:
        raise ValueError(f"heads and channels must be at least 1, got query of shape {tuple(query.shape)}")


def _check_edges(
    query: Tensor, graph: GraphStructure, edge_attr: Tensor | None, edge_weight: Tensor | None, edge_bias: Tensor | None
) -> None:
    heads, channels = query.shape[-2:]
    if edge_bias is not None and edge_weight is None:
        raise ValueError("edge_bias must come with edge_weight: embedded edge features hold their bias already")
    if edge_attr is None:
        if edge_weight is not None:
            raise ValueError("edge_weight must come with edge_attr [E, D], got edge_attr None")
        return
    if edge_weight is None:
        feature, wanted, remedy = (
            (heads, channels),
            "[E, H, C] or [B, E, H, C]",
            "raw attributes [E, D] need edge_weight",
        )
    else:
        if edge_weight.dim() != 2 or edge_weight.shape[0] != heads * channels or edge_weight.shape[1] == 0:
            raise ValueError(
                f"edge_weight must have shape [heads * channels, D] = [{heads * channels}, D >= 1], "
                f"got {tuple(edge_weight.shape)}"
            )
        feature, wanted, remedy = (edge_weight.shape[1],), "[E, D] or [B, E, D]", "D is edge_weight.shape[1]"
    shared, per_sample = (graph.num_edges, *feature), (*query.shape[:-3], graph.num_edges, *feature)
    if not (_has_shape(edge_attr, shared) or _has_shape(edge_attr, per_sample)):
        raise ValueError(f"edge_attr must have shape {wanted} = {shared}, got {tuple(edge_attr.shape)}; {remedy}")
    if edge_bias is not None and tuple(edge_bias.shape) != (heads * channels,):
        raise ValueError(f"edge_bias must have shape [{heads * channels}], got {tuple(edge_bias.shape)}")


def _has_shape(operand: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor has this shape. Size by size: tuples that hold a symbolic size do not compare while code is traced."""
    return operand.dim() == len(shape) and all(map(have_size, operand.shape, shape))
