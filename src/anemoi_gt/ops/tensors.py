"""Tensors, options and checks of each operator, as trees of NamedTuples; checks read metadata only.

    edge_attention          see `anemoi_gt.edge_attention`
    attention_sublayer      z_i = x_i + W_proj (edge attention of n + W_self n_i) + b, n = norm(x),
                            and in a block the network_sublayer of z
    network_sublayer        y_n = x_n + network([norm_in(x_n), m_n])       or without x_n
    interaction_sublayer    e'_e = e_e + network([x_i, x_j, e_e])          or without e_e
    sum_edges               s_i  = sum of e'_e over the in-edges of i      edge e from j to i

    network(u) = norm(W_out act(W_2 act(W_1 u + b_1) + b_2) + b_out)

Hidden layers, both norms and m_n are optional: the feed-forward sub-layer of a transformer is
x + network(norm_in(x)) without the outer norm, a linear layer network(x) without hidden layers. The
first layer of the edge update factors over nodes: W_1 u = W_e e_e + (W_i x_i + b_1) + W_j x_j. An
interaction network (Battaglia et al. 2016, https://arxiv.org/abs/1612.00222) is both, the second on
[x_i, s_i]. Anemoi's graph networks consist of them; GraphCast (Lam et al. 2023, supplement 3.5 to
3.7) sums the networks, not e'_e.

Dimensions: N nodes of a batch entry, B batch entries, E edges of one, R halo rows, F features of a
row, K and L hidden features, or K features of a condition, H heads of C channels, D edge
attributes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import have_size
from anemoi_gt.graph.structure import check_structure
from anemoi_gt.option_checks import check_number


class Operand(Protocol):
    """An object with a shape and a dtype: a tensor, or its description in a plan."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the elements."""


# Tensor at run time, Buffer in a plan
Held = TypeVar("Held", covariant=True)
OperandT = TypeVar("OperandT", bound=Operand)  # for functions that read only shapes and dtypes


class AttentionOperands(NamedTuple, Generic[Held]):
    """The floating-point operands of one call, or what belongs to each of them.

    `edge_attention` documents them.
    """

    query: Held  # [N_dst, H, C] or [B, N_dst, H, C]
    key: Held  # [N_src, H, C] or [B, N_src, H, C]
    value: Held  # [N_src, H, C] or [B, N_src, H, C]
    edge_attr: Held | None = None  # raw [.., E, D] with edge_weight, else embedded [.., E, H, C]
    edge_weight: Held | None = None  # [H * C, D]
    edge_bias: Held | None = None  # [H * C]

    def map(self, function: Callable[[Held], Held]) -> "AttentionOperands[Held]":
        """Apply `function` to each operand that is not None."""
        rows = function(self.query), function(self.key), function(self.value)
        # no function inside: its annotations cannot be traced before torch 2.13
        edges = [
            None if operand is None else function(operand)
            for operand in (self.edge_attr, self.edge_weight, self.edge_bias)
        ]
        return AttentionOperands(*rows, *edges)


class IndexTensors(NamedTuple, Generic[Held]):
    """The index tensors of a `GraphStructure`, by name; the reverse structure only if read."""

    colptr: Held  # [N_dst + 1]
    row: Held  # [E]
    perm: Held | None = None  # [E]
    global_edge_id: Held | None = None  # [E] int64
    fixed_in_degree: Held | None = None  # [K, 0]
    rowptr: Held | None = None  # [N_src + 1]
    col: Held | None = None  # [E]
    csr_to_csc: Held | None = None  # [E]
    dst_hubs: Held | None = None  # [257, 0]: the number of edges from which a node is a hub
    src_hubs: Held | None = None

    @classmethod
    def of(cls, graph: GraphStructure) -> "IndexTensors[Tensor]":
        """Collect the index tensors of `graph`."""
        return IndexTensors(*[getattr(graph, name) for name in cls._fields])


