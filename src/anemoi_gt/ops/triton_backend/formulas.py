"""Formulas of the sub-layers of blocks and graph networks, and their operators.

The equations are in `anemoi_gt.ops.sublayer_tensors` and `anemoi_gt.ops.network_tensors`.
"""

from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.network_tensors import (
    InteractionOptions,
    InteractionTensors,
    NetworkOptions,
    NetworkTensors,
    check_interaction,
    check_network,
)
from anemoi_gt.ops.operands import Operand
from anemoi_gt.ops.sublayer_tensors import NoConstants
from anemoi_gt.ops.triton_backend.derived_passes import FormulaOperator
from anemoi_gt.ops.triton_backend.edge_nodes import EndsNode, GatherActivationNode
from anemoi_gt.ops.triton_backend.formula import Loop, Program, Value
from anemoi_gt.ops.triton_backend.packing import aligned_columns
from anemoi_gt.ops.triton_backend.row_nodes import (
    ActivationNode,
    AddNode,
    LinearNode,
    NormNode,
    ResidualNormNode,
    joined,
)
from anemoi_gt.ops.triton_backend.sizes import IndexTensors


def network(p: Program, t: NetworkTensors[Value], o: NetworkOptions) -> Value:
    """Y = x + norm(network([norm_in(x), more])): any part but the last linear map may be absent."""
    rows = [t.x]
    if o.norm_in.eps:
        norm = NormNode(t.x, t.norm_in, o.norm_in, p.dtype)
        rows = [p.add(norm)]
    if t.more is not None:
        rows.append(t.more)
    elif o.repeats_x:
        rows.append(rows[0])
    # rows of a model: their columns are its variables, which are padded, and few
    pads_input = rows == [t.x] and not o.residual
    pads_output = not o.residual and not o.norm.eps
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
    is_result = pads_output
    out = LinearNode(
        "out",
        rows,
        [t.network.out],
        p.dtype,
        out_dtype=o.out_dtype if is_result else None,
        pads_input=pads_input,
        pads_output=pads_output,
        sums_bias=is_result,
    )
    r = p.add(out)
    if is_result:
        return r
    x = t.x if o.residual else None
    if not o.norm_in.eps:
        return p.add(ResidualNormNode(x, r, t.network.norm, o.norm, o.out_dtype))
    if o.norm.eps:
        r = p.add(ResidualNormNode(None, r, t.network.norm, o.norm, o.out_dtype))
    return r if x is None else p.add(AddNode(x, r, norm))


def edge_update(
    p: Program, t: InteractionTensors[Value], index: IndexTensors[Operand], o: InteractionOptions
) -> Value:
    """e'_e = e_e + norm(network([x_i, x_j, e_e])) for each edge e from j to i.

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
    r = p.add(LinearNode("out", [rows], [out], p.dtype))
    return p.add(ResidualNormNode(t.edges, r, norm, o.network.norm, o.network.out_dtype))


def network_sublayer(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> Tensor:
    """Return y [N, F] of a network on rows."""
    check_network(tensors, options)
    flat = network_triton.flatten(tensors)
    (y,) = network_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


def network_kept_bytes(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> int:
    """Return the bytes that a call keeps for its backward pass, besides its inputs."""
    return network_triton.kept_bytes(tensors, NoConstants(), options)


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
    outputs=("out",),
    num_results=4,
)

interaction_triton = FormulaOperator(
    "interaction",
    edge_update,
    tensors=InteractionTensors,
    constants=IndexTensors,
    options=InteractionOptions,
    outputs=("edges",),
    num_results=5,
)
