"""Batches: problems on one graph, run in one call and judged separately."""

from dataclasses import replace
from typing import NamedTuple

import torch

from support.dropout import keep_of
from support.oracle import magnitude, oracle, plain
from support.run import attend


class Judged(NamedTuple):
    """Results and what they are judged by, each a dict of tensors by name."""

    result: dict
    exact: dict
    plain: dict
    size: dict


def run_batch(samples, graph, backend, *, dropout_p=0.0, seed=0, arriving=("grad_out", "grad_lse")):
    """Run the problems of a batch on `graph` in one call, and compute what they are judged by.

    Shared operands are passed once. Upstream gradients not named in `arriving` must be zero and are
    not passed.
    """
    if dropout_p:
        heads = samples[0].query.shape[1]
        keeps = [
            keep_of(graph, heads, dropout_p, seed, sample=number) for number in range(len(samples))
        ]
        samples = [replace(sample, keep=keep) for sample, keep in zip(samples, keeps, strict=True)]
    batch = samples[0] if len(samples) == 1 else stack(samples)
    batch = replace(
        batch, **{name: None for name in ("grad_out", "grad_lse") if name not in arriving}
    )
    torch.manual_seed(seed)
    result = attend(batch, graph, backend, dropout_p=dropout_p)
    answers = ([judge(sample) for sample in samples] for judge in (oracle, plain, magnitude))
    return Judged(result, *(combine(answer, shared_names(samples)) for answer in answers))


def share(samples, *names):
    """Return the problems with the named operands of the first."""
    return [
        replace(sample, **{name: getattr(samples[0], name) for name in names}) for sample in samples
    ]


def shared_names(samples):
    """Return the names of shared operands, whose gradients are summed."""
    first, *others = samples
    return {
        name
        for name in first.operands()
        if others and getattr(others[0], name) is getattr(first, name)
    }


def stack(samples):
    """Return the problem of a batch: operands that are not shared are stacked."""
    names = {*samples[0].operands(), "grad_out", "grad_lse"} - shared_names(samples)
    return replace(
        samples[0],
        **{name: torch.stack([getattr(sample, name) for sample in samples]) for name in names},
    )


def combine(results, shared):
    """Return the result of a batch from the results of its elements."""
    if len(results) == 1:
        return results[0]
    summed = {"d" + name for name in shared}
    return {
        name: (sum if name in summed else torch.stack)([result[name] for result in results])
        for name in results[0]
    }
