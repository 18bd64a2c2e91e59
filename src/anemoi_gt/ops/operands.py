"""The operands of edge attention and their checks: metadata only, no device synchronisation."""

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import have_size
from anemoi_gt.option_checks import check_number


class Operand(Protocol):
    """An object with a shape and a dtype: a tensor, or its description in a plan."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""


# Tensor at run time, Buffer in a plan
Held = TypeVar("Held", covariant=True)
OperandT = TypeVar("OperandT", bound=Operand)  # for functions that read only shapes and dtypes


class AttentionOperands(NamedTuple, Generic[Held]):
    """The floating-point operands of one call; `edge_attention` documents them."""

    query: Held  # [N_dst, H, C] or [B, N_dst, H, C]
    key: Held  # [N_src, H, C] or [B, N_src, H, C]
    value: Held  # [N_src, H, C] or [B, N_src, H, C]
    edge_attr: Held | None = None  # raw [.., E, D] with edge_weight, else embedded [.., E, H, C]
    edge_weight: Held | None = None  # [H * C, D]
    edge_bias: Held | None = None  # [H * C]

    def map(self, function: Callable[[Held], Held]) -> "AttentionOperands[Held]":
        """Apply `function` to each operand that is not None."""
        rows = function(self.query), function(self.key), function(self.value)
        # no function inside: its annotations cannot be traced before torch 2.13
        edges = [
            None if operand is None else function(operand)
            for operand in (self.edge_attr, self.edge_weight, self.edge_bias)
        ]
        return AttentionOperands(*rows, *edges)


class CallSizes(NamedTuple):
    """Sizes of a call of an operator, for people."""

    sizes: dict[str, int]  # by name
    dtype: torch.dtype  # of products
    features: str = ""  # form of the edge features that an attention reads

    @classmethod
    def of_attention(cls, operands: AttentionOperands[Operand], num_edges: int) -> "CallSizes":
        """Read the sizes of operands, or of what has their shapes."""
        query, key, _, edge_attr, edge_weight, _ = operands
        num_dst, heads, channels = query.shape[-3:]
        features = "none"
        if edge_attr is not None:
            features = "embedded" if edge_weight is None else "raw"
        sizes = {
            "batch": query.shape[0] if len(query.shape) == 4 else 1,
            "sources": key.shape[-3],
            "destinations": num_dst,
            "edges": num_edges,
            "heads": heads,
            "channels": channels,
            "attributes": 0 if edge_weight is None else edge_weight.shape[1],
        }
        return cls(sizes, query.dtype, features)


class Needs(NamedTuple):
    """The operands that need a gradient."""

    query: bool = True
    key: bool = True
    value: bool = True
    edge_attr: bool = True
    edge_weight: bool = True
    edge_bias: bool = True


def check_operands(operands: AttentionOperands[Tensor], graph: GraphStructure) -> None:
    """Raise ValueError unless the operands of `edge_attention` fit together and fit `graph`."""
    query, key, value, *edges = operands
    if not isinstance(graph, GraphStructure):
        raise ValueError(
            f"graph must be a GraphStructure, got {type(graph).__name__}; build it once with "
            "GraphStructure.from_edge_index(edge_index, (num_src, num_dst))"
        )
    device = graph.device
    for name, operand in zip(AttentionOperands._fields, operands, strict=True):
        if operand is None and name.startswith("edge"):
            continue
        if (
            not isinstance(operand, Tensor)
            or not operand.is_floating_point()
            or operand.device != device
        ):
            _refuse_tensor(name, operand, device)
    _check_nodes(query, key, value, graph)
    _check_edges(query, graph, *edges)


def check_scale(scale: float | None) -> None:
    """Raise ValueError unless `scale` is a finite number or None."""
    if scale is None:
        return
    check_number("scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, or None for 1 / sqrt(channels), got {scale}")


def _refuse_tensor(name: str, operand: object, device: torch.device) -> None:
    """Raise ValueError with the reason why an operand is invalid."""
    if not isinstance(operand, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(operand).__name__}")
    if not operand.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {operand.dtype}; cast it first")
    raise ValueError(
        f"{name} must be on the device of the graph, {device}, got {operand.device}; move the "
        "graph once with graph.to(device)"
    )


def _check_nodes(query: Tensor, key: Tensor, value: Tensor, graph: GraphStructure) -> None:
    shape = tuple(query.shape)
    if len(shape) not in (3, 4):
        raise ValueError(f"query must have shape [N_dst, H, C] or [B, N_dst, H, C], got {shape}")
    *batch, num_dst, heads, channels = shape
    for name, operand in (("key", key), ("value", value)):
        got = tuple(operand.shape)
        if len(got) != len(shape):
            raise ValueError(f"{name} must have the {len(shape)} dimensions of query, got {got}")
        *its_batch, num_src, its_heads, its_channels = got
        if its_channels != channels or its_heads != heads or its_batch != batch:
            raise ValueError(
                f"{name} must have the batch, heads and channels of query {shape}, got {got}"
            )
        if not have_size(num_src, graph.num_src):
            raise ValueError(
                f"{name} must have {graph.num_src} rows, one per source node, got {got}"
            )
    if not have_size(num_dst, graph.num_dst):
        raise ValueError(
            f"query must have {graph.num_dst} rows, one per destination node, got {shape}"
        )
    if heads == 0 or channels == 0:
        raise ValueError(f"heads and channels must be at least 1, got query of shape {shape}")


def _check_edges(
    query: Tensor,
    graph: GraphStructure,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
) -> None:
    *batch, _, heads, channels = query.shape
    if edge_bias is not None and edge_weight is None:
        raise ValueError(
            "edge_bias must come with edge_weight: embedded edge features include their bias"
        )
    if edge_attr is None:
        if edge_weight is not None:
            raise ValueError("edge_weight must come with edge_attr [E, D], got edge_attr None")
        return
    feature: tuple[int, ...] = (heads, channels)
    expected = "[E, H, C] or [B, E, H, C]"
    remedy = "raw attributes [E, D] need edge_weight"
    if edge_weight is not None:
        if (
            edge_weight.dim() != 2
            or edge_weight.shape[0] != heads * channels
            or edge_weight.shape[1] == 0
        ):
            raise ValueError(
                f"edge_weight must have shape [heads * channels, D] = [{heads * channels}, D >= "
                f"1], got {tuple(edge_weight.shape)}"
            )
        feature = (edge_weight.shape[1],)
        expected = "[E, D] or [B, E, D]"
        remedy = "D is edge_weight.shape[1]"
    shared = (graph.num_edges, *feature)
    if not (_has_shape(edge_attr, shared) or _has_shape(edge_attr, (*batch, *shared))):
        raise ValueError(
            f"edge_attr must have shape {expected} = {shared}, got {tuple(edge_attr.shape)}; "
            f"{remedy}"
        )
    if edge_bias is not None and tuple(edge_bias.shape) != (heads * channels,):
        raise ValueError(
            f"edge_bias must have shape [{heads * channels}], got {tuple(edge_bias.shape)}"
        )


def _has_shape(operand: Tensor, shape: tuple[int, ...]) -> bool:
    """Compare shapes size by size: tuples with symbolic sizes do not compare in traced code."""
    return operand.dim() == len(shape) and all(map(have_size, operand.shape, shape))
