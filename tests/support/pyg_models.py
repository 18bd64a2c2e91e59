"""A heterogeneous graph, and four models with PyG's `TransformerConv`, called with x, edge_index and edge_attr."""

import torch
from torch import nn
from torch_geometric.nn import Linear, TransformerConv

from support.weather import weather_graph

DIM = 3  # edge attributes


class UnifiedMessagePassing(nn.Module):
    """Gated layers with norms on node features and labels, as in UniMP (Shi et al. 2021)."""

    def __init__(self, channels=6, classes=4, hidden=8, heads=2, layers=3):
        super().__init__()
        self.labels = nn.Embedding(classes + 1, channels)  # the last is the unknown one
        widths = [channels] + [hidden * heads] * (layers - 1)
        layers = (
            TransformerConv(width, hidden, heads, beta=True, dropout=0.2) for width in widths[:-1]
        )
        self.layers = nn.ModuleList(layers)
        self.last = TransformerConv(widths[-1], classes, heads, concat=False, beta=True)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden * heads) for _ in self.layers)

    def forward(self, x, edge_index, edge_attr):
        x = x + self.labels(torch.arange(x.shape[0], device=x.device) % self.labels.num_embeddings)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x, edge_index)).relu()
        return self.last(x, edge_index)


class TemporalEmbedding(nn.Module):
    """Attention over past events, with a message and the encoded time since on each edge: TGN (Rossi et al. 2020)."""

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
    """Batch norm and dropout on text embeddings of nodes and edges: G-Retriever (He et al. 2024)."""

    def __init__(self, channels=6, hidden=4, heads=4):
        super().__init__()
        self.first = TransformerConv(channels, hidden, heads, edge_dim=DIM, bias=False)
        self.norm = nn.BatchNorm1d(hidden * heads)
        self.second = TransformerConv(
            hidden * heads, hidden, heads, edge_dim=DIM, root_weight=False
        )

    def forward(self, x, edge_index, edge_attr):
        x = self.norm(self.first(x, edge_index, edge_attr)).relu()
        x = nn.functional.dropout(x, 0.3, self.training)
        return self.second(x, edge_index, edge_attr)


class ConditionalProcessor(nn.Module):
    """Gated layers with norms conditioned on a noise level, as the processor of GenCast in graph_weather."""

    def __init__(self, channels=6, hidden=4, heads=2, blocks=3, noise=16):
        super().__init__()
        self.noise = nn.Sequential(nn.Linear(1, noise), nn.SiLU(), nn.Linear(noise, noise))
        width = hidden * heads
        self.layers = nn.ModuleList()
        for block in range(blocks):
            inputs = width if block else channels
            self.layers.append(TransformerConv(inputs, hidden, heads, beta=True, edge_dim=DIM))
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=False) for _ in self.layers
        )
        self.scales = nn.ModuleList(nn.Linear(noise, width) for _ in self.layers)
        self.biases = nn.ModuleList(nn.Linear(noise, width) for _ in self.layers)

    def forward(self, x, edge_index, edge_attr):
        condition = self.noise(x.new_full((x.shape[0], 1), 0.5))
        parts = zip(self.layers, self.norms, self.scales, self.biases, strict=True)
        for layer, norm, scale, bias in parts:
            x = norm(layer(x, edge_index, edge_attr))
            x = (scale(condition) * x + bias(condition)).relu()
        return x


class TwoLayers(nn.Module):
    """Two attention layers of a given class, as a user would write them."""

    def __init__(self, layer, in_channels=6, **options):
        super().__init__()
        torch.manual_seed(1)
        self.first = layer(in_channels, 4, heads=2, edge_dim=DIM, **options)
        self.second = layer(in_channels if in_channels == -1 else 8, 2, edge_dim=DIM, **options)

    def forward(self, x, edge_index, edge_attr):
        return self.second(self.first(x, edge_index, edge_attr).relu(), edge_index, edge_attr)


def make_hetero():
    """Return the weather graph with three edge attributes in `edge_attr`, as PyG expects."""
    graph = weather_graph()
    for edges in graph.edge_stores:
        edges.edge_attr = torch.cat([edges.edge_length, edges.edge_dirs], dim=1)
    return graph


MODELS = (UnifiedMessagePassing, TemporalEmbedding, TextGraphEncoder, ConditionalProcessor)
