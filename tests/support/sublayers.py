"""Both sub-layers of a block in plain PyTorch, and what they are tested with."""

import torch
from torch.nn import functional

# a number is that of the channels of a condition
NORMS = (
    "bare",
    "scale",
    "shift",
    "both",
    1,
    4,
    16,
)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}


def draw_norm(prefix, norm, features, rows, generator):
    """Return the parameters of a norm by name, and its condition."""
    drawn = {}
    if isinstance(norm, int):
        drawn = {"scale": (features, norm), "shift": (features, norm)}
        drawn |= {"scale_bias": (features,), "shift_bias": (features,)}
    else:
        drawn = {name: (features,) for name in ("scale", "shift") if norm in (name, "both")}
    named = {
        f"{prefix}_{name}": torch.randn(shape, generator=generator) for name, shape in drawn.items()
    }
    if isinstance(norm, int):
        named[prefix.replace("norm", "condition")] = torch.randn(rows, norm, generator=generator)
    return named


def fill(kind, named):
    """Return the tensors of a sub-layer from those that are there, by name."""
    return kind(*(named.get(name) for name in kind._fields))


def results_of(compute, named, grad, dtype):
    """Return the output of `compute(named)` and the gradients by name, from leaves in a dtype."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in named.items()}
    out = compute(leaves)
    gradients = torch.autograd.grad(out, list(leaves.values()), grad.to(out.dtype))
    return {"out": out.detach()} | {
        f"d{name}": x for name, x in zip(leaves, gradients, strict=True)
    }


def normed(x, named, prefix, eps):
    """Layer norm with or without scale and shift, or with those that a condition makes."""
    rows = functional.layer_norm(x, x.shape[-1:], eps=eps)
    condition = named.get(prefix.replace("norm", "condition"))
    scale, shift = named.get(f"{prefix}_scale"), named.get(f"{prefix}_shift")
    if condition is not None:
        scale = 1 + functional.linear(condition, scale, named[f"{prefix}_scale_bias"])
        shift = functional.linear(condition, shift, named[f"{prefix}_shift_bias"])
    if scale is not None:
        rows = rows * scale
    if shift is not None:
        rows = rows + shift
    return rows


def feed_forward(named, eps, activation):
    """The feed-forward sub-layer."""
    rows = normed(named["x"], named, "norm", eps)
    hidden = functional.linear(rows, named["weight_in"], named.get("bias_in"))
    if "weight_gate" in named:
        gate = functional.linear(rows, named["weight_gate"], named.get("bias_gate"))
        hidden = ACTIVATIONS[activation](gate) * hidden
    else:
        hidden = ACTIVATIONS[activation](hidden)
    return named["x"] + functional.linear(hidden, named["weight_out"], named.get("bias_out"))


def attention(named, edge_index, options):
    """The attention sub-layer; weights of a destination's edges by a mask."""
    batch, heads = options.batch, options.heads

    def entries(rows):
        return rows.unflatten(0, (batch, -1))

    def mapped(rows, name):
        return functional.linear(rows, named[f"{name}_weight"], named.get(f"{name}_bias"))

    def head_norm(rows, name, eps):
        scale = named.get(f"{name}_norm_scale")
        return functional.layer_norm(rows, rows.shape[-1:], scale, eps=eps) if eps else rows

    dst = src = entries(normed(named["x_dst"], named, "norm", options.norm_eps))
    if "x_src" in named:
        src = entries(normed(named["x_src"], named, "norm_src", options.norm_src_eps))
    if "halo" in named:
        src = torch.cat([src, entries(named["halo"])], 1)
    query, key, value = (
        mapped(rows, name).unflatten(-1, (heads, -1))
        for rows, name in ((dst, "query"), (src, "key"), (src, "value"))
    )
    query, key = (
        head_norm(query, "query", options.query_norm_eps),
        head_norm(key, "key", options.key_norm_eps),
    )
    edges = mapped(named["edge_attr"], "edge").unflatten(-1, (heads, -1))
    source, destination = edge_index.to(query.device)
    scores = (query[:, destination] * (key[:, source] + edges)).sum(-1) / query.shape[-1] ** 0.5
    belongs = (torch.arange(dst.shape[1], device=query.device)[:, None] == destination)[
        None, :, :, None
    ]
    weights = torch.where(belongs, scores[:, None], -1e4).softmax(2) * belongs
    out = (weights[..., None] * (value[:, source] + edges)[:, None]).sum(2).flatten(-2)
    return named["x_dst"] + mapped(out + mapped(dst, "self"), "projection").flatten(0, 1)
