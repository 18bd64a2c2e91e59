"""Problems to measure, as data: graphs, shapes and passes by name. Nothing here computes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

GRADIENTS = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")
# part of a model: (source, destination) node sets
PARTS = {
    "encoder": ("data", "hidden"),
    "processor": ("hidden", "hidden"),
    "decoder": ("hidden", "data"),
}
# Passes: without gradients; both passes; "replay" is both, replayed from a CUDA graph.
ATTENTION = ("forward", "forward_backward")


@dataclass(frozen=True)
class Weather:
    """One part of an encoder-processor-decoder graph between a global grid and an icosphere."""

    part: str
    grid: str
    refinement: int

    def __str__(self) -> str:
        return f"{self.part}-{self.grid}-{self.refinement}".lower()


@dataclass(frozen=True)
class Random:
    """Edges between uniformly drawn ends."""

    num_src: int
    num_dst: int
    num_edges: int

    def __str__(self) -> str:
        return f"random-{self.num_src}-{self.num_dst}-{self.num_edges}"


@dataclass(frozen=True)
class Skewed:
    """Edges between uniformly drawn sources and destinations of which few have most edges.

    Law "power": destination floor(u^exponent num_nodes) with uniform u; "zipf": rank k with
    probability k^-exponent.
    """

    num_nodes: int
    num_edges: int
    law: str
    exponent: float

    def __str__(self) -> str:
        return f"{self.law}{self.exponent:g}-{self.num_nodes}-{self.num_edges}"


@dataclass(frozen=True)
class Problem:
    """One line of the benchmark, selected by its name or group."""

    name: str
    group: str
    graph: Weather | Random | Skewed  # its edges, sorted by destination
    heads: int = 16  # H
    channels: int = 64  # C
    edge_dim: int = 11  # D
    dtype: str = "bfloat16"  # of every operand, a name in torch
    batch: int = 1  # B, on the one graph, with shared edge attributes
    gradients: tuple[str, ...] = GRADIENTS  # operands whose gradients backward returns
    passes: tuple[str, ...] = ATTENTION

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the torch dtype."""
        return getattr(torch, self.dtype)


def _model(group: str, grid: str, refinement: int, channels: tuple[int, ...]) -> list[Problem]:
    """Return encoder, processor and decoder of a grid and a mesh."""
    return [
        Problem(f"{part}-{group}-c{width}", group, Weather(part, grid, refinement), channels=width)
        for width in channels
        for part in PARTS
    ]


def _variants(group: str, grid: str, refinement: int) -> list[Problem]:
    """Return the same parts with C = 64, in variants that change one thing each."""
    changes = {
        "d3": {
            "edge_dim": 3,
            "gradients": tuple(name for name in GRADIENTS if name != "edge_attr"),
        },
        "b4": {"batch": 4},
        "fp16": {"dtype": "float16"},
    }
    return [
        replace(problem, name=f"{problem.name}-{label}", group=f"{group}-variants", **change)
        for label, change in changes.items()
        for problem in _model(group, grid, refinement, (64,))
    ]


def _skewed() -> list[Problem]:
    """Return a graph with a hub of a sixth of the edges, and large power-law graphs."""
    hub = Problem("hub-c64", "skewed", Skewed(40_962, 1_200_000, "power", 6.0))
    zipf = [
        Problem(
            f"zipf{exponent:g}-c16",
            "skewed",
            Skewed(10**6, 10**7, "zipf", exponent),
            heads=4,
            channels=16,
            edge_dim=8,
        )
        for exponent in (1.1, 1.5, 2.0)
    ]
    return [hub, *zipf]


def _small() -> list[Problem]:
    """Float32 problems that two CPU cores do in seconds."""
    parts = [
        Problem(f"{part}-small-c8", "small", Weather(part, "O32", 4), channels=8, dtype="float32")
        for part in PARTS
    ]
    mesh = Weather("processor", "O32", 5)
    meshes = [
        Problem(f"processor-small-i5-c{c}", "small", mesh, channels=c, dtype="float32")
        for c in (8, 32)
    ]
    return [*parts, *meshes]


PROBLEMS = {
    problem.name: problem
    for problem in [
        *_model("n320", "N320", 6, (64, 32)),
        *_variants("n320", "N320", 6),
        Problem("edges1000-c64", "host", Random(512, 256, 1000), passes=(*ATTENTION, "replay")),
        *_skewed(),
        *_small(),
    ]
}
# groups that run by default
DEFAULT = {
    "cuda": ("n320", "host"),
    "cpu": ("small",),
}


def select(names: Sequence[str]) -> list[Problem]:
    """Return the problems with these names or groups, each once, in the order of `PROBLEMS`.

    Raises
    ------
    ValueError
        If a name is neither a problem's nor a group's.
    """
    groups = sorted({problem.group for problem in PROBLEMS.values()})
    unknown = [name for name in names if name not in PROBLEMS and name not in groups]
    if unknown:
        raise ValueError(
            f"problems must be groups {groups} or names such as {next(iter(PROBLEMS))!r}, got "
            f"{unknown}"
        )
    return [
        problem for problem in PROBLEMS.values() if problem.name in names or problem.group in names
    ]