class AttentionConstants(NamedTuple, Generic[Held]):
    """All tensors of a call of edge attention that are not differentiated."""

    graph: IndexTensors[Held]
    seed: Held | None  # [1] int64, with dropout


class Linear(NamedTuple, Generic[Held]):
    """y = W x + b."""

    weight: Held = None  # type: ignore[assignment]  # [F_out, F_in]; None without the map
    bias: Held | None = None  # [F_out]


class Norm(NamedTuple, Generic[Held]):
    """n = (x - mean) / sqrt(var + eps), times a scale, plus a shift.

    Without a condition they are [F], None for 1 and 0. With a condition c_i per row, both are
    affine in it:

        scale_i = 1 + W_scale c_i + b_scale        shift_i = W_shift c_i + b_shift
    """

    scale: Held | None = None  # [F]
    shift: Held | None = None  # [F]
    condition: Held | None = None  # [B * N, K]
    scale_map: Linear[Held] = Linear()  # [F, K] and [F], with a condition only
    shift_map: Linear[Held] = Linear()


class EdgeAttentionOptions(NamedTuple):
    """Options of edge attention."""

    scale: float
    dropout_p: float
    replay: bool  # as in `KernelConfig`


class NormOptions(NamedTuple):
    """Options of a norm."""

    eps: float = 0.0  # positive; 0 without a norm of heads or of a linear layer
    is_centred: bool = True  # layer norm; if not, RMSNorm, whose mean is taken as 0


class Layer(NamedTuple, Generic[Held]):
    """A hidden layer: act(W u + b), or gated act(W_gate u + b_gate) (W u + b)."""

    gate: Linear[Held] = Linear()
    value: Linear[Held] = Linear()


class AttentionTensors(NamedTuple, Generic[Held]):
    """Tensors of an attention sub-layer, or what belongs to each of them.

    x_src is None where sources and destinations are one set of nodes with one norm. The halo
    follows a rank's own sources in each batch entry; its owner ranks normalised it.
    """

    x_src: Held | None  # [B * N_src, F]
    halo: Held | None  # [B * R, F]
    x_dst: Held  # [B * N_dst, F]
    edge_attr: Held  # [E, D] or [B, E, D]
    norm: Norm[Held]  # of destinations
    norm_src: Norm[Held]  # of sources, where x_src is not None
    query: Linear[Held]  # [H * C, F]
    self_term: Linear[Held]  # [H * C, F]
    key: Linear[Held]  # [H * C, F]
    value: Linear[Held]  # [H * C, F]
    edge: Linear[Held]  # [H * C, D]
    projection: Linear[Held]  # [F, H * C]
    query_scale: Held | None  # [C], of the norm of queries
    key_scale: Held | None  # [C], of the norm of keys
    # of the feed-forward network after the attention, in a block that is one operator
    norm_in: Norm[Held] = Norm()
    hidden: Layer[Held] = Layer()  # [K, F]
    out: Linear[Held] = Linear()  # [F, K]; None without the network


class Network(NamedTuple, Generic[Held]):
    """A network of at most two hidden layers; K or L are its inputs where a layer is absent."""

    first: Layer[Held]  # [K, inputs]
    second: Layer[Held]  # [L, K]
    out: Linear[Held]  # [F, L]
    norm: Norm[Held]


class NetworkTensors(NamedTuple, Generic[Held]):
    """Tensors of a network on rows, or what belongs to each of them."""

    x: Held  # [N, F_x]
    more: Held | None  # [N, F_m]: more inputs
    norm_in: Norm[Held]  # of x before the network
    network: Network[Held]


class InteractionTensors(NamedTuple, Generic[Held]):
    """Tensors of an edge update, or what belongs to each of them.

    The halo, sources of other ranks, follows a rank's own sources in each batch entry.
    """

    x_src: Held | None  # [B * N_src, F_src]; None where sources are the destinations
    halo: Held | None  # [B * R, F_src]
    x_dst: Held  # [B * N_dst, F_dst]
    edges: Held  # [B * E, F]
    network: Network[Held]


