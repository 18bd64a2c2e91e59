"""Backends of edge attention and their choice: one predicate per backend, no silent fallback."""

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.ops import torch_backend, triton_backend
from anemoi_gt.ops.triton_backend.edge_sums import sum_edges
from anemoi_gt.ops.triton_backend.formulas import (
    attention_kept_bytes,
    attention_sublayer,
    interaction_sublayer,
    network_kept_bytes,
    network_sublayer,
)
from anemoi_gt.ops.triton_backend.tiles import MAX_ATTRIBUTES, MAX_FUSED_FEATURES
from anemoi_gt.refusal import Refusal, RefusalKind
from anemoi_gt.torch_compat import constant_when_traced

log = logging.getLogger(__name__)


class Sublayer(NamedTuple):
    """A fused sub-layer: functions of the tree of its tensors, a graph if it has one, options."""

    compute: Callable[..., Tensor]
    kept_bytes: Callable[..., int]  # kept for the backward pass, besides the inputs


class Sublayers(NamedTuple):
    """The fused sub-layers of a backend.

    The formulas are in `ops.tensors`.
    """

    attention: Sublayer
    network: Sublayer
    interaction: Callable[..., Tensor]
    sum_edges: Callable[..., Tensor]
    max_features: int  # of a row
    max_attributes: int  # of an edge


class Backend(NamedTuple):
    """An implementation of edge attention.

    `attend` has the arguments of `torch_backend.attend`. `why_not(query)` refuses queries that it
    cannot attend with, and is "not faster" for those that `auto` gives to another backend.
    """

    attend: Callable[..., tuple[Tensor, Tensor]]
    why_not: Callable[[Tensor], Refusal | None]
    sublayers: Sublayers | None  # None: it has none


BACKENDS = {  # in the order in which `auto` tries them
    "triton": Backend(
        triton_backend.attend,
        triton_backend.why_not,
        Sublayers(
            Sublayer(attention_sublayer, attention_kept_bytes),
            Sublayer(network_sublayer, network_kept_bytes),
            interaction_sublayer,
            sum_edges,
            MAX_FUSED_FEATURES,
            MAX_ATTRIBUTES - 1,
        ),
    ),
    "torch": Backend(
        torch_backend.attend,
        why_not=lambda _: None,  # it runs wherever PyTorch does
        sublayers=None,
    ),
}


def unsupported_reason(name: str, query: Tensor) -> str | None:
    """Return why the backend `name` cannot run for a query like this one, or None if it can."""
    refusal = BACKENDS[name].why_not(query)
    if refusal is None or refusal.kind is RefusalKind.NOT_FASTER:
        return None
    return refusal.text


def choose_backend(name: str, query: Tensor) -> Backend:
    """Return the backend `name`; for "auto", the first that can run. ValueError if none can."""
    if name != "auto":
        reason = unsupported_reason(name, query)
        if reason is not None:
            raise ValueError(f"attention backend {name!r} cannot run here: {reason}")
        return BACKENDS[name]
    reasons: dict[str, str] = {}
    for candidate, backend in BACKENDS.items():
        refusal = backend.why_not(query)
        if refusal is None:
            if query.device.type == "cuda" and reasons:
                _warn_of_fallback(candidate, str(reasons))
            if not torch.compiler.is_compiling():
                log.debug("attention backend auto: %s; rejected: %s", candidate, reasons or "none")
            return backend
        reasons[candidate] = refusal.text
    raise ValueError(f"no attention backend can run here: {reasons}")


@constant_when_traced  # said once per process
def _warn_of_fallback(chosen: str, reasons: str) -> None:
    """Log once that `auto` computes on a GPU with a backend that is slow there, and why."""
    _log_fallback(chosen, reasons)


@cache
def _log_fallback(chosen: str, reasons: str) -> None:
    log.warning(
        "attention backend auto: %r computes on a GPU, where it is slow; rejected: %s",
        chosen,
        reasons,
    )


def rejected(chosen: str, query: Tensor) -> dict[str, str]:
    """Return the reason by name for each backend other than `chosen`, which runs for `query`."""
    refusals = {name: backend.why_not(query) for name, backend in BACKENDS.items()}
    first = next(name for name, refusal in refusals.items() if refusal is None)
    selected_by = "'auto' selects" if first == chosen else "the config names"
    supported = f"supported; {selected_by} {chosen!r}"
    reasons = {}
    for name, refusal in refusals.items():
        if name != chosen:
            reasons[name] = supported if refusal is None else refusal.text
    return reasons
