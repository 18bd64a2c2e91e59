"""Networks on rows and the edge update in plain PyTorch, and the cases and tensors to test them."""

from typing import NamedTuple

import torch
from torch.nn import functional

from anemoi_gt import GraphStructure
from anemoi_gt.ops.tensors import (
    InteractionOptions,
    NetworkOptions,
    NormOptions,
)
from support.pairwise import pairwise
from support.run import with_hubs
from support.sublayers import ACTIVATIONS, DTYPES, EPS, draw_norm, normed
from support.sublayers import NORMS as NORMS_OF_BLOCKS

NORMS = {  # options of the norm, and its parameters
    "none": (NormOptions(), "bare"),
    "bare layer norm": (NormOptions(EPS), "bare"),
    "layer norm": (NormOptions(EPS), "both"),
    "layer norm with shift": (NormOptions(EPS), "shift"),
    "RMSNorm": (NormOptions(EPS, is_centred=False), "scale"),
    "conditional": (NormOptions(EPS), 4),
}
HIDDEN = {  # hidden layers, and the kinds of linear maps in each
    "one": (1, ("value",)),
    "one gated": (1, ("gate", "value")),
    "two": (2, ("value",)),
    "two gated": (2, ("gate", "value")),
}
OF_A_NETWORK = {
    "norm": tuple(NORMS),
    "hidden": tuple(HIDDEN),
    "bias": (True, False),
    "activation": ("silu", "gelu", "relu"),
    "rows": ("float32", "GEMM", "float16"),  # their dtype: float32, that of the GEMMs, or another
    "out": ("float32", "GEMM"),
}
INPUTS = ("x", "x and more", "x twice")
# columns of x: rows of 48 bytes in 16 bits, and of 22 and 10, which are padded
COLUMNS = (24, 11, 5)
NETWORK_CASES = pairwise(
    **OF_A_NETWORK, inputs=INPUTS, residual=(True, False), columns=COLUMNS, dtype=DTYPES
)
FEED_FORWARD_CASES = pairwise(
    norm=NORMS_OF_BLOCKS,
    activation=("gelu", "gelu_tanh", "sigmoid", "mish"),  # networks have the others
    gated=(False, True),
    bias=(True, False),
    centred=(True, False),
    keep_hidden=(True, False),
    dtype=DTYPES,
)
# rows of 16, 22 and 26 bytes in 16 bits, of which cuBLAS multiplies the first at full speed
LINEAR_CASES = pairwise(
    norm=(None, "bare", "scale", "shift", "both"),
    columns=(24, 11, 13),
    out_columns=(8, 11, 13),
    bias=(True, False),
    centred=(True, False),
    dtype=DTYPES,
)
INTERACTION_CASES = pairwise(
    **OF_A_NETWORK,
    nodes=("one set", "two sets"),
    batch=(1, 2),
    segment=(None, 2),  # edges of a segment of hubs
    edges=(13, 0),
    halo=(None, 5, 0),  # rows of each batch entry
    residual=(True, False),
    dtype=DTYPES,
)


class Sizes(NamedTuple):
    """Sizes of a problem; small ones fill no tile."""

    rows: int = 13  # of a network on rows
    features: int = 24  # of its x, or of edges
    more: int = 10
    out: int = 7  # of a network without the residual connection
    hidden: int = 16
    second: int = 20
    src: int = 8  # features of sources, if they are other nodes than destinations
    dst: int = 12
    num_src: int = 4
    num_dst: int = 4
    edges: int = 13


SIZES = Sizes()


def draw_feed_forward(
    device,
    norm="both",
    dtype=torch.float32,
    *,
    gated=False,
    bias=True,
    activation="gelu",
    centred=True,
    keep_hidden=True,
    hidden=40,
    seed=0,
    sizes=SIZES,
):
    """Draw tensors of a feed-forward sub-layer by name and the gradient of its output; return them with the options."""
    generator = torch.Generator().manual_seed(seed)
    features, rows = sizes.features, sizes.rows
    named = {"x": torch.randn(rows, features, generator=generator)}
    named |= draw_norm("norm_in", norm, features, rows, generator)
    kinds = ("gate", "value") if gated else ("value",)
    maps = {f"first_{kind}": (hidden, features) for kind in kinds} | {"out": (features, hidden)}
    named |= _draw_maps(maps, bias, generator)
    grads = {"out": torch.randn(rows, features, generator=generator)}
    options = NetworkOptions(
        NormOptions(),
        activation,
        dtype,
        dtype,
        residual=True,
        norm_in=NormOptions(EPS, centred),
        keep_hidden=keep_hidden,
    )
    return _to(device, named), _to(device, grads), options


