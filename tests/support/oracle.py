"""Three implementations of edge attention that share no line with the package.

`oracle` loops over destinations in float64 and embeds every edge. `plain` is straightforward
PyTorch in the dtype under test; its error is the baseline. `magnitude` is the size of the summands,
which is the scale of rounding.
"""

from dataclasses import dataclass, field, fields, replace

import torch


@dataclass
class Problem:
    """Operands of an attention problem without batch dimension, and the upstream gradients."""

    edge_index: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    edge_attr: torch.Tensor | None = None
    edge_weight: torch.Tensor | None = None
    edge_bias: torch.Tensor | None = None
    grad_out: torch.Tensor = None
    grad_lse: torch.Tensor = None
    scale: float = None
    keep: torch.Tensor | None = None  # [E, H] dropout factors
    names: tuple = field(default=("query", "key", "value", "edge_attr", "edge_weight", "edge_bias"))

    def operands(self):
        """Return the operands that are not None by name."""
        return {name: getattr(self, name) for name in self.names if getattr(self, name) is not None}

    def to(self, dtype):
        """Return the problem with all floating-point tensors in `dtype`."""
        converted = {}
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if torch.is_tensor(value) and value.is_floating_point():
                converted[attribute.name] = value.to(dtype)
        return replace(self, **converted)


def make_problem(graph, heads, channels, edge_dim, form="raw", dtype=torch.float32, seed=0):
    """Return a random problem on (edge_index, (num_src, num_dst)); form: raw, raw_without_bias, embedded or none."""
    edge_index, (num_src, num_dst) = graph
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, size=1.0):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * size).to(dtype)

    edges = edge_index.shape[1]
    query = draw(num_dst, heads, channels)
    key = draw(num_src, heads, channels)
    value = draw(num_src, heads, channels)
    grad_out = draw(num_dst, heads, channels)
    grad_lse = draw(num_dst, heads)
    grad_lse = grad_lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
    gradients = {"grad_out": grad_out, "grad_lse": grad_lse}
    problem = Problem(edge_index, query, key, value, **gradients, scale=channels**-0.5)
    if form == "embedded":
        problem.edge_attr = draw(edges, heads, channels)
    elif form != "none":
        problem.edge_attr = draw(edges, edge_dim)
        problem.edge_weight = draw(heads * channels, edge_dim, size=edge_dim**-0.5)
        problem.edge_bias = draw(heads * channels) if form == "raw" else None
    return problem


def _embed(problem):
    """Return x_e of every edge, or None."""
    if problem.edge_weight is None:
        return problem.edge_attr
    heads, channels = problem.query.shape[1:]
    x = problem.edge_attr @ problem.edge_weight.T
    if problem.edge_bias is not None:
        x = x + problem.edge_bias
    return x.reshape(-1, heads, channels)


def _attend_densely(problem):
    x = _embed(problem)
    src, dst = problem.edge_index
    outs = []
    lses = []
    for i in range(problem.query.shape[0]):
        into = (dst == i).nonzero().flatten()
        k, v = problem.key[src[into]], problem.value[src[into]]
        if x is not None:
            k, v = k + x[into], v + x[into]
        score = problem.scale * torch.einsum("hc,ehc->eh", problem.query[i], k)
        p = torch.softmax(score, dim=0)
        if problem.keep is not None:
            p = p * problem.keep[into]
        outs.append(torch.einsum("eh,ehc->hc", p, v))
        lses.append(torch.logsumexp(score, dim=0))
    if not outs:
        return problem.query * 1.0, problem.query.sum(-1)
    return torch.stack(outs), torch.stack(lses)


