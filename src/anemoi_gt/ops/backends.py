"""Choice of the backend of edge attention: one predicate per backend, and nothing behind the caller's back."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.ops import torch_backend, triton_backend

log = logging.getLogger(__name__)


class Backend(NamedTuple):
    """One way to compute edge attention.

    `attend` has the arguments of `torch_backend.attend`. `why_not(query)` says why it cannot serve, or None;
    `why_not_auto(query)` why `auto` passes it over, be it that it could run.
    """

    attend: Callable[..., tuple[Tensor, Tensor]]
    why_not: Callable[[Tensor], str | None]
    why_not_auto: Callable[[Tensor], str | None]


BACKENDS = {  # in the order in which `auto` tries them
    "triton": Backend(triton_backend.attend, triton_backend.why_not, triton_backend.why_not_auto),
    "torch": Backend(torch_backend.attend, torch_backend.why_not, torch_backend.why_not),
}


def why_not(name: str, query: Tensor) -> str | None:
    """Return why the backend called `name` cannot serve a query like this one, or None when it can."""
    return BACKENDS[name].why_not(query)


def choose_backend(name: str, query: Tensor) -> Backend:
    """Return the backend called `name`, or for "auto" the first that can serve `query`.

    Raises
    ------
    ValueError
        When the named backend cannot, with its reason.
    """
    if name != "auto":
        reason = why_not(name, query)
        if reason is not None:
            raise ValueError(f"attention backend {name!r} cannot run here: {reason}")
        return BACKENDS[name]
    reasons = {}
    for candidate, backend in BACKENDS.items():
        reason = backend.why_not_auto(query)
        if reason is None:
            if not torch.compiler.is_compiling():
                log.debug("attention backend auto: %s; passed over: %s", candidate, reasons or "none")
            return backend
        reasons[candidate] = reason
    raise ValueError(f"no attention backend can run here: {reasons}")
