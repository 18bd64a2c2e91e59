"""Who owns which rows: contiguous ranges of a numbering, one for each rank. The only place that cuts nodes and edges.

    cost_i     = edges into i  +  NODE_COST                        in units of one edge
    cut p      = the boundary between nodes at which the sum of costs is nearest to p / P of the whole

So no rank has more than the P-th part of the cost and one node besides. What a rank has to fetch from others is what
lies around its nodes, so nodes are laid on a line on which neighbours on the ground come together before they are cut.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from anemoi_gt.option_checks import check_integer

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
        When the bounds are no tuple of whole numbers that rise from 0.

    Examples
    --------
    >>> ranges = Ranges.balanced(torch.tensor([5, 1, 1, 1, 1, 1]), 2)
    >>> ranges.bounds, ranges.of(1), ranges.owner(torch.tensor([0, 5])).tolist()
    ((0, 1, 6), slice(1, 6, None), [0, 1])
    """

    bounds: tuple[int, ...]

    def __post_init__(self):
        if not isinstance(self.bounds, tuple) or not all(isinstance(bound, int) for bound in self.bounds):
            raise ValueError(f"bounds must be a tuple of int, got {self.bounds!r}")
        falls = any(low > high for low, high in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or falls:
            raise ValueError(f"bounds must rise from 0, with one more than there are ranks, got {self.bounds}")

    @classmethod
    def balanced(cls, cost: Tensor, parts: int) -> "Ranges":
        """Cut so that all parts cost about the same.

        Parameters
        ----------
        cost : Tensor [N], integer
            What each number costs, 0 at least; sums stay below 2^63 / parts.
        parts : int
            Number of ranks.

        Raises
        ------
        ValueError
            For costs that are no integers, on which ranks could round differently, or negative, or no parts.
        """
        check_integer("the number of parts", parts)
        if not isinstance(cost, Tensor) or cost.dim() != 1:
            raise ValueError(f"cost must be a tensor [N], got {described(cost)}")
        if cost.is_floating_point():
            raise ValueError(f"cost must be integer, so that every rank finds the same cuts, got {cost.dtype}")
        if bool((cost < 0).any()):
            raise ValueError(f"cost must be 0 at least, got {int(cost.min())}")
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
        check_integer("the number of parts", parts)
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
        When the order does not have each number of the ranges once.

    Examples
    --------
    >>> partition = Partition(Ranges((0, 2, 3)), torch.tensor([2, 0, 1]))
    >>> partition.nodes(0).tolist(), partition.places(torch.tensor([0, 1])).tolist()
    ([2, 0], [1, 2])
    """

    ranges: Ranges
    order: Tensor | None = None

    def __post_init__(self):
        if not isinstance(self.ranges, Ranges):
            raise ValueError(f"ranges must be Ranges, got {type(self.ranges).__name__}")
        if self.order is not None:
            self._check_order()

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
            The line, as `anemoi_gt.graph.ordering.morton_order` makes it from positions.
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

    def _check_order(self) -> None:
        """Raise unless the order is a permutation: with a node twice, another has no owner, and ranks wait for each other's rows."""
        order, size = self.order, self.ranges.size
        if not isinstance(order, Tensor) or order.dtype != torch.int64 or tuple(order.shape) != (size,):
            raise ValueError(
                f"order must hold {size} nodes, one for each place, int64 [{size}], got {described(order)}"
            )
        rising = order.sort().values
        wrong = (rising != torch.arange(size, device=order.device)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            got = int(rising[place])
            raise ValueError(f"order must hold each node 0 .. {size - 1} once, sorted it has {got} at place {place}")

    def places(self, index: Tensor) -> Tensor:
        """The place on the line of each node of `index` [n], int64."""
        if self.order is None:
            return index.long()
        place = torch.empty_like(self.order)
        place[self.order] = torch.arange(self.size, device=place.device)
        return place.to(index.device)[index.long()]


def described(value: object) -> str:
    """What came, for a message: dtype and shape of a tensor, the type of anything else."""
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def destination_cost(in_degree: Tensor) -> Tensor:
    """What each destination costs, in units of an edge [N_dst] int64, from the number of its in-edges."""
    return in_degree.long() + NODE_COST