def _attend_plainly(problem):
    x = _embed(problem)
    src, dst = problem.edge_index
    q, k, v = problem.query[dst], problem.key[src], problem.value[src]
    if x is not None:
        k, v = k + x, v + x
    score = (q * k).sum(-1) * problem.scale
    index = dst[:, None].expand_as(score)
    shape = (problem.query.shape[0], score.shape[1])
    row_max = torch.full(shape, -torch.inf, dtype=score.dtype)
    row_max = row_max.scatter_reduce(0, index, score.detach(), "amax")
    p = torch.exp(score - row_max[dst])
    denominator = torch.zeros(shape, dtype=score.dtype).index_add(0, dst, p)
    lse = row_max + torch.log(denominator)
    p = p / denominator[dst]
    if problem.keep is not None:
        p = p * problem.keep.to(p.dtype)
    return torch.zeros_like(problem.query).index_add(0, dst, p[..., None] * v), lse


def _differentiate(attend, problem):
    """Return outputs, and gradients by autograd, by name."""
    leaves = {}
    for name, operand in problem.operands().items():
        leaves[name] = operand.detach().clone().requires_grad_()
    out, lse = attend(replace(problem, **leaves))
    finite = torch.isfinite(lse)
    grad_lse = problem.grad_lse.to(lse.dtype)
    loss = (out * problem.grad_out).sum() + (lse[finite] * grad_lse[finite]).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    result = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        result["d" + name] = torch.zeros_like(leaf) if gradient is None else gradient
    return result


def oracle(problem):
    """Return out, lse and all gradients in float64 by name."""
    return _differentiate(_attend_densely, problem.to(torch.float64))


def plain(problem):
    """Return the same from plain PyTorch in the dtype of the problem."""
    return _differentiate(_attend_plainly, problem)


def magnitude(problem):
    """Return the same expressions with absolute values of all summands, float64, by name."""
    p64 = problem.to(torch.float64)
    absolute = replace(p64, **{name: operand.abs() for name, operand in p64.operands().items()})
    src, dst = problem.edge_index
    x_abs = _embed(absolute)
    k, v = absolute.key[src], absolute.value[src]
    if x_abs is not None:
        k, v = k + x_abs, v + x_abs
    score_size = (absolute.query[dst] * k).sum(-1) * abs(problem.scale)  # [E, H]
    exact = oracle(problem)
    x = _embed(p64)
    key = p64.key[src] if x is None else p64.key[src] + x
    score = (p64.query[dst] * key).sum(-1) * problem.scale
    p = torch.exp(score - exact["lse"][dst]) * (1 + score_size)
    m = 1.0 if problem.keep is None else p64.keep
    grad_out, grad_lse = p64.grad_out.abs(), p64.grad_lse.abs()

    def into(rows):
        """Sum rows of edges at their destinations."""
        sums = torch.zeros(problem.query.shape[0], *rows.shape[1:], dtype=torch.float64)
        return sums.index_add(0, dst, rows)

    def out_of(rows):
        """Sum rows of edges at their sources."""
        sums = torch.zeros(problem.key.shape[0], *rows.shape[1:], dtype=torch.float64)
        return sums.index_add(0, src, rows)

    dp = m * (grad_out[dst] * v).sum(-1)
    ds = p * (dp + into(p * dp)[dst] + grad_lse[dst]) * abs(problem.scale)
    w = m * p
    lse_size = torch.where(torch.isfinite(exact["lse"]), exact["lse"].abs(), 0.0)
    sizes = {
        "out": into(w[..., None] * v),
        "lse": 1 + lse_size + into(p * score_size),
        "dquery": into(ds[..., None] * k),
        "dkey": out_of(ds[..., None] * absolute.query[dst]),
        "dvalue": out_of(w[..., None] * grad_out[dst]),
    }
    dx = w[..., None] * grad_out[dst] + ds[..., None] * absolute.query[dst]  # [E, H, C]
    if problem.edge_weight is not None:
        sizes["dedge_attr"] = dx.flatten(1) @ absolute.edge_weight
        sizes["dedge_weight"] = dx.flatten(1).T @ absolute.edge_attr
        sizes["dedge_bias"] = dx.flatten(1).sum(0)
    elif problem.edge_attr is not None:
        sizes["dedge_attr"] = dx
    return {name: sizes[name] for name in exact}