def draw_linear(
    device,
    norm="both",
    dtype=torch.float32,
    *,
    columns=24,
    out_columns=13,
    bias=True,
    centred=True,
    seed=0,
    sizes=SIZES,
):
    """Draw tensors of a linear layer as `draw_feed_forward`; without a norm for None."""
    generator = torch.Generator().manual_seed(seed)
    named = {"x": torch.randn(sizes.rows, columns, generator=generator)}
    norm_in = NormOptions()
    if norm is not None:
        named |= draw_norm("norm_in", norm, columns, sizes.rows, generator)
        norm_in = NormOptions(EPS, centred)
    named |= _draw_maps({"out": (out_columns, columns)}, bias, generator)
    grads = {"out": torch.randn(sizes.rows, out_columns, generator=generator)}
    options = NetworkOptions(NormOptions(), "", dtype, dtype, residual=False, norm_in=norm_in)
    return _to(device, named), _to(device, grads), options


def draw_network(
    device,
    norm="layer norm",
    inputs="x and more",
    dtype=torch.float32,
    *,
    hidden="one",
    bias=True,
    residual=True,
    activation="silu",
    rows="float32",
    out="float32",
    columns=None,
    seed=0,
    sizes=SIZES,
):
    """Draw tensors by name and the gradient of the output; return them with the options."""
    generator = torch.Generator().manual_seed(seed)
    features = columns or sizes.features
    shapes = {"x": (sizes.rows, features)}
    if inputs == "x and more":
        shapes["more"] = (sizes.rows, sizes.more)
    width = {"x": features, "x and more": features + sizes.more, "x twice": 2 * features}[inputs]
    out_features = features if residual else sizes.out
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    named = _in_dtype(named, rows, dtype)
    named |= draw_parameters(width, out_features, norm, hidden, bias, sizes, generator, sizes.rows)
    grads = {"out": torch.randn(sizes.rows, out_features, generator=generator)}
    options = _options(norm, activation, dtype, out, residual=residual)
    options = options._replace(repeats_x=inputs == "x twice")
    return _to(device, named), _to(device, grads), options


def draw_interaction(
    device,
    norm="layer norm",
    nodes="two sets",
    batch=1,
    segment=None,
    dtype=torch.float32,
    *,
    halo=None,
    hidden="one",
    bias=True,
    activation="silu",
    rows="float32",
    out="float32",
    edges=None,
    residual=True,
    seed=0,
    sizes=SIZES,
):
    """Draw tensors by name and gradients of the outputs; return them with a structure, edge_index and options.

    Edges are not sorted, and the last destination is isolated. `halo` is the number of sources of
    other ranks in each batch entry.
    """
    generator = torch.Generator().manual_seed(seed)
    features, num_dst = sizes.features, sizes.num_dst
    edges = sizes.edges if edges is None else edges
    num_src, src = (num_dst, sizes.dst) if nodes == "one set" else (sizes.num_src, sizes.src)
    shapes = {"x_dst": (batch * num_dst, sizes.dst), "edges": (batch * edges, features)}
    if nodes == "two sets":
        shapes["x_src"] = (batch * num_src, src)
    if halo is not None:
        shapes["halo"] = (batch * halo, src)
        num_src += halo
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    named = _in_dtype(named, rows, dtype)
    width = sizes.dst + src + features
    named |= draw_parameters(width, features, norm, hidden, bias, sizes, generator, batch * edges)
    sources = torch.randint(max(1, num_src), (edges,), generator=generator)
    destinations = torch.randint(max(1, num_dst - 1), (edges,), generator=generator)
    edge_index = torch.stack([sources, destinations]).to(device)
    graph = with_hubs(GraphStructure.from_edge_index(edge_index, (num_src, num_dst)), segment)
    grads = {
        "edges": torch.randn(batch * edges, features, generator=generator),
        "sums": torch.randn(batch * num_dst, features, generator=generator),
    }
    options = InteractionOptions(batch, _options(norm, activation, dtype, out, residual=residual))
    return _to(device, named), _to(device, grads), graph, edge_index, options


def draw_parameters(inputs, out, norm, hidden, bias, sizes, generator, rows):
    """Draw the parameters of a network by name, of the sizes of a new model's."""
    layers, kinds = HIDDEN[hidden]
    maps = {"out": (out, sizes.second if layers == 2 else sizes.hidden)}
    for kind in kinds:
        maps[f"first_{kind}"] = (sizes.hidden, inputs)
        if layers == 2:
            maps[f"second_{kind}"] = (sizes.second, sizes.hidden)
    _, parameters = NORMS[norm]
    drawn = _draw_maps(maps, bias, generator)
    return drawn | draw_norm("network_norm", parameters, out, rows, generator)