class NetworkOptions(NamedTuple):
    """Options of a network."""

    norm: NormOptions  # eps 0 for an absent norm
    activation: str  # of hidden layers, or of their gates; see `anemoi_gt.ops.activations`
    gemm_dtype: torch.dtype
    out_dtype: torch.dtype
    residual: bool  # whether x is added
    repeats_x: bool = False  # whether x takes the place of `more` too
    norm_in: NormOptions = NormOptions()  # eps 0 for an absent norm
    keep_hidden: bool = True  # rows before activations, which are else computed again
    replay: bool = True  # as in `KernelConfig`


class AttentionOptions(NamedTuple):
    """Options of an attention sub-layer."""

    heads: int
    batch: int
    norm: NormOptions
    norm_src: NormOptions
    query_norm: NormOptions
    key_norm: NormOptions
    gemm_dtype: torch.dtype  # of the operands of the attention too
    replay: bool = True  # as in `KernelConfig`
    # as of `NetworkOptions`, of the feed-forward network
    norm_in: NormOptions = NormOptions()
    activation: str = ""
    keep_hidden: bool = True


class InteractionOptions(NamedTuple):
    """Options of an edge update."""

    batch: int
    network: NetworkOptions  # without a residual connection, the update of e_e is returned

    @property
    def gemm_dtype(self) -> torch.dtype:
        """The dtype of the operands of matrix products."""
        return self.network.gemm_dtype

    @property
    def replay(self) -> bool:
        """As in `KernelConfig`."""
        return self.network.replay


class NoConstants(NamedTuple):
    """The constants of an operator on rows, which reads no graph."""


class CallSizes(NamedTuple):
    """Sizes of a call of an operator, for people."""

    sizes: dict[str, int]  # by name
    dtype: torch.dtype  # of products
    features: str = ""  # form of the edge features that an attention reads

    @classmethod
    def of_attention(cls, operands: AttentionOperands[Operand], num_edges: int) -> "CallSizes":
        """Read the sizes of operands, or of what has their shapes."""
        query, key, _, edge_attr, edge_weight, _ = operands
        num_dst, heads, channels = query.shape[-3:]
        features = "none"
        if edge_attr is not None:
            features = "embedded" if edge_weight is None else "raw"
        sizes = {
            "batch": query.shape[0] if len(query.shape) == 4 else 1,
            "sources": key.shape[-3],
            "destinations": num_dst,
            "edges": num_edges,
            "heads": heads,
            "channels": channels,
            "attributes": 0 if edge_weight is None else edge_weight.shape[1],
        }
        return cls(sizes, query.dtype, features)


def check_operands(operands: AttentionOperands[Tensor], graph: GraphStructure) -> None:
    """Raise ValueError unless the operands of `edge_attention` fit together and fit `graph`."""
    query, key, value, *edges = operands
    check_structure(graph)
    device = graph.device
    for name, operand in zip(AttentionOperands._fields, operands, strict=True):
        if operand is None and name.startswith("edge"):
            continue
        if (
            not isinstance(operand, Tensor)
            or not operand.is_floating_point()
            or operand.device != device
        ):
            _refuse_tensor(name, operand, device)
    _check_nodes(query, key, value, graph)
    *batch, _, heads, channels = query.shape
    _check_edges(batch, heads, channels, graph, *edges)


def check_scale(scale: float | None) -> None:
    """Raise ValueError unless `scale` is a finite number or None."""
    if scale is None:
        return
    check_number("scale", scale)
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be finite, or None for 1 / sqrt(channels), got {scale}")


