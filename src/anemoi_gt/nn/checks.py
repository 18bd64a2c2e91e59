"""What layers must be given. The only place that words what is wrong with node features, and with what stands for a graph."""

from torch import Tensor

from anemoi_gt.graph import GraphStructure


def check_features(name: str, features: Tensor, channels: int) -> None:
    """Raise unless `features` is a tensor [N, channels] or [B, N, channels]."""
    if not isinstance(features, Tensor):
        raise ValueError(
            f"{name} must be a tensor [N, {channels}] or [B, N, {channels}], got {type(features).__name__}"
        )
    if features.dim() not in (2, 3) or features.shape[-1] != channels:
        raise ValueError(f"{name} must have shape [N, {channels}] or [B, N, {channels}], got {tuple(features.shape)}")


def check_sides(x: tuple[Tensor, Tensor], channels: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return (x_src, x_dst); raise unless they are two tensors of so many channels."""
    if isinstance(x, Tensor) or len(x) != 2:
        got = type(x).__name__ if isinstance(x, Tensor) else f"{len(x)} of them"
        raise ValueError(f"x must be a pair of tensors (x_src, x_dst), got {got}")
    for name, features, expected in zip(("x_src", "x_dst"), x, channels, strict=True):
        check_features(name, features, expected)
    return x


def check_graph(graph: object) -> None:
    """Raise unless `graph` is a structure, or attends in place of one."""
    if not isinstance(graph, GraphStructure) and not hasattr(graph, "attend"):
        raise ValueError(
            f"graph must be a GraphStructure, got {type(graph).__name__}; make one of an edge_index, once, with "
            "GraphStructure.from_edge_index"
        )
