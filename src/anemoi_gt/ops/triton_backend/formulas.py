"""Formulas of the sub-layers of blocks and graph networks, and their operators.

The equations are in `anemoi_gt.ops.tensors`.
"""

from functools import partial

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.tensors import (
    AttentionOptions,
    AttentionTensors,
    IndexTensors,
    InteractionOptions,
    InteractionTensors,
    Layer,
    Linear,
    Network,
    NetworkOptions,
    NetworkTensors,
    NoConstants,
    Norm,
    NormOptions,
    Operand,
    check_attention,
    check_interaction,
    check_network,
)
from anemoi_gt.ops.triton_backend.attention_nodes import AttendNode, HeadNormNode
from anemoi_gt.ops.triton_backend.derived_passes import FormulaOperator
from anemoi_gt.ops.triton_backend.edge_nodes import EndsNode, GatherActivationNode
from anemoi_gt.ops.triton_backend.formula import Loop, Program, Value, key_of, present
from anemoi_gt.ops.triton_backend.packing import aligned_columns
from anemoi_gt.ops.triton_backend.row_nodes import (
    ActivationNode,
    AddNode,
    Halo,
    LinearNode,
    NormNode,
    ResidualNormNode,
    joined,
    own_rows,
)


def add_residual_norm(
    p: Program,
    x: Value | None,
    r: Value,
    norm: Norm[Value],
    options: NormOptions,
    out_dtype: torch.dtype,
) -> Value:
    """Y = x + norm(r), without x or the norm."""
    if norm.condition is not None:
        r = p.add(NormNode(r, norm, options, p.dtype, "network_norm"))
        norm, options = Norm(), NormOptions()
    return p.add(ResidualNormNode(x, r, norm, options, out_dtype))


def network(p: Program, t: NetworkTensors[Value], o: NetworkOptions) -> Value:
    """Y = x + norm(network([norm_in(x), more])): any part but the last linear map may be absent."""
    rows = [t.x]
    if o.norm_in.eps:
        norm = NormNode(t.x, t.norm_in, o.norm_in, p.dtype, "norm_in")
        rows = [p.add(norm)]
    if t.more is not None:
        rows.append(t.more)
    elif o.repeats_x:
        rows.append(rows[0])
    # rows of a model: their columns are its variables, which are padded, and few
    pads_input = rows == [t.x] and not o.residual
    is_result = not o.residual and not o.norm.eps  # of the last linear map
    for name, layer in (("first", t.network.first), ("second", t.network.second)):
        if layer.value.weight is None:
            continue
        layers = [linear for linear in layer if linear.weight is not None]
        is_cheap = not o.keep_hidden
        if pads_input:  # writing the rows takes longer than their product
            columns = aligned_columns(t.x.shape[1], p.dtype)
            is_cheap = is_cheap or 2 * columns <= layer.value.weight.shape[0]
        hidden = LinearNode(name, rows, layers, p.dtype, pads_input=pads_input, is_cheap=is_cheap)
        rows = [p.add(ActivationNode(p.add(hidden), o.activation))]
        pads_input = False
    out = LinearNode(
        "out",
        rows,
        [t.network.out],
        p.dtype,
        out_dtype=o.out_dtype if is_result else None,
        pads_input=pads_input,
        pads_output=is_result,
        # the pass of a conditional norm does not sum the gradient that it writes
        summed=[t.network.out] if is_result or t.network.norm.condition is not None else [],
    )
    r = p.add(out)
    if is_result:
        return r
    x = t.x if o.residual else None
    if not o.norm_in.eps:
        return add_residual_norm(p, x, r, t.network.norm, o.norm, o.out_dtype)
    if o.norm.eps:
        r = add_residual_norm(p, None, r, t.network.norm, o.norm, o.out_dtype)
    return r if x is None else p.add(AddNode(x, r, norm))


def edge_update(
    p: Program, t: InteractionTensors[Value], index: IndexTensors[Operand], o: InteractionOptions
) -> Value:
    """e'_e = e_e + norm(network([x_i, x_j, e_e])), or without e_e, for each edge e from j to i.

    The first layer is z_e + a_i + b_j, of products over edges and over each set of nodes.
    """
    first, second, out, norm = t.network
    layers = [linear for linear in first if linear.weight is not None]
    x_src = joined(t.x_dst if t.x_src is None else t.x_src, t.halo, o.batch)
    columns_dst, columns_src = t.x_dst.shape[1], x_src.shape[1]
    ends = p.add_alone(EndsNode(index))
    # W_1 is [W_i, W_j, W_e]
    b = p.add_alone(
        LinearNode("first", [x_src], layers, p.dtype, first_column=columns_dst, has_bias=False)
    )
    a = p.add_alone(LinearNode("first", [t.x_dst], layers, p.dtype))
    p.loop = Loop("edges")
    z = LinearNode(
        "first",
        [t.edges],
        layers,
        p.dtype,
        first_column=columns_dst + columns_src,
        has_bias=False,
    )
    gathered = GatherActivationNode(p, p.add(z), a.out, b.out, ends, o.network.activation, o.batch)
    rows = p.add(gathered)
    if second.value.weight is not None:
        layers = [linear for linear in second if linear.weight is not None]
        hidden = p.add(LinearNode("second", [rows], layers, p.dtype))
        rows = p.add(ActivationNode(hidden, o.network.activation))
    summed = [] if norm.condition is None else [out]
    r = p.add(LinearNode("out", [rows], [out], p.dtype, summed=summed))
    x = t.edges if o.network.residual else None
    return add_residual_norm(p, x, r, norm, o.network.norm, o.network.out_dtype)