def _refuse_tensor(name: str, operand: object, device: torch.device) -> None:
    """Raise ValueError with the reason why an operand is invalid."""
    if not isinstance(operand, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(operand).__name__}")
    if not operand.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {operand.dtype}; cast it first")
    raise ValueError(
        f"{name} must be on the device of the graph, {device}, got {operand.device}; move the "
        "graph once with graph.to(device)"
    )


def _check_nodes(query: Tensor, key: Tensor, value: Tensor, graph: GraphStructure) -> None:
    shape = tuple(query.shape)
    if len(shape) not in (3, 4):
        raise ValueError(f"query must have shape [N_dst, H, C] or [B, N_dst, H, C], got {shape}")
    *batch, num_dst, heads, channels = shape
    for name, operand in (("key", key), ("value", value)):
        got = tuple(operand.shape)
        if len(got) != len(shape):
            raise ValueError(f"{name} must have the {len(shape)} dimensions of query, got {got}")
        *its_batch, num_src, its_heads, its_channels = got
        if its_channels != channels or its_heads != heads or its_batch != batch:
            raise ValueError(
                f"{name} must have the batch, heads and channels of query {shape}, got {got}"
            )
        if not have_size(num_src, graph.num_src):
            raise ValueError(
                f"{name} must have {graph.num_src} rows, one per source node, got {got}"
            )
    if not have_size(num_dst, graph.num_dst):
        raise ValueError(
            f"query must have {graph.num_dst} rows, one per destination node, got {shape}"
        )
    if heads == 0 or channels == 0:
        raise ValueError(f"heads and channels must be at least 1, got query of shape {shape}")


def _check_edges(
    batch: Sequence[int],
    heads: int,
    channels: int,
    graph: GraphStructure,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
) -> None:
    if edge_bias is not None and edge_weight is None:
        raise ValueError(
            "edge_bias must come with edge_weight: embedded edge features include their bias"
        )
    if edge_attr is None:
        if edge_weight is not None:
            raise ValueError("edge_weight must come with edge_attr [E, D], got edge_attr None")
        return
    feature: tuple[int, ...] = (heads, channels)
    expected = "[E, H, C] or [B, E, H, C]"
    remedy = "raw attributes [E, D] need edge_weight"
    if edge_weight is not None:
        if (
            edge_weight.dim() != 2
            or edge_weight.shape[0] != heads * channels
            or edge_weight.shape[1] == 0
        ):
            raise ValueError(
                f"edge_weight must have shape [heads * channels, D] = [{heads * channels}, D >= "
                f"1], got {tuple(edge_weight.shape)}"
            )
        feature = (edge_weight.shape[1],)
        expected = "[E, D] or [B, E, D]"
        remedy = "D is edge_weight.shape[1]"
    shared = (graph.num_edges, *feature)
    if not (_has_shape(edge_attr, shared) or _has_shape(edge_attr, (*batch, *shared))):
        raise ValueError(
            f"edge_attr must have shape {expected} = {shared}, got {tuple(edge_attr.shape)}; "
            f"{remedy}"
        )
    if edge_bias is not None and tuple(edge_bias.shape) != (heads * channels,):
        raise ValueError(
            f"edge_bias must have shape [{heads * channels}], got {tuple(edge_bias.shape)}"
        )


def _has_shape(operand: Tensor, shape: tuple[int, ...]) -> bool:
    """Compare shapes size by size: tuples with symbolic sizes do not compare in traced code."""
    if not torch.compiler.is_compiling():
        return operand.shape == shape
    return operand.dim() == len(shape) and all(map(have_size, operand.shape, shape))


def check_network(t: NetworkTensors[Tensor], options: NetworkOptions) -> None:
    """Raise ValueError unless rows and parameters of a network fit together: kernels rely on it."""
    inputs = t.x.shape[1]
    if t.more is not None:
        check_rows("more", t.more, t.x.shape[0])
        inputs += t.more.shape[1]
    elif options.repeats_x:
        inputs *= 2
    # compared here, because a call of a function in every call of a block costs time
    network = t.network
    first, out = network.first.value.weight, network.out.weight
    if (out if first is None else first).shape[1] != inputs:
        _refuse_inputs(network, inputs)
    if options.residual and t.x.shape[1] != out.shape[0]:
        _refuse_residual(network, "x", t.x)


