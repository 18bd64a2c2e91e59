"""Both sub-layers of a block and the linear layer in plain PyTorch, and the cases and tensors to test them."""

from typing import NamedTuple

import torch
from torch.nn import functional

from anemoi_gt import GraphStructure
from anemoi_gt.ops import activations
from anemoi_gt.ops.network_tensors import InteractionTensors, NetworkTensors
from anemoi_gt.ops.sublayer_tensors import (
    AttentionOptions,
    AttentionTensors,
    FeedForwardTensors,
    NormLinearTensors,
    NormOptions,
)
from anemoi_gt.ops.tree import form_of, leaf_types, tree_of
from support.nightly import nightly
from support.pairwise import pairwise
from support.run import with_hubs

NORMS = ("bare", "scale", "shift", "both", 1, 4, 16)  # a number: channels of a condition
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CORPUS_DTYPES = (torch.float32, torch.float16, *nightly(torch.bfloat16))
ACTIVATIONS = {name: known.module() for name, known in activations.ACTIVATIONS.items()}
EPS = 1e-5
NORM = NormOptions(EPS)
FORMS = {  # of each kind of tensors, and the names of its leaves; types cannot be read when traced
    kind: (form_of(kind), tuple(leaf_types(kind)))
    for kind in (
        FeedForwardTensors,
        AttentionTensors,
        NormLinearTensors,
        NetworkTensors,
        InteractionTensors,
    )
}
BIASES = ("query", "self_term", "key", "value", "edge", "projection")
FEED_FORWARD_CASES = pairwise(
    norm=NORMS,
    activation=tuple(ACTIVATIONS),
    gated=(False, True),
    bias=(True, False),
    centred=(True, False),
)
ATTENTION_CASES = pairwise(
    norm=NORMS,
    nodes=("one set", "two sets"),
    batch=(1, 2),
    halo=(0, 3),
    segment=(None, 2),  # edges of a segment of hubs
    qk_norm=("none", "bare", "scale"),
    biases=(BIASES, (), ("key", "value")),
    shares_attributes=(False, True),
    centred=(True, False),
)

# rows of 16, 22 and 26 bytes in 16 bits, of which cuBLAS multiplies the first at full speed
NORM_LINEAR_CASES = pairwise(
    norm=(None, "bare", "scale", "shift", "both"),
    columns=(24, 11, 13),
    out_columns=(8, 11, 13),
    bias=(True, False),
    centred=(True, False),
)


class Sizes(NamedTuple):
    """Sizes of a problem; small ones fill no tile."""

    features: int = 24
    hidden: int = 40
    rows: int = 13  # of a feed-forward sub-layer
    width: int = 16
    heads: int = 2
    edge_dim: int = 3
    edges: int = 17
    num_src: int = 5
    num_dst: int = 6


SMALL = Sizes()


def draw_feed_forward(
    device, norm="both", *, gated=False, bias=True, seed=0, sizes=SMALL, scaled=False, **_
):
    """Draw tensors by name and a gradient of the output; `scaled` weights are as in a new model."""
    generator = torch.Generator().manual_seed(seed)
    features, hidden, rows = sizes.features, sizes.hidden, sizes.rows
    shapes = {
        "x": (rows, features),
        "hidden_weight": (hidden, features),
        "out_weight": (features, hidden),
    }
    if bias:
        shapes |= {"hidden_bias": (hidden,), "out_bias": (features,)}
    if gated:
        shapes["gate_weight"] = (hidden, features)
    if gated and bias:
        shapes["gate_bias"] = (hidden,)
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    if scaled:
        for name in shapes:
            if name.endswith("weight"):
                named[name] *= shapes[name][1] ** -0.5
    named |= draw_norm("norm", norm, features, rows, generator)
    grad = torch.randn(rows, features, generator=generator)
    return {name: tensor.to(device) for name, tensor in named.items()}, grad.to(device)


