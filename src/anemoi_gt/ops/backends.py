"""Backends of edge attention and their choice: one predicate per backend, no silent fallback."""

import logging
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.ops import torch_backend, triton_backend
from anemoi_gt.torch_compat import constant_when_traced

log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """An implementation of edge attention.

    `attend` has the arguments of `torch_backend.attend`. `unsupported_reason(query)` returns why it
    cannot run, or None; `auto_unsupported_reason(query)` why `auto` rejects it, even if it could
    run.
    """

    attend: Callable[..., tuple[Tensor, Tensor]]
    unsupported_reason: Callable[[Tensor], str | None]
    auto_unsupported_reason: Callable[[Tensor], str | None]


BACKENDS = {  # in the order in which `auto` tries them
    "triton": Backend(
        triton_backend.attend,
        triton_backend.unsupported_reason,
        triton_backend.auto_unsupported_reason,
    ),
    "torch": Backend(
        torch_backend.attend,
        unsupported_reason=lambda _: None,  # it runs wherever PyTorch does
        auto_unsupported_reason=lambda _: None,
    ),
}


def unsupported_reason(name: str, query: Tensor) -> str | None:
    """Return why the backend `name` cannot run for a query like this one, or None if it can."""
    return BACKENDS[name].unsupported_reason(query)


def choose_backend(name: str, query: Tensor) -> Backend:
    """Return the backend `name`; for "auto", the first that can run. ValueError if none can."""
    if name != "auto":
        reason = BACKENDS[name].unsupported_reason(query)
        if reason is not None:
            raise ValueError(f"attention backend {name!r} cannot run here: {reason}")
        return BACKENDS[name]
    reasons: dict[str, str] = {}
    for candidate, backend in BACKENDS.items():
        reason = backend.auto_unsupported_reason(query)
        if reason is None:
            if query.device.type == "cuda" and reasons:
                _warn_of_fallback(candidate, str(reasons))
            if not torch.compiler.is_compiling():
                log.debug("attention backend auto: %s; rejected: %s", candidate, reasons or "none")
            return backend
        reasons[candidate] = reason
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
    reasons = {name: backend.auto_unsupported_reason(query) for name, backend in BACKENDS.items()}
    first = next(name for name, reason in reasons.items() if reason is None)
    selected_by = "'auto' selects" if first == chosen else "the config names"
    supported = f"supported; {selected_by} {chosen!r}"
    return {name: reason or supported for name, reason in reasons.items() if name != chosen}
