"""Formulas of the sub-layers of blocks and graph networks, and their operators.

The equations are in `anemoi_gt.ops.sublayer_tensors` and `anemoi_gt.ops.network_tensors`.
"""

from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.ops.network_tensors import NetworkOptions, NetworkTensors, check_network
from anemoi_gt.ops.sublayer_tensors import NoConstants
from anemoi_gt.ops.triton_backend.derived_passes import FormulaOperator
from anemoi_gt.ops.triton_backend.formula import Program, Value
from anemoi_gt.ops.triton_backend.packing import aligned_columns
from anemoi_gt.ops.triton_backend.row_nodes import (
    ActivationNode,
    AddNode,
    LinearNode,
    NormNode,
    ResidualNormNode,
)


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


def network_sublayer(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> Tensor:
    """Return y [N, F] of a network on rows."""
    check_network(tensors, options)
    flat = network_triton.flatten(tensors)
    (y,) = network_triton(flat, NoConstants(), options, save=needs_gradient(*flat))
    return y


def network_kept_bytes(tensors: NetworkTensors[Tensor], options: NetworkOptions) -> int:
    """Return the bytes that a call keeps for its backward pass, besides its inputs."""
    return network_triton.kept_bytes(tensors, NoConstants(), options)


network_triton = FormulaOperator(
    "network",
    network,
    tensors=NetworkTensors,
    constants=NoConstants,
    options=NetworkOptions,
    outputs=("out",),
    num_results=4,
)