def draw_norm_linear(
    device, norm="both", *, columns=24, out_columns=13, bias=True, seed=0, rows=13, **_
):
    """Draw the tensors of a linear layer by name and a gradient of the output; no norm with None."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (rows, columns), "linear_weight": (out_columns, columns)}
    if bias:
        shapes["linear_bias"] = (out_columns,)
    shapes |= {name: (columns,) for name in ("scale", "shift") if norm in (name, "both")}
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    named["linear_weight"] *= columns**-0.5
    grad = torch.randn(rows, out_columns, generator=generator)
    return {name: tensor.to(device) for name, tensor in named.items()}, grad.to(device)


def draw_attention(
    device,
    norm="both",
    nodes="two sets",
    batch=1,
    halo=0,
    segment=None,
    qk_norm="scale",
    biases=BIASES,
    *,
    shares_attributes=False,
    centred=True,
    seed=0,
    dtype=torch.float32,
    sizes=SMALL,
):
    """Draw tensors by name and a gradient of the output; return them with a structure, edge_index and options.

    The last destination is isolated.
    """
    generator = torch.Generator().manual_seed(seed)
    features, width, heads, num_dst = sizes.features, sizes.width, sizes.heads, sizes.num_dst
    edges = sizes.edges
    num_src = num_dst if nodes == "one set" else sizes.num_src
    shapes = {"x_dst": (batch * num_dst, features), "edge_attr": (batch, edges, sizes.edge_dim)}
    if batch == 1 or shares_attributes:
        shapes["edge_attr"] = (edges, sizes.edge_dim)
    for name in ("query", "self_term", "key", "value"):
        shapes[f"{name}_weight"] = (width, features)
    shapes |= {"edge_weight": (width, sizes.edge_dim), "projection_weight": (features, width)}
    shapes |= {f"{name}_bias": (features if name == "projection" else width,) for name in biases}
    if nodes == "two sets":
        shapes["x_src"] = (batch * num_src, features)
    if halo:
        shapes["halo"] = (batch * halo, features)
    if qk_norm == "scale":
        shapes |= {"query_scale": (width // heads,), "key_scale": (width // heads,)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.endswith("_weight"):  # so that scores are about 1, as in a new model
            named[name] *= shape[1] ** -0.5
    named |= draw_norm("norm", norm, features, batch * num_dst, generator)
    if nodes == "two sets":
        named |= draw_norm("norm_src", norm, features, batch * num_src, generator)
    sources = torch.randint(num_src + halo, (edges,), generator=generator)
    destinations = torch.randint(num_dst - 1, (edges,), generator=generator)
    edge_index = torch.stack([sources, destinations]).to(device)
    graph = GraphStructure.from_edge_index(edge_index, (num_src + halo, num_dst))
    graph = with_hubs(graph, segment)
    grad = torch.randn(batch * num_dst, features, generator=generator)
    norms = [NormOptions(EPS, centred)] * 4
    if qk_norm == "none":
        norms[2:] = [NormOptions()] * 2
    options = AttentionOptions(heads, batch, *norms, dtype)
    named = {name: tensor.to(device) for name, tensor in named.items()}
    return named, grad.to(device), graph, edge_index, options


def draw_norm(prefix, norm, features, rows, generator):
    """Return the parameters of a norm by name, and its condition."""
    drawn = {}
    if isinstance(norm, int):
        drawn = {"condition": (rows, norm)}
        for part in ("scale_map", "shift_map"):
            drawn |= {f"{part}_weight": (features, norm), f"{part}_bias": (features,)}
    else:
        drawn = {name: (features,) for name in ("scale", "shift") if norm in (name, "both")}
    named = {}
    for name, shape in drawn.items():
        parameter = torch.randn(shape, generator=generator)
        if name.endswith("_weight"):  # so that rows are about 1, and scores with them
            parameter *= shape[1] ** -0.5
        named[f"{prefix}_{name}"] = parameter
    return named


def fill(kind, named):
    """Return the tensors of a sub-layer from named tensors; missing ones are None."""
    form, names = FORMS[kind]
    return tree_of(form, [named.get(name) for name in names])


def results_of(compute, named, grad, dtype):
    """Return the output of `compute(named)` and the gradients by name, from leaves in a dtype."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in named.items()}
    out = compute(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    result = {"out": out.detach()}
    for name, gradient in zip(leaves, gradients, strict=True):
        result[f"d{name}"] = gradient
    return result


def bare_norm(x, norm):
    """Return a norm over the last dimension without scale and shift."""
    function = functional.layer_norm if norm.is_centred else functional.rms_norm
    return function(x, x.shape[-1:], eps=norm.eps)


def normed(x, named, prefix, norm):
    """Return the layer norm, with scale and shift if there are any; a condition may compute them."""
    rows = bare_norm(x, norm)
    condition = named.get(f"{prefix}_condition")
    scale, shift = named.get(f"{prefix}_scale"), named.get(f"{prefix}_shift")
    if condition is not None:
        scale, shift = (
            functional.linear(
                condition, named[f"{prefix}_{part}_weight"], named[f"{prefix}_{part}_bias"]
            )
            for part in ("scale_map", "shift_map")
        )
        scale = 1 + scale
    if scale is not None:
        rows = rows * scale
    if shift is not None:
        rows = rows + shift
    return rows


def feed_forward(named, norm, activation):
    """Return the output of the feed-forward sub-layer."""
    rows = normed(named["x"], named, "norm", norm)
    hidden = functional.linear(rows, named["hidden_weight"], named.get("hidden_bias"))
    if "gate_weight" in named:
        gate = functional.linear(rows, named["gate_weight"], named.get("gate_bias"))
        hidden = ACTIVATIONS[activation](gate) * hidden
    else:
        hidden = ACTIVATIONS[activation](hidden)
    return named["x"] + functional.linear(hidden, named["out_weight"], named.get("out_bias"))


def norm_linear(named, norm):
    """Return the output of a linear layer, after a norm unless its eps is 0."""
    rows = named["x"]
    if norm.eps:
        parameters = {f"norm_{name}": named.get(name) for name in ("scale", "shift")}
        rows = normed(rows, parameters, "norm", norm)
    return functional.linear(rows, named["linear_weight"], named.get("linear_bias"))


def attention(named, edge_index, options):
    """Return the output of the attention sub-layer; a mask selects the in-edges of each destination."""
    batch, heads = options.batch, options.heads

    def entries(rows):
        return rows.unflatten(0, (batch, -1))

    def mapped(rows, name):
        return functional.linear(rows, named[f"{name}_weight"], named.get(f"{name}_bias"))

    def head_norm(rows, name, norm):
        if not norm.eps:
            return rows
        scale = named.get(f"{name}_scale")
        rows = bare_norm(rows, norm)
        return rows if scale is None else rows * scale

    dst = entries(normed(named["x_dst"], named, "norm", options.norm))
    src = dst
    if "x_src" in named:
        src = entries(normed(named["x_src"], named, "norm_src", options.norm_src))
    if "halo" in named:
        src = torch.cat([src, entries(named["halo"])], 1)
    query = mapped(dst, "query").unflatten(-1, (heads, -1))
    key = mapped(src, "key").unflatten(-1, (heads, -1))
    value = mapped(src, "value").unflatten(-1, (heads, -1))
    query = head_norm(query, "query", options.query_norm)
    key = head_norm(key, "key", options.key_norm)
    edges = mapped(named["edge_attr"], "edge").unflatten(-1, (heads, -1))
    source, destination = edge_index.to(query.device)
    scores = (query[:, destination] * (key[:, source] + edges)).sum(-1) / query.shape[-1] ** 0.5
    nodes = torch.arange(dst.shape[1], device=query.device)
    mask = (nodes[:, None] == destination)[None, :, :, None]  # [1, N_dst, E, 1]
    weights = torch.where(mask, scores[:, None], -1e4).softmax(2) * mask
    out = (weights[..., None] * (value[:, source] + edges)[:, None]).sum(2).flatten(-2)
    return named["x_dst"] + mapped(out + mapped(dst, "self_term"), "projection").flatten(0, 1)
