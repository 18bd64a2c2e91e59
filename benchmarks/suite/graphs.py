"""Graphs of the problems: built once, handed to every process by file."""

from pathlib import Path
from typing import NamedTuple

import torch

from suite.problems import PARTS, Random, Skewed, Weather


class Coo(NamedTuple):
    """Edges in order of destination."""

    edge_index: torch.Tensor  # [2, E] int64, row 0 source, row 1 destination
    sizes: tuple[int, int]  # N_src, N_dst

    @property
    def nbytes(self) -> int:
        """Bytes of the edges."""
        return self.edge_index.nbytes

    def to(self, device: str) -> "Coo":
        """Return the same edges on a device."""
        return Coo(self.edge_index.to(device), self.sizes)


def build(graphs: list[Weather | Random | Skewed], folder: Path) -> dict[str, tuple[int, int, int]]:
    """Write each graph to `folder`; return (N_src, N_dst, E) by graph.

    Only this function needs scipy, and only the process that starts the workers calls it.
    """
    counts = {}
    models = {}
    for graph in dict.fromkeys(graphs):
        if isinstance(graph, Random):
            coo = _random(graph)
        elif isinstance(graph, Skewed):
            coo = _skewed(graph)
        else:
            coo = _part(graph, models)
        torch.save(tuple(coo), _path(graph, folder))
        counts[str(graph)] = (*coo.sizes, coo.edge_index.shape[1])
    return counts


def load(graph: Weather | Random | Skewed, folder: Path) -> Coo:
    """Read a graph that `build` wrote."""
    return Coo(*torch.load(_path(graph, folder)))


def _path(graph: Weather | Random | Skewed, folder: Path) -> Path:
    return folder / f"{graph}.pt"


def _part(graph: Weather, models: dict) -> Coo:
    """Return a part of a model; the three parts are built together and cached in `models`."""
    from anemoi_gt.data.graphs import icosphere_graph
    from anemoi_gt.data.grids import grid

    model = graph.grid, graph.refinement
    if model not in models:
        models[model] = icosphere_graph(grid(graph.grid), refinement=graph.refinement)
    source, destination = PARTS[graph.part]
    whole = models[model]
    sizes = whole[source].num_nodes, whole[destination].num_nodes
    return sort_edges(whole[source, "to", destination].edge_index, sizes)


def _random(graph: Random) -> Coo:
    generator = torch.Generator().manual_seed(0)
    ends = [
        torch.randint(n, (graph.num_edges,), generator=generator)
        for n in (graph.num_src, graph.num_dst)
    ]
    return sort_edges(torch.stack(ends), (graph.num_src, graph.num_dst))


def _skewed(graph: Skewed) -> Coo:
    generator, nodes = torch.Generator().manual_seed(0), graph.num_nodes
    u = torch.rand(graph.num_edges, generator=generator, dtype=torch.float64)
    if graph.law == "power":
        dst = (u**graph.exponent * nodes).long()
    else:
        below = torch.arange(1, nodes + 1, dtype=torch.float64).pow(-graph.exponent).cumsum(0)
        dst = torch.searchsorted(below, u * below[-1]).clamp_max(nodes - 1)
    src = torch.randint(nodes, (graph.num_edges,), generator=generator)
    return sort_edges(torch.stack([src, dst]), (nodes, nodes))


def sort_edges(edge_index: torch.Tensor, sizes: tuple[int, int]) -> Coo:
    """Order edges by destination."""
    return Coo(edge_index[:, edge_index[1].argsort(stable=True)].contiguous(), sizes)
