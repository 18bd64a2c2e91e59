"""The attention sub-layer of a block as one operator: norms, projections, attention, residual.

    n_i = norm(x_i)              n_j = norm_src(x_j), or norm(x_j) for one set of nodes
    q_i = q_norm(W_query n_i + b_query)      k_j = k_norm(W_key n_j + b_key)      v_j = W_value n_j
    x_e = W_edge a_e + b_edge + b_value      p_e = softmax of < q_i , k_j + x_e > / sqrt(C)
    y_i = sum_e p_e (v_j + x_e) + W_self n_i + b_self
    z_i = x_i + W_projection y_i + b_projection

q_norm and k_norm, per head, are the identity where the options give them no eps. On a shard of a
graph, a rank's own sources are followed by its halo, rows n_j that their owner ranks normalised.

Adding one vector to all keys shifts all scores of a destination alike and changes no weight. So
without k_norm b_key has no effect, its gradient is 0, and b_value may be added to key and value by
the bias of the edges, whose gradient it shares: the sum of dy_i over destinations that have
in-edges. The gradient of b_self follows from the projection's: sum_i dy_i = W_projection^T sum_i
dz_i. Only dq (and dk with k_norm) needs an extra reduction over nodes; all other gradients of
biases and norms are made by the passes over rows that are needed anyway.

Nodes are one of three kinds of sets (`anemoi_gt.ops.triton_backend.node_rows`), which own the
norms and projections of both passes.

Kept for the backward pass, in one storage: rows of nodes (query and key before their norms), the
edge attributes if they were cast, what edge attention keeps, and the cast weights. The backward
pass recomputes normalised rows where it reads x. Gradients of parameters are parts of one tensor
too.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.dtypes import scratch_dtype
from anemoi_gt.ops.operands import (
    AttentionOperands,
    AttentionSizes,
    Needs,
    Operand,
    OperandT,
)
from anemoi_gt.ops.operator import GradientLayout, Spec
from anemoi_gt.ops.sublayer_tensors import AttentionOptions, AttentionTensors, Linear
from anemoi_gt.ops.tree import leaves
from anemoi_gt.ops.triton_backend import sublayer_steps
from anemoi_gt.ops.triton_backend.edge_attention_triton import kept_of
from anemoi_gt.ops.triton_backend.node_rows import (
    HeadNorms,
    NodeRows,
    NodeSets,
    NodeSizes,
)
from anemoi_gt.ops.triton_backend.packing import (
    PackedGradients,
    PackedWeights,
    Part,
    Piece,
    stacked,
    zero,
)
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator, Shaped
from anemoi_gt.ops.triton_backend.sizes import IndexTensors, Sizes, sizes_of
from anemoi_gt.ops.triton_backend.sublayer_builder import NodeSums, SublayerBuilder
from anemoi_gt.ops.triton_backend.sublayer_steps import NormGradients
from anemoi_gt.ops.triton_backend.tiles import TUNING, Tuning

# results of the backward pass by number; the packed gradients of parameters follow
X_SRC, HALO, X_DST, EDGE_ATTR, CONDITION_SRC, CONDITION_DST = range(6)


def attention_sublayer(
    tensors: AttentionTensors[Tensor], graph: GraphStructure, options: AttentionOptions
) -> Tensor:
    """Return z [B * N_dst, F], in the promoted dtype of x and the GEMMs.

    `graph` is the structure of one batch entry, from own sources and halo to destinations. Edge
    attributes [E, D] are shared by the batch.
    """
    flat = attention_sublayer_triton.flatten(tensors)
    save = needs_gradient(*flat)
    if save:
        graph = graph.with_reverse()
    (z,) = attention_sublayer_triton(flat, IndexTensors.of(graph), options, save=save)
    return z


def attention_kept_bytes(
    tensors: AttentionTensors[Tensor], graph: GraphStructure, options: AttentionOptions
) -> int:
    """Return the bytes that a call keeps for its backward pass, besides its inputs."""
    return kept_layout(tensors, IndexTensors.of(graph), options).num_bytes


class AttentionSublayer(PlannedOperator):
    """Outputs z; keeps rows of nodes, cast weights and what edge attention keeps."""

    builder_class = SublayerBuilder

    def __init__(self) -> None:
        super().__init__(
            "attention_sublayer",
            tensors=AttentionTensors,
            constants=IndexTensors,
            options=AttentionOptions,
            outputs=("out",),
            num_results=7,
        )

    def attention_sizes(
        self,
        tensors: AttentionTensors[Tensor],
        constants: IndexTensors[Tensor],
        options: AttentionOptions,
    ) -> AttentionSizes:
        """Return the sizes of the edge attention in a call."""
        return AttentionSizes.of(_operands(tensors, options), constants.row.shape[0])

    def forward_specs(
        self,
        tensors: AttentionTensors[Operand],
        constants: IndexTensors[Operand],
        options: AttentionOptions,
    ) -> list[Spec]:
        """Return the specs of z and of the kept bytes."""
        kept = kept_layout(tensors, constants, options)
        z = (tensors.x_dst.shape, _out_dtype(tensors, options))
        return [z, ((kept.num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: SublayerBuilder,
        tensors: AttentionTensors[Buffer],
        constants: IndexTensors[Buffer],
        options: AttentionOptions,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        from anemoi_gt.ops.triton_backend import attention_steps

        t = tensors
        kept = builder.empty_parts(kept_layout(t, constants, options), together=save)
        weights = builder.pack(_packed(t, options), kept["packed"])
        nodes = NodeSets.of(builder, t, options, weights)
        rows = nodes.project(kept)
        attr = t.edge_attr
        if "attr" in kept:
            attr = kept["attr"]
            builder.add(t.edge_attr, None, attr)
        sizes = nodes.sizes
        head_norms = HeadNorms(builder, sizes, t, options)
        call = _attention_call(
            builder, t, constants, options, head_norms.forward(rows), attr, weights
        )
        attended = builder.empty((t.x_dst.shape[0], sizes.width), options.gemm_dtype)
        attention_steps.attend_and_add(
            call, kept_of(kept), sizes.split_heads(attended), sizes.split_heads(rows.attended)
        )
        z = builder.empty(t.x_dst.shape, _out_dtype(t, options))
        for begin, end in builder.chunks(t.x_dst.shape[0]):
            y = rows.attended.slice(0, begin, end)
            delta = builder.linear(y, weights["projection"], weights.get("projection_bias"))
            builder.add(t.x_dst.slice(0, begin, end), delta, z.slice(0, begin, end))
        return [z, builder.whole(kept["dst"])] if save else [z]

    def gradient_layout(
        self,
        tensors: AttentionTensors[Operand],
        constants: IndexTensors[Operand],
        options: AttentionOptions,
        needs: AttentionTensors[bool],
    ) -> GradientLayout:
        """Return the layout of the gradients of rows, edges, conditions, and of parameters."""
        t = tensors
        parts = _Parts.of(t, options)
        whole: list[Spec | None] = [None] * 6
        for result, x in ((X_SRC, t.x_src), (HALO, t.halo), (X_DST, t.x_dst)):
            whole[result] = None if x is None else (x.shape, x.dtype)
        if needs.edge_attr:
            sizes = NodeSizes.of(t, options)
            whole[EDGE_ATTR] = (sizes.attribute_shape(t.edge_attr), options.gemm_dtype)
        if t.norm.condition is not None and needs.norm.condition:
            whole[CONDITION_DST] = (t.norm.condition.shape, options.gemm_dtype)
        if t.norm_src.condition is not None and needs.norm_src.condition:
            whole[CONDITION_SRC] = (t.norm_src.condition.shape, options.gemm_dtype)
        packed = parts.packed(needs)
        return packed.layout(whole, leaves(parts.tree), leaves(t), leaves(needs))

    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: AttentionTensors[Buffer],
        constants: IndexTensors[Buffer],
        options: AttentionOptions,
        kept: Buffer,
        grads: Sequence[Buffer],
        needs: AttentionTensors[bool],
    ) -> list[Buffer | None]:
        """Add the steps of the backward pass."""
        from anemoi_gt.ops.triton_backend import attention_steps

        t = tensors
        (grad,) = grads
        kept_parts = kept_layout(t, constants, options).buffers(kept)
        weights = PackedWeights.of(_packed(t, options)).views(kept_parts["packed"])
        nodes = NodeSets.of(builder, t, options, weights)
        sizes = nodes.sizes
        parts = _Parts.of(t, options)
        widths = {name: part.shape[0] for name, part in parts.sums.items()}
        sums = NodeSums(builder, widths, builder.tuning.programs)
        packed_gradients, parameters = parts.packed(needs).allocate(builder)
        if "key_bias" in parameters:
            builder.compute(zero, parameters["key_bias"])

        rows = nodes.kept_rows(kept_parts)
        nodes.allocate_gradients(sums, parameters, needs)
        gradients = nodes.gradient_rows
        grad_cast = builder.cast(grad, options.gemm_dtype)
        builder.product(grad_cast, weights["projection"], gradients.attended)
        if "projection_weight" in parameters:
            grad_weight = parameters["projection_weight"]
            builder.outer_product(grad_cast, rows.attended, grad_weight, is_first=True)

        attr = kept_parts.get("attr", t.edge_attr)
        head_norms = HeadNorms(builder, sizes, t, options)
        call = _attention_call(
            builder, t, constants, options, head_norms.forward(rows), attr, weights
        )
        edge_bias = parameters.get("edge_bias")
        if edge_bias is not None and options.gemm_dtype == torch.float32:
            # The kernels' sum has terms of the keys, which cancel but for rounding. That is below
            # the rounding of 16-bit operands, but several times the error of a float32 sum.
            builder.compute(_sum_of_attending_rows, gradients.attended, constants.colptr, edge_bias)
            edge_bias = None
        dedge_attr = attention_steps.gradients(
            call,
            kept_of(kept_parts),
            sizes.split_heads(gradients.attended),
            None,
            Needs(edge_attr=bool(needs.edge_attr), edge_bias=edge_bias is not None),
            into=AttentionOperands(
                query=sizes.split_heads(gradients.query),
                key=sizes.split_heads(gradients.key),
                value=sizes.split_heads(gradients.value),
                edge_weight=parameters["edge_weight"],
                edge_bias=edge_bias,
            ),
        ).edge_attr
        head_norms.backward(sums, rows, gradients)
        for name, gradient in (("query_bias", gradients.query), ("key_bias", gradients.key)):
            if name in sums.columns:
                sums.sum_rows(name, gradient)
        of_rows = nodes.differentiate(grad)
        sums.reduce_into(parameters["sums"])
        if "self_bias" in parameters:
            total = parameters["sums"].rows(sums.columns["norm_total"])
            builder.map_total(t.projection.weight, total, parameters["self_bias"])
        return [
            of_rows.x_src,
            of_rows.halo,
            of_rows.x_dst,
            dedge_attr,
            of_rows.condition_src,
            of_rows.condition_dst,
            packed_gradients,
        ]


def _packed(
    t: AttentionTensors[OperandT], options: AttentionOptions
) -> dict[str, list[Piece[OperandT]]]:
    """Return the packed parameters by the group that stacks them."""
    groups = {
        "nodes": stacked(t.query.weight, t.self_term.weight, t.key.weight, t.value.weight),
        "projection": stacked(t.projection.weight),
        "edge": stacked(t.edge.weight),
    }
    key_bias = t.key.bias if options.key_norm.eps else None
    biases = (t.query.bias, t.self_term.bias, key_bias, None)
    if any(bias is not None for bias in biases):
        width = t.query.weight.shape[0]
        groups["nodes_bias"] = [Piece((width,), bias) for bias in biases]
    if t.projection.bias is not None:
        groups["projection_bias"] = stacked(t.projection.bias)
    if t.edge.bias is not None and t.value.bias is not None:
        groups["edge_bias"] = [Piece(t.edge.bias.shape, t.edge.bias, addend=t.value.bias)]
    elif t.edge.bias is not None or t.value.bias is not None:
        groups["edge_bias"] = stacked(t.edge.bias, t.value.bias)
    of_norm = sublayer_steps.packed_norm(t.norm, "norm")
    return groups | of_norm | sublayer_steps.packed_norm(t.norm_src, "norm_src")


def _sizes(
    t: AttentionTensors[Operand],
    index: IndexTensors[Operand],
    options: AttentionOptions,
    tuning: Tuning = TUNING,
) -> Sizes:
    """Return the sizes of the call of edge attention."""
    nodes = NodeSizes.of(t, options)
    scale = (nodes.width // nodes.heads) ** -0.5
    return sizes_of(
        _operands(t, options),
        index,
        scale,
        row_stride=nodes.row_stride,
        int32_limit=tuning.int32_limit,
    )


def _operands(
    t: AttentionTensors[Operand], options: AttentionOptions
) -> AttentionOperands[Operand]:
    """Return shapes and dtypes of the operands of edge attention."""
    nodes = NodeSizes.of(t, options)
    batch = () if nodes.batch == 1 else (nodes.batch,)
    heads = (nodes.heads, nodes.width // nodes.heads)
    query = Shaped((*batch, nodes.destinations, *heads), options.gemm_dtype)
    key = Shaped((*batch, nodes.sources, *heads), options.gemm_dtype)
    edge_attr = Shaped(nodes.attribute_shape(t.edge_attr), options.gemm_dtype)
    has_bias = t.edge.bias is not None or t.value.bias is not None
    edge_bias = Shaped((nodes.width,), options.gemm_dtype) if has_bias else None
    return AttentionOperands(query, key, key, edge_attr, t.edge.weight, edge_bias)


def kept_layout(
    t: AttentionTensors[Operand], index: IndexTensors[Operand], options: AttentionOptions
) -> MemoryLayout:
    """Return the layout of what the forward pass keeps for the backward pass."""
    nodes = NodeSizes.of(t, options)
    sizes = _sizes(t, index, options)
    heads = (nodes.batch * nodes.destinations, nodes.heads)
    num_packed = PackedWeights.of(_packed(t, options)).num_elements
    specs: dict[str, Spec] = {"packed": ((num_packed,), options.gemm_dtype)}
    for name, shape in nodes.row_shapes().items():
        specs[name] = (shape, options.gemm_dtype)
    if t.edge_attr.dtype != options.gemm_dtype:
        specs["attr"] = (tuple(t.edge_attr.shape), options.gemm_dtype)
    specs["inv_denominator"] = (sizes.inverse_shape(heads), torch.float32)
    specs["exp_scores"] = ((sizes.batch, sizes.num_edges, sizes.heads), torch.float32)
    specs["projected"] = ((*heads, sizes.columns), scratch_dtype(options.gemm_dtype))
    return MemoryLayout.of(specs)


def _attention_call(
    builder: SublayerBuilder,
    t: AttentionTensors[Buffer],
    index: IndexTensors[Buffer],
    options: AttentionOptions,
    rows: NodeRows,
    attr: Buffer,
    weights: dict[str, Buffer],
) -> Any:
    """Return the call of edge attention on query, key and value [B * N, H * C]."""
    from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall

    nodes = NodeSizes.of(t, options)
    if len(nodes.attribute_shape(attr)) > len(attr.shape):
        attr = attr.unflatten(0, (1, attr.shape[0]))
    operands = AttentionOperands(
        query=nodes.split_heads(rows.query),
        key=nodes.split_heads(rows.key),
        value=nodes.split_heads(rows.value),
        edge_attr=attr,
        edge_weight=weights["edge"],
        edge_bias=weights.get("edge_bias"),
    )
    return AttentionCall(builder, _sizes(t, index, options, builder.tuning), operands, index)


def _sum_of_attending_rows(rows: Tensor, colptr: Tensor, total: Tensor) -> None:
    """Sum rows [B * N, width] over destinations with in-edges, whose weights sum to 1."""
    attends = (colptr.diff() > 0).to(rows.dtype)
    num_entries = rows.shape[0] // max(1, attends.shape[0])
    torch.sum(rows * attends.repeat(num_entries).unsqueeze(1), 0, out=total)


class _Parts(NamedTuple):
    """The packed gradients of parameters, and the tree of all gradients."""

    groups: dict[str, list[Part]]  # without the sums
    sums: dict[str, Part]  # sums over nodes, by the names of their columns
    tree: AttentionTensors

    @classmethod
    def of(cls, t: AttentionTensors[Operand], options: AttentionOptions) -> "_Parts":
        """Return the parts for these tensors."""
        width, features = t.query.weight.shape
        nodes = [Part((width, features)) for _ in range(4)]
        query, self_term, key, value = (Linear(weight) for weight in nodes)
        projection = Linear(Part((features, width)))
        edge = Linear(Part(tuple(t.edge.weight.shape)))
        groups: dict[str, list[Part]] = {
            "nodes_weight": nodes,
            "projection_weight": [projection.weight],
            "edge_weight": [edge.weight],
        }
        norm = NormGradients.of(t.norm, features, CONDITION_DST)
        norm_src = NormGradients.of(t.norm_src, features, CONDITION_SRC)
        of_scale, of_shift = norm.sums
        sums = {"norm_scale": of_scale, "norm_shift": of_shift, "norm_total": Part((features,))}
        projection = projection._replace(bias=sums["norm_total"])
        if t.edge.bias is not None or t.value.bias is not None:
            bias = Part((width,))
            groups["edge_bias"] = [bias]
            edge, value = edge._replace(bias=bias), value._replace(bias=bias)
        if t.self_term.bias is not None:
            bias = Part((width,))
            groups["self_bias"] = [bias]
            self_term = self_term._replace(bias=bias)
        if norm.maps:
            groups["norm_map"] = list(norm.maps)
        if t.x_src is not None:
            sums["norm_src_scale"], sums["norm_src_shift"] = norm_src.sums
            if norm_src.maps:
                groups["norm_src_map"] = list(norm_src.maps)
        for name, scale in (("query_norm", t.query_scale), ("key_norm", t.key_scale)):
            if scale is not None:
                sums[name] = Part(tuple(scale.shape))
        if t.query.bias is not None:
            bias = Part((width,))
            sums["query_bias"] = bias
            query = query._replace(bias=bias)
        if t.key.bias is not None:
            bias = Part((width,))
            if options.key_norm.eps:
                sums["key_bias"] = bias
            else:
                groups["key_bias"] = [bias]  # zeros
            key = key._replace(bias=bias)
        tree: AttentionTensors = AttentionTensors(
            x_src=X_SRC,
            halo=HALO,
            x_dst=X_DST,
            edge_attr=EDGE_ATTR,
            norm=norm.tree,
            norm_src=norm_src.tree,
            query=query,
            self_term=self_term,
            key=key,
            value=value,
            edge=edge,
            projection=projection,
            query_scale=sums.get("query_norm"),
            key_scale=sums.get("key_norm"),
        )
        return cls(groups, sums, tree)

    def packed(self, needs: AttentionTensors[bool]) -> PackedGradients:
        """Return their layout, without frozen projections of nodes."""
        groups = dict(self.groups)
        linears = (needs.query, needs.self_term, needs.key, needs.value, needs.projection)
        if not any(linear.weight for linear in linears):
            del groups["nodes_weight"], groups["projection_weight"]
        if not needs.key.bias:
            groups.pop("key_bias", None)
        groups["sums"] = list(self.sums.values())
        return PackedGradients.of(groups)


def _out_dtype(t: AttentionTensors[Operand], options: AttentionOptions) -> torch.dtype:
    """Return the dtype of z, and of its gradient."""
    return torch.promote_types(t.x_dst.dtype, options.gemm_dtype)


attention_sublayer_triton = AttentionSublayer()
