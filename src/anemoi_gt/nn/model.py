"""EncoderProcessorDecoder: the weather model, from fields on the data grid to fields on the data grid."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric.data import HeteroData

from anemoi_gt.config import AttentionConfig
from anemoi_gt.nn.block import GraphTransformerBlock
from anemoi_gt.nn.edges import StaticEdges
from anemoi_gt.nn.nodes import StaticNodes

EDGE_ATTRIBUTES = ("edge_length", "edge_dirs")


class EncoderProcessorDecoder(nn.Module):
    """Graph transformer that encodes the data grid into a hidden mesh, processes there, and decodes back.

        data   = embed_data([x, nodes of the data grid])
        hidden = encoder((data, embed_hidden(nodes of the mesh)), data_to_hidden)
        hidden = block(hidden, hidden_to_hidden)                                    num_layers times
        y      = output(decoder((hidden, data), hidden_to_data))

    Parameters
    ----------
    graph : torch_geometric.data.HeteroData
        As anemoi-graphs lays it out: nodes "data" and "hidden" with positions `x` [N, 2], latitude and longitude in
        radians; edges ("data", "to", "hidden"), ("hidden", "to", "hidden") and ("hidden", "to", "data") with `edge_index`
        [2, E], `edge_length` [E, 1] and `edge_dirs` [E, 2].
    in_channels : int
        Fields that go in, at each data node.
    out_channels : int
        Fields that come out.
    channels : int
        Features of a node inside the model; a multiple of `heads`.
    heads : int
    num_layers : int
        Blocks of the processor, which share the trained edge attributes.
    trainable_nodes, trainable_edges : int
        Number of trained features of each node and of each edge.
    mlp_ratio : float
        Width of the feed-forward networks' hidden layers over `channels`.
    dropout : float
        Probability with which each attention weight is dropped in training.
    checkpoint : bool
        Keep only the inputs of each block for backward and compute the rest again: less memory, the same gradients.
    config : AttentionConfig
        Backend and precision of the attention.

    Raises
    ------
    ValueError
        When the graph lacks a part, a part does not fit the others, or a size is out of range.

    Notes
    -----
    The state dict holds what is trained, not the graph: build the model from the same graph before loading it. The graph
    is held in buffers, which need no broadcast in distributed data parallel (`broadcast_buffers=False`).

    Examples
    --------
    >>> graph = HeteroData()
    >>> graph["data"].x, graph["hidden"].x = torch.zeros(6, 2), torch.zeros(2, 2)
    >>> for source, destination in (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data")):
    ...     edges = graph[source, "to", destination]
    ...     edges.edge_index = torch.zeros(2, 1, dtype=torch.int64)
    ...     edges.edge_length, edges.edge_dirs = torch.ones(1, 1), torch.ones(1, 2)
    >>> model = EncoderProcessorDecoder(graph, in_channels=4, out_channels=1, channels=16, heads=2)
    >>> model(torch.randn(3, 6, 4)).shape
    torch.Size([3, 6, 1])
    """

    def __init__(
        self,
        graph: HeteroData,
        in_channels: int,
        out_channels: int,
        *,
        channels: int = 128,
        heads: int = 8,
        num_layers: int = 4,
        trainable_nodes: int = 8,
        trainable_edges: int = 8,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        checkpoint: bool = False,
        config: AttentionConfig = AttentionConfig(),  # noqa: B008  frozen, hence one value for all models
    ):
        super().__init__()
        for name, size in (("in_channels", in_channels), ("out_channels", out_channels), ("num_layers", num_layers)):
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        self.in_channels = in_channels
        self.checkpoint = checkpoint
        self.nodes = nn.ModuleDict({name: _nodes(graph, name, trainable_nodes) for name in ("data", "hidden")})
        self.data_to_hidden = _edges(graph, "data", "hidden", trainable_edges)
        self.hidden_to_hidden = _edges(graph, "hidden", "hidden", trainable_edges)
        self.hidden_to_data = _edges(graph, "hidden", "data", trainable_edges)

        def block(edges: StaticEdges) -> GraphTransformerBlock:
            return GraphTransformerBlock(
                channels, heads, edges.edge_dim, mlp_ratio=mlp_ratio, dropout=dropout, config=config
            )

        self.embed_data = nn.Linear(in_channels + self.nodes["data"].channels, channels)
        self.embed_hidden = nn.Linear(self.nodes["hidden"].channels, channels)
        self.encoder = block(self.data_to_hidden)
        self.processor = nn.ModuleList(block(self.hidden_to_hidden) for _ in range(num_layers))
        self.decoder = block(self.hidden_to_data)
        self.output = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Map fields on the data grid to fields on the data grid.

        Parameters
        ----------
        x : Tensor [B, N_data, in_channels]

        Returns
        -------
        Tensor [B, N_data, out_channels]

        Raises
        ------
        ValueError
            For any other shape.
        """
        self._check_input(x)
        samples = x.shape[0]
        data = self.embed_data(torch.cat([x, self.nodes["data"]().expand(samples, -1, -1)], dim=-1))
        hidden = self.embed_hidden(self.nodes["hidden"]()).expand(samples, -1, -1)

        hidden = self._apply_block(self.encoder, (data, hidden), self.data_to_hidden())
        edges = self.hidden_to_hidden()
        for block in self.processor:
            hidden = self._apply_block(block, hidden, edges)
        data = self._apply_block(self.decoder, (hidden, data), self.hidden_to_data())
        return self.output(data)

    def _apply_block(self, block: GraphTransformerBlock, x, edges) -> Tensor:
        if self.checkpoint:
            return checkpoint(block, x, *edges, use_reentrant=False)
        return block(x, *edges)

    def _check_input(self, x: Tensor) -> None:
        wanted = (len(self.nodes["data"]), self.in_channels)
        if x.dim() != 3 or tuple(x.shape[1:]) != wanted:
            raise ValueError(f"x must have shape [B, {wanted[0]}, {wanted[1]}], got {tuple(x.shape)}")


def _nodes(graph: HeteroData, name: str, trainable: int) -> StaticNodes:
    if name not in graph.node_types or "x" not in graph[name]:
        raise ValueError(f"graph must have nodes {name!r} with positions x [N, 2], got nodes {graph.node_types}")
    return StaticNodes(graph[name].x, trainable)


def _edges(graph: HeteroData, source: str, destination: str, trainable: int) -> StaticEdges:
    kind = (source, "to", destination)
    if kind not in graph.edge_types:
        raise ValueError(f"graph must have edges {kind}, got edges {graph.edge_types}")
    edges = graph[kind]
    missing = [name for name in ("edge_index", *EDGE_ATTRIBUTES) if name not in edges]
    if missing:
        raise ValueError(f"edges {kind} must have edge_index, edge_length and edge_dirs, missing {', '.join(missing)}")
    for name in EDGE_ATTRIBUTES:
        if edges[name].dim() != 2 or edges[name].shape[0] != edges.edge_index.shape[-1]:
            raise ValueError(
                f"{name} of edges {kind} must have shape [{edges.edge_index.shape[-1]}, features], one row per edge, "
                f"got {tuple(edges[name].shape)}"
            )
    edge_attr = torch.cat([edges[name] for name in EDGE_ATTRIBUTES], dim=-1)
    num_nodes = (graph[source].x.shape[0], graph[destination].x.shape[0])
    return StaticEdges(edges.edge_index, edge_attr, num_nodes, trainable)
