"""Graph networks as PyG layers: the edge update with its sum, and a block with the node update.

For an edge e from source j to destination i:

    e'_e = e_e + edge_mlp([x_i, x_j, e_e])        s_i = sum of e'_e over the in-edges of i
    x'_i = x_i + node_mlp([x_i, s_i])             or of the updates edge_mlp(..)

The `torch` backend is PyG's message passing with modules; `triton` has three operators: the edge
update, the sums over edges, and networks on rows (`anemoi_gt.ops.tensors`).
"""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.inits import reset
from torch_geometric.typing import OptTensor, PairTensor  # noqa: F401  read with `propagate_type`

from anemoi_gt.graph import GraphStructure, ShardedGraph
from anemoi_gt.graph.sharded_graph import is_sharded
from anemoi_gt.kernel_config import KernelConfig, check_config
from anemoi_gt.nn.fused_block import (
    NOT_FASTER,
    WRONG_CONDITION,
    for_call,
    network,
    update_edges,
)
from anemoi_gt.nn.input_validation import (
    check_batch,
    check_features,
    check_nodes,
    sides_of,
    stored_parameter,
)
from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.mlp import NormedMLP
from anemoi_gt.nn.plain import (
    CONDITIONAL_NORM,
    IDENTITY,
    INTERACTION,
    LAYER_NORM,
    RMS_NORM,
    Asked,
    why_not_plain,
)
from anemoi_gt.nn.pyg_inputs import is_edge_index, read_edges
from anemoi_gt.nn.sublayers import Computation, NetworkModules, read_network
from anemoi_gt.nn.unchanged import none_refused, reading
from anemoi_gt.ops.dtypes import DTYPES, accumulator_dtype, without_autocast
from anemoi_gt.option_checks import check_integer
from anemoi_gt.refusal import Refusal, RefusalKind, not_faster, permanent, transient
from anemoi_gt.torch_compat import constant_when_traced, is_exporting

NO_OPERATORS = not_faster("its backend has no operators of graph networks")
NORMS = (LAYER_NORM, RMS_NORM, IDENTITY, CONDITIONAL_NORM)
SUMMED = ("edges", "updates")


