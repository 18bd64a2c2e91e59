"""Mappers: embed two sets of nodes, and carry the features of one to the other by a block.

x_src', x_dst' = emb_nodes_src(x_src), emb_nodes_dst(x_dst)
y              = proc((x_src', x_dst'), edges)                         forward: data to hidden
y              = node_data_extractor(proc((x_src', x_dst'), edges))    backward: hidden to data

The block of a graph network reads embedded edges: emb_edges(edge_attr).
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure, ShardedGraph
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.activation_checkpointing import checkpoint_activations
from anemoi_gt.nn.block import GraphTransformerMapperBlock
from anemoi_gt.nn.chunking import Chunk, Conditions, Pair, Rows, map_chunks
from anemoi_gt.nn.fused_block import NOT_FASTER, network, read_linear_layer
from anemoi_gt.nn.input_validation import check_conditions, check_sides, stored_parameter
from anemoi_gt.nn.interaction_network import InteractionBlock, apply_mlp
from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.mlp import MLP, NormedMLP, hidden_width
from anemoi_gt.nn.norm import apply_norm
from anemoi_gt.nn.sublayers import Computation, NetworkModules
from anemoi_gt.option_checks import check_integer
from anemoi_gt.refusal import Refusal
from anemoi_gt.torch_compat import is_exporting


class BaseMapper(nn.Module):
    """Base class of mappers: they map destinations chunk by chunk, and can be checkpointed.

    A subclass has the modules below, and defines `map_nodes`, which maps the nodes of one chunk.

    Parameters
    ----------
    in_channels_src, in_channels_dst : int
        Input features of a source and of a destination.
    gradient_checkpointing : bool
        Keep only the inputs of each chunk for the backward pass (activation checkpointing).
    """

    emb_nodes_src: nn.Module
    emb_nodes_dst: nn.Module

    def __init__(
        self, *, in_channels_src: int, in_channels_dst: int, gradient_checkpointing: bool = False
    ):
        super().__init__()
        check_integer("in_channels_src", in_channels_src)
        check_integer("in_channels_dst", in_channels_dst)
        self.in_channels_src, self.in_channels_dst = in_channels_src, in_channels_dst
        self.gradient_checkpointing = gradient_checkpointing

    @property
    def draws(self) -> bool:
        """Whether `map_nodes` draws random numbers, which a recomputation must draw again."""
        return self.training

    def map_nodes(self, x: Pair, graph: GraphStructure, edge_attr: Tensor, cond: Pair) -> Tensor:
        """Return destinations [..., N_dst, F] of a graph or one chunk.

        `x` holds sources and destinations, each a tensor or a tuple of tensors with its columns;
        `concatenate` returns one tensor.

        Raises
        ------
        NotImplementedError
            Unless a subclass defines it.
        """
        raise NotImplementedError

    def _in_chunks(
        self,
        x: tuple[Tensor, Tensor],
        graph: object,
        edge_attr: Tensor,
        cond: Conditions = (None, None),
    ) -> Tensor:
        like = stored_parameter(self.emb_nodes_dst)
        x = check_sides(x, (self.in_channels_src, self.in_channels_dst), like=like)
        call = None
        if self.gradient_checkpointing:
            call = partial(checkpoint_activations, device=edge_attr.device, draws=self.draws)
        return map_chunks(self.map_nodes, graph, x, edge_attr, cond, call=call)


class GraphTransformerBaseMapper(BaseMapper):
    """Base class of the mappers of graph transformers: block, and embedding of destinations.

    Parameters
    ----------
    in_channels_src, in_channels_dst : int
        Input features of a source and of a destination.
    num_channels : int
        Features of a node inside the mapper.
    mlp_hidden_ratio : float
        Width of the hidden layer of the feed-forward network over `num_channels`.
    gradient_checkpointing : bool
        Keep only the inputs of each chunk for the backward pass (activation checkpointing).
    **block_options
        Of `GraphTransformerMapperBlock`: num_heads, edge_dim, and its options except
        `update_src_nodes`.

    Raises
    ------
    ValueError
        For options that the block refuses.
    """

    def __init__(
        self,
        *,
        in_channels_src: int,
        in_channels_dst: int,
        num_channels: int,
        mlp_hidden_ratio: float = 4,
        gradient_checkpointing: bool = False,
        **block_options: Any,
    ):
        super().__init__(
            in_channels_src=in_channels_src,
            in_channels_dst=in_channels_dst,
            gradient_checkpointing=gradient_checkpointing,
        )
        self.proc = GraphTransformerMapperBlock(
            in_channels=num_channels,
            hidden_dim=hidden_width(num_channels, mlp_hidden_ratio),
            out_channels=num_channels,
            update_src_nodes=False,  # a mapper returns destinations only
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
        """Map features of sources to destinations.

        Parameters
        ----------
        x : (Tensor, Tensor)
            (x_src, x_dst), [N_src, in_channels_src] and [N_dst, in_channels_dst], or [B, ...] both.
            A side may be a tuple of tensors with the columns, which each chunk concatenates: no
            tensor of all nodes is made.
        graph : GraphStructure, or its chunks from `split_destinations`
            Chunks need less memory for the same result, up to the rounding of matrix products with
            fewer rows; each chunk draws its own dropout mask.
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Raw attributes of the whole graph in the caller's edge order, which for chunks is sorted
            by destination.
        cond : (Tensor, Tensor), optional
            Conditions of sources and destinations for conditional norms: [N or 1, K] or [B, N or 1,
            K].

        Returns
        -------
        Tensor [N_dst, F] or [B, N_dst, F]
            F is num_channels, or out_channels_dst of a backward mapper.

        Raises
        ------
        ValueError
            When rows do not fit the graph, or chunks do not make up one graph.
        """
        return self._in_chunks(x, graph, edge_attr, check_conditions(cond))

    @property
    def draws(self) -> bool:
        """Whether the block has dropout."""
        return self.training and self.proc.dropout > 0

    def map_nodes(self, x: Pair, graph: GraphStructure, edge_attr: Tensor, cond: Pair) -> Tensor:
        """Return destination features [..., N_dst, num_channels] of a graph or one chunk."""
        x_src = self._apply_linear("emb_nodes_src", concatenate(x[0]))
        # concatenated here, in the chunk: no tensor with the columns of all nodes exists
        x_dst = self._apply_linear("emb_nodes_dst", concatenate(x[1]))
        return self.proc((x_src, x_dst), graph, edge_attr, cond=cond)[1]

    def _apply_linear(self, name: str, x: Tensor) -> Tensor:
        """Return the result of the linear layer `name`, fused where that is faster."""
        layer = getattr(self, name)
        modules: NetworkModules | Refusal = NOT_FASTER
        if not is_exporting():
            computation = Computation.of(x, self.proc.config)
            if computation.is_faster_fused:
                modules = read_linear_layer(layer, name, x, computation)
        if isinstance(modules, Refusal):
            # a norm may have more rows than PyTorch's kernel takes
            return apply_norm(layer, x) if isinstance(layer, nn.Sequential) else layer(x)
        return network(modules, x)


class GraphTransformerForwardMapper(GraphTransformerBaseMapper):
    """Encoder: data nodes to hidden nodes, with the state dict of Anemoi's class of this name.

    Parameters as for `GraphTransformerBaseMapper`, by keyword.

    Examples
    --------
    >>> mapper = GraphTransformerForwardMapper(
    ...     in_channels_src=5, in_channels_dst=4, num_channels=16, num_heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), (5, 2))
    >>> mapper((torch.randn(5, 5), torch.randn(2, 4)), graph, torch.randn(3, 3)).shape
    torch.Size([2, 16])
    """

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.emb_nodes_src = self.proc.layer_kernels.Linear(
            self.in_channels_src, self.proc.channels
        )


class FieldExtractor(nn.Sequential):
    """Norm and linear map from features to fields.

    A separate class, because torch.compile skips PyTorch's classes.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., num_channels] to [..., out_channels_dst]."""
        return super().forward(x)


