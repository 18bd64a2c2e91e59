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

    `attend` has the arguments of `torch_backend.attend`. `unsupported_reason(query)` says why it cannot serve, or None;
    `auto_unsupported_reason(query)` why `auto` passes it over, be it that it could run.
    """

    attend: Callable[..., tuple[Tensor, Tensor]]
    unsupported_reason: Callable[[Tensor], str | None]
    auto_unsupported_reason: Callable[[Tensor], str | None]


BACKENDS = {  # in the order in which `auto` tries them
    "triton": Backend(triton_backend.attend, triton_backend.unsupported_reason, triton_backend.auto_unsupported_reason),
    "torch": Backend(torch_backend.attend, torch_backend.unsupported_reason, torch_backend.unsupported_reason),
}


def unsupported_reason(name: str, query: Tensor) -> str | None:
    """Return why the backend called `name` cannot serve a query like this one, or None when it can."""
    return BACKENDS[name].unsupported_reason(query)


def choose_backend(name: str, query: Tensor) -> Backend:
    """Return the backend called `name`, or for "auto" the first that can serve `query`.

    Raises
    ------
    ValueError
        When the named backend cannot, with its reason.
    """
    if name != "auto":
        reason = unsupported_reason(name, query)
        if reason is not None:
            raise ValueError(f"attention backend {name!r} cannot run here: {reason}")
        return BACKENDS[name]
    reasons = {}
    for candidate, backend in BACKENDS.items():
        reason = backend.auto_unsupported_reason(query)
        if reason is None:
            if not torch.compiler.is_compiling():
                log.debug("attention backend auto: %s; passed over: %s", candidate, reasons or "none")
            return backend
        reasons[candidate] = reason
    raise ValueError(f"no attention backend can run here: {reasons}")


def check_counts_heads(backend: Backend, dropout_p: float) -> None:
    """Raise ValueError unless a backend's dropout knows the number of a head among all of a layer, where a caller has some of them."""
    if backend is BACKENDS["triton"]:
        raise ValueError(
            "dropout_p must be 0 where a call has some of a layer's heads on attention backend 'triton', whose "
            f"kernels count heads from 0, got {dropout_p}; use attention backend 'torch', or strategy 'edges' where ranks "
            "share the heads"
        )


def rejected(chosen: str, query: Tensor) -> dict[str, str]:
    """Return, for each backend other than the one called `chosen` that serves `query`, why it does not."""
    reasons = {}
    for name, backend in BACKENDS.items():
        if name == chosen:
            continue
        reason = backend.auto_unsupported_reason(query)
        if reason is None:
            first = next(other for other, backend in BACKENDS.items() if backend.auto_unsupported_reason(query) is None)
            taken_by = "'auto' takes" if first == chosen else "the config names"
            reason = f"could serve; {taken_by} {chosen!r}"
        reasons[name] = reason
    return reasons
