"""Tensors of a problem on a device, the same numbers for every baseline."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from suite.graphs import Coo
from suite.problems import GRADIENTS, Problem

COLD = 4  # times the L2 cache that all sets of operands fill together
MAX_SETS = 32


@dataclass(frozen=True)
class Operands:
    """Operands of one call and the incoming gradient; node rows are [N, H, C] or [B, N, H, C]."""

    coo: Coo
    query: Tensor
    key: Tensor
    value: Tensor
    edge_attr: Tensor  # [E, D]
    edge_weight: Tensor  # [H * C, D]
    edge_bias: Tensor  # [H * C]
    grad_out: Tensor
    gradients: tuple[str, ...]

    @property
    def leaves(self) -> list[Tensor]:
        """Tensors that need a gradient, in the order of `gradients`."""
        return [getattr(self, name) for name in self.gradients]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        inputs = [getattr(self, name) for name in GRADIENTS]
        return sum(part.nbytes for part in (self.coo, self.grad_out, *inputs))

    @property
    def num_samples(self) -> int:
        """B."""
        return self.query.shape[0] if self.query.dim() == 4 else 1

    def side_by_side(self) -> "Operands":
        """Return a batch as one large graph, for baselines without batch; edge_attr is shared."""
        coo, samples = self.coo, self.num_samples
        if self.query.dim() == 3:
            return self
        steps = torch.tensor(coo.sizes, device=coo.edge_index.device)[:, None]
        edge_index = torch.cat(
            [coo.edge_index + number * steps for number in range(samples)], dim=1
        )
        return replace(self, coo=Coo(edge_index, tuple(samples * size for size in coo.sizes)))

    def nodes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value [B * N, H, C], one batch entry after the other."""
        return tuple(
            rows.reshape(-1, *rows.shape[-2:]) for rows in (self.query, self.key, self.value)
        )

    def attributes(self) -> Tensor:
        """Return the edge attributes for `side_by_side`, [B * E, D]."""
        return (
            self.edge_attr if self.num_samples == 1 else self.edge_attr.repeat(self.num_samples, 1)
        )


def draw(problem: Problem, coo: Coo, seed: int = 0) -> Operands:
    """Return normally distributed operands on the device of `coo`; scores are of order one."""
    device, dtype = coo.edge_index.device, problem.torch_dtype
    generator = torch.Generator(device).manual_seed(seed)
    heads, channels, edge_dim = problem.heads, problem.channels, problem.edge_dim
    batch = (problem.batch,) if problem.batch > 1 else ()
    num_src, num_dst = coo.sizes
    shapes = {
        "query": (*batch, num_dst, heads, channels),
        "key": (*batch, num_src, heads, channels),
        "value": (*batch, num_src, heads, channels),
        "edge_attr": (coo.edge_index.shape[1], edge_dim),
        "edge_weight": (heads * channels, edge_dim),
        "edge_bias": (heads * channels,),
        "grad_out": (*batch, num_dst, heads, channels),
    }
    drawn = {
        n: torch.randn(shape, generator=generator, device=device, dtype=dtype)
        for n, shape in shapes.items()
    }
    drawn["edge_weight"] *= edge_dim**-0.5
    for name in problem.gradients:
        drawn[name].requires_grad_()
    return Operands(coo, gradients=problem.gradients, **drawn)


def rotation(make: Callable[[int], Operands | Coo], cache: int) -> list:
    """Return sets `make(0)`, `make(1)`, ... that together outgrow a cache of `cache` bytes."""
    first = make(0)
    sets = min(math.ceil(COLD * cache / first.nbytes), MAX_SETS)
    return [first, *(make(seed) for seed in range(1, sets))]
