"""The attention sub-layer of a block as one operator: norms, projections, attention, residual.

    n_i = norm(x_i)              n_j = norm_src(x_j), or norm(x_j) for one set of nodes
    q_i = q_norm(W_query n_i + b_query)      k_j = k_norm(W_key n_j + b_key)      v_j = W_value n_j
    x_e = W_edge a_e + b_edge + b_value      p_e = softmax of < q_i , k_j + x_e > / sqrt(C)
    y_i = sum_e p_e (v_j + x_e) + W_self n_i + b_self
    z_i = x_i + W_projection y_i + b_projection

q_norm and k_norm, per head, are the identity where the options give them no eps. On a shard of a
graph, a rank's own sources are followed by its halo, rows n_j that their owners normed.

Adding one vector to all keys shifts all scores of a destination alike and changes no weight. So
without k_norm b_key has no effect, its gradient is 0, and b_value may be added to key and value by
the bias of the edges, whose gradient it shares: the sum of dy_i over destinations that have
in-edges. The gradient of b_self follows from the projection's: sum_i dy_i = W_projection^T sum_i
dz_i. So rows are read for sums over nodes of dq alone (and of dk, with k_norm); all other gradients
of biases and norms are made by the passes over rows that are needed anyway.

Query, y, key and value of one set of nodes are columns of one tensor, [q, y, k, v], which one
product makes, with the term of self where y will be: the attention is added to it. So are their
gradients, and the gradients of n and of the weights are one product each. Destinations and sources
that differ, as in a mapper or with a halo, have a tensor each: [q, y] and [k, v].

Kept for the backward pass, in one block: these tensors (query and key before their norms), the edge
attributes if they were cast, what edge attention saves, and the cast weights. The backward pass
makes normed rows again, where it reads x. Gradients of parameters are parts of one block too.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import (
    define_operator,
    flat_arguments,
    is_plain,
    needs_gradient,
    on_device,
    refuse_forward_mode,
    refuse_second_derivative,
)
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.operands import AttentionOperands, Held, Needs, Operand, OperandT
from anemoi_gt.ops.sublayer_tensors import AttentionOptions, AttentionTensors
from anemoi_gt.ops.triton_backend import row_launches, sublayer_steps
from anemoi_gt.ops.triton_backend.plan import BlockLayout, Buffer, Plan, PlanBuilder
from anemoi_gt.ops.triton_backend.sizes import IndexTensors, Sizes, sizes_of
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    GradientPiece,
    ModulationGradients,
    NodeSums,
    Norm,
    NormParameters,
    PackedWeights,
    ParameterPieces,
    Piece,
    Shaped,
    SublayerPlans,
)
from anemoi_gt.torch_compat import is_batched

KEPT = 128  # plans of both passes that are kept
NUM_TENSORS = len(AttentionTensors._fields)
NUM_OPTIONS = len(AttentionOptions._fields)
NUM_INPUTS = NUM_TENSORS + len(IndexTensors._fields)


class SublayerNeeds(NamedTuple):
    """Gradients that need separate launches and are computed only if needed."""

    edge_attr: bool
    condition: bool
    condition_src: bool
    weights: bool  # some of the projections of nodes; False in a frozen block

    @classmethod
    def of(cls, needs: AttentionTensors[bool]) -> "SublayerNeeds":
        """Read them from the needs of all tensors."""
        weights = (
            needs.query_weight,
            needs.self_weight,
            needs.key_weight,
            needs.value_weight,
            needs.projection_weight,
        )
        return cls(
            edge_attr=bool(needs.edge_attr),
            condition=bool(needs.condition),
            condition_src=bool(needs.condition_src),
            weights=any(weights),
        )


class SublayerGradients(NamedTuple, Generic[Held]):
    """Results of the backward plan; None for what is absent or not needed."""

    x_src: Held | None
    halo: Held | None
    x_dst: Held
    edge_attr: Held | None
    condition: Held | None
    condition_src: Held | None
    parameters: Held  # a block, see `parameter_pieces`


def attention_sublayer(
    tensors: AttentionTensors[Tensor], graph: GraphStructure, options: AttentionOptions
) -> Tensor:
    """Return z [B * N_dst, F], in the promoted dtype of x and the products.

    `graph` is the structure of one batch entry, from own sources and halo to destinations. Edge
    attributes [E, D] are shared by the batch.
    """
    refuse_forward_mode(*tensors)
    save = needs_gradient(*tensors)
    if save:
        graph = graph.with_reverse()
    index = IndexTensors.of(graph)
    if not is_plain(*tensors, *index):
        return attention_sublayer_triton(*tensors, *index, *options, save)[0]
    if save:
        return AttentionSublayer.apply(*tensors, index, options)
    _, (z,) = _run_forward(tensors, index, options, save=False)
    return z


def _weight_groups(
    t: AttentionTensors[OperandT], options: AttentionOptions
) -> dict[str, list[Piece[OperandT]]]:
    """Return the packed parameters by the group that stacks them."""
    weights = (t.query_weight, t.self_weight, t.key_weight, t.value_weight)
    groups = {
        "nodes": [Piece.of(weight) for weight in weights],
        "projection": [Piece.of(t.projection_weight)],
        "edge": [Piece.of(t.edge_weight)],
    }
    key_bias = t.key_bias if options.key_norm_eps else None
    biases = (t.query_bias, t.self_bias, key_bias, None)
    if any(bias is not None for bias in biases):
        groups["nodes_bias"] = [Piece((t.query_weight.shape[0],), bias) for bias in biases]
    if t.projection_bias is not None:
        groups["projection_bias"] = [Piece.of(t.projection_bias)]
    if t.edge_bias is not None and t.value_bias is not None:
        groups["edge_bias"] = [Piece(t.edge_bias.shape, t.edge_bias, addend=t.value_bias)]
    elif t.edge_bias is not None:
        groups["edge_bias"] = [Piece.of(t.edge_bias)]
    elif t.value_bias is not None:
        groups["edge_bias"] = [Piece.of(t.value_bias)]
    return (
        groups | _norm_parameters(t).groups("norm") | _source_norm_parameters(t).groups("norm_src")
    )


def _norm_parameters(t: AttentionTensors[Held]) -> NormParameters[Held]:
    return NormParameters(
        t.norm_scale, t.norm_shift, t.norm_scale_bias, t.norm_shift_bias, t.condition
    )


def _source_norm_parameters(t: AttentionTensors[Held]) -> NormParameters[Held]:
    return NormParameters(
        t.norm_src_scale,
        t.norm_src_shift,
        t.norm_src_scale_bias,
        t.norm_src_shift_bias,
        t.condition_src,
    )


class _Layout(NamedTuple):
    """Numbers of rows and columns of a call."""

    batch: int
    heads: int
    width: int  # H * C
    destinations: int  # of a batch entry
    own_sources: int
    halo: int
    is_one_set: bool  # sources are the destinations, with one norm; a halo may follow them

    @classmethod
    def of(cls, t: AttentionTensors[Operand], options: AttentionOptions) -> "_Layout":
        x_src = t.x_dst if t.x_src is None else t.x_src
        halo = 0 if t.halo is None else t.halo.shape[0] // options.batch
        return cls(
            options.batch,
            options.heads,
            t.query_weight.shape[0],
            t.x_dst.shape[0] // options.batch,
            x_src.shape[0] // options.batch,
            halo,
            t.x_src is None,
        )

    @property
    def sources(self) -> int:
        """Own sources and halo of a batch entry."""
        return self.own_sources + self.halo

    @property
    def is_one_tensor(self) -> bool:
        """True if query, y, key and value are columns of one tensor."""
        return self.is_one_set and not self.halo

    @property
    def row_stride(self) -> int:
        """Elements between the queries of two nodes, and between their keys."""
        return (4 if self.is_one_tensor else 2) * self.width

    def rows(self, dst: Buffer, src: Buffer) -> "NodeRows":
        """Return query, y, key and value, columns of the tensors of destinations and sources."""
        width = self.width
        first = 2 * width if self.is_one_tensor else 0
        return NodeRows(
            dst.slice(1, 0, width),
            dst.slice(1, width, 2 * width),
            src.slice(1, first, first + width),
            src.slice(1, first + width, first + 2 * width),
        )

    def split_heads(self, rows: Buffer) -> Buffer:
        """Return rows [B * N, H * C] as [N, H, C], or [B, N, H, C] of a batch."""
        heads = rows.unflatten(1, (self.heads, self.width // self.heads))
        if self.batch == 1:
            return heads
        return heads.unflatten(0, (self.batch, rows.shape[0] // self.batch))

    def halo_rows(self, rows: Buffer) -> Buffer:
        """Return the rows of the halo [B, R, ..] of rows [B * (N + R), ..]."""
        return rows.unflatten(0, (self.batch, self.sources)).slice(
            1, self.own_sources, self.sources
        )

    def entries(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each batch entry among destinations, and its own rows among sources.

        One entry with all rows where there is no halo between the entries.
        """
        if not self.halo:
            rows = self.batch * self.destinations
            yield slice(0, rows), slice(0, rows)
            return
        for entry in range(self.batch):
            first_dst, first_src = entry * self.destinations, entry * self.sources
            yield (
                slice(first_dst, first_dst + self.destinations),
                slice(first_src, first_src + self.own_sources),
            )


