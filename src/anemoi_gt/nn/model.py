"""EncoderProcessorDecoder: the weather model, from fields to fields on data grids."""

from collections.abc import Callable, Mapping
from functools import partial, reduce
from operator import add
from typing import Any

from torch import Tensor, nn
from torch_geometric.data import HeteroData

from anemoi_gt.graph.checks import check_shape
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn.input_validation import check_dtype
from anemoi_gt.nn.mapper import GraphTransformerBackwardMapper, GraphTransformerForwardMapper
from anemoi_gt.nn.processor import GraphTransformerProcessor
from anemoi_gt.nn.residual import Residual
from anemoi_gt.nn.static_graph import DATA, HIDDEN, edges_of, nodes_of
from anemoi_gt.option_checks import check_integer


class EncoderProcessorDecoder(nn.Module):
    """Model that encodes data grids into a hidden mesh, processes, and decodes.

        in_d   = [x_d, nodes_d]                            fields and node features of data set d
        hidden = sum over d of encoder_d((in_d, nodes_hidden), edges from d to the mesh)
        hidden = processor(hidden, edges of the mesh)
        y_d    = decoder_d((hidden, in_d), edges from the mesh to d)    + residual_d(x_d)

    Parameters
    ----------
    graph : torch_geometric.data.HeteroData
        In the layout of anemoi-graphs: nodes of each data set d, "data" if there is one, and
        "hidden", with positions `x` [N, 2], latitude and longitude in radians; edges (d, "to",
        "hidden"), ("hidden", "to", "hidden") and ("hidden", "to", d) with `edge_index` [2, E],
        `edge_length` [E, 1] and `edge_dirs` [E, 2].
    in_channels, out_channels : int, or mapping of str to int
        Input and output fields of a data node: of one data set, or of several by the name of their
        nodes. A data set may be input only or output only.
    processor : callable, optional
        Builds the processor, a module that is called as processor(x, graph, edge_attr) and returns
        x [B, N, channels], from the keywords num_channels, num_layers, edge_dim, checkpoint_groups
        and config: `GNNProcessor`, or `functools.partial` of it with its options. None is a graph
        transformer.
    mapper : callable, optional
        Builds each encoder and decoder, modules that are called as mapper((x_src, x_dst), graph,
        edge_attr) and return x_dst, from the keywords in_channels_src, in_channels_dst,
        out_channels_dst, num_channels, edge_dim, gradient_checkpointing and config. An encoder has
        out_channels_dst None and returns num_channels features. See `BaseMapper` for the forms of
        x and graph. None is a graph transformer.
    channels : int
        Features of a node inside the model.
    heads : int
        Number of attention heads. This and mlp_ratio, attn_channels, qk_norm, mlp_implementation,
        edge_pre_mlp and dropout are options of graph transformers.
    num_layers : int
        Blocks of the processor, which share the trainable edge attributes.
    trainable_nodes : int
        Number of trainable features of each node.
    trainable_edges : int
        Number of trainable attributes of each edge.
    mlp_ratio : float
        Width of the hidden layers of the feed-forward networks over `channels`.
    attn_channels : int, optional
        Features of query, key and value, all heads together. None is `channels`.
    qk_norm : bool
        Normalise query and key per head.
    mlp_implementation : {"mlp", "glu", "swiglu", "geglu", "reglu"}
        Plain or gated feed-forward networks.
    edge_pre_mlp : bool
        Mix the attributes of an edge by a linear map and an activation before they are embedded.
    dropout : float
        Probability of dropping an attention weight in training.
    config : KernelConfig
        Backend and precision of the attention, or of a graph network.
    residual : mapping, optional
        Output channel to the input channel that is added to it, for prognostic variables: {0: 2}.
        For several data sets a mapping of data set to such a mapping. None adds nothing, as for a
        network that predicts tendencies.
    mapper_chunks : int
        Number of chunks of destinations in encoders and decoders: less memory, the same result, but
        each chunk draws its own dropout mask.
    checkpoint_groups : int, optional
        Activation checkpointing: number of groups of processor layers; only the input of each group
        and of each mapper chunk is kept for the backward pass. Less memory, the same gradients.
        None keeps all activations.

    Raises
    ------
    ValueError
        If the graph is incomplete or inconsistent, a size is out of range, or an option of graph
        transformers is given with another processor and mapper.

    Notes
    -----
    The state dict holds the parameters, not the graph: build the model from the same graph before
    loading it. The graph is in buffers, which need no broadcast in distributed data parallel
    (`broadcast_buffers=False`).

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

    nodes: Any  # ModuleDict of StaticNodes by set of nodes
    encoder_edges: Any  # ModuleDict of StaticEdges by data set
    decoder_edges: Any
    num_layers = 1  # of a model that version 0.4.0 pickled; it only balances shards

    def __init__(
        self,
        graph: HeteroData,
        in_channels: int | Mapping[str, int],
        out_channels: int | Mapping[str, int],
        *,
        processor: Callable[..., nn.Module] | None = None,
        mapper: Callable[..., nn.Module] | None = None,
        channels: int = 128,
        heads: int = 8,
        num_layers: int = 4,
        trainable_nodes: int = 8,
        trainable_edges: int = 8,
        mlp_ratio: float = 4,
        attn_channels: int | None = None,
        qk_norm: bool = False,
        mlp_implementation: str = "mlp",
        edge_pre_mlp: bool = False,
        dropout: float = 0.0,
        residual: Mapping | None = None,
        mapper_chunks: int = 1,
        checkpoint_groups: int | None = None,
        config: KernelConfig = KernelConfig(),  # noqa: B008  frozen: one value for all
    ):
        super().__init__()
        self.num_layers = num_layers
        self.has_one_data_set = not isinstance(in_channels, Mapping)
        self.in_channels, self.out_channels = _by_data_set(in_channels, out_channels)
        names = list(dict.fromkeys([*self.in_channels, *self.out_channels]))
        self.nodes = nn.ModuleDict(
            {name: nodes_of(graph, name, trainable_nodes) for name in (*names, HIDDEN)}
        )
        sizes = trainable_edges, mapper_chunks
        self.encoder_edges = nn.ModuleDict(
            {d: edges_of(graph, d, HIDDEN, *sizes) for d in self.in_channels}
        )
        self.processor_edges = edges_of(graph, HIDDEN, HIDDEN, trainable_edges)
        self.decoder_edges = nn.ModuleDict(
            {d: edges_of(graph, HIDDEN, d, *sizes) for d in self.out_channels}
        )

        same_names = {
            "attn_channels": attn_channels,
            "qk_norm": qk_norm,
            "mlp_implementation": mlp_implementation,
            "edge_pre_mlp": edge_pre_mlp,
            "dropout": dropout,
        }
        if processor is not None and mapper is not None:
            _refuse_options(same_names | {"heads": heads, "mlp_ratio": mlp_ratio})
        options: dict[str, Any] = {"num_heads": heads, "mlp_hidden_ratio": mlp_ratio, **same_names}
        processor = processor or partial(GraphTransformerProcessor, **options)
        mapper = mapper or partial(_graph_transformer_mapper, **options)
        self.processor = processor(
            num_channels=channels,
            num_layers=num_layers,
            edge_dim=self.processor_edges.edge_dim,
            checkpoint_groups=checkpoint_groups,
            config=config,
        )
        make_mapper = partial(
            mapper,
            num_channels=channels,
            # not an option of the processor, which has groups
            gradient_checkpointing=checkpoint_groups is not None,
            config=config,
        )
        self.encoder = nn.ModuleDict()
        for name, fields in self.in_channels.items():
            self.encoder[name] = make_mapper(
                in_channels_src=fields + self.nodes[name].channels,
                in_channels_dst=self.nodes[HIDDEN].channels,
                out_channels_dst=None,
                edge_dim=self.encoder_edges[name].edge_dim,
            )
        self.decoder = nn.ModuleDict()
        for name, fields in self.out_channels.items():
            self.decoder[name] = make_mapper(
                in_channels_src=channels,
                in_channels_dst=self.in_channels.get(name, 0) + self.nodes[name].channels,
                out_channels_dst=fields,
                edge_dim=self.decoder_edges[name].edge_dim,
            )
        self.residual = nn.ModuleDict(self._make_residuals(residual))

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Map fields on the data grids to fields on the data grids.

        Parameters
        ----------
        x : Tensor [B, N, in_channels], or mapping of data set to that
            A mapping if `in_channels` is one.

        Returns
        -------
        Tensor [B, N, out_channels], or dict of data set to that
            A dict if `out_channels` is a mapping; in the dtype of `x`.

        Raises
        ------
        ValueError
            For a wrong shape, wrong data sets, or batch sizes that differ.
        """
        fields: Any = {DATA: x} if self.has_one_data_set else x
        self._check_input(fields)
        batch = next(iter(fields.values())).shape[0]
        # views: samples share node features, and mappers concatenate them chunk by chunk
        columns = {
            name: [column.expand(batch, -1, -1) for column in nodes.columns()]
            for name, nodes in self.nodes.items()
        }
        mesh = tuple(columns.pop(HIDDEN))
        data = {
            name: (fields[name], *of_nodes) if name in fields else tuple(of_nodes)
            for name, of_nodes in columns.items()
        }

        # a generator: besides the sum, one encoder's result is in memory at a time
        encoded = (
            encoder((data[name], mesh), *self.encoder_edges[name]())
            for name, encoder in self.encoder.items()
        )
        hidden = self.processor(reduce(add, encoded), *self.processor_edges())
        out = {name: self._decode(name, hidden, data[name], fields) for name in self.decoder}
        return out[DATA] if self.has_one_data_set else out

    def _decode(
        self, name: str, hidden: Tensor, data: tuple[Tensor, ...], fields: Mapping[str, Tensor]
    ) -> Tensor:
        """Return the fields of one data set in the input dtype: residuals need over 16 bits."""
        out = self.decoder[name]((hidden, data), *self.decoder_edges[name]())
        out = out.to(next(iter(fields.values())).dtype)
        return self.residual[name](out, fields[name]) if name in self.residual else out

    def _check_input(self, fields: Mapping[str, Tensor]) -> None:
        if not isinstance(fields, Mapping) or set(fields) != set(self.in_channels):
            got = list(fields) if isinstance(fields, Mapping) else type(fields).__name__
            raise ValueError(
                f"x must map each of the data sets {list(self.in_channels)} to its fields, got "
                f"{got}"
            )
        for name, x in fields.items():
            shape = (self.nodes[name].num_nodes, self.in_channels[name])
            label = "x" if self.has_one_data_set else f"x[{name!r}]"
            check_shape(label, x, f"[B, {shape[0]}, {shape[1]}]", partial(_is_batch_of, shape))
            check_dtype(label, x, like=self.nodes[name].sin_cos_lat_lon)

    def _make_residuals(self, residual: Mapping | None) -> dict[str, Residual]:
        if residual is None:
            return {}
        residual = {DATA: residual} if self.has_one_data_set else residual
        return {
            d: Residual(pairs, self.in_channels[d], self.out_channels[d])
            for d, pairs in residual.items()
        }