class GraphTransformerBackwardMapper(GraphTransformerBaseMapper):
    """Decoder: hidden nodes to data nodes, with the state dict of Anemoi's class of this name.

    Sources with `num_channels` features are not embedded. A norm and a linear map give the fields.

    Parameters
    ----------
    out_channels_dst : int
        Output fields of each destination.
    **options
        Of `GraphTransformerBaseMapper`.

    Examples
    --------
    >>> mapper = GraphTransformerBackwardMapper(
    ...     in_channels_src=16, in_channels_dst=4, out_channels_dst=3, num_channels=16,
    ...     num_heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 4]]), (2, 5))
    >>> mapper((torch.randn(2, 16), torch.randn(5, 4)), graph, torch.randn(3, 3)).shape
    torch.Size([5, 3])
    """

    def __init__(self, *, out_channels_dst: int, **options: Any):
        check_integer("out_channels_dst", out_channels_dst)
        super().__init__(**options)
        channels = self.proc.channels
        # as Anemoi does, whose state dict has no embedding for hidden nodes
        embed = nn.Identity if self.in_channels_src == channels else self.proc.layer_kernels.Linear
        self.emb_nodes_src = embed(self.in_channels_src, channels)
        self.node_data_extractor = FieldExtractor(
            nn.LayerNorm(channels), nn.Linear(channels, out_channels_dst)
        )

    def map_nodes(self, x: Pair, graph: GraphStructure, edge_attr: Tensor, cond: Pair) -> Tensor:
        """Return destination fields [..., N_dst, out_channels_dst] of a graph or one chunk."""
        x_dst = super().map_nodes(x, graph, edge_attr, cond)
        return self._apply_linear("node_data_extractor", x_dst)


