"""Partition of nodes among ranks: contiguous ranges of a node order, balanced by cost.

    cost_i     = in-edges of i + NODE_COST        in units of one edge
    bound p    = the position at which the cumulative cost is nearest to p / P of the total

No rank exceeds 1 / P of the cost by more than the cost of one node. A rank's halo surrounds its
nodes, so it is small if the order keeps neighbours together, as a Morton curve does.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from anemoi_gt.option_checks import check_integer

# For a node with F features, projections and feed-forward network take 12 F^2 multiply-adds; for an
# edge, attention reads 2 F elements. On an H200 in bfloat16 with F = 1024, that is 36 ns per node
# (700 TFLOP/s) and 0.95 ns per edge (327,600 edges in 0.31 ms).
NODE_COST = 38


@dataclass(frozen=True)
class Ranges:
    """Contiguous ranges of 0 .. size - 1, one per rank; ranges may be empty.

    Parameters
    ----------
    bounds : tuple of int
        Rank p owns bounds[p] .. bounds[p + 1] - 1.

    Raises
    ------
    ValueError
        If the bounds are not sorted ascending from 0.

    Examples
    --------
    >>> ranges = Ranges.balanced(torch.tensor([5, 1, 1, 1, 1, 1]), 2)
    >>> ranges.bounds, ranges.of(1), ranges.owner(torch.tensor([0, 5])).tolist()
    ((0, 1, 6), slice(1, 6, None), [0, 1])
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        is_ascending = list(self.bounds) == sorted(self.bounds)
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not is_ascending:
            raise ValueError(
                "bounds must start at 0 and be sorted ascending, one more than ranks, got "
                f"{self.bounds}"
            )

    @classmethod
    def balanced(cls, cost: Tensor, num_ranks: int) -> "Ranges":
        """Split into ranges of about the same cost.

        `cost` [N], non-negative integers, is the cost of each position; the total must stay below
        2^63 / num_ranks. Raise ValueError for floating-point costs (ranks could round differently),
        or if num_ranks is below 1.
        """
        check_integer("num_ranks", num_ranks)
        if cost.is_floating_point():
            raise ValueError(
                f"cost must be integer, so that every rank finds the same bounds, got {cost.dtype}"
            )
        cumulative = torch.nn.functional.pad(cost.cumsum(0), (1, 0))
        # Both sides times the number of ranks: a division would round.
        targets = cumulative[-1] * torch.arange(num_ranks + 1, device=cost.device)
        scaled = cumulative * num_ranks
        right = torch.searchsorted(scaled, targets).clamp(max=cost.shape[0])
        left = (right - 1).clamp(min=0)
        nearest = torch.where(targets - scaled[left] <= scaled[right] - targets, left, right)
        return cls((0, *nearest[1:-1].tolist(), cost.shape[0]))

    @classmethod
    def even(cls, size: int, num_ranks: int) -> "Ranges":
        """Split into ranges whose sizes differ by at most one."""
        share, remainder = divmod(size, num_ranks)
        return cls(tuple(p * share + min(p, remainder) for p in range(num_ranks + 1)))

    @property
    def size(self) -> int:
        """Number of positions."""
        return self.bounds[-1]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.bounds) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of positions of each rank."""
        return tuple(high - low for low, high in pairwise(self.bounds))

    def of(self, rank: int) -> slice:
        """Return the positions that `rank` owns."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def owns(self, rank: int, index: Tensor) -> Tensor:
        """Return whether `rank` owns each position of `index` [n], bool."""
        local = self.of(rank)
        return (index >= local.start) & (index < local.stop)

    def owner(self, index: Tensor) -> Tensor:
        """Return the rank that owns each position of `index` [n], int64."""
        ends = torch.tensor(self.bounds[1:], device=index.device)
        # searchsorted warns of an input that is not contiguous, and copies it
        return torch.searchsorted(ends, index.long().contiguous(), right=True)


@dataclass(frozen=True, eq=False)
class Partition:
    """Owner of each node: a node order, and ranges of its positions.

    Parameters
    ----------
    ranges : Ranges
        Positions of each rank.
    order : Tensor [N], int64, optional
        Node at each position, a permutation; None is 0, 1, 2, ...

    Raises
    ------
    ValueError
        If the order does not hold each node once.

    Examples
    --------
    >>> partition = Partition(Ranges((0, 2, 3)), torch.tensor([2, 0, 1]))
    >>> partition.nodes(0).tolist(), partition.positions(torch.tensor([0, 1])).tolist()
    ([2, 0], [1, 2])
    """

    ranges: Ranges
    order: Tensor | None = None

    def __post_init__(self) -> None:
        if self.order is None:
            return
        size = self.ranges.size
        # If a node were listed twice, another would have no owner, and ranks would hang.
        ascending = self.order.sort().values
        different = (ascending != torch.arange(size, device=ascending.device)).nonzero()
        if len(different) > 0:
            i = int(different[0])
            raise ValueError(
                f"order must hold each node 0 .. {size - 1} once, got {int(ascending[i])} at "
                f"position {i} when sorted"
            )

    @classmethod
    def balanced(cls, cost: Tensor, num_ranks: int, order: Tensor | None = None) -> "Partition":
        """Split a node order into ranges of about equal cost, like `Ranges.balanced`.

        `cost` [N], integer, is the cost of each node. `order` is as in `Partition`, for example
        `anemoi_gt.graph.ordering.morton_order` of node coordinates.
        """
        cost_by_position = cost if order is None else cost[order]
        return cls(Ranges.balanced(cost_by_position, num_ranks), order)

    @property
    def size(self) -> int:
        """Number of nodes."""
        return self.ranges.size

    def nodes(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """Return the nodes that `rank` owns [n], int64, in the order of its rows."""
        local = self.ranges.of(rank)
        if self.order is None:
            return torch.arange(local.start, local.stop, device=device)
        return self.order[local].to(device)

    def positions(self, nodes: Tensor) -> Tensor:
        """Return the position of each of `nodes` [n], int64."""
        if self.order is None:
            return nodes.long()
        position = torch.empty_like(self.order)
        position[self.order] = torch.arange(self.size, device=position.device)
        return position.to(nodes.device)[nodes.long()]


def destination_cost(in_degree: Tensor) -> Tensor:
    """Return the cost of each destination [N_dst], int64, in units of one edge."""
    return in_degree.long() + NODE_COST
