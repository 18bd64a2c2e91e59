"""A weather graph of random nodes and edges in the layout of anemoi-graphs."""

import torch
from torch_geometric.data import HeteroData

NODES = {"data": 30, "hidden": 11}
KINDS = {("data", "to", "hidden"): 60, ("hidden", "to", "hidden"): 50, ("hidden", "to", "data"): 90}
SAMPLES, IN, OUT = 2, 5, 3


def weather_graph(nodes=NODES, kinds=KINDS):
    """Return HeteroData with the given numbers of nodes and edges."""
    generator = torch.Generator().manual_seed(0)
    graph = HeteroData()
    for name, size in nodes.items():
        graph[name].x = torch.rand(size, 2, generator=generator) * torch.tensor([3.0, 6.0]) - torch.tensor([1.5, 0.0])
    for kind, edges in kinds.items():
        ends = [torch.randint(nodes[name], (edges,), generator=generator) for name in (kind[0], kind[2])]
        graph[kind].edge_index = torch.stack(ends)
        graph[kind].edge_length = torch.rand(edges, 1, generator=generator)
        graph[kind].edge_dirs = torch.randn(edges, 2, generator=generator)
    return graph