class InteractionConv(MessagePassing):
    """Edge update of a graph network, and its sum over the in-edges of each destination.

    For an edge e from source j to destination i:

        u_e  = edge_mlp([x_i, x_j, e_e])
        e'_e = e_e + u_e
        s_i  = sum of e'_e, or of u_e, over the in-edges of i

    The network `edge_mlp` has hidden layers with an activation or a gate, a linear map and a norm.
    On backend `triton` no tensor of its inputs side by side is materialised.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features of a node, or of a source and of a destination.
    edge_dim : int
        Features of an edge, which the update keeps.
    hidden_dim : int, optional
        Features of a hidden layer; None is `edge_dim`.
    hidden_layers : int
        Hidden layers of a network; backend `triton` has one or two.
    mlp_implementation : {"mlp", "glu", "swiglu", "geglu", "reglu"}
        Plain or gated hidden layers.
    layer_kernels : LayerKernels
        Classes of linear maps, of the norm on the output, and of the activation:
        `LayerNorm=torch.nn.RMSNorm` is an RMSNorm, `LayerNorm=torch.nn.Identity` no norm, and
        `LayerNorm=partial(ConditionalLayerNorm, condition_shape=K)` takes a condition.
    sum_of : {"edges", "updates"}
        What is summed over in-edges: the updated edges e', as in Anemoi, or their updates u, as in
        GraphCast and neural-lam.
    config : KernelConfig
        Backend of the layer, precision of its matrix products, and sorting of raw edges. `auto`
        selects `triton` on a GPU under 16-bit autocast, or with a 16-bit precision.

    Raises
    ------
    ValueError
        For a size that is not an integer or below 1, or an unknown mlp_implementation or sum_of.

    Notes
    -----
    Results have the dtype of `edge_attr`. While a PyG explainer, a message hook or
    `torch.jit.trace` is active, the layer computes with PyG's messages, with a warning. So it does
    if a method of message passing or a module of `edge_mlp` is replaced; backend `triton`, if it is
    named, raises ValueError then.

    On backend `triton` results are the same bits each time. On `torch` on a GPU they are only under
    `torch.use_deterministic_algorithms(True)`, as in PyG.

    Examples
    --------
    >>> conv = InteractionConv((4, 6), edge_dim=8)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), (5, 2))
    >>> edges, sums = conv((torch.randn(5, 4), torch.randn(2, 6)), graph, torch.randn(3, 8))
    >>> edges.shape, sums.shape
    (torch.Size([3, 8]), torch.Size([2, 8]))

    References
    ----------
    Battaglia et al. (2016), Interaction Networks for Learning about Objects, Relations and Physics,
    section 2.
    """

    sum_of = "edges"  # of a layer that version 0.4.0 pickled

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        edge_dim: int,
        hidden_dim: int | None = None,
        hidden_layers: int = 1,
        *,
        mlp_implementation: str = "mlp",
        layer_kernels: LayerKernels = LayerKernels(),  # noqa: B008  frozen, as config
        sum_of: str = "edges",
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
    ):
        super().__init__(aggr="add", node_dim=-2)
        self.in_channels = sides_of(in_channels)
        for channels in self.in_channels:
            check_integer("in_channels", channels)
        check_integer("edge_dim", edge_dim)
        check_config(config)
        if sum_of not in SUMMED:
            raise ValueError(f"sum_of must be one of {', '.join(SUMMED)}, got {sum_of!r}")
        self.edge_dim, self.sum_of, self.config = edge_dim, sum_of, config
        self.edge_mlp = NormedMLP(
            sum(self.in_channels) + edge_dim,
            edge_dim if hidden_dim is None else hidden_dim,
            edge_dim,
            mlp_implementation,
            layer_kernels,
            hidden_layers,
        )

    def reset_parameters(self) -> None:
        """Reinitialise all parameters: the same seed gives those of a new layer."""
        super().reset_parameters()
        reset(self.edge_mlp)

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphStructure | ShardedGraph | Tensor,  # or a SparseTensor
        edge_attr: Tensor,
        cond: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update the edges; return them, and the sums over in-edges.

        Parameters
        ----------
        x : Tensor [N, F] or [B, N, F], or a pair (x_src, x_dst) of them
            The batch shares one graph; different graphs form one graph, as PyG's `Batch` makes it.
        edge_index : GraphStructure, ShardedGraph, Tensor [2, E], EdgeIndex, or adjacency adj_t
            For a ShardedGraph, x_src holds the local sources, and edges are those of the rank.
            adj_t is a `torch.sparse` tensor or `SparseTensor` [N_dst, N_src], whose values
            [E, edge_dim] replace an `edge_attr` of None. All but the first are sorted in every
            call (see `KernelConfig.stable_sort`).
        edge_attr : Tensor [E, edge_dim] or [B, E, edge_dim]
            Features of the edges in the caller's order.
        cond : Tensor [E or 1, K] or [B, E or 1, K], optional
            Condition of each edge, required by a conditional norm and refused by others.

        Returns
        -------
        edges : Tensor [E, edge_dim] or [B, E, edge_dim]
            In the caller's order.
        sums : Tensor [N_dst, edge_dim] or [B, N_dst, edge_dim]
            0 for a destination without in-edges.

        Raises
        ------
        ValueError
            When x and edges do not fit together, features have another width, or `config` names a
            backend that cannot run.
        RuntimeError
            For features of other edges, by PyTorch; a ValueError on backend `triton`.
        """
        like = stored_parameter(self.edge_mlp)
        if self.config.precision is not None and like is not None and like.dtype != torch.float32:
            raise ValueError(
                f"the weights of a layer with a precision must be float32, got {like.dtype}; use "
                "KernelConfig(precision=None)"
            )
        x_src, x_dst = sides_of(x)
        check_features("x_src", x_src, self.in_channels[0], like)
        check_features("x_dst", x_dst, self.in_channels[1], like)
        is_one_set = x_src is x_dst
        features: Any = edge_attr  # None if a sparse matrix has them
        graph: GraphStructure | None = None
        if is_sharded(edge_index):
            pending = edge_index.start_exchange(x_src)
            x_src, halo, graph = pending.own, pending.wait_halo(), edge_index.structure
            x_dst = x_src if is_one_set else x_dst
            check_batch(x_src, x_dst)  # start_exchange has checked the local sources
        else:
            halo = None
            # a trace would make constants of the sizes of a structure, and computes without one
            if not torch.jit.is_tracing() or not is_edge_index(edge_index):
                sizes = (x_src.shape[-2], x_dst.shape[-2])
                graph, features = read_edges(edge_index, edge_attr, sizes, self.config)
                check_nodes(graph, x_src, x_dst)
        check_features("edge_attr", features, self.edge_dim, like)
        edges = features.expand(*x_dst.shape[:-2], *features.shape[-2:])
        dtype = edges.dtype
        with _precision(self.config, x_dst.device):
            x_dst, edges = _read(x_dst, self.config), _read(edges, self.config)
            x_src = x_dst if is_one_set else _read(x_src, self.config)
            halo = None if halo is None else _read(halo, self.config)
            own: Asked = ("", self, (INTERACTION,))
            modules = _network_of(self, "edge_mlp", self.edge_mlp, x_dst, cond, self.config, own)
            if graph is None or isinstance(modules, Refusal):
                x = (x_src if halo is None else torch.cat([x_src, halo], dim=-2), x_dst)
                sizes = (x[0].shape[-2], x_dst.shape[-2])
                # sums by int32 indices have wrong gradients on a CPU (PyTorch 2.13)
                edge_list: Any = edge_index  # [2, E] where there is no structure
                ends = edge_list.long() if graph is None else graph.edge_index()
                # With a condition a pair: PyG would hand another argument to messages of subclasses
                # without it too, as it generates `propagate` once (2.8).
                attributes = edges if cond is None else (edges, cond)
                # propagate_type: (x: PairTensor, edge_attr: Tensor)
                summed, sums = self.propagate(ends, size=sizes, x=x, edge_attr=attributes)
            else:
                nodes = (None if is_one_set else x_src, halo, x_dst)
                of_edges = self.sum_of == "edges"
                # results are cast to the dtype of the rows that they update
                out_dtype = modules.computation.gemm_dtype
                if not of_edges:
                    out_dtype = torch.promote_types(edges.dtype, out_dtype)
                batch = x_dst.shape[0] if x_dst.dim() == 3 else 1
                summed, sums = update_edges(
                    modules,
                    nodes,
                    graph,
                    edges,
                    batch,
                    cond=cond,
                    residual=of_edges,
                    out_dtype=out_dtype,
                )
                if x_dst.dim() == 3:
                    summed = summed.view(edges.shape)
                    sums = sums.view(*x_dst.shape[:-1], edges.shape[-1])
            edges = edges + summed if self.sum_of == "updates" else summed
        return edges.to(dtype), sums.to(dtype)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        """Return the updated edges [.., E, edge_dim], or the updates, which are PyG's messages.

        With a condition, `edge_attr` is a pair with it.
        """
        edges, cond = edge_attr if isinstance(edge_attr, tuple) else (edge_attr, None)
        update = _mapped(self.edge_mlp, torch.cat([x_i, x_j, edges], dim=-1), cond)
        return update if self.sum_of == "updates" else edges + update

    def aggregate(
        self,
        inputs: Tensor,
        index: Tensor,
        ptr: OptTensor = None,
        dim_size: Optional[int] = None,  # noqa: UP045  PyG supports no other spelling
    ) -> tuple[Tensor, Tensor]:
        """Return the messages, and their sums."""
        terms = inputs.to(accumulator_dtype(inputs.dtype))
        return inputs, super().aggregate(terms, index, ptr=ptr, dim_size=dim_size)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.in_channels}, edge_dim={self.edge_dim})"


class InteractionBlock(nn.Module):
    """Block of a graph network: the update of its edges, then of its destination nodes.

    For an edge e from source j to destination i:

        e'_e = e_e + edge_mlp([x_i, x_j, e_e])        s_i = sum of e'_e over the in-edges of i
        x'_i = x_i + node_mlp([x_i, s_i])

    The first line is `conv`, an `InteractionConv`. State dicts equal Anemoi's
    `GraphConvProcessorBlock` with two hidden layers, if `in_channels`, `edge_dim` and `hidden_dim`
    are the same.

    Parameters
    ----------
    in_channels : int or (int, int)
        Features of a node, or of a source and of a destination; destinations keep theirs.
    edge_dim : int
        Features of an edge, which the update keeps.
    hidden_dim, hidden_layers, mlp_implementation, layer_kernels, config
        As for `InteractionConv`, of both networks.
    sum_of
        As for `InteractionConv`.

    Raises
    ------
    ValueError
        As for `InteractionConv`.

    Notes
    -----
    With `sum_of="updates"` it is a block of GraphCast, where s_i is the sum of edge_mlp(..).

    Examples
    --------
    >>> block = InteractionBlock(16, edge_dim=16)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 4], [0, 0, 1]]), 5)
    >>> x, edges = torch.randn(2, 5, 16), torch.randn(3, 16)
    >>> for _ in range(2):
    ...     x, edges = block(x, graph, edges)
    >>> x.shape, edges.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 3, 16]))

    References
    ----------
    Battaglia et al. (2018), Relational inductive biases, deep learning, and graph networks, section
    3.2. Lam et al. (2023), Learning skillful medium-range global weather forecasting, supplement
    3.5 to 3.7.
    """

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        edge_dim: int,
        hidden_dim: int | None = None,
        hidden_layers: int = 1,
        *,
        mlp_implementation: str = "mlp",
        layer_kernels: LayerKernels = LayerKernels(),  # noqa: B008  frozen, as config
        sum_of: str = "edges",
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
    ):
        super().__init__()
        _, channels = sides_of(in_channels)
        hidden_dim = edge_dim if hidden_dim is None else hidden_dim
        # in Anemoi's order: the same seed gives the same weights
        self.node_mlp = NormedMLP(
            channels + edge_dim,
            hidden_dim,
            channels,
            mlp_implementation,
            layer_kernels,
            hidden_layers,
        )
        self.conv = InteractionConv(
            in_channels,
            edge_dim,
            hidden_dim,
            hidden_layers,
            mlp_implementation=mlp_implementation,
            layer_kernels=layer_kernels,
            sum_of=sum_of,
            config=config,
        )

    def reset_parameters(self) -> None:
        """Reinitialise all parameters: the same seed gives those of a new block."""
        reset(self.node_mlp)
        self.conv.reset_parameters()

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        edge_index: GraphStructure | ShardedGraph | Tensor,  # or a SparseTensor
        edge_attr: Tensor,
        cond: Tensor | tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Update edges and destinations.

        Parameters
        ----------
        x, edge_index, edge_attr
            As for `InteractionConv`.
        cond : Tensor [1, K] or [B, 1, K], or (Tensor, Tensor), optional
            Condition of edges and destinations, or a pair of one for each: [E or 1, K] and
            [N_dst or 1, K], or with a batch. Required by conditional norms and refused by others.

        Returns
        -------
        x : Tensor [N_dst, F] or [B, N_dst, F]
            Destinations, in the dtype of theirs.
        edges : Tensor [E, edge_dim] or [B, E, edge_dim]
            In the dtype and order of `edge_attr`.

        Raises
        ------
        ValueError, RuntimeError
            As for `InteractionConv`.
        """
        of_edges, of_nodes = (cond, cond) if cond is None or isinstance(cond, Tensor) else cond
        edges, sums = self.conv(x, edge_index, edge_attr, of_edges)
        x_dst = x if isinstance(x, Tensor) else x[1]
        nodes = apply_mlp(self, "node_mlp", x_dst, self.conv.config, more=sums, cond=of_nodes)
        return nodes.to(x_dst.dtype), edges