def _graph_transformer_mapper(*, out_channels_dst: int | None, **options: Any) -> nn.Module:
    """Return an encoder, or a decoder to fields."""
    if out_channels_dst is None:
        return GraphTransformerForwardMapper(**options)
    return GraphTransformerBackwardMapper(out_channels_dst=out_channels_dst, **options)


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError unless options of graph transformers have their defaults."""
    defaults = EncoderProcessorDecoder.__init__.__kwdefaults__ or {}
    changed = {name: value for name, value in options.items() if value != defaults[name]}
    if changed:
        raise ValueError(
            "options of graph transformers must be left out with another processor and mapper, got "
            f"{changed}; bind their own options with functools.partial"
        )


def _is_batch_of(shape: tuple[int, int], x: Tensor) -> bool:
    return x.dim() == 3 and tuple(x.shape[1:]) == shape


def _by_data_set(
    in_channels: int | Mapping[str, int], out_channels: int | Mapping[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Return input and output fields by data set, checked; a single data set is called "data"."""
    sides = {"in_channels": in_channels, "out_channels": out_channels}
    if len({isinstance(side, Mapping) for side in sides.values()}) > 1:
        raise ValueError(
            f"in_channels and out_channels must both be integers or both be mappings, got {sides}"
        )
    named: dict[str, dict[str, int]] = {}
    for name, side in sides.items():
        named[name] = dict(side) if isinstance(side, Mapping) else {DATA: side}
    for name, side in named.items():
        for data_set, size in side.items():
            label = f"{name}[{data_set!r}]" if isinstance(in_channels, Mapping) else name
            check_integer(label, size)
        if not side or HIDDEN in side:
            raise ValueError(
                f"{name} must name at least one data set, none of them {HIDDEN!r}, got {list(side)}"
            )
    return named["in_channels"], named["out_channels"]
