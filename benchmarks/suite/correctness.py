"""Correctness checks. Implementations that fail them are not timed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from support.accuracy import assert_within
from support.oracle import Problem as Exact
from support.oracle import magnitude, oracle, plain
from torch import Tensor

from suite.graphs import Coo
from suite.operands import Operands
from suite.problems import Problem

DESTINATIONS, SOURCES = 128, 16


class Sides(NamedTuple):
    """A structure: the edges by destination, and the way to them by source."""

    colptr: Tensor  # [N_dst + 1]
    row: Tensor  # [E] source of each edge
    rowptr: Tensor  # [N_src + 1]
    csr_to_csc: Tensor  # [E] edges in order of their sources
    perm: Tensor | None  # [E] the caller's edge at each position of row; None: the same


@dataclass(frozen=True)
class Part:
    """Some destinations with all in-edges, including all destinations of some sources.

    Where a gradient arrives at these destinations alone, theirs are the only edges that any
    gradient knows of.
    """

    dst: Tensor  # [n] numbers in the whole graph, rising
    edges: Tensor  # numbers of their in-edges
    src: Tensor  # sources of these edges, rising
    edge_index: Tensor  # [2, e] the edges in numbers of this part

    @classmethod
    def of(cls, coo: Coo) -> "Part":
        """Draw a part from a graph whose edges are sorted by destination."""
        src, dst = coo.edge_index.cpu()  # drawn alike on all devices
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
        return cls(*(each.to(coo.edge_index.device) for each in (chosen, edges, origins, local)))


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
    part, last = Part.of(operands.coo), operands.num_samples - 1
    arriving = torch.zeros_like(operands.grad_out)
    _in_sample(arriving, last)[part.dst] = _in_sample(operands.grad_out, last)[part.dst]
    operands = replace(operands, grad_out=arriving)
    call = attention(operands)
    with torch.no_grad():
        inferred = _rows(_in_sample(call(), last), part.dst)
    out = call()
    gradients = torch.autograd.grad(out, operands.leaves, arriving)
    result = {
        "out": out.detach(),
        **{"d" + n: g for n, g in zip(operands.gradients, gradients, strict=True)},
    }
    places = {
        "out": part.dst,
        "dquery": part.dst,
        "dkey": part.src,
        "dvalue": part.src,
        "dedge_attr": part.edges,
    }
    chosen = {
        name: _rows(_in_sample(tensor, last), places.get(name)) for name, tensor in result.items()
    }
    exact = _exact(problem, operands, part, last)
    with arriving.device:  # a hub has millions of edges
        answers = [answer(exact) for answer in (oracle, plain, magnitude)]
    for results in (chosen, {"out": inferred}):
        assert_within(results, *({n: a[n] for n in results} for a in answers), problem.torch_dtype)
    for name in places.keys() & result.keys() - {"out"}:
        _in_sample(result[name], last)[places[name]] = 0
        assert not result[name].any(), f"{name}: not zero where no gradient arrives"


def check_structure(coo: Coo, sides: Sides) -> None:
    """Raise AssertionError unless both sides hold exactly the edges of `coo`."""
    src, dst = coo.edge_index
    num_src, num_dst = coo.sizes
    identity = torch.arange(len(src), device=src.device)
    perm = identity if sides.perm is None else sides.perm.long()
    order = sides.csr_to_csc.long()
    assert torch.equal(perm.sort().values, identity), "perm must be a permutation"
    assert torch.equal(sides.row.long(), src[perm]), "row must hold the sources"
    assert torch.equal(_ends(sides.colptr, num_dst), dst[perm]), (
        "colptr must count the destinations"
    )
    assert torch.equal(order.sort().values, identity), "csr_to_csc must be a permutation"
    assert torch.equal(_ends(sides.rowptr, num_src), src[perm][order]), (
        "rowptr must count the sources"
    )


def _ends(pointers: Tensor, nodes: int) -> Tensor:
    """Node of each edge, from the pointers of a side."""
    return torch.arange(nodes, device=pointers.device).repeat_interleave(pointers.long().diff())


def _in_sample(tensor: Tensor, sample: int) -> Tensor:
    """Rows of one sample where there is a batch; tensors that the samples share as they are."""
    return tensor[sample] if tensor.dim() == 4 else tensor


def _rows(tensor: Tensor, index: Tensor | None) -> Tensor:
    """Chosen rows; all where index is None."""
    return tensor.detach() if index is None else tensor.detach()[index]


def _exact(problem: Problem, operands: Operands, part: Part, sample: int) -> Exact:
    """The part as a problem of the tests' oracle."""
    places = {
        "query": part.dst,
        "grad_out": part.dst,
        "key": part.src,
        "value": part.src,
        "edge_attr": part.edges,
    }
    names = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias", "grad_out")
    tensors = {n: _rows(_in_sample(getattr(operands, n), sample), places.get(n)) for n in names}
    grad_lse = torch.zeros(len(part.dst), problem.heads, device=part.dst.device)
    return Exact(part.edge_index, **tensors, grad_lse=grad_lse, scale=problem.channels**-0.5)
