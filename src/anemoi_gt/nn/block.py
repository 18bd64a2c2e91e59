"""Blocks with Anemoi's state dict: residual edge attention and feed-forward network with norms.

For destination i, source j, edge e = (j -> i) with attributes a_e and each head of C channels, x
being normed features:

    q_i = q_norm(W_query x_i)    k_j = k_norm(W_key x_j)
    v_j = W_value x_j            x_e = W_edge edge_pre_mlp(a_e)
    p_e = softmax over the in-edges of i of < q_i , k_j + x_e > / sqrt(C)
    attended_i = projection(sum_e p_e (v_j + x_e) + W_self x_i)

Every W has a bias (W_self if `bias` is set). The norms q_norm, k_norm and the network edge_pre_mlp
are the identity by default. W_edge and its bias are operands of the attention: x_e is never
materialised.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from anemoi_gt.graph import GraphStructure, ShardedGraph
from anemoi_gt.graph.sharded_graph import is_sharded
from anemoi_gt.graph.structure import check_structure
from anemoi_gt.kernel_config import KernelConfig, check_config
from anemoi_gt.nn.chunking import Chunk, Conditions, map_chunks
from anemoi_gt.nn.fused_block import (
    NOT_FASTER,
    BlockModules,
    block_forward,
    feed_forward,
)
from anemoi_gt.nn.input_validation import (
    check_batch,
    check_conditions,
    check_features,
    check_nodes,
    check_sides,
    stored_parameter,
)
from anemoi_gt.nn.layer_kernels import LayerKernels, cast_for_projections
from anemoi_gt.nn.mlp import MLP
from anemoi_gt.nn.norm import apply_norm
from anemoi_gt.nn.plain import BLOCK, why_not_plain
from anemoi_gt.nn.sublayers import Computation, edge_operands
from anemoi_gt.nn.unchanged import none_refused, reading
from anemoi_gt.ops import edge_attention
from anemoi_gt.option_checks import check_integer, check_probability
from anemoi_gt.refusal import not_faster, permanent
from anemoi_gt.torch_compat import is_exporting

EMPTY_BATCH = not_faster("its batch is empty")


class GraphTransformerBaseBlock(nn.Module):
    """Base class of both blocks: projections, attention, norms and feed-forward network.

    `GraphTransformerProcessorBlock` and `GraphTransformerMapperBlock` define the sources. Modules
    are created in Anemoi's order, so that one seed gives the same weights and optimiser states have
    the same parameter order.

    Parameters
    ----------
    in_channels, out_channels : int
        Features of a node, source or destination; equal, because of the residual connection.
    hidden_dim : int
        Features of the hidden layer of the feed-forward networks.
    num_heads : int
        Number of attention heads.
    edge_dim : int
        Number of attributes of an edge.
    attn_channels : int, optional
        Features of query, key and value, all heads together; None is `out_channels`.
    bias : bool
        Whether `lin_self` has a bias.
    qk_norm : bool
        Normalise query and key per head.
    mlp_implementation : {"mlp", "glu", "swiglu", "geglu", "reglu"}
        Plain or gated feed-forward networks.
    edge_pre_mlp : bool
        Mix the attributes of an edge by a linear map and an activation before they are embedded.
    layer_kernels : LayerKernels
        Classes of the submodules.
    dropout : float
        Probability of dropping an attention weight in training.
    config : KernelConfig
        Backend and precision of the attention.

    Raises
    ------
    ValueError
        For a size that is not an integer or below 1, in_channels other than out_channels, heads
        that do not divide the channels of the attention, an unknown mlp_implementation, or a
        dropout outside 0 .. 1.
    """

    def __init__(
        self,
        *,
        in_channels: int,
        hidden_dim: int,
        out_channels: int,
        num_heads: int,
        edge_dim: int,
        attn_channels: int | None = None,
        bias: bool = True,
        qk_norm: bool = False,
        mlp_implementation: str = "mlp",
        edge_pre_mlp: bool = False,
        layer_kernels: LayerKernels = LayerKernels(),  # noqa: B008  frozen, as config
        dropout: float = 0.0,
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
    ):
        super().__init__()
        width = out_channels if attn_channels is None else attn_channels
        _check_sizes(in_channels, out_channels, width, num_heads, edge_dim)
        check_probability("dropout", dropout)
        check_config(config)
        self.channels = out_channels
        self.hidden_dim = hidden_dim
        self.num_heads = num_heads
        self.mlp_implementation = mlp_implementation
        self.layer_kernels = layer_kernels
        self.dropout = dropout
        self.config = config

        Linear = layer_kernels.Linear
        self.lin_key = Linear(in_channels, width)
        self.lin_query = Linear(in_channels, width)
        self.lin_value = Linear(in_channels, width)
        self.lin_self = Linear(in_channels, width, bias=bias)
        self.lin_edge = Linear(edge_dim, width)
        self.projection = Linear(width, out_channels)
        self.q_norm = layer_kernels.QueryNorm(width // num_heads) if qk_norm else nn.Identity()
        self.k_norm = layer_kernels.KeyNorm(width // num_heads) if qk_norm else nn.Identity()
        self.layer_norm_attention = self._make_norm()
        self.layer_norm_mlp_dst = self._make_norm()
        self.node_dst_mlp = self._make_mlp()
        # without modules it is the identity, and has no keys in the state dict, as in Anemoi
        mixing = (Linear(edge_dim, edge_dim), layer_kernels.Activation()) if edge_pre_mlp else ()
        self.edge_pre_mlp = nn.Sequential(*mixing)

    def attend(
        self, src: Tensor, dst: Tensor, graph: GraphStructure | ShardedGraph, edge_attr: Tensor
    ) -> Tensor:
        """Attend to the sources; return the residual update [.., N_dst, out_channels].

        Parameters
        ----------
        src : Tensor [N_src, in_channels] or [B, N_src, in_channels]
            Normed features of the sources; the local ones of a sharded graph.
        dst : Tensor [N_dst, in_channels] or [B, N_dst, in_channels]
            Normed features of the destinations.
        graph : GraphStructure or ShardedGraph
            While the halo exchange of a sharded graph is pending, query and skip connection are
            computed.
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
        """
        edges = self.edge_operands(edge_attr)
        dropout_p = self.dropout if self.training else 0.0
        pending = None
        if not isinstance(graph, GraphStructure):
            pending, graph = graph.start_exchange(src), graph.structure
        query = self.make_query(dst)
        skip = self.lin_self(dst)
        key, value = self.key_value(src if pending is None else pending.wait())
        out, _ = edge_attention(
            query, key, value, graph, *edges, dropout_p=dropout_p, config=self.config
        )
        return self.combine(out, skip)

    def read_modules(self, x_dst: Tensor, cond: Tensor | None) -> BlockModules:
        """Return the modules of fused sub-layers, or refusals; called once per call."""
        if x_dst.dim() == 3 and x_dst.shape[0] == 0:
            return BlockModules.by_modules(EMPTY_BATCH)  # views could not be sized
        if is_exporting():
            refusal = permanent("an exported program has no operators of this library")
            return BlockModules.by_modules(refusal)
        computation = Computation.of(x_dst, self.config)
        if not computation.is_faster_fused:
            return BlockModules.by_modules(NOT_FASTER)

        def read() -> BlockModules:
            refusal = why_not_plain(("", self, (BLOCK,)))
            if refusal is not None:
                return BlockModules.by_modules(refusal)
            return BlockModules.of(self, x_dst, cond, self.config, computation)

        key = (computation, type(x_dst), x_dst.dtype, cond is None)
        return reading((self,), key, read, none_refused)

    def update_destinations(
        self,
        modules: BlockModules,
        x: tuple[Tensor, Tensor],
        graph: GraphStructure | ShardedGraph,
        edge_attr: Tensor,
        cond: Conditions,
    ) -> Tensor:
        """Update destinations [.., N_dst, out_channels] by attention and feed-forward network.

        `modules` were read in this call; `x` is (x_src, x_dst), [N_src, in_channels] and [N_dst,
        in_channels], or [B, ...] both; `edge_attr` is [E, edge_dim] or [B, E, edge_dim]; `cond`
        holds the conditions of sources and destinations.
        """
        if isinstance(graph, GraphStructure):
            check_nodes(graph, *x)
        elif is_sharded(graph):
            check_batch(*x)  # its local sources are checked by start_exchange
        else:
            check_structure(graph)

        def attend() -> Tensor:
            return x[1] + self.attend(*self.normed_sides(x, cond), graph, edge_attr)

        batch = x[1].shape[0] if x[1].dim() == 3 else 1
        return block_forward(self, modules, x, graph, edge_attr, cond, batch=batch, attend=attend)

    def run_node_dst_mlp(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """Return the feed-forward network of normed destinations x [.., N, channels]."""
        return self.node_dst_mlp(apply_norm(self.layer_norm_mlp_dst, x, cond))

    def normed_sides(self, x: tuple[Tensor, Tensor], cond: Conditions) -> tuple[Tensor, Tensor]:
        """Return normed sources and destinations; the same tensor for one set of nodes."""
        dst = self.normed(self.layer_norm_attention, x[1], cond[1])
        # a mapper has a norm of its own for the sources
        source_norm = getattr(self, "layer_norm_attention_src", self.layer_norm_attention)
        is_one_set = x[0] is x[1] and source_norm is self.layer_norm_attention
        return dst if is_one_set else self.normed(source_norm, x[0], cond[0]), dst

    def normed(self, norm: nn.Module, x: Tensor, cond: Tensor | None) -> Tensor:
        """Return normed features, cast once for all projections if all are `nn.Linear`."""
        projections = (self.lin_query, self.lin_key, self.lin_value, self.lin_self)
        return cast_for_projections(apply_norm(norm, x, cond), *projections)

    def make_query(self, dst: Tensor) -> Tensor:
        """Return the query [..., heads, C] from normed destinations [..., in_channels]."""
        return apply_norm(self.q_norm, self._split_heads(self.lin_query(dst)))

    def key_value(self, src: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value [..., heads, C] from normed sources [..., in_channels]."""
        return apply_norm(self.k_norm, self._split_heads(self.lin_key(src))), self._split_heads(
            self.lin_value(src)
        )

    def combine(self, out: Tensor, skip: Tensor) -> Tensor:
        """Project attention output [..., heads, C] plus `skip`, the destinations' `lin_self`."""
        return self.projection(out.flatten(-2) + skip)

    def edge_operands(self, edge_attr: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the edge operands: attributes [.., E, edge_dim], embedding weight and bias.

        If `lin_edge` must be called, because it is not plain, they are embedded edges, None and
        None.
        """
        return edge_operands(self.lin_edge, self.edge_pre_mlp(edge_attr), self.num_heads)

    def _make_norm(self) -> nn.Module:
        return self.layer_kernels.LayerNorm(normalized_shape=self.channels)

    def _make_mlp(self) -> MLP:
        sizes = (self.channels, self.hidden_dim, self.channels)
        return MLP(*sizes, self.mlp_implementation, self.layer_kernels)

    def _split_heads(self, features: Tensor) -> Tensor:
        return features.unflatten(-1, (self.num_heads, -1))


class GraphTransformerProcessorBlock(GraphTransformerBaseBlock):
    """Block within one set of nodes, with the state dict of Anemoi's class of this name.

        n = layer_norm_attention(x)
        x = x + attended(n, n)
        y = x + node_dst_mlp(layer_norm_mlp_dst(x))

    Parameters as for `GraphTransformerBaseBlock`, by keyword.

    Examples
    --------
    >>> sizes = {"in_channels": 16, "hidden_dim": 64, "out_channels": 16}
    >>> block = GraphTransformerProcessorBlock(**sizes, num_heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), 5)
    >>> block(torch.randn(2, 5, 16), graph, torch.randn(3, 3)).shape
    torch.Size([2, 5, 16])
    """

    def forward(
        self,
        x: Tensor,
        graph: GraphStructure | ShardedGraph | Sequence[Chunk],
        edge_attr: Tensor,
        *,
        cond: Tensor | None = None,
    ) -> Tensor:
        """Return the nodes [N, out_channels] or [B, N, out_channels] after the block.

        Parameters
        ----------
        x : Tensor [N, in_channels] or [B, N, in_channels]
        graph : GraphStructure or ShardedGraph, or chunks from `split_destinations`
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Raw attributes in the caller's edge order.
        cond : Tensor [N or 1, K] or [B, N or 1, K], optional
            Condition, required by conditional norms and refused by others.

        Raises
        ------
        ValueError
            When features, graph and attributes do not fit together.
        """
        check_features("x", x, self.channels, like=stored_parameter(self.lin_query))
        layer = partial(self.update_destinations, self.read_modules(x, cond))
        return map_chunks(layer, graph, (x, x), edge_attr, (cond, cond))


class GraphTransformerMapperBlock(GraphTransformerBaseBlock):
    """Block from source to destination nodes, with the state dict of Anemoi's class.

        dst   = x_dst + attended(layer_norm_attention_src(x_src), layer_norm_attention(x_dst))
        y_dst = dst + node_dst_mlp(layer_norm_mlp_dst(dst))
        y_src = x_src + node_src_mlp(layer_norm_mlp_src(x_src))    if update_src_nodes, else x_src

    `layer_norm_attention_dest` is another name of `layer_norm_attention`: the state dict has both,
    as in Anemoi.

    Parameters
    ----------
    update_src_nodes : bool
        Give the sources their own feed-forward network.
    **options
        Of `GraphTransformerBaseBlock`.

    Examples
    --------
    >>> sizes = {"in_channels": 16, "hidden_dim": 64, "out_channels": 16}
    >>> block = GraphTransformerMapperBlock(**sizes, num_heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), (5, 2))
    >>> x = torch.randn(1, 5, 16), torch.randn(1, 2, 16)
    >>> x_src, x_dst = block(x, graph, torch.randn(3, 3))
    >>> x_dst.shape
    torch.Size([1, 2, 16])
    """

    def __init__(self, *, update_src_nodes: bool = False, **options: Any):
        super().__init__(**options)
        self.update_src_nodes = update_src_nodes
        self.layer_norm_attention_src = self._make_norm()
        # one module with two names, which both occur in state dicts of Anemoi
        self.layer_norm_attention_dest = self.layer_norm_attention
        if update_src_nodes:
            self.layer_norm_mlp_src = self._make_norm()
            self.node_src_mlp = self._make_mlp()

    def forward(
        self,
        x: tuple[Tensor, Tensor],
        graph: GraphStructure | ShardedGraph | Sequence[Chunk],
        edge_attr: Tensor,
        *,
        cond: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (y_src, y_dst), shaped like `x`; sources change only if `update_src_nodes`.

        Parameters
        ----------
        x : (Tensor, Tensor)
            (x_src, x_dst), [N_src, in_channels] and [N_dst, in_channels], or [B, ...] both.
        graph : GraphStructure or ShardedGraph, or chunks from `split_destinations`
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Raw attributes in the caller's edge order.
        cond : (Tensor, Tensor), optional
            Conditions of sources and destinations, [N or 1, K] or [B, N or 1, K]; required by
            conditional norms and refused by others.

        Raises
        ------
        ValueError
            When features, graph and attributes do not fit together.
        """
        like = stored_parameter(self.lin_query)
        x_src, x_dst = check_sides(x, (self.channels, self.channels), like)
        conditions = check_conditions(cond)
        modules = self.read_modules(x_dst, conditions[1])
        layer = partial(self.update_destinations, modules)
        x_dst = map_chunks(layer, graph, (x_src, x_dst), edge_attr, conditions)
        if self.update_src_nodes:
            sources = modules.source_feed_forward
            x_src = feed_forward(sources, self.run_node_src_mlp, x_src, conditions[0])
        return x_src, x_dst

    def run_node_src_mlp(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """Return the feed-forward network of normed sources x [.., N, channels]."""
        return self.node_src_mlp(apply_norm(self.layer_norm_mlp_src, x, cond))


def _check_sizes(
    in_channels: int, out_channels: int, width: int, num_heads: int, edge_dim: int
) -> None:
    sizes = {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "attn_channels": width,
        "num_heads": num_heads,
    }
    for name, size in (sizes | {"edge_dim": edge_dim}).items():
        check_integer(name, size)
    if in_channels != out_channels:
        got = f"{in_channels} and {out_channels}"
        raise ValueError(f"in_channels must equal out_channels (residual connection), got {got}")
    if width % num_heads:
        raise ValueError(
            f"num_heads must divide the attention channels, got {num_heads} heads and {width} "
            "channels"
        )