def _draw_maps(maps, bias, generator):
    drawn = {}
    for name, shape in maps.items():
        weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
        drawn[f"network_{name}_weight"] = weight
        if bias:
            drawn[f"network_{name}_bias"] = torch.randn(shape[0], generator=generator)
    return drawn


def _options(norm, activation, dtype, out, *, residual):
    options, _ = NORMS[norm]
    out_dtype = dtype if out == "GEMM" else torch.float32
    return NetworkOptions(options, activation, dtype, out_dtype, residual)


def _in_dtype(named, rows, dtype):
    row_dtype = {"float32": torch.float32, "GEMM": dtype, "float16": torch.float16}[rows]
    return {name: tensor.to(row_dtype) for name, tensor in named.items()}


def _to(device, named):
    return {name: tensor.to(device) for name, tensor in named.items()}


def results_of(compute, named, grads, dtype=None):
    """Return the outputs of `compute(named)` and gradients by name, from leaves in a dtype or in their own.

    Outputs without a gradient in `grads` are not differentiated.
    """
    leaves = {
        name: tensor.detach().to(dtype or tensor.dtype).requires_grad_()
        for name, tensor in named.items()
    }
    outputs = compute(leaves)
    gradients = torch.autograd.grad(
        [outputs[name] for name in grads],
        list(leaves.values()),
        [grad.to(outputs[name].dtype) for name, grad in grads.items()],
    )
    result = {name: output.detach() for name, output in outputs.items()}
    return result | {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}


def network_sublayer(named, options):
    """Return y of a network on rows."""
    x, more = named["x"], named.get("more")
    rows = normed(x, named, "norm_in", options.norm_in) if options.norm_in.eps else x
    if options.repeats_x:
        more = rows
    y = network(named, _concatenated(rows) if more is None else _concatenated(rows, more), options)
    return {"out": _rounded(x + y if options.residual else y, x, options)}


def interaction_sublayer(named, edge_index, options):
    """Return e' and s of an edge update; a batch is one larger graph."""
    dst, batch = named["x_dst"], options.batch
    src = named.get("x_src", dst)
    if "halo" in named:  # after the own sources of each batch entry
        entries = [rows.unflatten(0, (batch, -1)) for rows in (src, named["halo"])]
        src = _concatenated(*entries).flatten(0, 1)
    entry = torch.arange(batch, device=dst.device)[:, None]
    source, destination = (
        (end + entry * (nodes.shape[0] // batch)).flatten()
        for end, nodes in zip(edge_index, (src, dst), strict=True)
    )
    edges = named["edges"]
    rows = _concatenated(dst[destination], src[source], edges)
    update = network(named, rows, options.network)
    edges = _rounded(edges + update if options.network.residual else update, edges, options.network)
    terms = edges.to(torch.promote_types(edges.dtype, torch.float32))
    sums = terms.new_zeros(dst.shape[0], edges.shape[1]).index_add(0, destination, terms)
    return {"edges": edges, "sums": sums.to(edges.dtype)}


def network(named, rows, options):
    """Return the output of a network, normalised."""
    for layer in ("first", "second"):
        if f"network_{layer}_value_weight" in named:
            rows = _hidden(named, layer, rows, options.activation)
    out = _mapped(named, "out", rows)
    if not options.norm.eps:
        return out
    out = out.to(torch.promote_types(out.dtype, torch.float32))
    return normed(out, named, "network_norm", options.norm)


def _concatenated(*rows):
    """Return tensors side by side, in float32 at least: autocast does not mix both 16-bit dtypes."""
    return torch.cat([x.to(torch.promote_types(x.dtype, torch.float32)) for x in rows], 1)


def _hidden(named, layer, rows, activation):
    value = _mapped(named, f"{layer}_value", rows)
    if f"network_{layer}_gate_weight" not in named:
        return ACTIVATIONS[activation](value)
    return ACTIVATIONS[activation](_mapped(named, f"{layer}_gate", rows)) * value


def _mapped(named, name, rows):
    weight, bias = named[f"network_{name}_weight"], named.get(f"network_{name}_bias")
    return functional.linear(rows, weight, bias)


def _rounded(y, x, options):
    """Return y in the dtype of the output, unless in float64."""
    if y.dtype == torch.float64:
        return y
    return y.to(
        torch.promote_types(x.dtype, options.out_dtype) if options.residual else options.out_dtype
    )