class NodeRows(NamedTuple):
    """Rows of nodes [B * N, H * C], columns of wider tensors; or their gradients."""

    query: Buffer
    attended: Buffer  # y
    key: Buffer
    value: Buffer


def _sizes(
    t: AttentionTensors[Operand], index: IndexTensors[Operand], options: AttentionOptions
) -> Sizes:
    """Return the sizes of the call of edge attention."""
    layout = _Layout.of(t, options)
    batch = () if layout.batch == 1 else (layout.batch,)
    heads = (layout.heads, layout.width // layout.heads)
    query = Shaped((*batch, layout.destinations, *heads), options.dtype)
    key = Shaped((*batch, layout.sources, *heads), options.dtype)
    edge_attr = Shaped(_attribute_shape(t.edge_attr, layout), options.dtype)
    has_bias = t.edge_bias is not None or t.value_bias is not None
    edge_bias = Shaped((layout.width,), options.dtype) if has_bias else None
    operands: AttentionOperands[Operand] = AttentionOperands(
        query, key, key, edge_attr, t.edge_weight, edge_bias
    )
    scale = heads[1] ** -0.5
    return sizes_of(operands, index, scale, row_stride=layout.row_stride)


def _attribute_shape(edge_attr: Operand, layout: _Layout) -> tuple[int, ...]:
    """Return the shape of the edge attributes as the attention takes them."""
    if layout.batch > 1 and len(edge_attr.shape) == 2:
        return (1, *edge_attr.shape)  # shared by the batch
    return tuple(edge_attr.shape)


def kept_layout(
    t: AttentionTensors[Operand], index: IndexTensors[Operand], options: AttentionOptions
) -> BlockLayout:
    """Return the layout of what the forward pass keeps for the backward pass."""
    layout = _Layout.of(t, options)
    sizes = _sizes(t, index, options)
    heads = (layout.batch * layout.destinations, layout.heads)
    num_packed = PackedWeights.of(_weight_groups(t, options)).num_elements
    specs = {
        "packed": ((num_packed,), options.dtype),
        "dst": ((layout.batch * layout.destinations, layout.row_stride), options.dtype),
    }
    if not layout.is_one_tensor:
        specs["src"] = ((layout.batch * layout.sources, layout.row_stride), options.dtype)
    if t.edge_attr.dtype != options.dtype:
        specs["attr"] = (t.edge_attr.shape, options.dtype)
    specs["inv_denominator"] = (sizes.inverse_shape(heads), torch.float32)
    specs["exp_scores"] = ((sizes.batch, sizes.num_edges, sizes.heads), torch.float32)
    specs["projected"] = ((*heads, sizes.columns), scratch_dtype(options.dtype))
    return BlockLayout.of(specs)


def _attention_call(
    builder: PlanBuilder,
    t: AttentionTensors[Buffer],
    index: IndexTensors[Buffer],
    options: AttentionOptions,
    rows: NodeRows,
    attr: Buffer,
    weights: dict[str, Buffer],
):
    """Return the call of edge attention on query, key and value [B * N, H * C]."""
    from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall

    layout = _Layout.of(t, options)
    if len(_attribute_shape(attr, layout)) > len(attr.shape):
        attr = attr.unflatten(0, (1, attr.shape[0]))
    operands = AttentionOperands(
        query=layout.split_heads(rows.query),
        key=layout.split_heads(rows.key),
        value=layout.split_heads(rows.value),
        edge_attr=attr,
        edge_weight=weights["edge"],
        edge_bias=weights.get("edge_bias"),
    )
    return AttentionCall(builder, _sizes(t, index, options), operands, index)


def _normed_heads(
    builder: PlanBuilder, t: AttentionTensors[Buffer], options: AttentionOptions, rows: NodeRows
) -> NodeRows:
    """Return rows with query and key normed per head, in scratch; unchanged without norms."""
    if not options.query_norm_eps and not options.key_norm_eps:
        return rows
    layout = _Layout.of(t, options)
    # The attention reads query, key and value with one stride, so normed rows lie as they do.
    dst = builder.empty((rows.query.shape[0], layout.row_stride), options.dtype)
    src = dst
    if not layout.is_one_tensor:
        src = builder.empty((rows.key.shape[0], layout.row_stride), options.dtype)
    normed = layout.rows(dst, src)
    query, key = rows.query, rows.key
    if options.query_norm_eps:
        query = normed.query
        eps = options.query_norm_eps
        _norm_heads(builder, layout, rows.query, t.query_norm_scale, eps, query)
    if options.key_norm_eps:
        key = normed.key
        eps = options.key_norm_eps
        _norm_heads(builder, layout, rows.key, t.key_norm_scale, eps, key)
    return rows._replace(query=query, key=key)


def _norm_heads(
    builder: PlanBuilder,
    layout: _Layout,
    x: Buffer,
    scale: Buffer | None,
    eps: float,
    out: Buffer,
) -> None:
    """Write rows x [B * N, H * C] normed per head."""
    launch = row_launches.head_norm_forward(
        x.shape[0],
        layout.heads,
        layout.width // layout.heads,
        eps,
        x_stride=x.stride[0],
        out_stride=out.stride[0],
    )
    builder.launch(launch, x=x, scale=scale, out=out)


def forward_plan(specs: tuple, options: AttentionOptions, *, save: bool) -> Plan:
    """Return the plan of a forward pass over tensors and index: z and what `save` keeps."""
    from anemoi_gt.ops.triton_backend import attention_steps

    builder = PlanBuilder(specs)
    t: AttentionTensors[Buffer] = AttentionTensors._make(builder.inputs[:NUM_TENSORS])
    index: IndexTensors[Buffer] = IndexTensors._make(builder.inputs[NUM_TENSORS:])
    layout = _Layout.of(t, options)
    kept = builder.empty_parts(kept_layout(t, index, options), together=save)
    weights = sublayer_steps.pack_weights(builder, _weight_groups(t, options), kept["packed"])
    features = t.x_dst.shape[1]
    width = layout.width

    n_src = builder.empty((layout.batch * layout.sources, features), options.dtype)
    norm = Norm.of(builder, _norm_parameters(t), options.norm_eps, weights, "norm")
    if layout.is_one_set:
        source_norm, x_src = norm, t.x_dst
    else:
        assert t.x_src is not None
        source_norm = Norm.of(
            builder, _source_norm_parameters(t), options.norm_src_eps, weights, "norm_src"
        )
        x_src = t.x_src
    sublayer_steps.norm_forward(builder, x_src, source_norm, n_src, layout.batch, layout.sources)
    if t.halo is not None and layout.halo:
        sublayer_steps.copy(
            builder, t.halo.unflatten(0, (layout.batch, layout.halo)), layout.halo_rows(n_src)
        )

    dst = kept["dst"]
    src = dst if layout.is_one_tensor else kept["src"]
    nodes, bias = weights["nodes"], weights.get("nodes_bias")
    if layout.is_one_tensor:
        sublayer_steps.linear(builder, n_src, nodes, bias, dst)
    else:
        dst_bias = None if bias is None else bias.slice(0, 0, 2 * width)
        src_bias = None if bias is None else bias.slice(0, 2 * width, 4 * width)
        dst_weight = nodes.slice(0, 0, 2 * width)
        sublayer_steps.linear(builder, n_src, nodes.slice(0, 2 * width, 4 * width), src_bias, src)
        if layout.is_one_set:
            for local, among_sources in layout.entries():
                n_dst = n_src.rows(among_sources)
                sublayer_steps.linear(builder, n_dst, dst_weight, dst_bias, dst.rows(local))
        else:
            n_dst = builder.empty(t.x_dst.shape, options.dtype)
            sublayer_steps.norm_forward(builder, t.x_dst, norm, n_dst)
            sublayer_steps.linear(builder, n_dst, dst_weight, dst_bias, dst)
    attr = t.edge_attr
    if "attr" in kept:
        attr = kept["attr"]
        sublayer_steps.add(builder, t.edge_attr, None, attr)

    rows = layout.rows(dst, src)
    normed = _normed_heads(builder, t, options, rows)
    call = _attention_call(builder, t, index, options, normed, attr, weights)
    attended = builder.empty((t.x_dst.shape[0], width), options.dtype)
    saved = attention_steps.Saved(kept["inv_denominator"], kept["exp_scores"], kept["projected"])
    attention_steps.attend_and_add(
        call, saved, layout.split_heads(attended), layout.split_heads(rows.attended)
    )

    z = builder.empty(t.x_dst.shape, _out_dtype(t, options))
    for begin, end in sublayer_steps.chunks(t.x_dst.shape[0]):
        y = rows.attended.slice(0, begin, end)
        delta = sublayer_steps.linear(
            builder, y, weights["projection"], weights.get("projection_bias")
        )
        sublayer_steps.add(builder, t.x_dst.slice(0, begin, end), delta, z.slice(0, begin, end))
    if not save:
        return builder.finish([z])
    return builder.finish([z, builder.whole(dst)])


def backward_plan(
    specs: tuple, options: AttentionOptions, needs: SublayerNeeds
) -> tuple[Plan, ParameterPieces]:
    """Return the plan of a backward pass over tensors, index, the kept block and the gradient of z.

    `specs` are the shapes and dtypes of tensors and index. The results are `SublayerGradients`; the
    pieces are of their block of parameters.
    """
    from anemoi_gt.ops.triton_backend import attention_steps

    shapes = Shaped.all_of(specs)
    shapes_of_tensors: AttentionTensors[Shaped] = AttentionTensors._make(shapes[:NUM_TENSORS])
    shapes_of_index: IndexTensors[Shaped] = IndexTensors._make(shapes[NUM_TENSORS:])
    kept_parts = kept_layout(shapes_of_tensors, shapes_of_index, options)
    grad_spec = (shapes_of_tensors.x_dst.shape, _out_dtype(shapes_of_tensors, options))
    builder = PlanBuilder([*specs, ((kept_parts.num_bytes,), torch.uint8), grad_spec])
    t: AttentionTensors[Buffer] = AttentionTensors._make(builder.inputs[:NUM_TENSORS])
    index: IndexTensors[Buffer] = IndexTensors._make(builder.inputs[NUM_TENSORS:NUM_INPUTS])
    kept_block, grad = builder.inputs[NUM_INPUTS:]
    assert kept_block is not None
    assert grad is not None
    kept = kept_parts.buffers(kept_block)
    layout = _Layout.of(t, options)
    weights = PackedWeights.of(_weight_groups(t, options)).views(kept["packed"])
    width = layout.width
    sums = sublayer_steps.NodeSums(builder, _sum_pieces(t, options))
    pieces = parameter_pieces(t, options, weights=needs.weights)
    parameter_block, parameters = pieces.allocate(builder)

    rows = layout.rows(kept["dst"], kept.get("src", kept["dst"]))
    dst = builder.empty(kept["dst"].shape, options.dtype)
    src = dst if layout.is_one_tensor else builder.empty(kept["src"].shape, options.dtype)
    gradients = layout.rows(dst, src)
    narrow = sublayer_steps.cast(builder, grad, options.dtype)
    sublayer_steps.product(builder, narrow, weights["projection"], gradients.attended)
    if needs.weights:
        sublayer_steps.outer_product(
            builder, narrow, rows.attended, parameters["projection_weight"], is_first=True
        )

    attr = kept.get("attr", t.edge_attr)
    normed = _normed_heads(builder, t, options, rows)
    call = _attention_call(builder, t, index, options, normed, attr, weights)
    edge_bias = parameters.get("edge_bias")
    if edge_bias is not None and options.dtype == torch.float32:
        # The kernels' sum has terms of the keys, which cancel but for rounding. That is below the
        # rounding of 16-bit operands, but several times the error of a float32 sum.
        builder.compute(_sum_of_attending_rows, gradients.attended, index.colptr, edge_bias)
        edge_bias = None
    dedge_attr = attention_steps.gradients(
        call,
        attention_steps.Saved(kept["inv_denominator"], kept["exp_scores"], kept["projected"]),
        layout.split_heads(gradients.attended),
        None,
        Needs(edge_attr=needs.edge_attr, edge_bias=edge_bias is not None),
        into=AttentionOperands(
            query=layout.split_heads(gradients.query),
            key=layout.split_heads(gradients.key),
            value=layout.split_heads(gradients.value),
            edge_weight=parameters["edge_weight"],
            edge_bias=edge_bias,
        ),
    ).edge_attr
    _head_norm_backward(
        sums,
        layout,
        "query_norm",
        rows.query,
        gradients.query,
        t.query_norm_scale,
        options.query_norm_eps,
    )
    _head_norm_backward(
        sums,
        layout,
        "key_norm",
        rows.key,
        gradients.key,
        t.key_norm_scale,
        options.key_norm_eps,
    )
    for name, gradient in (("query_bias", gradients.query), ("key_bias", gradients.key)):
        if name in sums.columns:
            sums.sum_rows(name, gradient)

    norm = Norm.of(builder, _norm_parameters(t), options.norm_eps, weights, "norm")
    norm_map = sublayer_steps.modulation_gradients(
        builder, norm, parameters.get("norm_map"), need_condition=needs.condition
    )
    dx_dst = builder.empty_like(t.x_dst)
    nodes_weight = parameters["nodes_weight"] if needs.weights else None
    of_destinations = _Projections.of(weights["nodes"], nodes_weight, 0, 2 * width)
    of_sources = _Projections.of(weights["nodes"], nodes_weight, 2 * width, 4 * width)
    through = _ThroughNorm(sums, layout, "norm", norm, norm_map)
    dx_src = None
    dhalo = None
    if t.halo is not None:  # a rank that needs no rows of others has an empty halo
        dhalo = builder.empty_like(t.halo)
    source_map = None
    if layout.is_one_tensor:
        all_projections = _Projections.of(weights["nodes"], nodes_weight, 0, 4 * width)
        dn = sublayer_steps.product(builder, dst, all_projections.weight)
        normed_rows = through.differentiate(t.x_dst, dx_dst, grad, dn)
        all_projections.differentiate(builder, dst, normed_rows, is_first=True)
    elif layout.is_one_set:
        assert t.halo is not None  # or there were one tensor
        assert dhalo is not None
        dn = sublayer_steps.product(builder, src, of_sources.weight)
        for local, among_sources in layout.entries():
            sublayer_steps.add_product(
                builder, dst.rows(local), of_destinations.weight, dn.rows(among_sources)
            )
        normed_rows = through.differentiate(t.x_dst, dx_dst, grad, dn)
        _differentiate_halo(builder, layout, t.halo, dn, normed_rows, dhalo)
        of_sources.differentiate(builder, src, normed_rows, is_first=True)
        for number, (local, among_sources) in enumerate(layout.entries()):
            of_destinations.differentiate(
                builder, dst.rows(local), normed_rows.rows(among_sources), is_first=number == 0
            )
    else:
        dn = sublayer_steps.product(builder, dst, of_destinations.weight)
        of_own = through._replace(layout=layout._replace(own_sources=layout.destinations, halo=0))
        normed_rows = of_own.differentiate(t.x_dst, dx_dst, grad, dn)
        of_destinations.differentiate(builder, dst, normed_rows, is_first=True)
        source_norm = Norm.of(
            builder, _source_norm_parameters(t), options.norm_src_eps, weights, "norm_src"
        )
        source_map = sublayer_steps.modulation_gradients(
            builder,
            source_norm,
            parameters.get("norm_src_map"),
            need_condition=needs.condition_src,
        )
        assert t.x_src is not None
        dx_src = builder.empty_like(t.x_src)
        through = _ThroughNorm(sums, layout, "norm_src", source_norm, source_map)
        dn = sublayer_steps.product(builder, src, of_sources.weight)
        normed_rows = through.differentiate(t.x_src, dx_src, None, dn)
        if layout.halo:
            assert t.halo is not None
            assert dhalo is not None
            _differentiate_halo(builder, layout, t.halo, dn, normed_rows, dhalo)
        of_sources.differentiate(builder, src, normed_rows, is_first=True)
    sums.total_into(parameters["sums"])
    if t.self_bias is not None:
        columns = sums.columns["norm_total"]
        total = parameters["sums"].slice(0, columns.start, columns.stop)
        sublayer_steps.map_total(builder, t.projection_weight, total, parameters["self_bias"])
    plan = builder.finish(
        SublayerGradients(
            x_src=dx_src,
            halo=dhalo,
            x_dst=dx_dst,
            edge_attr=dedge_attr,
            condition=None if norm_map is None else norm_map.condition,
            condition_src=None if source_map is None else source_map.condition,
            parameters=parameter_block,
        )
    )
    return plan, pieces


class _Projections(NamedTuple):
    """Some of the stacked projections of nodes, and the gradient of their weight."""

    weight: Buffer
    grad_weight: Buffer | None  # None if no weight needs a gradient

    @classmethod
    def of(cls, weight: Buffer, grad: Buffer | None, first: int, stop: int) -> "_Projections":
        """Return the projections that make columns `first` to `stop` of [query, y, key, value]."""
        if grad is not None:
            grad = grad.slice(0, first, stop)
        return cls(weight.slice(0, first, stop), grad)

    def differentiate(
        self, builder: PlanBuilder, gradients: Buffer, normed: Buffer, *, is_first: bool
    ) -> None:
        """Write the gradient of the weight if needed, or add to it unless `is_first`."""
        if self.grad_weight is not None:
            sublayer_steps.outer_product(
                builder, gradients, normed, self.grad_weight, is_first=is_first
            )


class _ThroughNorm(NamedTuple):
    """The backward pass of a norm; `layout` names its rows as own sources."""

    sums: NodeSums
    layout: _Layout
    name: str
    norm: Norm
    norm_map: ModulationGradients | None

    def differentiate(self, x: Buffer, dx: Buffer, grad_total: Buffer | None, dn: Buffer) -> Buffer:
        """Fill dx from the gradient of the normed rows; return the normed rows, made again."""
        layout = self.layout
        normed = self.sums.builder.empty_like(dn)
        num_rows = x.shape[0]
        if layout.batch > 1 and layout.halo > 0:  # each entry is followed by its halo rows
            sublayer_steps.norm_backward(
                self.sums,
                self.name,
                self.norm,
                (0, num_rows),
                x=x,
                grad_normed=dn,
                grad_total=grad_total,
                dx=dx,
                normed=normed,
                modulation=self.norm_map,
                is_first=True,
                batch=layout.batch,
                entry_rows=layout.sources,
            )
            return normed
        parts = [(0, num_rows)]
        if self.norm.condition is not None:
            parts = list(sublayer_steps.chunks(num_rows))
        for begin, end in parts:
            total_rows = None
            if grad_total is not None:
                total_rows = grad_total.slice(0, begin, end)
            sublayer_steps.norm_backward(
                self.sums,
                self.name,
                self.norm,
                (begin, end),
                x=x.slice(0, begin, end),
                grad_normed=dn.slice(0, begin, end),
                grad_total=total_rows,
                dx=dx.slice(0, begin, end),
                normed=normed.slice(0, begin, end),
                modulation=self.norm_map,
                is_first=begin == 0,
            )
        return normed


def _differentiate_halo(
    builder: PlanBuilder,
    layout: _Layout,
    halo: Buffer,
    dn: Buffer,
    normed: Buffer,
    dhalo: Buffer,
) -> None:
    """Fill the gradient of the halo, and the halo's rows of `normed`."""
    entries = (layout.batch, layout.halo)
    sublayer_steps.copy(builder, halo.unflatten(0, entries), layout.halo_rows(normed))
    sublayer_steps.copy(builder, layout.halo_rows(dn), dhalo.unflatten(0, entries))


def _head_norm_backward(
    sums: NodeSums,
    layout: _Layout,
    name: str,
    x: Buffer,
    gradient: Buffer,
    scale: Buffer | None,
    eps: float,
) -> None:
    """Differentiate the head norm of x [B * N, H * C], in place of its output's gradient."""
    if not eps:
        return
    columns = sums.columns.get(name)
    launch = row_launches.head_norm_backward(
        x.shape[0],
        layout.heads,
        layout.width // layout.heads,
        eps,
        x_stride=x.stride[0],
        grad_stride=gradient.stride[0],
        dx_stride=gradient.stride[0],
        programs=sublayer_steps.PROGRAMS,
        sums=0 if columns is None else sums.width,
        first_sum=0 if columns is None else columns.start,
        is_first=True,
    )
    partial = None if columns is None else sums.partial
    sums.builder.launch(
        launch, x=x, grad_normed=gradient, scale=scale, dx=gradient, partial=partial
    )


def _sum_of_attending_rows(rows: Tensor, colptr: Tensor, total: Tensor) -> None:
    """Sum rows [B * N, width] over destinations with in-edges, whose weights sum to 1."""
    attends = (colptr.diff() > 0).to(rows.dtype)
    num_entries = rows.shape[0] // max(1, attends.shape[0])
    torch.sum(rows * attends.repeat(num_entries).unsqueeze(1), 0, out=total)


def parameter_pieces(
    t: AttentionTensors[Operand], options: AttentionOptions, *, weights: bool
) -> ParameterPieces:
    """Return where the gradients of parameters lie in their block.

    With `weights`, it includes the gradients of the node projections.
    """
    width, features = t.query_weight.shape
    groups = {"edge_weight": [GradientPiece(("edge_weight",), t.edge_weight.shape)]}
    if weights:
        nodes = ("query_weight", "self_weight", "key_weight", "value_weight")
        projection_shape = t.projection_weight.shape
        groups = {
            "nodes_weight": [GradientPiece((name,), (width, features)) for name in nodes],
            "projection_weight": [GradientPiece(("projection_weight",), projection_shape)],
            **groups,
        }
    if t.edge_bias is not None or t.value_bias is not None:
        groups["edge_bias"] = [GradientPiece(("edge_bias", "value_bias"), (width,))]
    if t.self_bias is not None:
        groups["self_bias"] = [GradientPiece(("self_bias",), (width,))]
    if t.condition is not None:
        num_conditions = t.condition.shape[1]
        groups["norm_map"] = sublayer_steps.norm_map_pieces("norm", features, num_conditions)
    if t.condition_src is not None:
        num_conditions = t.condition_src.shape[1]
        groups["norm_src_map"] = sublayer_steps.norm_map_pieces(
            "norm_src", features, num_conditions
        )
    groups["sums"] = list(_sum_pieces(t, options).values())
    return ParameterPieces.of(groups)


def _sum_pieces(
    t: AttentionTensors[Operand], options: AttentionOptions
) -> dict[str, GradientPiece]:
    """Return the gradients that are sums over nodes, by the names of their columns."""
    features = t.x_dst.shape[1]
    pieces = sublayer_steps.norm_sum_pieces("norm", features, has_condition=t.condition is not None)
    pieces["norm_total"] = GradientPiece(("projection_bias",), (features,))
    if t.x_src is not None:
        has_condition = t.condition_src is not None
        pieces |= sublayer_steps.norm_sum_pieces("norm_src", features, has_condition=has_condition)
    for name in ("query_norm", "key_norm"):
        scale = getattr(t, f"{name}_scale")
        if scale is not None:
            pieces[name] = GradientPiece((f"{name}_scale",), scale.shape)
    if t.query_bias is not None:
        pieces["query_bias"] = GradientPiece(("query_bias",), t.query_bias.shape)
    if t.key_bias is not None and options.key_norm_eps:
        pieces["key_bias"] = GradientPiece(("key_bias",), t.key_bias.shape)
    return pieces


def _named_gradients(
    t: AttentionTensors[Tensor],
    results: SublayerGradients[Tensor],
    pieces: ParameterPieces,
    needs: AttentionTensors[bool],
) -> list[Tensor | None]:
    """Return the gradients that are needed, in the order and the dtypes of `t`."""
    gradients = pieces.gradients(results.parameters)
    for name in ("x_src", "halo", "x_dst", "condition", "condition_src"):
        gradients[name] = getattr(results, name)
    if needs.edge_attr:
        dedge_attr = results.edge_attr
        shape = t.edge_attr.shape
        gradients["edge_attr"] = dedge_attr.view(shape)  # type: ignore[union-attr]  # it is needed
    if needs.key_bias and "key_bias" not in gradients:
        bias = t.key_bias
        gradients["key_bias"] = torch.zeros_like(bias)  # type: ignore[arg-type]  # it is needed
    return sublayer_steps.ordered_gradients(t, gradients, needs)


def _out_dtype(t: AttentionTensors[Operand], options: AttentionOptions) -> torch.dtype:
    """Return the dtype of z, and of its gradient."""
    return torch.promote_types(t.x_dst.dtype, options.dtype)


@lru_cache(KEPT)
def plans_of(specs: tuple, options: AttentionOptions) -> SublayerPlans:
    """Return the plans of both passes over tensors and index of these shapes and dtypes."""
    return SublayerPlans(forward_plan, backward_plan, specs, options)


def _run_forward(
    tensors: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    options: AttentionOptions,
    *,
    save: bool,
) -> tuple[SublayerPlans, list[Tensor]]:
    """Return the plans of these tensors, and the results of the forward pass."""
    inputs = sublayer_steps.contiguous((*tensors, *index))
    with on_device(tensors.x_dst):
        plans = plans_of(sublayer_steps.specs_of(inputs), options)
        results = plans.forward(save=save).run(inputs)
        return plans, results  # type: ignore[return-value]  # no result of this pass is None


def _run_backward(
    plans: SublayerPlans,
    tensors: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    kept: Tensor,
    grad: Tensor,
    needs: SublayerNeeds,
) -> tuple[SublayerGradients[Tensor], ParameterPieces]:
    inputs = sublayer_steps.contiguous((*tensors, *index, kept, grad))
    with on_device(tensors.x_dst):
        plan, pieces = plans.backward(needs)
        return SublayerGradients._make(plan.run(inputs)), pieces


class AttentionSublayer(torch.autograd.Function):
    """The sub-layer of eager calls: apply(*tensors, index, options) returns z."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, index, options = arguments
        plans, (z, kept) = _run_forward(AttentionTensors(*tensors), index, options, save=True)
        ctx.plans = plans
        ctx.save_for_backward(*tensors, *index, kept)
        return z

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks at each access
        t = AttentionTensors(*tensors[:NUM_TENSORS])
        index = IndexTensors(*tensors[NUM_TENSORS:NUM_INPUTS])
        kept = tensors[NUM_INPUTS]
        needs = AttentionTensors(*ctx.needs_input_grad[:NUM_TENSORS])
        wanted = SublayerNeeds.of(needs)
        is_eager = is_plain(*tensors, grad) and not is_batched(grad)
        if torch.is_grad_enabled() or not is_eager:
            options = ctx.plans.options
            results, pieces = _call_backward(t, index, options, kept, grad, wanted)
        else:
            results, pieces = _run_backward(ctx.plans, t, index, kept, grad, wanted)
        return *_named_gradients(t, results, pieces, needs), None, None


@define_operator
def attention_sublayer_triton(
    tensors: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    options: AttentionOptions,
    save: bool,  # noqa: FBT001  operators take positions
) -> tuple[Tensor, Tensor]:
    """Return z, and the block that `kept_layout` describes, empty unless `save`."""
    _, (z, *kept) = _run_forward(tensors, index, options, save=save)
    return z, kept[0] if save else z.new_empty(0, dtype=torch.uint8)


@torch.library.register_fake("anemoi_gt::attention_sublayer_triton")
@flat_arguments
def _(
    tensors: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    options: AttentionOptions,
    save: bool,  # noqa: FBT001  operators take positions
):
    x = tensors.x_dst
    z = x.new_empty(x.shape, dtype=_out_dtype(tensors, options))
    num_bytes = kept_layout(tensors, index, options).num_bytes if save else 0
    return z, z.new_empty((num_bytes,), dtype=torch.uint8)


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = AttentionOptions(*inputs[NUM_INPUTS:-1])
    _, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.save_for_backward(*inputs[:NUM_INPUTS], kept)


@define_operator
def attention_sublayer_triton_backward(
    tensors: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    options: AttentionOptions,
    kept: Tensor,
    grad: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return `SublayerGradients`, empty for those that are None."""
    plans = plans_of(sublayer_steps.specs_of((*tensors, *index)), options)
    grad = grad.to(_out_dtype(tensors, options))
    results, _ = _run_backward(plans, tensors, index, kept, grad, SublayerNeeds(*needs))
    dx_src, dhalo, dx_dst, dedge_attr, dcondition, dcondition_src, parameters = (
        grad.new_empty(0) if result is None else result for result in results
    )
    return dx_src, dhalo, dx_dst, dedge_attr, dcondition, dcondition_src, parameters


@torch.library.register_fake("anemoi_gt::attention_sublayer_triton_backward")
@flat_arguments
def _(
    tensors: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    options: AttentionOptions,
    kept: Tensor,
    grad: Tensor,
    needs: list[bool],
):
    t = tensors
    wanted = SublayerNeeds(*needs)
    attr_shape = _attribute_shape(t.edge_attr, _Layout.of(t, options))
    num_elements = parameter_pieces(t, options, weights=wanted.weights).num_elements
    results = SublayerGradients(
        x_src=_like(t.x_src),
        halo=_like(t.halo),
        x_dst=t.x_dst.new_empty(t.x_dst.shape),
        edge_attr=grad.new_empty(attr_shape, dtype=options.dtype) if wanted.edge_attr else None,
        condition=_like(t.condition, options.dtype) if wanted.condition else None,
        condition_src=_like(t.condition_src, options.dtype) if wanted.condition_src else None,
        parameters=grad.new_empty((num_elements,), dtype=torch.float32),
    )
    # an empty one for each: results are no aliases of each other
    return tuple(grad.new_empty(0) if result is None else result for result in results)


def _like(tensor: Tensor | None, dtype: torch.dtype | None = None) -> Tensor | None:
    return None if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)


