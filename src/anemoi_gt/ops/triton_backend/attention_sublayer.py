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

Kept for the backward pass: query and key before their norms, value, y, the edge attributes if they
were cast, what edge attention saves, and the cast weights. Gradients of query, y, key and value are
columns of one tensor, so that the gradients of n and of the weights are one product each. The
backward pass makes normed rows again, where it reads x.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import (
    define_operator,
    flat_arguments,
    is_batched,
    is_plain,
    needs_gradient,
    on_device,
    refuse_forward_mode,
    refuse_second_derivative,
)
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dtypes import scratch_dtype, without_autocast
from anemoi_gt.ops.operands import AttentionOperands, Needs
from anemoi_gt.ops.sublayer_tensors import AttentionOptions, AttentionTensors
from anemoi_gt.ops.triton_backend import row_launches, sublayer_steps
from anemoi_gt.ops.triton_backend.plan import Buffer, Plan, PlanBuilder
from anemoi_gt.ops.triton_backend.sizes import IndexTensors, sizes_of
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    Norm,
    NormParameters,
    PackedWeights,
    sum_columns,
)

KEPT = 128  # plans of each pass that are kept
NUM_TENSORS = len(AttentionTensors._fields)
NUM_OPTIONS = len(AttentionOptions._fields)
NUM_INPUTS = NUM_TENSORS + len(IndexTensors._fields)


class SublayerNeeds(NamedTuple):
    """Gradients that need separate launches and are computed only if needed."""

    edge_attr: bool
    condition: bool
    condition_src: bool

    @classmethod
    def of(cls, needs: AttentionTensors) -> "SublayerNeeds":
        """Read them from the needs of all tensors."""
        return cls(*(bool(getattr(needs, name)) for name in cls._fields))


class SublayerSaved(NamedTuple):
    """What the forward pass keeps for the backward pass."""

    query: Buffer | Tensor  # [B * N_dst, H * C], before q_norm
    key: Buffer | Tensor  # [B * N_src, H * C], before k_norm
    value: Buffer | Tensor
    attended: Buffer | Tensor  # y [B * N_dst, H * C]
    attr: (
        Buffer | Tensor | None
    )  # edge attributes in the dtype of products; None where they came in it
    inv_denominator: Buffer | Tensor  # of the attention, as `attention_steps.Saved`
    exp_scores: Buffer | Tensor
    projected: Buffer | Tensor
    packed: Buffer | Tensor  # cast weights


class SublayerGradients(NamedTuple):
    """Results of the backward plan; None for what is absent or not needed."""

    x_src: Buffer | Tensor | None
    halo: Buffer | Tensor | None
    x_dst: Buffer | Tensor
    edge_attr: Buffer | Tensor | None
    condition: Buffer | Tensor | None
    condition_src: Buffer | Tensor | None
    nodes_weight: Buffer | Tensor  # [4 H * C, F]: query, self, key, value
    projection_weight: Buffer | Tensor
    edge_weight: Buffer | Tensor
    edge_bias: Buffer | Tensor | None
    norm_map: Buffer | Tensor | None  # [2 F, K] of a condition
    norm_src_map: Buffer | Tensor | None
    query_bias: Buffer | Tensor | None
    key_bias: Buffer | Tensor | None
    self_bias: Buffer | Tensor | None
    sums: Buffer | Tensor  # over nodes, with the columns of `_sum_widths`


