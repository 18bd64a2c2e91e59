"""Batches: problems on one graph, run in one call and checked separately."""

from dataclasses import replace
from typing import NamedTuple

import torch

from support.dropout import keep_of
from support.oracle import magnitude, oracle, plain
from support.run import attend


class Judged(NamedTuple):
    """Results with their references, each a dict of tensors by name."""

    result: dict
    exact: dict
    plain: dict
    size: dict


def run_batch(samples, graph, backend, *, dropout_p=0.0, seed=0, arriving=("grad_out", "grad_lse")):
    """Run the problems of a batch on `graph` in one call, and compute their references.

    Shared operands are passed once. Upstream gradients not named in `arriving` must be zero and are
    not passed.
    """
    if dropout_p:
        heads = samples[0].query.shape[1]
        with_dropout = []
        for number, sample in enumerate(samples):
            keep = keep_of(graph, heads, dropout_p, seed, sample=number)
            with_dropout.append(replace(sample, keep=keep))
        samples = with_dropout
    batch = samples[0] if len(samples) == 1 else stack(samples)
    for name in ("grad_out", "grad_lse"):
        if name not in arriving:
            batch = replace(batch, **{name: None})
    torch.manual_seed(seed)
    result = attend(batch, graph, backend, dropout_p=dropout_p)
    shared = shared_names(samples)
    references = []
    for compute in (oracle, plain, magnitude):
        references.append(combine([compute(sample) for sample in samples], shared))
    return Judged(result, *references)


def share(samples, *names):
    """Return the problems, all with the named operands of the first."""
    shared = {name: getattr(samples[0], name) for name in names}
    return [replace(sample, **shared) for sample in samples]


def shared_names(samples):
    """Return the names of shared operands, whose gradients are summed."""
    if len(samples) == 1:
        return set()
    first, second = samples[:2]
    return {name for name in first.operands() if getattr(second, name) is getattr(first, name)}


def stack(samples):
    """Return the problem of a batch: operands that are not shared are stacked."""
    stacked = {}
    for name in {*samples[0].operands(), "grad_out", "grad_lse"} - shared_names(samples):
        stacked[name] = torch.stack([getattr(sample, name) for sample in samples])
    return replace(samples[0], **stacked)


def combine(results, shared):
    """Combine the results of the elements of a batch into its result."""
    if len(results) == 1:
        return results[0]
    summed = {f"d{name}" for name in shared}
    combined = {}
    for name in results[0]:
        tensors = [result[name] for result in results]
        combined[name] = sum(tensors) if name in summed else torch.stack(tensors)
    return combined