def apply_mlp(
    layer: nn.Module,
    name: str,
    x: Tensor,
    config: KernelConfig,
    *,
    more: Tensor | None = None,
    cond: Tensor | None = None,
) -> Tensor:
    """Return rows x [.., N, F] mapped by the MLP `name` of a layer, fused where that is faster.

    With `more`, rows [.., N, F_m], they are updated: x + mlp([x, more]).
    """
    mlp = getattr(layer, name)
    with _precision(config, x.device):
        rows = _read(x, config)
        others = None if more is None else _read(more, config)
        modules = _network_of(layer, name, mlp, rows, cond, config)
        if isinstance(modules, Refusal):
            if others is None:
                return _mapped(mlp, rows, cond)
            return rows + _mapped(mlp, torch.cat([rows, others], dim=-1), cond)
        return network(modules, rows, cond, more=others, residual=others is not None)


def _mapped(mlp: nn.Module, rows: Tensor, cond: Tensor | None) -> Tensor:
    """Return mlp(rows), with a condition if there is one: any module takes the place of an MLP."""
    return mlp(rows) if cond is None else mlp(rows, cond)


def _precision(config: KernelConfig, device: torch.device) -> AbstractContextManager:
    """Return the context in which modules multiply matrices in the precision of a config."""
    if config.precision is None:
        return nullcontext()
    if config.precision == "fp32":
        return without_autocast(device.type)
    return torch.autocast(device.type, DTYPES[config.precision])