def check_attention(
    t: AttentionTensors[Tensor], graph: GraphStructure, options: AttentionOptions
) -> None:
    """Raise ValueError unless rows, parameters and structure of an attention fit together."""
    device = graph.device
    checked = (("x_dst", t.x_dst), ("edge_attr", t.edge_attr), ("edge_weight", t.edge.weight))
    for name, operand in checked:
        if not operand.is_floating_point() or operand.device != device:
            _refuse_tensor(name, operand, device)
    x_src = _check_ends(t, graph, options.batch)
    width, features = t.query.weight.shape
    for name, rows in (("x_dst", t.x_dst), ("x_src", x_src)):
        if rows.shape[1] != features:
            raise ValueError(f"{name} must have {features} features, got {tuple(rows.shape)}")
    batch = () if options.batch == 1 else (options.batch,)
    _check_edges(batch, options.heads, width // options.heads, graph, t.edge_attr, *t.edge)


def check_interaction(
    t: InteractionTensors[Tensor], graph: GraphStructure, options: InteractionOptions
) -> None:
    """Raise ValueError unless rows, parameters and structure of an edge update fit together."""
    batch = options.batch
    x_src = _check_ends(t, graph, batch)
    check_rows("edges", t.edges, batch * graph.num_edges)
    inputs = t.x_dst.shape[1] + x_src.shape[1] + t.edges.shape[1]
    if t.network.first.value.weight.shape[1] != inputs:
        _refuse_inputs(t.network, inputs)
    if t.edges.shape[1] != t.network.out.weight.shape[0]:
        _refuse_residual(t.network, "edges", t.edges)


def _check_ends(
    t: AttentionTensors[Tensor] | InteractionTensors[Tensor], graph: GraphStructure, batch: int
) -> Tensor:
    """Return the own sources; raise unless there is a row for each node of each batch entry."""
    x_src = t.x_dst if t.x_src is None else t.x_src
    own_sources = batch * graph.num_src
    if t.halo is not None:
        _check_halo(t.halo, x_src.shape[1], batch)
        own_sources -= t.halo.shape[0]
    check_rows("x_dst", t.x_dst, batch * graph.num_dst)
    check_rows("x_src", x_src, own_sources)
    return x_src


def check_rows(name: str, rows: Tensor, number: int) -> None:
    """Raise ValueError unless there are `number` rows."""
    if not torch.compiler.is_compiling() and rows.shape[:-1] == (number,):
        return
    if rows.dim() != 2 or not have_size(rows.shape[0], number):
        raise ValueError(f"{name} must be [{number}, features], got {tuple(rows.shape)}")


def _check_halo(halo: Tensor, features: int, batch: int) -> None:
    is_entries = halo.dim() == 2 and have_size(halo.shape[0] % batch, 0)
    if not is_entries or halo.shape[1] != features:
        raise ValueError(
            f"halo must be [{batch} * R, {features}], rows of each batch entry with the features "
            f"of x_src, got {tuple(halo.shape)}"
        )


def _refuse_inputs(network: Network[Tensor], inputs: int) -> None:
    weight = network.first.value.weight
    if weight is None:
        weight = network.out.weight
    raise ValueError(
        f"the first layer must take the {inputs} features of its inputs, side by side, got a "
        f"weight {tuple(weight.shape)}"
    )


def _refuse_residual(network: Network[Tensor], name: str, rows: Tensor) -> None:
    raise ValueError(
        f"{name} must have the {network.out.weight.shape[0]} features that the network returns "
        f"(residual connection), got {tuple(rows.shape)}"
    )
