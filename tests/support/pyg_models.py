"""A heterogeneous graph, and three models with PyG's `TransformerConv`, as in its examples; all take x, edge_index, edge_attr."""

import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import Linear, TransformerConv

DIM = 3  # edge attributes


class UnifiedMessagePassing(nn.Module):
    """Nodes with some of their labels, through gated layers with norms, as in UniMP (Shi et al. 2021)."""

    def __init__(self, channels=6, classes=4, hidden=8, heads=2, layers=3):
        super().__init__()
        self.labels = nn.Embedding(classes + 1, channels)  # the last is the unknown one
        widths = [channels] + [hidden * heads] * (layers - 1)
        layers = (TransformerConv(width, hidden, heads, beta=True, dropout=0.2) for width in widths[:-1])
        self.layers = nn.ModuleList(layers)
        self.last = TransformerConv(widths[-1], classes, heads, concat=False, beta=True)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden * heads) for _ in self.layers)

    def forward(self, x, edge_index, edge_attr):
        x = x + self.labels(torch.arange(x.shape[0], device=x.device) % self.labels.num_embeddings)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, edge_index)).relu()
        return self.last(x, edge_index)


class TemporalEmbedding(nn.Module):
    """Attention over past events, whose edges carry a message and the encoded time since: TGN (Rossi et al. 2020)."""

    def __init__(self, channels=6, hidden=4, heads=2, times=5):
        super().__init__()
        self.time = Linear(1, times)
        self.attention = TransformerConv(channels, hidden, heads, dropout=0.1, edge_dim=DIM + times)
        self.score = Linear(hidden * heads, 1)

    def forward(self, x, edge_index, edge_attr):
        since = self.time(edge_attr[:, :1] - edge_attr[:, :1].min()).cos()
        embedded = self.attention(x, edge_index, torch.cat([since, edge_attr], dim=-1))
        return self.score(embedded.relu())


class TextGraphEncoder(nn.Module):
    """Batch norm and dropout over nodes and edges that carry text embeddings: G-Retriever (He et al. 2024)."""

    def __init__(self, channels=6, hidden=4, heads=4):
        super().__init__()
        self.first = TransformerConv(channels, hidden, heads, edge_dim=DIM, bias=False)
        self.norm = nn.BatchNorm1d(hidden * heads)
        self.second = TransformerConv(hidden * heads, hidden, heads, edge_dim=DIM, root_weight=False)

    def forward(self, x, edge_index, edge_attr):
        x = nn.functional.dropout(self.norm(self.first(x, edge_index, edge_attr)).relu(), 0.3, self.training)
        return self.second(x, edge_index, edge_attr)


def make_hetero():
    """A graph of two kinds of nodes and three of edges."""
    generator = torch.Generator().manual_seed(2)
    graph, sizes = HeteroData(), {"data": 9, "hidden": 5}
    for name, size in sizes.items():
        graph[name].x = torch.randn(size, 6, generator=generator)
    for source, target in (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data")):
        ends = [torch.randint(sizes[name], (20,), generator=generator) for name in (source, target)]
        graph[source, "to", target].edge_index = torch.stack(ends)
        graph[source, "to", target].edge_attr = torch.randn(20, DIM, generator=generator)
    return graph


MODELS = (UnifiedMessagePassing, TemporalEmbedding, TextGraphEncoder)