class GNNMapper(BaseMapper):
    """Encoder or decoder of a graph network, with the parameters of Anemoi's GNN mappers.

    MLPs embed sources, destinations and edge attributes; a block updates edges and destinations; in
    a decoder, an MLP without a norm gives the fields. An encoder has the state dict of Anemoi's
    `GNNForwardMapper`. A decoder has `emb_nodes_dst` besides the keys of `GNNBackwardMapper`:
    Anemoi's destinations are nodes that its encoder has embedded.

    Parameters
    ----------
    in_channels_src, in_channels_dst : int
        Input features of a source and of a destination.
    num_channels : int
        Features of a node inside the mapper, and of an embedded edge. A decoder does not embed
        sources with so many features.
    edge_dim : int
        Attributes of an edge.
    out_channels_dst : int, optional
        Output fields of each destination of a decoder; None is an encoder, which returns
        `num_channels` features.
    mlp_hidden_ratio : float
        Width of the hidden layers over `num_channels`.
    gradient_checkpointing : bool
        As for `GraphTransformerBaseMapper`.
    hidden_layers : int
        Hidden layers of each MLP; Anemoi has two.
    mlp_implementation : {"mlp", "glu", "swiglu", "geglu", "reglu"}
        Plain or gated hidden layers.
    layer_kernels : LayerKernels
        Classes of the submodules, as for `InteractionBlock`.
    sum_of : {"edges", "updates"}
        What is summed over in-edges: updated edges as in Anemoi, or their updates as in GraphCast.
    config : KernelConfig
        Backend and precision.

    Raises
    ------
    ValueError
        For a size that is not an integer or below 1, or options that `InteractionBlock` refuses.

    Examples
    --------
    >>> sizes = {"in_channels_dst": 4, "num_channels": 16, "edge_dim": 3}
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), (5, 2))
    >>> encoder = GNNMapper(in_channels_src=5, **sizes)
    >>> encoder((torch.randn(5, 5), torch.randn(2, 4)), graph, torch.randn(3, 3)).shape
    torch.Size([2, 16])
    >>> decoder = GNNMapper(in_channels_src=16, **sizes, out_channels_dst=3)
    >>> decoder((torch.randn(5, 16), torch.randn(2, 4)), graph, torch.randn(3, 3)).shape
    torch.Size([2, 3])
    """

    def __init__(
        self,
        *,
        in_channels_src: int,
        in_channels_dst: int,
        num_channels: int,
        edge_dim: int,
        out_channels_dst: int | None = None,
        mlp_hidden_ratio: float = 1,
        gradient_checkpointing: bool = False,
        hidden_layers: int = 1,
        mlp_implementation: str = "mlp",
        layer_kernels: LayerKernels = LayerKernels(),  # noqa: B008  frozen, as config
        sum_of: str = "edges",
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
    ):
        super().__init__(
            in_channels_src=in_channels_src,
            in_channels_dst=in_channels_dst,
            gradient_checkpointing=gradient_checkpointing,
        )
        check_integer("edge_dim", edge_dim)
        self.config = config
        hidden_dim = hidden_width(num_channels, mlp_hidden_ratio)
        networks = (mlp_implementation, layer_kernels, hidden_layers)
        # in Anemoi's order: the same seed gives the same weights
        self.emb_edges = NormedMLP(edge_dim, hidden_dim, num_channels, *networks)
        self.proc = InteractionBlock(
            num_channels,
            num_channels,
            hidden_dim,
            hidden_layers,
            mlp_implementation=mlp_implementation,
            layer_kernels=layer_kernels,
            sum_of=sum_of,
            config=config,
        )
        self.emb_nodes_src = nn.Identity()
        if out_channels_dst is None or in_channels_src != num_channels:
            self.emb_nodes_src = NormedMLP(in_channels_src, hidden_dim, num_channels, *networks)
        self.emb_nodes_dst = NormedMLP(in_channels_dst, hidden_dim, num_channels, *networks)
        self.node_data_extractor = None
        if out_channels_dst is not None:
            check_integer("out_channels_dst", out_channels_dst)
            self.node_data_extractor = MLP(num_channels, hidden_dim, out_channels_dst, *networks)

    def forward(
        self,
        x: tuple[Tensor, Tensor],
        graph: GraphStructure | ShardedGraph | Sequence[Chunk],
        edge_attr: Tensor,
    ) -> Tensor:
        """Map features of sources to destinations.

        Arguments, result and errors as for `GraphTransformerBaseMapper`, without conditions.
        """
        return self._in_chunks(x, graph, edge_attr)

    @property
    def draws(self) -> bool:
        """Whether `map_nodes` draws random numbers: never in a graph network."""
        return False

    def map_nodes(self, x: Pair, graph: GraphStructure, edge_attr: Tensor, cond: Pair) -> Tensor:
        """Return destinations [..., N_dst, F] of a graph or one chunk."""
        x_src, x_dst = concatenate(x[0]), concatenate(x[1])
        if type(self.emb_nodes_src) is not nn.Identity:
            x_src = apply_mlp(self, "emb_nodes_src", x_src, self.config)
        x_dst = apply_mlp(self, "emb_nodes_dst", x_dst, self.config)
        edges = apply_mlp(self, "emb_edges", edge_attr, self.config)
        x_dst, _ = self.proc((x_src, x_dst), graph, edges)
        if self.node_data_extractor is None:
            return x_dst
        return apply_mlp(self, "node_data_extractor", x_dst, self.config)


def concatenate(rows: Rows) -> Tensor:
    """Return features [..., N, F] from their columns."""
    assert rows is not None  # check_sides has refused it
    return torch.cat(rows, dim=-1) if isinstance(rows, tuple) else rows
