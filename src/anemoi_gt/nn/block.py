"""GraphTransformerBlock: attention over edges and a feed-forward network, each after a norm and beside a residual."""

from collections.abc import Callable

from torch import Tensor, nn

from anemoi_gt.config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.conv import GraphTransformerConv


class GraphTransformerBlock(nn.Module):
    """Pre-norm graph-transformer block: from source nodes to destination nodes, or within one set of nodes.

        x = x_dst + projection(conv((norm_attention(x_src), norm_attention(x_dst)), graph, edge_attr))
        y = x + mlp(norm_mlp(x))

    One norm serves both sides, for its scale and shift are absorbed by the projections that follow it.

    Parameters
    ----------
    channels : int
        Features of a node, on both sides; a multiple of `heads`.
    heads : int
    edge_dim : int, optional
        Number of attributes of an edge; None when edges have none.
    mlp_ratio : float
        Width of the feed-forward network's hidden layer over `channels`.
    dropout : float
        Probability with which each attention weight is dropped in training.
    config : AttentionConfig
        Backend and precision of the attention.

    Raises
    ------
    ValueError
        When `channels` is not a multiple of `heads`, or a size is below 1.

    Examples
    --------
    >>> import torch
    >>> block = GraphTransformerBlock(channels=16, heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), (5, 2))
    >>> block((torch.randn(1, 5, 16), torch.randn(1, 2, 16)), graph, torch.randn(3, 3)).shape
    torch.Size([1, 2, 16])
    """

    def __init__(
        self,
        channels: int,
        heads: int,
        edge_dim: int | None = None,
        *,
        mlp_ratio: float = 4,
        dropout: float = 0.0,
        config: AttentionConfig = AttentionConfig(),  # noqa: B008  frozen, hence one value for all blocks
    ):
        super().__init__()
        if heads < 1 or channels < 1 or channels % heads:
            raise ValueError(f"channels must be a multiple of heads, got {channels} channels and {heads} heads")
        hidden = int(mlp_ratio * channels)
        if hidden < 1:
            raise ValueError(f"mlp_ratio * channels must be at least 1, got {mlp_ratio} * {channels}")
        self.norm_attention = nn.LayerNorm(channels)
        self.conv = GraphTransformerConv(
            channels, channels // heads, heads, dropout=dropout, edge_dim=edge_dim, config=config
        )
        self.projection = nn.Linear(channels, channels)
        self.norm_mlp = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        graph: GraphStructure,
        edge_attr: Tensor | None = None,
        exchange: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Update the destinations.

        Parameters
        ----------
        x : Tensor [N, channels] or [B, N, channels], or a pair (x_src, x_dst) of them
            A tensor when sources and destinations are the same nodes.
        graph : GraphStructure
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim], optional
            Raw attributes in the caller's edge order.
        exchange : callable, optional
            Takes the features of the source nodes that are here to those of every source that the edges need, in the
            numbering of `graph`. None: they are all here.

        Returns
        -------
        Tensor [N_dst, channels] or [B, N_dst, channels]
        """
        x_src, x_dst = (x, x) if isinstance(x, Tensor) else x
        dst = self.norm_attention(x_dst)
        src = dst if x_src is x_dst else self.norm_attention(x_src)
        if exchange is not None:
            src = exchange(src)
        x_dst = x_dst + self.projection(self.conv((src, dst), graph, edge_attr))
        return x_dst + self.mlp(self.norm_mlp(x_dst))
