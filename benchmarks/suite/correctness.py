"""Correctness checks. Implementations that fail them are not timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from support.accuracy import assert_within
from support.oracle import Problem as Exact
from support.oracle import magnitude, oracle, plain
from torch import Tensor

from suite.graphs import Coo
from suite.operands import Operands
from suite.problems import Problem

DESTINATIONS, SOURCES = 128, 16


@dataclass(frozen=True)
class Part:
    """Some destinations with all in-edges, including all destinations of some sources.

    If only these destinations have incoming gradients, no other edge affects any gradient.
    """

    dst: Tensor  # [n] global node ids, sorted ascending
    edges: Tensor  # [e] global edge ids of the in-edges of dst
    src: Tensor  # global node ids of the sources of these edges, sorted ascending
    edge_index: Tensor  # [2, e] the edges in local node ids, positions in src and dst

    @classmethod
    def of(cls, coo: Coo) -> "Part":
        """Draw a part from a graph whose edges are sorted by destination."""
        src, dst = coo.edge_index.cpu()  # so that all devices draw the same part
        generator = torch.Generator().manual_seed(0)
        num_src, num_dst = coo.sizes
        drawn = torch.randint(num_dst, (DESTINATIONS,), generator=generator)
        sources = torch.randint(num_src, (SOURCES,), generator=generator)
        ends = torch.tensor([0, num_dst - 1])
        chosen = torch.cat([drawn, ends, dst[torch.isin(src, sources)]]).unique()
        edges = torch.isin(dst, chosen).nonzero().flatten()
        origins = src[edges].unique()
        local = torch.stack(
            [torch.searchsorted(origins, src[edges]), torch.searchsorted(chosen, dst[edges])]
        )
        device = coo.edge_index.device
        return cls(chosen.to(device), edges.to(device), origins.to(device), local.to(device))


def check_attention(
    problem: Problem, operands: Operands, attention: Callable[[Operands], Callable]
) -> None:
    """Check a baseline without gradients, and with incoming gradients at some of the destinations.

    The destinations are in the last batch entry.

    Raises
    ------
    AssertionError
        If a result is less accurate than the tests' criterion asks, or a gradient appears where
        none can.
    """
    part = Part.of(operands.coo)
    last = operands.num_samples - 1
    grad_out = torch.zeros_like(operands.grad_out)
    _in_sample(grad_out, last)[part.dst] = _in_sample(operands.grad_out, last)[part.dst]
    operands = replace(operands, grad_out=grad_out)
    call = attention(operands)
    with torch.no_grad():
        inferred = _rows(_in_sample(call(), last), part.dst)
    out = call()
    gradients = torch.autograd.grad(out, operands.leaves, grad_out)
    result = {"out": out.detach()}
    for name, gradient in zip(operands.gradients, gradients, strict=True):
        result[f"d{name}"] = gradient
    index_by_name = {
        "out": part.dst,
        "dquery": part.dst,
        "dkey": part.src,
        "dvalue": part.src,
        "dedge_attr": part.edges,
    }
    chosen = {}
    for name, tensor in result.items():
        chosen[name] = _rows(_in_sample(tensor, last), index_by_name.get(name))
    exact = _exact(problem, operands, part, last)
    with grad_out.device:  # a hub has millions of edges
        references = [reference(exact) for reference in (oracle, plain, magnitude)]
    for results in (chosen, {"out": inferred}):
        selected = [{name: reference[name] for name in results} for reference in references]
        assert_within(results, *selected, problem.torch_dtype)
    for name in index_by_name.keys() & result.keys() - {"out"}:
        _in_sample(result[name], last)[index_by_name[name]] = 0
        assert not result[name].any(), f"{name}: not zero where the incoming gradient is zero"


def _in_sample(tensor: Tensor, sample: int) -> Tensor:
    """Return the rows of one batch entry; tensors shared by the batch are returned as they are."""
    return tensor[sample] if tensor.dim() == 4 else tensor


def _rows(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Return the rows at `index`, or all rows if it is None."""
    return tensor.detach() if index is None else tensor.detach()[index]


def _exact(problem: Problem, operands: Operands, part: Part, sample: int) -> Exact:
    """Return the part as a problem of the tests' oracle."""
    index_by_name = {
        "query": part.dst,
        "grad_out": part.dst,
        "key": part.src,
        "value": part.src,
        "edge_attr": part.edges,
    }
    names = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias", "grad_out")
    tensors = {}
    for name in names:
        tensor = _in_sample(getattr(operands, name), sample)
        tensors[name] = _rows(tensor, index_by_name.get(name))
    grad_lse = torch.zeros(len(part.dst), problem.heads, device=part.dst.device)
    return Exact(part.edge_index, **tensors, grad_lse=grad_lse, scale=problem.channels**-0.5)
