"""What partitions and edges of a rank must be. The only place that words these errors."""

import torch
import torch.distributed as dist
from torch import Tensor

from anemoi_gt.distributed.consensus import fingerprint
from anemoi_gt.distributed.partition import Partition, described
from anemoi_gt.graph.validation import INDEX_DTYPES


def check_member(group: dist.ProcessGroup) -> None:
    """Raise unless `group` is a process group that this rank belongs to."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"group must be a ProcessGroup that this rank belongs to, got {type(group).__name__}; "
            "torch.distributed.group.WORLD is that of all ranks, mesh.get_group('model') one of a mesh"
        )


def check_partitions(sources: Partition, destinations: Partition, sizes: tuple[int, int], parts: int) -> None:
    """Raise unless both partitions are of `sizes` nodes, (sources, destinations), among `parts` ranks."""
    for name, partition, size in (("sources", sources, sizes[0]), ("destinations", destinations, sizes[1])):
        if partition.ranges.parts != parts:
            raise ValueError(f"{name} must be divided among {parts} ranks, got a partition of {partition.ranges.parts}")
        if partition.size != size:
            raise ValueError(f"{name} must be a partition of {size} nodes, got one of {partition.size}")


def describe(partition: Partition) -> str:
    """A short text that two ranks share when their partitions are the same."""
    if not isinstance(partition, Partition):
        raise ValueError(f"sources and destinations must be Partitions, got {type(partition).__name__}")
    order = "by number" if partition.order is None else f"order {fingerprint(partition.order)}"
    return f"{order}, bounds {partition.ranges.bounds}"


def check_own_rows(name: str, rows: Tensor, dim: int, count: int, kind: str) -> None:
    """Raise unless `rows` has, along `dim`, one row for each of the `count` nodes or edges of this rank."""
    if not isinstance(rows, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(rows).__name__}")
    if rows.dim() < -dim or rows.shape[dim] != count:
        raise ValueError(
            f"{name} must have one row for each of the {count} {kind} of this rank, got {tuple(rows.shape)}"
        )


def misplaced(edge_index: Tensor, sources: Partition, destinations: Partition, rank: int) -> str | None:
    """What is wrong with the edges [2, E] that `rank` holds, which must all end in its own nodes; or None."""
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        return f"edge_index must have shape [2, E], got {described(edge_index)}"
    if edge_index.dtype not in INDEX_DTYPES:
        return f"edge_index must be int32 or int64, got {edge_index.dtype}"
    for name, index, size in zip(
        ("sources", "destinations"), edge_index, (sources.size, destinations.size), strict=True
    ):
        if index.shape[0] and not 0 <= int(index.min()) <= int(index.max()) < size:
            return f"{name} must be in 0 .. {size - 1}, got {int(index.min())} to {int(index.max())}"
    owner = destinations.ranges.owner(destinations.places(edge_index[1]))
    stray = (owner != rank).nonzero()
    if stray.shape[0]:
        node, other = int(edge_index[1, stray[0, 0]]), int(owner[stray[0, 0]])
        return f"every edge must end in a node of the rank that holds it, got one into {node}, which rank {other} owns"
    return None


def misnumbered(edge_index: Tensor, numbers: Tensor | None) -> str | None:
    """What is wrong with the numbers in the whole graph of the edges [2, E] of a rank; or None."""
    shape, is_tensor = (edge_index.shape[1],), isinstance(numbers, Tensor)
    if numbers is None or (is_tensor and tuple(numbers.shape) == shape and numbers.dtype == torch.int64):
        return None
    return f"numbers must be int64 [{shape[0]}], one for each edge, got {described(numbers)}"
