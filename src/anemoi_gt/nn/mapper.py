"""Mappers: embed two sets of nodes, and take the features of one to the other by a block, in pieces where asked.

x_src', x_dst' = emb_nodes_src(x_src), emb_nodes_dst(x_dst)
y              = proc((x_src', x_dst'), edges)                         forward: data to hidden
y              = node_data_extractor(proc((x_src', x_dst'), edges))    backward: hidden to data
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.activation_checkpointing import recompute
from anemoi_gt.nn.block import GraphTransformerMapperBlock
from anemoi_gt.nn.chunking import Chunk
from anemoi_gt.nn.input_validation import check_conditions, check_sides, check_structure
from anemoi_gt.nn.mlp import hidden_width
from anemoi_gt.nn.norm import apply_norm
from anemoi_gt.ops.dropout import draw_seed
from anemoi_gt.option_checks import check_integer


class GraphTransformerBaseMapper(nn.Module):
    """What both mappers have: the block, the embedding of the destinations, and the walk over pieces.

    Parameters
    ----------
    in_channels_src, in_channels_dst : int
        Features of a source and of a destination as they come in.
    num_channels : int
        Features of a node inside.
    mlp_hidden_ratio : float
        Width of the feed-forward network's hidden layer over `num_channels`.
    gradient_checkpointing : bool
        Keep only the inputs of each piece for backward, and compute the rest again.
    **block_options
        Of `GraphTransformerMapperBlock`: num_heads, edge_dim, and its options but `update_src_nodes`.

    Raises
    ------
    ValueError
        With `update_src_nodes`, or for what the block refuses.
    """

    def __init__(
        self,
        *,
        in_channels_src: int,
        in_channels_dst: int,
        num_channels: int,
        mlp_hidden_ratio: float = 4,
        gradient_checkpointing: bool = False,
        **block_options,
    ):
        super().__init__()
        if block_options.get("update_src_nodes"):
            raise ValueError(
                "update_src_nodes must be False in a mapper, which returns destinations only, got True; "
                "GraphTransformerMapperBlock returns the sources too"
            )
        check_integer("in_channels_src", in_channels_src)
        check_integer("in_channels_dst", in_channels_dst)
        self.in_channels_src, self.in_channels_dst = in_channels_src, in_channels_dst
        self.gradient_checkpointing = gradient_checkpointing
        self.proc = GraphTransformerMapperBlock(
            in_channels=num_channels,
            hidden_dim=hidden_width(num_channels, mlp_hidden_ratio),
            out_channels=num_channels,
            **block_options,
        )
        self.emb_nodes_dst = self.proc.layer_kernels.Linear(in_channels_dst, num_channels)

    def forward(
        self,
        x: tuple[Tensor, Tensor],
        graph: GraphStructure | Sequence[Chunk],
        edge_attr: Tensor,
        *,
        cond: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Take features from sources to destinations.

        Parameters
        ----------
        x : (Tensor, Tensor)
            (x_src, x_dst), [N_src, in_channels_src] and [N_dst, in_channels_dst], or [B, ...] both.
        graph : GraphStructure, or its pieces from `split_destinations`
            In pieces, memory falls and the result stays, to the rounding of matrix products of fewer rows.
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Raw attributes of the whole graph; with pieces by destination, as these are cut.
        cond : (Tensor, Tensor), optional
            Conditions of conditional norms, of sources and of destinations: [N or 1, K] or [B, N or 1, K].

        Returns
        -------
        Tensor [N_dst, F] or [B, N_dst, F]
            F is num_channels, or out_channels_dst of a backward mapper.

        Raises
        ------
        ValueError
            When rows do not fit the graph, or there are no pieces.
        """
        self.check_sides(x)
        chunks = _pieces_of(graph)
        cond_src, cond_dst = cond = check_conditions(cond)
        chunks[0].check_rows(x_src=x[0], x_dst=x[1], edge_attr=edge_attr, cond_src=cond_src, cond_dst=cond_dst)
        drops = self.training and self.proc.dropout > 0
        if drops and len(chunks) > 1:
            seed = draw_seed(x[0].device)
            chunks = tuple(chunk.seeded(seed) for chunk in chunks)
        run = self.map_chunk
        if self.gradient_checkpointing:
            run = partial(recompute, self.map_chunk, device=x[0].device, draws=drops)
        pieces = [run(chunk, x, edge_attr, cond) for chunk in chunks]
        return torch.cat(pieces, dim=-2) if len(pieces) > 1 else pieces[0]

    def check_sides(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return `x`; ValueError unless it is (x_src, x_dst) as this mapper takes them."""
        return check_sides(x, (self.in_channels_src, self.in_channels_dst), like=self.emb_nodes_dst.weight)

    def map_chunk(
        self, chunk: Chunk, x: tuple[Tensor, Tensor], edge_attr: Tensor, cond: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """Return what the destinations of one piece get: [..., N_dst of the piece, num_channels]."""
        x_src, x_dst = self.emb_nodes_src(chunk.sources(x[0])), self.emb_nodes_dst(chunk.destinations(x[1]))
        cond = _by_node(cond[0], chunk.sources), _by_node(cond[1], chunk.destinations)
        _, x_dst = self.proc((x_src, x_dst), chunk.graph, chunk.attributes(edge_attr), cond=cond)
        return x_dst


class GraphTransformerForwardMapper(GraphTransformerBaseMapper):
    """Encoder: data nodes to hidden nodes, with the state dict of Anemoi's `GraphTransformerForwardMapper`.

    Parameters are those of `GraphTransformerBaseMapper`, by keyword.

    Examples
    --------
    >>> mapper = GraphTransformerForwardMapper(
    ...     in_channels_src=5, in_channels_dst=4, num_channels=16, num_heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), (5, 2))
    >>> mapper((torch.randn(5, 5), torch.randn(2, 4)), graph, torch.randn(3, 3)).shape
    torch.Size([2, 16])
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.emb_nodes_src = self.proc.layer_kernels.Linear(self.in_channels_src, self.proc.channels)