def _backward(ctx, grad, *_):
    num_arguments = NUM_INPUTS + NUM_OPTIONS + 1
    if grad is None:
        return (None,) * num_arguments
    tensors = ctx.saved_tensors
    t = AttentionTensors(*tensors[:NUM_TENSORS])
    index = IndexTensors(*tensors[NUM_TENSORS:NUM_INPUTS])
    needs = AttentionTensors(*ctx.needs_input_grad[:NUM_TENSORS])
    wanted = SublayerNeeds.of(needs)
    results, pieces = _call_backward(t, index, ctx.options, tensors[NUM_INPUTS], grad, wanted)
    gradients = _named_gradients(t, results, pieces, needs)
    return *gradients, *((None,) * (num_arguments - NUM_TENSORS))


def _call_backward(
    t: AttentionTensors[Tensor],
    index: IndexTensors[Tensor],
    options: AttentionOptions,
    kept: Tensor,
    grad: Tensor,
    needs: SublayerNeeds,
) -> tuple[SublayerGradients[Tensor], ParameterPieces]:
    """Call the backward operator; return what `_run_backward` does."""
    results = SublayerGradients(
        *attention_sublayer_triton_backward(*t, *index, *options, kept, grad, list(needs))
    )
    return results, parameter_pieces(t, options, weights=needs.weights)


torch.library.register_autograd(attention_sublayer_triton, _backward, setup_context=_setup_context)
refuse_second_derivative(attention_sublayer_triton_backward)
