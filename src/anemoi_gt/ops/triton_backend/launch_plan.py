"""Which kernels one call of the `triton` backend launches, by name, with tile, score and bytes. Nothing is launched here.

The launches are those of `launch`, in the order of `op`; a test compares them with what a call really launches.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.problem import Sizes
from anemoi_gt.ops.triton_backend.tile_score import Choice, Scored
from anemoi_gt.ops.triton_backend.tiles import (
    attribute_heads,
    attribute_warps,
    contraction_choice,
    destination_choice,
    forward_choice,
    source_choice,
)

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Needs:
    """Of which operands a backward pass returns gradients."""

    query: bool = True
    key: bool = True
    value: bool = True
    edge_attr: bool = True
    edge_weight: bool = True
    edge_bias: bool = True


@dataclass(frozen=True)
class Planned:
    """One launch.

    `seconds` is what `anemoi_gt.ops.triton_backend.tile_score` predicts for `tile`, and for each of the `others`; None where there is one
    tile to choose from. `bytes` counts each tensor that the kernel reads or writes once.
    """

    name: str  # as a profiler shows it
    tile: dict[str, int]
    seconds: float | None
    others: tuple[tuple[dict[str, int], float], ...]
    bytes: int


def forward_kernels(sizes: Sizes) -> Iterator[Planned]:
    """Yield what a forward pass launches."""
    count = Counts(sizes)
    if sizes.edge_dim:
        yield _contraction(sizes, launch.project_launch(sizes), "project", count.row + count.sums + count.weight)
    moved = 2 * count.row + 2 * count.source + 2 * count.statistic + count.scores + count.edges
    moved += 2 * count.sums + count.attributes + count.embedded
    if launch.has_fixed_degree(sizes):
        yield _equal(sizes, launch.forward_launch(sizes), moved)
    else:
        chosen = forward_choice(sizes.over_destinations, sizes.device)
        yield _planned(sizes, launch.forward_launch(sizes), chosen, sizes.destinations, moved + count.scores)
    if sizes.edge_dim:
        yield _contraction(sizes, launch.embed_launch(sizes), "embed", 2 * count.row + count.sums + count.weight)


def backward_kernels(sizes: Sizes, needs: Needs) -> Iterator[Planned]:
    """Yield what a backward pass launches."""
    count, raw = Counts(sizes), bool(sizes.edge_dim)
    if raw:
        yield _contraction(sizes, launch.project_launch(sizes), "project", count.row + count.sums + count.weight)
    moved = (1 + needs.query) * count.row + 2 * count.source + count.statistic + count.scores + count.pairs
    moved += count.edges + count.sums + count.attributes + count.embedded
    if sizes.embedded:
        moved += count.row + needs.edge_attr * count.embedded_gradient
    if launch.has_fixed_degree(sizes):
        moved += 2 * count.sums + needs.edge_attr * (count.sums + count.attributes_gradient)
        yield _equal(sizes, launch.destination_launch(sizes), moved)
    else:
        chosen = destination_choice(sizes.over_destinations, sizes.device)
        moved += (1 + raw) * count.scores
        yield _planned(sizes, launch.destination_launch(sizes), chosen, sizes.destinations, moved)
    if raw and (needs.query or needs.edge_attr or needs.edge_weight or needs.edge_bias):
        if not launch.has_fixed_degree(sizes):
            yield _attribute_kernel(sizes, count, needs)
        yield from _weight_kernels(sizes, count, needs)
    if needs.key or needs.value:
        chosen = source_choice(sizes.over_sources, sizes.device)
        moved = (needs.key + needs.value) * (count.row + count.source) + count.pairs + 2 * count.edges
        yield _planned(sizes, launch.source_launch(sizes), chosen, sizes.batch * sizes.num_src, moved)


def _equal(sizes: Sizes, bound: Launch, moved: int) -> Planned:
    """A kernel for one small degree, which has one tile."""
    tile = {"edges": bound.constants["K"], "num_warps": bound.constants["num_warps"]}
    return Planned(bound.name(NAMES[sizes.dtype]), tile, None, (), moved)


def _attribute_kernel(sizes: Sizes, count: "Counts", needs: Needs) -> Planned:
    """What sums attributes over the edges of each destination."""
    tile = {"heads": attribute_heads(sizes.heads), "num_warps": attribute_warps(sizes.heads, sizes.attributes)}
    moved = count.pairs + count.attributes + 2 * count.sums + count.edges
    if needs.edge_attr:
        moved += 2 * count.sums + count.attributes_gradient
    return Planned(launch.attribute_launch(sizes).name(NAMES[sizes.dtype]), tile, None, (), moved)


def _weight_kernels(sizes: Sizes, count: "Counts", needs: Needs) -> Iterator[Planned]:
    """What follows from the sums over attributes."""
    if needs.query:
        yield _contraction(sizes, launch.embed_launch(sizes), "embed", 2 * count.row + count.sums + count.weight)
    if needs.edge_weight or needs.edge_bias:
        bound, partials = launch.weight_launch(sizes)
        moved = 2 * count.row + 2 * count.sums + 4 * partials * sizes.heads * sizes.channels * sizes.attributes
        yield _contraction(sizes, bound, "weight", moved)


class Counts:
    """Bytes of the tensors of a call; 0 for those that are not there."""

    def __init__(self, sizes: Sizes):
        size, heads, edges = sizes.dtype.itemsize, sizes.heads, sizes.batch * sizes.num_edges
        scratch, raw = scratch_dtype(sizes.dtype).itemsize, bool(sizes.edge_dim)
        row = size * heads * sizes.channels
        self.row = row * sizes.destinations  # query, out and their gradients
        self.source = row * sizes.batch * sizes.num_src  # key, value and their gradients
        self.statistic = 4 * heads * sizes.destinations  # lse, inverse
        self.scores = 4 * heads * edges  # scores, numerators
        self.pairs = 2 * scratch * heads * edges  # weights
        self.sums = raw * scratch * heads * sizes.columns * sizes.destinations  # u, g, A, B
        self.weight = size * heads * sizes.channels * sizes.attributes
        self.edges = 4 * sizes.num_edges  # row, col or a map; pointers of nodes are left out
        shared = sizes.batch > 1 and not sizes.attr_stride  # then gradients of samples are float32, to be summed
        sets, of_samples = (1, 4 / size) if shared else (sizes.batch, 1)
        self.attributes = raw * size * sizes.edge_dim * sets * sizes.num_edges
        self.embedded = sizes.embedded * row * sets * sizes.num_edges
        self.attributes_gradient = int(of_samples * self.attributes / sets) * sizes.batch
        self.embedded_gradient = int(of_samples * self.embedded / sets) * sizes.batch


def _contraction(sizes: Sizes, bound: Launch, kernel: str, moved: int) -> Planned:
    choice = contraction_choice(sizes.over_destinations, kernel, sizes.device)
    return _planned(sizes, bound, choice, sizes.destinations, moved)


def _planned(sizes: Sizes, bound: Launch, choice: Choice, nodes: int, moved: int) -> Planned:
    (own, seconds), *others = (_of_all(scored, nodes) for scored in (choice.chosen, *choice.others))
    return Planned(bound.name(NAMES[sizes.dtype]), own, seconds, tuple(others), moved)


def _of_all(scored: Scored, nodes: int) -> tuple[dict[str, int], float]:
    """A tile as numbers by name, and the seconds of all nodes."""
    return dict(vars(scored.tile)), nodes * scored.seconds
