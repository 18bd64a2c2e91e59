"""The attention sub-layer of a block in plain PyTorch, and the cases and tensors to test it."""

from typing import NamedTuple

import torch
from torch.nn import functional

from anemoi_gt import GraphStructure
from anemoi_gt.ops import activations
from anemoi_gt.ops.tensors import (
    AttentionOptions,
    AttentionTensors,
    InteractionTensors,
    NetworkTensors,
    NormOptions,
)
from anemoi_gt.ops.tree import form_of, leaf_types, tree_of
from support.pairwise import pairwise
from support.run import with_hubs

NORMS = ("bare", "scale", "shift", "both", 1, 4, 16)  # a number: channels of a condition
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = {name: known.module() for name, known in activations.ACTIVATIONS.items()}
EPS = 1e-5
NORM = NormOptions(EPS)
FORMS = {  # of each kind of tensors, and the names of its leaves; types cannot be read when traced
    kind: (form_of(kind), tuple(leaf_types(kind)))
    for kind in (
        AttentionTensors,
        NetworkTensors,
        InteractionTensors,
    )
}
BIASES = ("query", "self_term", "key", "value", "edge", "projection")
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
    feed_forward=("none", "plain", "gated"),
    keep_hidden=(True, False),
    dtype=DTYPES,
)


class Sizes(NamedTuple):
    """Sizes of a problem; small ones fill no tile."""

    features: int = 24
    width: int = 16
    heads: int = 2
    edge_dim: int = 3
    edges: int = 13
    num_src: int = 4
    num_dst: int = 5


SMALL = Sizes()


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
    feed_forward="none",
    keep_hidden=True,
    seed=0,
    dtype=torch.float32,
    sizes=SMALL,
):
    """Draw tensors by name and the gradient of the output; return them with a structure, edge_index and options.

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
    if feed_forward != "none":
        shapes |= {"hidden_value_weight": (width, features), "out_weight": (features, width)}
        if biases:
            shapes |= {"hidden_value_bias": (width,), "out_bias": (features,)}
    if feed_forward == "gated":
        parts = [name for name in shapes if name.startswith("hidden_value")]
        shapes |= {name.replace("value", "gate"): shapes[name] for name in parts}
    if qk_norm == "scale":
        shapes |= {"query_scale": (width // heads,), "key_scale": (width // heads,)}
    named = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name.endswith("_weight"):  # so that scores are about 1, as in a new model
            named[name] *= shape[1] ** -0.5
    named |= draw_norm("norm", norm, features, batch * num_dst, generator)
    if nodes == "two sets":
        named |= draw_norm("norm_src", norm, features, batch * num_src, generator)
    if feed_forward != "none":
        named |= draw_norm("norm_in", norm, features, batch * num_dst, generator)
    sources = torch.randint(num_src + halo, (edges,), generator=generator)
    destinations = torch.randint(num_dst - 1, (edges,), generator=generator)
    edge_index = torch.stack([sources, destinations]).to(device)
    graph = GraphStructure.from_edge_index(edge_index, (num_src + halo, num_dst))
    graph = with_hubs(graph, segment)
    grads = {"out": torch.randn(batch * num_dst, features, generator=generator).to(device)}
    norms = [NormOptions(EPS, centred)] * 4
    if qk_norm == "none":
        norms[2:] = [NormOptions()] * 2
    options = AttentionOptions(heads, batch, *norms, dtype)
    if feed_forward != "none":
        options = options._replace(norm_in=norms[0], activation="gelu", keep_hidden=keep_hidden)
    named = {name: tensor.to(device) for name, tensor in named.items()}
    return named, grads, graph, edge_index, options


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


def attention(named, edge_index, options):
    """Return the output of attention, and feed-forward network if any; a mask selects the in-edges of each destination."""
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
    out = out + mapped(dst, "self_term")
    z = named["x_dst"] + mapped(out, "projection").flatten(0, 1)
    if "out_weight" not in named:
        return {"out": z}
    rows = normed(z, named, "norm_in", options.norm_in)
    hidden = mapped(rows, "hidden_value")
    if "hidden_gate_weight" in named:
        hidden = functional.gelu(mapped(rows, "hidden_gate")) * hidden
    else:
        hidden = functional.gelu(hidden)
    return {"out": z + mapped(hidden, "out")}