def _read(rows: Tensor, config: KernelConfig) -> Tensor:
    """Return rows as networks read them: in float32 if that is the precision."""
    return rows.float() if config.precision == "fp32" else rows


def _network_of(
    layer: nn.Module,
    name: str,
    mlp: NormedMLP,
    x: Tensor,
    cond: Tensor | None,
    config: KernelConfig,
    *asked: Asked,
) -> NetworkModules | Refusal:
    """Return a network of a layer for a call on rows like x, or why its modules compute it.

    `asked` must be plain as well. Raise ValueError if the config names a backend with operators.
    """
    computation = Computation.of(x, config)
    modules: NetworkModules | Refusal
    backend = computation.backend
    formulas = [backend.edge_update, backend.edge_sums] if asked else [backend.network]
    if None in formulas or (x.dim() == 3 and x.shape[0] == 0):
        modules = NO_OPERATORS
    elif config.backend == "auto" and not computation.is_faster_fused:
        modules = NOT_FASTER
    elif is_exporting():
        modules = permanent("an exported program has no operators of this library")
    elif torch.jit.is_tracing():
        modules = transient("torch.jit.trace records it")
    else:

        def read() -> Any:  # PyTorch 2.9 traces no union
            refusal = why_not_plain(*asked) if asked else None
            modules = refusal or read_network(
                mlp, computation, name, norms=NORMS, is_edge_update=len(asked) > 0
            )
            return for_call(modules, x, cond)

        roots = (layer,) if asked else (mlp,)
        key = (name, computation, type(x), x.dtype, cond is None)
        modules = reading(roots, key, read, none_refused)
    # PyTorch 2.9 cannot trace whether it is the same refusal; the modules raise the error
    if isinstance(modules, Refusal) and modules.text != WRONG_CONDITION.text:
        kind = type(layer).__name__
        modules.raise_if_named(config.backend, kind, "falls back to plain PyTorch")
        if modules.kind is not RefusalKind.NOT_FASTER:
            _warn_of_modules(kind, modules.text)
    return modules


@constant_when_traced
def _warn_of_modules(layer: str, text: str) -> None:
    warnings.warn(f"{layer} falls back to plain PyTorch: {text}", stacklevel=4)