def attention(
    p: Program, t: AttentionTensors[Value], index: IndexTensors[Operand], o: AttentionOptions
) -> Value:
    """Z = x + W_projection y + b, where y is the self term plus the attention to sources.

    In a block that is one operator, the feed-forward network of z follows.

    Query, y, key and value of one set of nodes are columns of one value. Where a halo follows the
    own sources, or sources are another set, [q, y] of destinations and [k, v] of sources are two.
    """
    width = t.query.weight.shape[0]
    key_bias = t.key.bias if o.key_norm.eps else None  # without effect where keys have no norm
    key, value = Linear(t.key.weight, key_bias), Linear(t.value.weight)
    layers = [t.query, t.self_term, key, value]
    to_dst, to_src = slice(0, 2 * width), slice(2 * width, 4 * width)
    project = partial(LinearNode, "nodes", layers=layers, dtype=p.dtype)
    halo = None
    if t.halo is not None and t.halo.shape[0]:
        halo = Halo(t.halo, o.batch)

    p.loop = Loop("sources", is_chunked=False, is_chunked_backward=False)
    if t.x_src is not None:
        normed = p.add(NormNode(t.x_src, t.norm_src, o.norm_src, p.dtype, "norm_src", halo))
        src = p.add(project(inputs=[normed], weight_rows=to_src, summed=[key]))
        p.loop = Loop("destinations", is_chunked=False, is_chunked_backward=False)
        norm = NormNode(t.x_dst, t.norm, o.norm, p.dtype)
        dst = p.add(project(inputs=[p.add(norm)], weight_rows=to_dst, summed=[t.query]))
    else:
        norm = NormNode(t.x_dst, t.norm, o.norm, p.dtype, halo=halo)
        normed = p.add(norm)
        if halo is None:
            dst = src = p.add(project(inputs=[normed], summed=[t.query, key]))
        else:
            own = own_rows(normed, t.x_dst.shape[0], o.batch)
            dst = p.add(project(inputs=[own], weight_rows=to_dst, summed=[t.query]))
            src = p.add(project(inputs=[normed], weight_rows=to_src, summed=[key]))
    q, y = dst.columns(0, width), dst.columns(width, 2 * width)
    first = src.shape[1] - 2 * width
    k, v = src.columns(first, first + width), src.columns(first + width, first + 2 * width)

    if o.query_norm.eps or o.key_norm.eps:
        beside = {rows: Value(rows.shape, rows.dtype) for rows in (dst, src)}
        if o.query_norm.eps:
            q = p.add_alone(HeadNormNode(q, t.query_scale, o.query_norm, o.heads, beside[dst])).out
        if o.key_norm.eps:
            k = p.add_alone(HeadNormNode(k, t.key_scale, o.key_norm, o.heads, beside[src])).out
    total = key_of(t.projection.bias, "norm_total")
    attended = p.add_alone(AttendNode(t, o, index, q, y, k, v, total))
    norm.parameters += present(t.self_term.bias)  # whose gradient is made from the same total

    p.loop = Loop("outputs", is_chunked_backward=False)
    delta = p.add(LinearNode("projection", [attended.out], [t.projection], p.dtype))
    z = p.add(AddNode(t.x_dst, delta, norm))
    if t.out.weight is None:
        return z
    p.loop = Loop("rows")
    feed_forward = NetworkTensors(z, None, t.norm_in, Network(t.hidden, Layer(), t.out, Norm()))
    options = NetworkOptions(
        norm=NormOptions(),
        activation=o.activation,
        gemm_dtype=p.dtype,
        out_dtype=p.dtype,
        residual=True,
        norm_in=o.norm_in,
        keep_hidden=o.keep_hidden,
    )
    return network(p, feed_forward, options)


def network_sublayer(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> Tensor:
    """Return y [N, F] of a network on rows."""
    check_network(tensors, options)
    flat = network_triton.flatten(tensors)
    (y,) = network_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


def attention_sublayer(
    tensors: AttentionTensors[Tensor], graph: GraphStructure, options: AttentionOptions
) -> Tensor:
    """Return z [B * N_dst, F], in the promoted dtype of x and the GEMMs.

    `graph` is the structure of one batch entry, from own sources and halo to destinations. Edge
    attributes [E, D] are shared by the batch.
    """
    check_attention(tensors, graph, options)
    flat = attention_triton.flatten(tensors)
    save = needs_gradient(*flat)
    if save:
        graph = graph.with_reverse()
    (z,) = attention_triton(flat, IndexTensors.of(graph), options, save=save)
    return z


def interaction_sublayer(
    tensors: InteractionTensors[Tensor], graph: GraphStructure, options: InteractionOptions
) -> Tensor:
    """Return the updated edges [B * E, F].

    `graph` is the structure of one batch entry, from own sources and halo to destinations.
    """
    check_interaction(tensors, graph, options)
    flat = interaction_triton.flatten(tensors)
    save = needs_gradient(*flat)
    if save:
        graph = graph.with_reverse()
    (edges,) = interaction_triton(flat, IndexTensors.of(graph), options, save=save)
    return edges


network_triton = FormulaOperator(
    "network",
    network,
    tensors=NetworkTensors,
    constants=NoConstants,
    options=NetworkOptions,
    num_results=5,
)

interaction_triton = FormulaOperator(
    "interaction",
    edge_update,
    tensors=InteractionTensors,
    constants=IndexTensors,
    options=InteractionOptions,
    num_results=6,
)

attention_triton = FormulaOperator(
    "attention_sublayer",
    attention,
    tensors=AttentionTensors,
    constants=IndexTensors,
    options=AttentionOptions,
    num_results=8,
)