class GraphTransformerBackwardMapper(GraphTransformerBaseMapper):
    """Decoder: hidden nodes to data nodes, with the state dict of Anemoi's `GraphTransformerBackwardMapper`.

    Sources that come with `num_channels` features are taken as they are. A norm and a linear map make the fields.

    Parameters
    ----------
    out_channels_dst : int
        Fields that come out at each destination.
    **options
        Of `GraphTransformerBaseMapper`.

    Examples
    --------
    >>> mapper = GraphTransformerBackwardMapper(
    ...     in_channels_src=16, in_channels_dst=4, out_channels_dst=3, num_channels=16, num_heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 4]]), (2, 5))
    >>> mapper((torch.randn(2, 16), torch.randn(5, 4)), graph, torch.randn(3, 3)).shape
    torch.Size([5, 3])
    """

    def __init__(self, *, out_channels_dst: int, **options):
        check_integer("out_channels_dst", out_channels_dst)
        super().__init__(**options)
        channels = self.proc.channels
        is_embedded = self.in_channels_src == channels
        self.emb_nodes_src = (
            nn.Identity() if is_embedded else self.proc.layer_kernels.Linear(self.in_channels_src, channels)
        )
        self.node_data_extractor = nn.Sequential(nn.LayerNorm(channels), nn.Linear(channels, out_channels_dst))

    def map_chunk(
        self, chunk: Chunk, x: tuple[Tensor, Tensor], edge_attr: Tensor, cond: tuple[Tensor | None, Tensor | None]
    ) -> Tensor:
        """Return what the destinations of one piece get: [..., N_dst of the piece, out_channels_dst]."""
        x_dst = super().map_chunk(chunk, x, edge_attr, cond)
        return apply_norm(self.node_data_extractor, x_dst)  # which begins with one


def _pieces_of(graph: GraphStructure | Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The pieces of a graph, checked; a structure is one."""
    if not isinstance(graph, (tuple, list)):
        check_structure(graph)
        return (Chunk.whole(graph),)
    wrong = [type(piece).__name__ for piece in graph if not isinstance(piece, Chunk)]
    if wrong or not graph:
        raise ValueError(
            "graph must be a GraphStructure, or at least one piece from split_destinations, "
            f"got {', '.join(wrong) or 'none'}"
        )
    if not _are_all(graph):
        raise ValueError(
            "graph must hold all pieces of one split_destinations, in their order, "
            f"got destinations {[(piece.dst.start, piece.dst.stop) for piece in graph]} of graphs with "
            f"{[piece.sizes for piece in graph]} sources, destinations and edges"
        )
    return tuple(graph)


def _are_all(pieces: Sequence[Chunk]) -> bool:
    """Whether pieces lie end to end over all destinations of one graph: results are laid side by side."""
    sizes, starts = pieces[0].sizes, [piece.dst.start for piece in pieces]
    if sizes is None:
        return len(pieces) == 1
    ends = [piece.dst.stop for piece in pieces]
    return all(piece.sizes == sizes for piece in pieces) and starts == [0, *ends[:-1]] and ends[-1] == sizes[1]


def _by_node(cond: Tensor | None, take: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Take the rows of a condition that has one for each node; one row is every node's, and none is none."""
    return cond if cond is None or cond.shape[-2] == 1 else take(cond)
