"""A weather graph of random nodes and edges in the layout of anemoi-graphs, and a month of temperatures."""

import numpy as np
import torch
from torch_geometric.data import HeteroData

from anemoi_gt.app.datasets.era5_uk import HourlyField
from anemoi_gt.data.grids import regional

NODES = {"data": 30, "hidden": 11}
KINDS = {("data", "to", "hidden"): 60, ("hidden", "to", "hidden"): 50, ("hidden", "to", "data"): 90}
SAMPLES = 2
IN = 5
OUT = 3


def weather_graph(nodes=NODES, kinds=KINDS):
    """Return HeteroData with the given numbers of nodes and edges."""
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    for name, size in nodes.items():
        fractions = torch.rand(size, 2, generator=generator)
        graph[name].x = fractions * torch.tensor([3.0, 6.0]) - torch.tensor([1.5, 0.0])
    for kind, edges in kinds.items():
        source, _, destination = kind
        src = torch.randint(nodes[source], (edges,), generator=generator)
        dst = torch.randint(nodes[destination], (edges,), generator=generator)
        graph[kind].edge_index = torch.stack([src, dst])
        graph[kind].edge_length = torch.rand(edges, 1, generator=generator)
        graph[kind].edge_dirs = torch.randn(edges, 2, generator=generator)
    return graph


HOURS = 744
POINTS = regional([58.0, 57.0], [-1.0, 0.0, 1.0])


def hourly_field(changed_from=HOURS, hours=HOURS, nodes=POINTS):
    """Return a month of random temperatures on some points; from hour `changed_from` on, they are others."""
    size = (HOURS, len(nodes))
    before = 280 + 5 * torch.randn(size, generator=torch.Generator().manual_seed(0))
    after = 280 + 5 * torch.randn(size, generator=torch.Generator().manual_seed(1))
    temperatures = torch.cat([before[:changed_from], after[changed_from:]])[:hours]
    times = np.datetime64("2019-03-01T00") + np.arange(hours)
    return HourlyField(nodes, times, temperatures)
