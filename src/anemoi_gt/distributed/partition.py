"""Who owns which rows: contiguous ranges of a numbering, one for each rank. The only place that cuts nodes and edges.

    cost_i     = edges into i  +  NODE_COST                        in units of one edge
    cut p      = the boundary between nodes at which the sum of costs is nearest to p / P of the whole

So no rank has more than the P-th part of the cost and one node besides. What a rank has to fetch from others is what
lies around its nodes, so nodes are laid on a line on which neighbours on the ground come together before they are cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anemoi_gt.options import check_whole

# Projections and feed-forward network of a node of F features take 12 F^2 products, attention along an edge reads 2 F numbers. On an
# H200 in bfloat16 with F = 1024 that is 36 ns at 700 TFLOP/s against 0.95 ns an edge (327,600 edges in 0.31 ms).
NODE_COST = 38


@dataclass(frozen=True)
class Ranges:
    """Contiguous ranges of 0 .. size - 1, one for each rank; ranges may be empty.

    Parameters
    ----------
    bounds : tuple of int
        Rank p owns the numbers bounds[p] .. bounds[p + 1] - 1.

    Raises
    ------
    ValueError
        When the bounds do not rise from 0.

    Examples
    --------
    >>> ranges = Ranges.balanced(torch.tensor([5, 1, 1, 1, 1, 1]), 2)
    >>> ranges.bounds, ranges.of(1), ranges.owner(torch.tensor([0, 5])).tolist()
    ((0, 1, 6), slice(1, 6, None), [0, 1])
    """

    bounds: tuple[int, ...]

    def __post_init__(self):
        falls = any(low > high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or falls:
            raise ValueError(f"bounds must rise from 0, with one more than there are ranks, got {self.bounds}")

    @classmethod
    def balanced(cls, cost: Tensor, parts: int) -> "Ranges":
        """Cut so that all parts cost about the same.

        Parameters
        ----------
        cost : Tensor [N], integer
            What each number costs; sums stay below 2^63 / parts.
        parts : int
            Number of ranks.

        Raises
        ------
        ValueError
            For costs that are no integers, on which ranks could round differently, or no parts.
        """
        check_whole("the number of parts", parts)
        if not isinstance(cost, Tensor):
            raise ValueError(f"cost must be a tensor [N], got {type(cost).__name__}")
        if cost.is_floating_point():
            raise ValueError(f"cost must be integer, so that every rank finds the same cuts, got {cost.dtype}")
        before = torch.zeros(cost.shape[0] + 1, dtype=torch.int64, device=cost.device)
        torch.cumsum(cost, 0, out=before[1:])
        targets = before[-1] * torch.arange(parts + 1, device=cost.device)
        scaled = before * parts
        right = torch.searchsorted(scaled, targets).clamp(max=cost.shape[0])
        left = (right - 1).clamp(min=0)
        nearest = torch.where(targets - scaled[left] <= scaled[right] - targets, left, right)
        return cls((0, *nearest[1:-1].tolist(), cost.shape[0]))

    @classmethod
    def even(cls, size: int, parts: int) -> "Ranges":
        """Cut into parts of equal size; the first take what is left over."""
        share, left = divmod(size, parts)
        return cls(tuple(p * share + min(p, left) for p in range(parts + 1)))

    @property
    def size(self) -> int:
        """How many numbers are shared out."""
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        """How many ranks share them."""
        return len(self.bounds) - 1

    @property
    def counts(self) -> tuple[int, ...]:
        """How many numbers each rank owns."""
        return tuple(high - low for low, high in zip(self.bounds, self.bounds[1:], strict=False))

    def of(self, rank: int) -> slice:
        """The numbers that `rank` owns."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def owner(self, index: Tensor) -> Tensor:
        """The rank that owns each of `index` [n], int64."""
        ends = torch.tensor(self.bounds[1:], device=index.device)
        return torch.searchsorted(ends, index.long().contiguous(), right=True)


@dataclass(frozen=True, eq=False)
class Partition:
    """Which nodes each rank owns: the nodes on a line, and where the line is cut.

    Parameters
    ----------
    ranges : Ranges
        The cuts.
    order : Tensor [N], int64, optional
        The node at each place of the line, a permutation; None is 0, 1, 2, ...

    Raises
    ------
    ValueError
        When the order is not one place for each number of the ranges.

    Examples
    --------
    >>> partition = Partition(Ranges((0, 2, 3)), torch.tensor([2, 0, 1]))
    >>> partition.nodes(0).tolist(), partition.places(torch.tensor([0, 1])).tolist()
    ([2, 0], [1, 2])
    """

    ranges: Ranges
    order: Tensor | None = None

    def __post_init__(self):
        if self.order is not None and tuple(self.order.shape) != (self.ranges.size,):
            raise ValueError(
                f"order must hold {self.ranges.size} nodes, one for each place, got {tuple(self.order.shape)}"
            )

    @classmethod
    def balanced(cls, cost: Tensor, parts: int, order: Tensor | None = None) -> "Partition":
        """Cut a line of nodes so that all parts cost about the same.

        Parameters
        ----------
        cost : Tensor [N], integer
            What each node costs, by node.
        parts : int
            Number of ranks.
        order : Tensor [N], int64, optional
            The line, as `anemoi_gt.graph.order.morton_order` makes it from positions.
        """
        return cls(Ranges.balanced(cost if order is None else cost[order], parts), order)

    @property
    def size(self) -> int:
        """How many nodes are shared out."""
        return self.ranges.size

    def nodes(self, rank: int, device: torch.device | str | None = None) -> Tensor:
        """The nodes that `rank` owns [n], int64, in the order in which it holds their rows."""
        own = self.ranges.of(rank)
        if self.order is None:
            return torch.arange(own.start, own.stop, device=device)
        return self.order[own].to(device)

    def places(self, index: Tensor) -> Tensor:
        """The place on the line of each node of `index` [n], int64."""
        if self.order is None:
            return index.long()
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(self.size, device=place.device)
        return place.to(index.device)[index.long()]


def destination_cost(in_degree: Tensor) -> Tensor:
    """What each destination costs, in units of an edge [N_dst] int64, from the number of its in-edges."""
    return in_degree.long() + NODE_COST