def attention_sublayer(
    tensors: AttentionTensors, graph: GraphStructure, options: AttentionOptions
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
    return _run_forward(tensors, index, options, save=False)[0]


def _weight_groups(t: AttentionTensors) -> dict[str, list[Buffer]]:
    """Return the parameters that are cast, by the group that stacks them."""
    groups = {
        "nodes": [t.query_weight, t.self_weight, t.key_weight, t.value_weight],
        "projection": [t.projection_weight],
        "edge": [t.edge_weight],
    }
    edge_bias = t.value_bias if t.edge_bias is None else t.edge_bias
    biases = {
        "query_bias": t.query_bias,
        "self_bias": t.self_bias,
        "key_bias": t.key_bias,
        "projection_bias": t.projection_bias,
        "edge_bias": edge_bias,
    }
    groups |= {name: [bias] for name, bias in biases.items() if bias is not None}
    return (
        groups | _norm_parameters(t).groups("norm") | _source_norm_parameters(t).groups("norm_src")
    )


def _norm_parameters(t: AttentionTensors) -> NormParameters:
    return NormParameters(
        t.norm_scale, t.norm_shift, t.norm_scale_bias, t.norm_shift_bias, t.condition
    )


def _source_norm_parameters(t: AttentionTensors) -> NormParameters:
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

    @classmethod
    def of(cls, t: AttentionTensors, options: AttentionOptions) -> "_Layout":
        x_src = t.x_dst if t.x_src is None else t.x_src
        halo = 0 if t.halo is None else t.halo.shape[0] // options.batch
        return cls(
            options.batch,
            options.heads,
            t.query_weight.shape[0],
            t.x_dst.shape[0] // options.batch,
            x_src.shape[0] // options.batch,
            halo,
        )

    @property
    def sources(self) -> int:
        """Own sources and halo of a batch entry."""
        return self.own_sources + self.halo

    def split_heads(self, rows: Buffer) -> Buffer:
        """Return rows [B * N, H * C] as [N, H, C], or [B, N, H, C] of a batch."""
        heads = rows.unflatten(1, (self.heads, self.width // self.heads))
        if self.batch == 1:
            return heads
        return heads.unflatten(0, (self.batch, rows.shape[0] // self.batch))

    def own_rows(self, rows: Buffer) -> Buffer:
        """Return the rows of own sources [B, N, ..] of rows [B * (N + R), ..]."""
        return rows.unflatten(0, (self.batch, self.sources)).slice(1, 0, self.own_sources)

    def halo_rows(self, rows: Buffer) -> Buffer:
        """Return the rows of the halo [B, R, ..] of rows [B * (N + R), ..]."""
        return rows.unflatten(0, (self.batch, self.sources)).slice(
            1, self.own_sources, self.sources
        )


def _attention_call(
    builder: PlanBuilder,
    layout: _Layout,
    rows: tuple,
    attr: Buffer,
    weights,
    index,
    stride: int = 0,
):
    """Return the call of edge attention on query, key and value [B * N, H * C]."""
    from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall

    query, key, value = (layout.split_heads(x) for x in rows)
    if layout.batch > 1 and len(attr.shape) == 2:
        attr = attr.unflatten(0, (1, attr.shape[0]))  # shared by the batch
    operands = AttentionOperands(query, key, value, attr, weights["edge"], weights.get("edge_bias"))
    scale = query.shape[-1] ** -0.5
    return AttentionCall(
        builder, sizes_of(operands, index, scale, gradient_stride=stride), operands, index
    )


def _head_norm(
    builder: PlanBuilder, layout: _Layout, x: Buffer, scale: Buffer | None, eps: float
) -> Buffer:
    """Return rows [B * N, H * C] normed per head; x itself if eps is 0, which means no norm."""
    if not eps:
        return x
    out = builder.empty_like(x)
    channels = layout.width // layout.heads
    launch = row_launches.head_norm_forward(
        x.shape[0], layout.heads, channels, eps, x_stride=x.stride[0], out_stride=out.stride[0]
    )
    builder.launch(launch, x=x, scale=scale, out=out)
    return out


@lru_cache(KEPT)
def forward_plan(specs: tuple, options: AttentionOptions, save: bool) -> Plan:
    """Return the plan of a forward pass over tensors and index: z and what `save` keeps."""
    from anemoi_gt.ops.triton_backend import attention_steps

    builder = PlanBuilder(specs)
    t = AttentionTensors(*builder.inputs[:NUM_TENSORS])
    index = IndexTensors(*builder.inputs[NUM_TENSORS:])
    layout = _Layout.of(t, options)
    packed, weights = sublayer_steps.cast_weights(builder, _weight_groups(t), options.dtype)
    if t.edge_bias is not None and t.value_bias is not None:
        sublayer_steps.add(builder, t.edge_bias, t.value_bias, weights["edge_bias"])
    for name in ("norm_bias", "norm_src_bias"):
        if name in weights:
            sublayer_steps.add_one_to_scale(builder, weights[name])
    features = t.x_dst.shape[1]
    width = layout.width

    n_src = builder.empty((layout.batch * layout.sources, features), options.dtype)
    norm = Norm.of(builder, _norm_parameters(t), options.norm_eps, weights, "norm")
    if t.x_src is None:
        source_norm, x_src = norm, t.x_dst
    else:
        source_norm = Norm.of(
            builder, _source_norm_parameters(t), options.norm_src_eps, weights, "norm_src"
        )
        x_src = t.x_src
    sublayer_steps.norm_forward(builder, x_src, source_norm, n_src, layout.batch, layout.sources)
    if t.halo is not None:
        sublayer_steps.copy(
            builder, t.halo.unflatten(0, (layout.batch, layout.halo)), layout.halo_rows(n_src)
        )
    n_dst = _destinations_of(builder, layout, n_src)
    if t.x_src is not None:
        n_dst = builder.empty(t.x_dst.shape, options.dtype)
        sublayer_steps.norm_forward(builder, t.x_dst, norm, n_dst)

    nodes = weights["nodes"]
    query = sublayer_steps.linear(
        builder, n_dst, nodes.slice(0, 0, width), weights.get("query_bias")
    )
    skip = sublayer_steps.linear(
        builder, n_dst, nodes.slice(0, width, 2 * width), weights.get("self_bias")
    )
    key_bias = weights.get("key_bias") if options.key_norm_eps else None
    key = sublayer_steps.linear(builder, n_src, nodes.slice(0, 2 * width, 3 * width), key_bias)
    value = sublayer_steps.linear(builder, n_src, nodes.slice(0, 3 * width, 4 * width), None)
    attr = sublayer_steps.cast(builder, t.edge_attr, options.dtype)

    normed_query = _head_norm(builder, layout, query, t.query_norm_scale, options.query_norm_eps)
    normed_key = _head_norm(builder, layout, key, t.key_norm_scale, options.key_norm_eps)
    call = _attention_call(builder, layout, (normed_query, normed_key, value), attr, weights, index)
    projected = attention_steps.project(call, call.operands.query)
    attended = builder.empty_like(query)
    out = layout.split_heads(attended)
    _, inv_denominator, exp_scores, attr_sums = attention_steps.attend_rows(call, projected, out)
    attention_steps.embed(call, attr_sums, out, skip=layout.split_heads(skip))

    z = builder.empty(t.x_dst.shape, torch.promote_types(t.x_dst.dtype, options.dtype))
    for begin, end in sublayer_steps.chunks(t.x_dst.shape[0]):
        rows = attended.slice(0, begin, end)
        delta = sublayer_steps.linear(
            builder, rows, weights["projection"], weights.get("projection_bias")
        )
        sublayer_steps.add(builder, t.x_dst.slice(0, begin, end), delta, z.slice(0, begin, end))
    if not save:
        return builder.finish([z])
    cast_attr = None if attr is t.edge_attr else attr
    saved = SublayerSaved(
        query, key, value, attended, cast_attr, inv_denominator, exp_scores, projected, packed
    )
    return builder.finish([z, *saved])


def _destinations_of(builder: PlanBuilder, layout: _Layout, n_src: Buffer) -> Buffer:
    """Return the local rows [B * N, F] of rows [B * (N + R), F]: a view, or else a copy.

    Only a batch with a halo needs the copy.
    """
    if not layout.halo:
        return n_src
    if layout.batch == 1:
        return n_src.slice(0, 0, layout.own_sources)
    rows = builder.empty((layout.batch * layout.own_sources, n_src.shape[1]), n_src.dtype)
    sublayer_steps.copy(
        builder, layout.own_rows(n_src), rows.unflatten(0, (layout.batch, layout.own_sources))
    )
    return rows


@lru_cache(KEPT)
def backward_plan(specs: tuple, options: AttentionOptions, needs: SublayerNeeds) -> Plan:
    """Return the plan of a backward pass over tensors, index, saved tensors and grad of z.

    Its results are `SublayerGradients`.
    """
    from anemoi_gt.ops.triton_backend import attention_steps

    builder = PlanBuilder(specs)
    t = AttentionTensors(*builder.inputs[:NUM_TENSORS])
    index = IndexTensors(*builder.inputs[NUM_TENSORS:NUM_INPUTS])
    *saved, grad = builder.inputs[NUM_INPUTS:]
    saved = SublayerSaved(*saved)
    layout = _Layout.of(t, options)
    weights = PackedWeights.of(_weight_groups(t)).views(saved.packed)
    width = layout.width
    is_one_set = t.x_src is None
    num_destinations = t.x_dst.shape[0]
    sums = sublayer_steps.NodeSums(builder, _sum_widths(t))

    # Gradients of query, y, key and value as columns: of sources [.., k, v], of one set [.., q, y,
    # k, v].
    columns = (4 if is_one_set else 2) * width
    src = builder.empty((layout.batch * layout.sources, columns), options.dtype)
    shares_rows = is_one_set and (not layout.halo or layout.batch == 1)
    if shares_rows:
        dst = src.slice(0, 0, num_destinations)
    else:
        dst = builder.empty((num_destinations, columns), options.dtype)
    dquery, dy = dst.slice(1, 0, width), dst.slice(1, width, 2 * width)
    dkey, dvalue = (
        src.slice(1, columns - 2 * width, columns - width),
        src.slice(1, columns - width, columns),
    )

    narrow = sublayer_steps.cast(builder, grad, options.dtype)
    sublayer_steps.product(builder, narrow, weights["projection"], dy)
    grad_projection = builder.empty_like(weights["projection"], torch.float32)
    sublayer_steps.outer_product(builder, narrow, saved.attended, grad_projection, is_first=True)

    query = _head_norm(builder, layout, saved.query, t.query_norm_scale, options.query_norm_eps)
    key = _head_norm(builder, layout, saved.key, t.key_norm_scale, options.key_norm_eps)
    attr = t.edge_attr if saved.attr is None else saved.attr
    call = _attention_call(
        builder, layout, (query, key, saved.value), attr, weights, index, stride=columns
    )
    operand_needs = Needs(edge_attr=needs.edge_attr, edge_bias=call.operands.edge_bias is not None)
    gradients = attention_steps.gradients(
        call,
        attention_steps.Saved(saved.inv_denominator, saved.exp_scores, saved.projected),
        layout.split_heads(dy),
        None,
        operand_needs,
        rows=tuple(layout.split_heads(rows) for rows in (dquery, dkey, dvalue)),
        sum_dtype=torch.float32,
    )
    _head_norm_backward(
        sums, layout, "query_norm", saved.query, dquery, t.query_norm_scale, options.query_norm_eps
    )
    _head_norm_backward(
        sums, layout, "key_norm", saved.key, dkey, t.key_norm_scale, options.key_norm_eps
    )
    edge_bias = gradients.edge_bias
    if edge_bias is not None and options.dtype == torch.float32:
        # The kernels' sum has terms of the keys, which cancel but for rounding. That is below the
        # rounding of 16-bit operands, but several times the error of a float32 sum.
        edge_bias = builder.empty((width,), torch.float32)
        builder.compute(_sum_of_attending_rows, dy, index.colptr, edge_bias)
    query_bias = None if t.query_bias is None else _sum_of_rows(builder, dquery)
    key_bias = None
    if t.key_bias is not None and options.key_norm_eps:
        key_bias = _sum_of_rows(builder, dkey)
    if (
        is_one_set and layout.halo
    ):  # the halo has no query and no y: zeros, so that one product computes all
        sublayer_steps.zero(builder, layout.halo_rows(src).slice(2, 0, 2 * width))
        if not shares_rows:
            of_entries = dst.slice(1, 0, 2 * width).unflatten(0, (layout.batch, layout.own_sources))
            sublayer_steps.copy(builder, of_entries, layout.own_rows(src).slice(2, 0, 2 * width))

    norm = Norm.of(builder, _norm_parameters(t), options.norm_eps, weights, "norm")
    norm_map = sublayer_steps.modulation_gradients(builder, norm, needs.condition)
    source_map = None
    grad_nodes = builder.empty_like(weights["nodes"], torch.float32)
    dx_dst = builder.empty_like(t.x_dst)
    dx_src = None
    if is_one_set:
        dhalo = _through_norm(
            sums,
            layout,
            "norm",
            norm,
            norm_map,
            t.x_dst,
            dx_dst,
            grad,
            src,
            weights["nodes"],
            grad_nodes,
            t.halo,
        )
    else:
        _through_norm(
            sums,
            layout._replace(own_sources=layout.destinations, halo=0),
            "norm",
            norm,
            norm_map,
            t.x_dst,
            dx_dst,
            grad,
            dst,
            weights["nodes"].slice(0, 0, 2 * width),
            grad_nodes.slice(0, 0, 2 * width),
            None,
        )
        source_norm = Norm.of(
            builder, _source_norm_parameters(t), options.norm_src_eps, weights, "norm_src"
        )
        source_map = sublayer_steps.modulation_gradients(builder, source_norm, needs.condition_src)
        dx_src = builder.empty_like(t.x_src)
        dhalo = _through_norm(
            sums,
            layout,
            "norm_src",
            source_norm,
            source_map,
            t.x_src,
            dx_src,
            None,
            src,
            weights["nodes"].slice(0, 2 * width, 4 * width),
            grad_nodes.slice(0, 2 * width, 4 * width),
            t.halo,
        )
    total = sums.total()
    self_bias = None
    if t.self_bias is not None:
        self_bias = builder.empty((width,), torch.float32)
        place = sums.columns["norm_total"]
        builder.compute(
            _map_by, t.projection_weight, total.slice(0, place.start, place.stop), self_bias
        )
    return builder.finish(
        SublayerGradients(
            x_src=dx_src,
            halo=dhalo,
            x_dst=dx_dst,
            edge_attr=gradients.edge_attr,
            condition=None if norm_map is None else norm_map.condition,
            condition_src=None if source_map is None else source_map.condition,
            nodes_weight=grad_nodes,
            projection_weight=grad_projection,
            edge_weight=gradients.edge_weight,
            edge_bias=edge_bias,
            norm_map=None if norm_map is None else norm_map.weight,
            norm_src_map=None if source_map is None else source_map.weight,
            query_bias=query_bias,
            key_bias=key_bias,
            self_bias=self_bias,
            sums=total,
        )
    )


def _through_norm(
    sums,
    layout: _Layout,
    name: str,
    norm: Norm,
    norm_map,
    x: Buffer,
    dx: Buffer,
    grad_total: Buffer | None,
    gradients: Buffer,
    weight: Buffer,
    grad_weight: Buffer,
    halo: Buffer | None,
) -> Buffer | None:
    """Differentiate x -> n -> columns; return the gradient of the halo, if any.

    The gradients of the columns are `gradients`.

    Fill dx and the gradient of the stacked weights; `layout` names the rows of x as own sources.
    """
    builder = sums.builder
    dn = sublayer_steps.product(builder, gradients, weight)
    normed = builder.empty_like(dn)
    arguments = {"batch": layout.batch, "entry_rows": layout.sources}
    if layout.batch == 1 or not layout.halo:
        arguments = {}
    parts = [(0, x.shape[0])]
    if norm.condition is not None and not arguments:
        parts = list(sublayer_steps.chunks(x.shape[0]))
    for begin, end in parts:
        rows = (begin, end)
        of_rows = [buffer if arguments else buffer.slice(0, *rows) for buffer in (dn, normed)]
        sublayer_steps.norm_backward(
            sums,
            name,
            norm,
            rows,
            x=x.slice(0, *rows),
            grad_normed=of_rows[0],
            grad_total=None if grad_total is None else grad_total.slice(0, *rows),
            dx=dx.slice(0, *rows),
            normed=of_rows[1],
            modulation=norm_map,
            is_first=begin == 0,
            **arguments,
        )
    dhalo = None
    if halo is not None:
        of_entries = halo.unflatten(0, (layout.batch, layout.halo))
        sublayer_steps.copy(builder, of_entries, layout.halo_rows(normed))
        dhalo = builder.empty_like(halo)
        sublayer_steps.copy(
            builder, layout.halo_rows(dn), dhalo.unflatten(0, (layout.batch, layout.halo))
        )
    sublayer_steps.outer_product(builder, gradients, normed, grad_weight, is_first=True)
    return dhalo


def _head_norm_backward(
    sums, layout: _Layout, name: str, x: Buffer, gradient: Buffer, scale: Buffer | None, eps: float
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
    )
    partial = None if columns is None else sums.partial
    sums.builder.launch(
        launch, x=x, grad_normed=gradient, scale=scale, dx=gradient, partial=partial
    )


def _sum_of_rows(builder: PlanBuilder, rows: Buffer) -> Buffer:
    """Return the sum over nodes of rows [N, width], float32."""
    total = builder.empty((rows.shape[1],), torch.float32)
    builder.compute(_sum_rows, rows, total)
    return total


def _sum_rows(rows: Tensor, total: Tensor) -> None:
    torch.sum(
        rows, 0, dtype=torch.float32, out=total
    )  # a product with ones has nine times the error


def _sum_of_attending_rows(rows: Tensor, colptr: Tensor, total: Tensor) -> None:
    """Sum rows [B * N, width] over destinations with in-edges, whose weights sum to 1."""
    attends = (colptr.diff() > 0).to(rows.dtype)
    num_entries = rows.shape[0] // max(1, attends.shape[0])
    torch.sum(rows * attends.repeat(num_entries).unsqueeze(1), 0, out=total)


def _map_by(weight: Tensor, x: Tensor, out: Tensor) -> None:
    torch.mv(weight.to(x.dtype).t(), x, out=out)


def _sum_widths(t: AttentionTensors) -> dict[str, int]:
    """Return the widths of sums over nodes; norm_total is the projection bias's gradient."""
    features = t.x_dst.shape[1]
    widths = sublayer_steps.norm_sums("norm", features)
    if t.x_src is not None:
        widths |= {"norm_src_scale": features, "norm_src_shift": features}
    for name in ("query_norm", "key_norm"):
        scale = getattr(t, f"{name}_scale")
        if scale is not None:
            widths[name] = scale.shape[0]
    return widths


def _named_gradients(t: AttentionTensors, gradients: SublayerGradients) -> AttentionTensors:
    """Return the gradients by name, from the results of `backward_plan`."""
    features = t.x_dst.shape[1]
    width = t.query_weight.shape[0]
    columns = sum_columns(_sum_widths(t))
    sums = {name: gradients.sums[place] for name, place in columns.items()}
    edge_attr = gradients.edge_attr
    if edge_attr is not None:
        edge_attr = edge_attr.view(t.edge_attr.shape)
    key_bias = gradients.key_bias
    if key_bias is None and t.key_bias is not None:
        key_bias = torch.zeros_like(t.key_bias)
    query_weight, self_weight, key_weight, value_weight = gradients.nodes_weight.split(width)
    named = {
        "x_src": gradients.x_src,
        "halo": gradients.halo,
        "x_dst": gradients.x_dst,
        "edge_attr": edge_attr,
        "condition": gradients.condition,
        "condition_src": gradients.condition_src,
        "query_weight": query_weight,
        "query_bias": gradients.query_bias,
        "self_weight": self_weight,
        "self_bias": gradients.self_bias,
        "key_weight": key_weight,
        "key_bias": key_bias,
        "value_weight": value_weight,
        "value_bias": gradients.edge_bias,
        "edge_weight": gradients.edge_weight,
        "edge_bias": gradients.edge_bias,
        "projection_weight": gradients.projection_weight,
        "projection_bias": sums["norm_total"],
        "query_norm_scale": sums.get("query_norm"),
        "key_norm_scale": sums.get("key_norm"),
    }
    norms = {"norm": gradients.norm_map}
    if t.x_src is not None:
        norms["norm_src"] = gradients.norm_src_map
    for name, norm_map in norms.items():
        scale, shift = sums[f"{name}_scale"], sums[f"{name}_shift"]
        if norm_map is not None:
            named |= {f"{name}_scale_bias": scale, f"{name}_shift_bias": shift}
            scale, shift = norm_map.split(features)
        named |= {f"{name}_scale": scale, f"{name}_shift": shift}
    ordered = [named.get(name) for name in AttentionTensors._fields]
    return AttentionTensors(*sublayer_steps.like_tensors(ordered, t))


def _run_forward(
    tensors: AttentionTensors, index: IndexTensors, options: AttentionOptions, save: bool
) -> list[Tensor | None]:
    inputs = sublayer_steps.contiguous((*tensors, *index))
    with on_device(tensors.x_dst), without_autocast(tensors.x_dst.device.type):
        return forward_plan(sublayer_steps.specs_of(inputs), options, save).run(inputs)


def _run_backward(
    tensors: AttentionTensors,
    index: IndexTensors,
    options: AttentionOptions,
    saved: SublayerSaved,
    grad: Tensor,
    needs: SublayerNeeds,
) -> SublayerGradients:
    inputs = sublayer_steps.contiguous((*tensors, *index, *saved, grad))
    with on_device(tensors.x_dst), without_autocast(tensors.x_dst.device.type):
        plan = backward_plan(sublayer_steps.specs_of(inputs), options, needs)
        return SublayerGradients(*plan.run(inputs))


class AttentionSublayer(torch.autograd.Function):
    """The sub-layer of eager calls: apply(*tensors, index, options) returns z."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, index, options = arguments
        z, *saved = _run_forward(AttentionTensors(*tensors), index, options, save=True)
        ctx.options = options
        ctx.save_for_backward(*tensors, *index, *saved)
        return z

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors  # read once: checkpointing unpacks at each access
        t = AttentionTensors(*tensors[:NUM_TENSORS])
        index = IndexTensors(*tensors[NUM_TENSORS:NUM_INPUTS])
        saved = SublayerSaved(*tensors[NUM_INPUTS:])
        needs = AttentionTensors(*ctx.needs_input_grad[:NUM_TENSORS])
        is_eager = is_plain(*tensors, grad) and not is_batched(grad)
        if torch.is_grad_enabled() or not is_eager:
            gradients = _call_backward(t, index, ctx.options, saved, grad, needs)
        else:
            results = _run_backward(t, index, ctx.options, saved, grad, SublayerNeeds.of(needs))
            gradients = _named_gradients(t, results)
        return *sublayer_steps.needed(gradients, needs), None, None


@define_operator
def attention_sublayer_triton(
    tensors: AttentionTensors, index: IndexTensors, options: AttentionOptions, save: bool
) -> tuple[(Tensor,) * (1 + len(SublayerSaved._fields))]:
    """Return z and `SublayerSaved`; empty tensors stand for None.

    All saved tensors are empty unless `save`.
    """
    z, *saved = _run_forward(tensors, index, options, save)
    saved = saved or [None] * len(SublayerSaved._fields)
    return z, *(z.new_empty(0) if tensor is None else tensor for tensor in saved)


@torch.library.register_fake("anemoi_gt::attention_sublayer_triton")
@flat_arguments
def _(tensors: AttentionTensors, index: IndexTensors, options: AttentionOptions, save: bool):
    t = tensors
    z = t.x_dst.new_empty(t.x_dst.shape, dtype=torch.promote_types(t.x_dst.dtype, options.dtype))
    if not save:
        return z, *(z.new_empty(0) for _ in SublayerSaved._fields)
    layout = _Layout.of(t, options)
    width, batch, nodes = layout.width, layout.batch, t.x_dst.shape[0]

    def empty(*shape, dtype=options.dtype):
        return z.new_empty(shape, dtype=dtype)

    query = empty(nodes, width)
    key = empty(batch * layout.sources, width)
    query_heads = query.unflatten(1, (layout.heads, -1))
    key_heads = key.unflatten(1, (layout.heads, -1))
    if batch > 1:
        query_heads, key_heads = (
            query_heads.unflatten(0, (batch, -1)),
            key_heads.unflatten(0, (batch, -1)),
        )
    layout_of_weights = PackedWeights.of(_weight_groups(t))
    has_bias = "edge_bias" in layout_of_weights.groups
    edge_bias = t.query_weight.new_empty(width) if has_bias else None
    operands = AttentionOperands(
        query_heads, key_heads, key_heads, t.edge_attr, t.edge_weight, edge_bias
    )
    sizes = sizes_of(operands, index)
    statistic_shape = query_heads.shape[:-1]
    return z, *SublayerSaved(
        query=query,
        key=key,
        value=torch.empty_like(key),
        attended=torch.empty_like(query),
        attr=z.new_empty(0) if t.edge_attr.dtype == options.dtype else empty(*t.edge_attr.shape),
        inv_denominator=empty(*sizes.inverse_shape(statistic_shape), dtype=torch.float32),
        exp_scores=empty(batch, index.row.shape[0], layout.heads, dtype=torch.float32),
        projected=empty(*statistic_shape, sizes.columns, dtype=scratch_dtype(options.dtype)),
        packed=empty(layout_of_weights.num_elements),
    )


def _setup_context(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.options = AttentionOptions(*inputs[NUM_INPUTS:-1])
    _, *saved = output
    ctx.mark_non_differentiable(*saved)
    ctx.save_for_backward(*inputs[:NUM_INPUTS], *saved)


@define_operator
def attention_sublayer_triton_backward(
    tensors: AttentionTensors,
    index: IndexTensors,
    options: AttentionOptions,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attended: Tensor,
    attr: Tensor,
    inv_denominator: Tensor,
    exp_scores: Tensor,
    projected: Tensor,
    packed: Tensor,
    grad: Tensor,
    needs: list[bool],
) -> tuple[(Tensor,) * len(SublayerGradients._fields)]:
    """Return `SublayerGradients`, empty for those that are None."""
    cast_attr = None if tensors.edge_attr.dtype == options.dtype else attr
    saved = SublayerSaved(
        query, key, value, attended, cast_attr, inv_denominator, exp_scores, projected, packed
    )
    results = _run_backward(tensors, index, options, saved, grad, SublayerNeeds(*needs))
    return tuple(grad.new_empty(0) if result is None else result for result in results)


@torch.library.register_fake("anemoi_gt::attention_sublayer_triton_backward")
@flat_arguments
def _(
    tensors: AttentionTensors,
    index: IndexTensors,
    options: AttentionOptions,
    query,
    key,
    value,
    attended,
    attr,
    inv_denominator,
    exp_scores,
    projected,
    packed,
    grad,
    needs,
):
    t = tensors
    needs = SublayerNeeds(*needs)
    width, features = t.query_weight.shape

    def absent():  # a new one each time: results are no aliases of each other
        return grad.new_empty(0)

    def like(tensor, dtype=None):
        return absent() if tensor is None else tensor.new_empty(tensor.shape, dtype=dtype)

    def sums(*shape):
        return grad.new_empty(shape, dtype=torch.float32)

    def map_like(condition):
        return absent() if condition is None else sums(2 * features, condition.shape[1])

    has_edge_bias = t.edge_bias is not None or t.value_bias is not None
    has_key_bias = t.key_bias is not None and options.key_norm_eps
    attr_shape = t.edge_attr.shape
    if options.batch > 1 and len(attr_shape) == 2:
        attr_shape = (1, *attr_shape)
    return tuple(
        SublayerGradients(
            x_src=like(t.x_src),
            halo=like(t.halo),
            x_dst=like(t.x_dst),
            edge_attr=grad.new_empty(attr_shape, dtype=options.dtype)
            if needs.edge_attr
            else absent(),
            condition=like(t.condition, options.dtype) if needs.condition else absent(),
            condition_src=like(t.condition_src, options.dtype) if needs.condition_src else absent(),
            nodes_weight=sums(4 * width, features),
            projection_weight=sums(*t.projection_weight.shape),
            edge_weight=sums(*t.edge_weight.shape),
            edge_bias=sums(width) if has_edge_bias else absent(),
            norm_map=map_like(t.condition),
            norm_src_map=map_like(t.condition_src),
            query_bias=absent() if t.query_bias is None else sums(width),
            key_bias=sums(width) if has_key_bias else absent(),
            self_bias=absent() if t.self_bias is None else sums(width),
            sums=sums(sum(_sum_widths(t).values())),
        )
    )


def _backward(ctx, grad, *_):
    num_arguments = NUM_INPUTS + NUM_OPTIONS + 1
    if grad is None:
        return (None,) * num_arguments
    tensors = ctx.saved_tensors
    t = AttentionTensors(*tensors[:NUM_TENSORS])
    index = IndexTensors(*tensors[NUM_TENSORS:NUM_INPUTS])
    saved = SublayerSaved(*tensors[NUM_INPUTS:])
    needs = AttentionTensors(*ctx.needs_input_grad[:NUM_TENSORS])
    gradients = _call_backward(t, index, ctx.options, saved, grad, needs)
    return *sublayer_steps.needed(gradients, needs), *((None,) * (num_arguments - NUM_TENSORS))


def _call_backward(
    t: AttentionTensors,
    index: IndexTensors,
    options: AttentionOptions,
    saved: SublayerSaved,
    grad: Tensor,
    needs: AttentionTensors,
) -> AttentionTensors:
    """Call the backward operator; return the gradients by name."""
    if saved.attr is None:
        saved = saved._replace(attr=grad.new_empty(0))
    wanted = SublayerNeeds.of(needs)
    results = attention_sublayer_triton_backward(*t, *index, *options, *saved, grad, list(wanted))
    is_present = {
        "x_src": t.x_src is not None,
        "halo": t.halo is not None,
        "edge_attr": wanted.edge_attr,
        "condition": wanted.condition,
        "condition_src": wanted.condition_src,
        "edge_bias": t.edge_bias is not None or t.value_bias is not None,
        "norm_map": t.condition is not None,
        "norm_src_map": t.condition_src is not None,
        "query_bias": t.query_bias is not None,
        "key_bias": t.key_bias is not None and bool(options.key_norm_eps),
        "self_bias": t.self_bias is not None,
    }
    gradients = SublayerGradients(*results)
    absent = {name: None for name, present in is_present.items() if not present}
    return _named_gradients(t, gradients._replace(**absent))


torch.library.register_autograd(attention_sublayer_triton, _backward, setup_context=_setup_context)
refuse_second_derivative(attention_sublayer_triton_backward)
