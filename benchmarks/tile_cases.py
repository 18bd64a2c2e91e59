"""A problem with all that the kernels of its attention hand each other, and each kernel as a call that takes a tile.

The only place that says which kernels there are to search, and with which tiles: `Case` where the kernels for any graph
run, `EqualCase` where those for one small degree do.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from anemoi_gt.ops.triton_backend.tile_score import Choice, RowTile, Tile
from suite.graphs import Coo
from suite.operands import draw
from suite.problems import Problem

from anemoi_gt import GraphStructure
from anemoi_gt.ops.triton_backend import fixed_degree_launch, launch
from anemoi_gt.ops.triton_backend.problem import Sizes
from anemoi_gt.ops.triton_backend.tiles import (
    CONTRACTIONS,
    FEWEST_NUMBERS,
    MOST_NUMBERS,
    contraction_choice,
    destination_choice,
    forward_choice,
    source_choice,
)

OVER_DESTINATIONS = ("forward", "destinations")
ROWS = (*OVER_DESTINATIONS, "sources")
KERNELS = (*ROWS, *CONTRACTIONS)


@dataclass(frozen=True)
class Search:
    """One kernel on one problem: the choice, the call with a given tile that returns what it computed, and the one to time."""

    chosen: Tile
    others: list[Tile]
    run: Callable
    time: Callable


class Case:
    """A problem on the kernels for any graph.

    Parameters
    ----------
    problem : launch.Problem
    grad_out : Tensor [N_dst, H, C] or [B, N_dst, H, C]
    reverse : tuple of Tensor
        rowptr, col and csr_to_csc of its graph.
    """

    def __init__(self, problem: launch.Problem, grad_out: torch.Tensor, reverse: tuple[torch.Tensor, ...]):
        self.problem, self.grad_out, self.reverse = problem, grad_out, reverse
        self.projected = launch.project(problem, problem.query)
        self.projected_grad = launch.project(problem, grad_out)
        self.out, _, inverse, numerators, _ = self.attend()
        self.saved = launch.Saved(inverse, numerators, self.projected)
        self.weights, self.sums = self.handed_on()

    def attend(self, tile=None) -> tuple[torch.Tensor, ...]:
        """All that the kernel of the forward pass computes."""
        return launch.attend_rows(self.problem, self.projected, tile=tile)

    def handed_on(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """What the backward pass over destinations leaves for the kernels behind it: [m p, ds] of each edge, and A and B."""
        weights = self.destinations()[1]
        return weights, launch.differentiate_attributes(self.problem, weights, self.saved, self.projected_grad, None)

    def forward(self, tile=None) -> tuple[torch.Tensor, ...]:
        """Out without W A, lse, A."""
        out, lse, _, _, sums = self.attend(tile)
        return out, lse, sums

    def destinations(self, tile=None) -> tuple[torch.Tensor, ...]:
        """Gradient of query without W B, and what goes to the sources."""
        dquery = torch.empty_like(self.problem.query)
        given = (self.problem, self.saved, self.projected_grad, self.grad_out, None, dquery, None)
        return dquery, launch.differentiate_rows(*given, tile=tile)

    def sources(self, tile=None) -> tuple[torch.Tensor, ...]:
        """Gradients of key and value."""
        gradients = torch.empty_like(self.problem.key), torch.empty_like(self.problem.value)
        launch.differentiate_sources(self.problem, self.weights, self.grad_out, *self.reverse, *gradients, tile=tile)
        return gradients

    def project(self, tile=None) -> tuple[torch.Tensor]:
        """W^T of query."""
        return (launch.project(self.problem, self.problem.query, tile),)

    def embed(self, tile=None) -> tuple[torch.Tensor]:
        """W A, added to zeros."""
        rows = torch.zeros_like(self.out)
        launch.embed(self.problem, self.sums[0], rows, tile)
        return (rows,)

    def embed_in_place(self, tile=None) -> None:
        """W A added to what is there, again and again: the kernel alone."""
        launch.embed(self.problem, self.sums[0], self.out, tile)

    def weight(self, tile=None) -> tuple[torch.Tensor]:
        """Gradient of W."""
        return (launch.differentiate_weight(self.problem, self.grad_out, *self.sums, tile=tile),)

    def tiles(self) -> dict[str, tuple[Tile, list[Tile]]]:
        """Chosen tile and others by kernel, those left out that are predicted to spill or not to fit."""
        sizes, device = self.problem.sizes, self.problem.sizes.device
        nodes = sizes.over_destinations
        choices = {
            "forward": forward_choice(nodes, device),
            "destinations": destination_choice(nodes, device),
            "sources": source_choice(sizes.over_sources, device),
            **{name: contraction_choice(nodes, name, device) for name in CONTRACTIONS},
        }
        return {name: _able(choice) for name, choice in choices.items()}

    def searches(self) -> dict[str, Search]:
        """What there is to search, by kernel."""
        return {
            name: Search(
                chosen, others, getattr(self, name), getattr(self, "embed_in_place" if name == "embed" else name)
            )
            for name, (chosen, others) in self.tiles().items()
        }


class EqualCase(Case):
    """A problem on the kernels for one small degree, whose pass backward computes A, B and the gradient of edge_attr too."""

    def attend(self, tile=None) -> tuple[torch.Tensor, ...]:
        """All that the kernel of the forward pass computes."""
        return fixed_degree_launch.attend_rows(self.problem, self.projected, tile=tile)

    def handed_on(self) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """As of any graph."""
        _, _, weights, *sums = self.destinations()
        return weights, tuple(sums)

    def destinations(self, tile=None) -> tuple[torch.Tensor, ...]:
        """Gradients of query without W B and of edge_attr, what goes to the sources, A and B."""
        problem = self.problem
        dquery, dtype = torch.empty_like(problem.query), problem.edge_attr.dtype
        shape = (problem.samples, *problem.edge_attr.shape[-2:])
        dedge_attr = dquery.new_empty(shape, dtype=torch.float32 if problem.shares_attributes else dtype)
        given = (problem, self.saved, self.projected_grad, self.grad_out, None, dquery, dedge_attr)
        weights, sums = fixed_degree_launch.differentiate_rows(*given, tile=tile)
        return dquery, dedge_attr, weights, *sums

    def tiles(self) -> dict[str, tuple[Tile, list[Tile]]]:
        """As of any graph; of the kernels for one degree, those that `equal_tiles` yields."""
        sizes = self.problem.sizes
        chosen = {
            "forward": fixed_degree_launch.forward_tile(sizes),
            "destinations": fixed_degree_launch.destination_tile(sizes),
        }
        own = {
            name: (tile, [other for other in equal_tiles(sizes, tile) if other != tile])
            for name, tile in chosen.items()
        }
        return super().tiles() | own


def make_case(problem: Problem, coo: Coo) -> Case:
    """Return a problem of the suite on the kernels that serve it."""
    drawn = draw(replace(problem, gradients=()), coo)
    graph = GraphStructure.from_edge_index(*coo).with_reverse()
    shared = drawn.edge_attr if problem.batch == 1 else drawn.edge_attr[None]
    nodes = (drawn.query, drawn.key, drawn.value, shared, drawn.edge_weight, drawn.edge_bias)
    structure = (graph.colptr, graph.row, graph.perm, graph.global_edge_id, graph.dst_schedule)
    degree = 0 if graph.fixed_in_degree is None else graph.fixed_in_degree.shape[0]
    given = launch.Problem(
        *nodes, *structure, seed=None, scale=problem.channels**-0.5, dropout_p=0.0, fixed_in_degree=degree
    )
    kind = EqualCase if fixed_degree_launch.serves(given.sizes) else Case
    return kind(given, drawn.grad_out, (graph.rowptr, graph.col, graph.csr_to_csc))


def make_small_case(problem: Problem, degree: float, device: str, *, fixed_in_degree: int) -> Case:
    """Return a case of few nodes whose kernels compile to what those of `problem` do.

    Parameters
    ----------
    problem : Problem
    degree : float
        Mean number of edges of the nodes whose edges a kernel walks, of which the small graph has the nearest whole number.
    device : str
    fixed_in_degree : int
        In-edges of every destination; 0: destinations have not all the same.
    """
    num_dst, degree = 16, fixed_in_degree or max(1, round(degree))
    ends = torch.arange(num_dst * degree)
    src, dst = ends % num_dst, ends // degree
    if not fixed_in_degree:
        dst[degree] = 0  # an edge of destination 1
    return make_case(problem, Coo(torch.stack([src, dst]).to(device), (num_dst, num_dst)))


def equal_tiles(sizes: Sizes, chosen: RowTile) -> Iterator[RowTile]:
    """Yield the tiles that a kernel for one degree can have: numbers of a row that a thread holds as in other kernels, in pairs or not."""
    fewest, most = chosen.heads * chosen.channels, chosen.heads * max(chosen.channels, sizes.columns)
    for warps, pairs in product((1, 2, 4, 8), (False, True) if sizes.pairs_possible else (False,)):
        if fewest >= FEWEST_NUMBERS * 32 * warps and most <= MOST_NUMBERS * 32 * warps:
            yield replace(chosen, num_warps=warps, pairs=pairs)


def _able(choice: Choice) -> tuple[Tile, list[Tile]]:
    """The chosen tile, and those of the others that are predicted to run."""
    return choice.chosen.tile, [other.tile for other in choice.others if math.isfinite(other.seconds)]
