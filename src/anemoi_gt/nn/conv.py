"""GraphTransformerConv: edge attention as a PyG layer, with its projections."""

import warnings
from collections.abc import Sequence
from typing import Any, Optional

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parameter import UninitializedParameter
from torch_geometric.nn import Linear
from torch_geometric.nn.conv import MessagePassing, transformer_conv
from torch_geometric.typing import OptTensor

from anemoi_gt.graph import GraphStructure, ShardedGraph
from anemoi_gt.graph.sharded_graph import is_sharded
from anemoi_gt.kernel_config import KernelConfig, check_config
from anemoi_gt.nn.chunking import Chunk, is_chunked, map_chunks
from anemoi_gt.nn.input_validation import (
    check_features,
    check_nodes,
    sides_of,
    stored_parameter,
)
from anemoi_gt.nn.plain import ATTENTION, PYG_LINEAR, why_not_plain
from anemoi_gt.nn.pyg_inputs import is_adjacency, is_sparse_tensor, read_edges
from anemoi_gt.nn.sublayers import edge_operands
from anemoi_gt.ops import attention_weights, edge_attention
from anemoi_gt.option_checks import check_integer, check_probability
from anemoi_gt.refusal import Refusal, transient

LAZY = -1  # inferred from the first input


class GraphTransformerConv(MessagePassing):
    """Multi-head attention over in-edges, with the state dict of PyG's `TransformerConv`.

    For destination i, source j, edge e = (j -> i) and each head of C = `out_channels` channels:

        p_e   = softmax over the in-edges of i of < W_query x_i , W_key x_j + W_edge a_e > / sqrt(C)
        out_i = sum_e p_e (W_value x_j + W_edge a_e)
        y_i   = out_i + W_skip x_i                                                       root_weight
        y_i   = g W_skip x_i + (1 - g) out_i                                             beta
        g     = sigmoid(W_beta [out_i, W_skip x_i, out_i - W_skip x_i])

    W_query, W_key, W_value and W_skip have a bias if `bias` is set. No tensor of size [E, heads *
    C] is materialised.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features of a node, or of a source and of a destination; -1 infers the number from the first
        input.
    out_channels : int
        Channels of each head.
    heads : int
    concat : bool
        Concatenate the heads to heads * out_channels features; otherwise average them to
        out_channels features.
    beta : bool
        Combine attention and the destination's own features by a learned gate; ignored without
        `root_weight`.
    dropout : float
        Probability of dropping an attention weight in training.
    edge_dim : int, optional
        Number of attributes of an edge, D; -1 infers it from the first input; None for no
        attributes.
    bias : bool
    root_weight : bool
        Add the transformed features of the destination itself.
    config : KernelConfig
        Backend and precision of the attention.
    **kwargs
        Options of PyG's `MessagePassing`, such as `flow`.

    Raises
    ------
    ValueError
        For sizes below 1, a dropout outside 0 .. 1, or an aggregation other than the sum.

    Notes
    -----
    The attention of a destination without in-edges is 0. While a PyG explainer, a message hook or
    `torch.jit.trace` is active, the layer falls back to per-edge messages, as in PyG, with a
    warning; a precision has no effect on them. It does so too if its `message`, `aggregate`,
    `update`, `propagate` or aggregation is replaced; a named backend raises ValueError then.

    Examples
    --------
    >>> conv = GraphTransformerConv(4, 8, heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    >>> conv(torch.randn(2, 4), graph, torch.randn(3, 3)).shape
    torch.Size([2, 16])

    References
    ----------
    Shi et al. (2021), Masked Label Prediction: Unified Message Passing Model for Semi-Supervised
    Classification, section 3.1.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        heads: int = 1,
        concat: bool = True,  # noqa: FBT001, FBT002  as in PyG's TransformerConv
        beta: bool = False,  # noqa: FBT001, FBT002  as in PyG's TransformerConv
        dropout: float = 0.0,
        edge_dim: int | None = None,
        bias: bool = True,  # noqa: FBT001, FBT002  as in PyG's TransformerConv
        root_weight: bool = True,  # noqa: FBT001, FBT002  as in PyG's TransformerConv
        *,
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
        **kwargs: Any,
    ):
        kwargs.setdefault("aggr", "add")
        # as in PyG's TransformerConv: messages are [E, heads, C]
        super().__init__(node_dim=0, **kwargs)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.edge_dim = edge_dim
        self.concat = concat
        # without root_weight there is nothing to combine, and PyG makes no lin_beta either
        self.beta = beta and root_weight
        self.root_weight = root_weight
        self.dropout = dropout
        self.config = config
        # PyG's AttentionExplainer reads the attention weights here while messages are computed.
        self._alpha: Tensor | None = None
        self._check_options()
        src_channels, dst_channels = _both_sides(in_channels)
        inner = heads * out_channels
        outer = inner if concat else out_channels
        self.lin_key = Linear(src_channels, inner, bias=bias)
        self.lin_query = Linear(dst_channels, inner, bias=bias)
        self.lin_value = Linear(src_channels, inner, bias=bias)
        self.lin_edge = None if edge_dim is None else Linear(edge_dim, inner, bias=False)
        # also without root_weight, as in PyG's state dict
        self.lin_skip = Linear(dst_channels, outer, bias=bias)
        self.lin_beta = Linear(3 * outer, 1, bias=False) if self.beta else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise all parameters in PyG's order: the same seed gives the same parameters."""
        super().reset_parameters()
        for linear in (
            self.lin_key,
            self.lin_query,
            self.lin_value,
            self.lin_edge,
            self.lin_skip,
            self.lin_beta,
        ):
            if linear is not None:
                linear.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphStructure | ShardedGraph | Sequence[Chunk] | Tensor,  # or a SparseTensor
        edge_attr: Tensor | None = None,
        return_attention_weights: bool | None = None,  # noqa: FBT001  as in PyG
    ) -> Any:
        """Attend over the in-edges of every destination.

        Parameters
        ----------
        x : Tensor [N, F] or [B, N, F], or a pair (x_src, x_dst) of them
            The batch shares one graph; different graphs form one graph, as PyG's `Batch` makes it.
        edge_index : GraphStructure, ShardedGraph, chunks, Tensor [2, E], EdgeIndex, or adjacency
        adj_t
            For a ShardedGraph, x_src holds the local sources. Chunks come from
            `split_destinations`. adj_t is a `torch.sparse` tensor or `SparseTensor` [N_dst, N_src],
            whose values [E, D] replace a missing `edge_attr`. Tensors and adjacencies are sorted in
            every call (see `KernelConfig.stable_sort`), and their indices are checked on the
            host on a CPU only.
        edge_attr : Tensor [E, D] or [B, E, D], optional
            Raw attributes in the caller's edge order.
        return_attention_weights : bool, optional
            Any value but None returns the weights too, as in PyG; not with chunks.

        Returns
        -------
        Tensor [N_dst, F_out] or [B, N_dst, F_out]
            F_out = heads * out_channels, or out_channels without `concat`. With
            `return_attention_weights` a pair: this tensor, and (edge_index, weights [E, heads]
            or [B, E, heads]), before dropout, in the caller's edge order; for a SparseTensor, that
            tensor with the weights as values.

        Raises
        ------
        ValueError
            When x, edges and attributes do not fit together, or `config` names a backend that
            cannot run.
        RuntimeError
            In an ONNX export, which has no operator for it.
        """
        if torch.onnx.is_in_onnx_export():
            raise RuntimeError(
                "a model for an ONNX export must have layers that ONNX has operators for, got "
                "GraphTransformerConv; export PyG's TransformerConv: "
                "anemoi_gt.integrations.pyg.swap_back(model) puts it back"
            )
        x_src, x_dst = x = self._sides(x)
        if is_chunked(edge_index):
            if return_attention_weights is not None:
                raise ValueError(
                    "return_attention_weights must be None with chunks, got "
                    f"{return_attention_weights}"
                )
            return map_chunks(
                lambda x, graph, attr, _: self.forward(x, graph, attr), edge_index, x, edge_attr
            )
        edges = edge_index
        pending = None
        if is_sharded(edge_index):
            pending = edge_index.start_exchange(x_src)
            edges = edge_index.structure
        query = self._split_heads(self.lin_query(x_dst))
        x_src = x_src if pending is None else pending.wait()
        key = self._split_heads(self.lin_key(x_src))
        value = self._split_heads(self.lin_value(x_src))

        alpha = None
        refusal = self._why_messages()
        if refusal is not None:
            out, alpha = self._attend_by_messages(refusal, query, key, value, edges, edge_attr)
        else:
            graph, edge_attr = self._edges(edges, edge_attr, (x_src.shape[-2], x_dst.shape[-2]))
            check_nodes(graph, x_src, x_dst)
            operands = self._edge_operands(edge_attr)
            dropout_p = self.dropout if self.training else 0.0
            out, _ = edge_attention(
                query, key, value, graph, *operands, dropout_p=dropout_p, config=self.config
            )
            if return_attention_weights is not None:
                alpha = attention_weights(query, key, graph, *operands[:2], config=self.config)
        out = self._add_skip(out.flatten(-2) if self.concat else out.mean(dim=-2), x_dst)
        if return_attention_weights is None:
            return out
        if is_sparse_tensor(edge_index):
            return out, edge_index.set_value(alpha, layout="coo")
        return out, (edge_index, alpha)

    def message(
        self,
        query_i: Tensor,
        key_j: Tensor,
        value_j: Tensor,
        edge_attr: OptTensor,
        index: Tensor,
        ptr: OptTensor,
        size_i: Optional[int],  # noqa: UP045  PyG reads the annotations and supports no other spelling
    ) -> Tensor:
        """Return the message of each edge [E, heads, C], for PyG's explainers and message hooks."""
        if self.lin_edge is not None:
            embedded = self._split_heads(self.lin_edge(edge_attr))
            key_j, value_j = key_j + embedded, value_j + embedded
        score = (query_i * key_j).sum(-1) * self.out_channels**-0.5
        # looked up where PyG's layer does, which an edit of it changes
        alpha = self._alpha = transformer_conv.softmax(score, index, ptr, size_i)
        return value_j * functional.dropout(alpha, self.dropout, self.training).unsqueeze(-1)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, {self.out_channels}, heads={self.heads})"

    def _check_options(self) -> None:
        check_integer("out_channels", self.out_channels)
        check_integer("heads", self.heads)
        if self.edge_dim not in (None, LAZY):
            check_integer("edge_dim", self.edge_dim, note=", or None for edges without attributes")
        check_probability("dropout", self.dropout)
        check_config(self.config)
        if self.aggr not in ("add", "sum"):
            raise ValueError(f"aggr must be 'add', attention is a weighted sum, got {self.aggr!r}")
        if self.decomposed_layers != 1:
            raise ValueError(
                f"decomposed_layers must be 1, heads cannot be split, got {self.decomposed_layers}"
            )

    def _sides(self, x: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return (x_src, x_dst), checked."""
        x_src, x_dst = sides_of(x)
        for name, side, linear in (
            ("x_src", x_src, self.lin_key),
            ("x_dst", x_dst, self.lin_query),
        ):
            channels = getattr(linear, "in_channels", None)  # None: an adapter, without PyG's name
            if channels == LAZY and isinstance(side, Tensor) and side.shape[-1] == 0:
                raise ValueError(f"{name} must have at least one feature, got {tuple(side.shape)}")
            known = None if channels == LAZY else channels
            check_features(name, side, known, stored_parameter(linear))
        return x_src, x_dst

    def _edges(
        self, edge_index: Any, edge_attr: Tensor | None, num_nodes: tuple[int, int]
    ) -> tuple[GraphStructure, Tensor | None]:
        """Return the edges as a structure, and the attributes in the caller's edge order."""
        graph, edge_attr = read_edges(
            self._along_flow(edge_index), edge_attr, num_nodes, self.config
        )
        self._check_attributes(edge_attr)
        return graph, edge_attr

    def _check_attributes(self, edge_attr: Tensor | None) -> None:
        if (edge_attr is None) != (self.lin_edge is None):
            got = "none" if edge_attr is None else f"shape {tuple(edge_attr.shape)}"
            raise ValueError(
                f"edge_attr must be passed if and only if the layer has an edge_dim, got {got} and "
                f"edge_dim={self.edge_dim}"
            )

    def _along_flow(self, edge_index: Any) -> Any:
        """Return `edge_index` with sources in row 0."""
        if self.flow == "source_to_target":
            return edge_index
        if isinstance(edge_index, GraphStructure) or is_adjacency(edge_index):
            raise ValueError(
                "flow 'target_to_source' must be used with an edge_index [2, E], got "
                f"{type(edge_index).__name__}, which has its own direction; build it in the other "
                "direction"
            )
        return edge_index.flip(0)

    def _edge_operands(
        self, edge_attr: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return attributes, W_edge [heads * C, D] and an added bias, or embedded edges."""
        linear = self.lin_edge
        if linear is None:
            return None, None, None
        assert edge_attr is not None  # as `_check_attributes` has seen
        # lin_edge is not called, so the hook of PyG's lazy Linear, which does this, does not run
        if type(linear._parameters.get("weight")) is UninitializedParameter:
            linear.initialize_parameters(linear, (edge_attr,))
        return edge_operands(linear, edge_attr, self.heads, PYG_LINEAR)

    def _split_heads(self, features: Tensor) -> Tensor:
        return features.view(*features.shape[:-1], self.heads, self.out_channels)

    def _add_skip(self, out: Tensor, x_dst: Tensor) -> Tensor:
        if not self.root_weight:
            return out
        skip = self.lin_skip(x_dst)
        lin_beta = self.lin_beta
        if lin_beta is None:
            return out + skip
        gate = lin_beta(torch.cat([out, skip, out - skip], dim=-1)).sigmoid()
        return gate * skip + (1 - gate) * out

    def _why_messages(self) -> Refusal | None:
        """Return why the layer must compute with PyG's messages, one per edge, or None."""
        if torch.jit.is_tracing():
            refusal: Refusal | None = transient("torch.jit.trace records it")
        else:
            refusal = why_not_plain(("", self, (ATTENTION,)))
        if refusal is not None:
            fallback = "falls back to per-edge messages"
            refusal.raise_if_named(self.config.backend, self, fallback)
        return refusal

    def _attend_by_messages(
        self,
        refusal: Refusal,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        edges: Any,  # as in `forward`, without chunks and shards
        edge_attr: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return attention [N_dst, H, C] and weights [E, H], as PyG computes them."""
        if query.dim() == 4:
            raise ValueError(
                "x must have shape [N, F] while a layer falls back to per-edge messages, got a "
                f"batch of {query.shape[0]}: {refusal.text}"
            )
        precision = self.config.precision
        dtype = "" if precision is None else f" in the dtype of its inputs, not {precision!r}"
        warnings.warn(
            f"GraphTransformerConv falls back to per-edge messages{dtype}: {refusal.text}",
            stacklevel=3,
        )
        size = (key.shape[0], query.shape[0])
        if self.flow == "target_to_source":
            size = size[::-1]
        edge_index = edges
        if not isinstance(edges, Tensor) or is_adjacency(edges):
            graph, edge_attr = self._edges(edges, edge_attr, size)
            edge_index = graph.edge_index()
        # sums by int32 indices have wrong gradients on a CPU (PyTorch 2.13)
        edge_index = edge_index.long()
        self._check_attributes(edge_attr)
        # PyG reads the types of arguments from the next line
        # propagate_type: (query: Tensor, key: Tensor, value: Tensor, edge_attr: OptTensor)
        out = self.propagate(
            edge_index, size=size, query=query, key=key, value=value, edge_attr=edge_attr
        )
        alpha = self._alpha
        self._alpha = None  # or the layer would keep the graph of autograd alive
        return out, alpha


def _both_sides(in_channels: int | tuple[int, int]) -> tuple[int, int]:
    """Return the features of a source and of a destination, checked."""
    sides = sides_of(in_channels)
    for side in sides:
        if side != LAZY:
            check_integer("in_channels", side, note=f", or {LAZY} to infer it from the first input")
    return sides
