"""Choice of a backend: no silent fallback."""

import logging
from functools import cache
from pkgutil import resolve_name

import torch

from anemoi_gt.ops.backend import Backend, Dtypes, Sizes
from anemoi_gt.ops.torch_backend import BACKEND as TORCH
from anemoi_gt.ops.triton_backend import BACKEND as TRITON
from anemoi_gt.refusal import RefusalKind
from anemoi_gt.torch_compat import constant_when_traced

log = logging.getLogger(__name__)

BACKENDS = {backend.name: backend for backend in (TRITON, TORCH)}  # in the order of `auto`
_IMPORTED: dict[str, Backend] = {}  # by their full names


def named_backend(name: str) -> Backend:
    """Return a backend by its name, or the full name of a value, such as package.module.BACKEND.

    Raise ValueError if there is none.
    """
    if name in BACKENDS:
        return BACKENDS[name]
    _import(name)
    return _IMPORTED[name]


@constant_when_traced
def _import(name: str) -> None:
    if name in _IMPORTED:
        return
    try:
        value = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"backend {name!r} must be importable: {error}") from error
    if not isinstance(value, Backend):
        raise ValueError(
            f"backend {name!r} must be an anemoi_gt.ops.backend.Backend, got {type(value).__name__}"
        )
    _IMPORTED[name] = value


def unsupported_reason(name: str, sizes: Sizes, dtypes: Dtypes, device: torch.device) -> str | None:
    """Return why a backend cannot run a call, or None if it can."""
    refusal = named_backend(name).why_not(sizes, dtypes, device)
    if refusal is None or refusal.kind is RefusalKind.NOT_FASTER:
        return None
    return refusal.text


def choose_backend(name: str, sizes: Sizes, dtypes: Dtypes, device: torch.device) -> Backend:
    """Return the backend `name`; for "auto", the first that can run. ValueError if none can."""
    if name != "auto":
        # no call of a function: this is asked in every call of a layer
        backend = BACKENDS.get(name) or named_backend(name)
        refusal = backend.why_not(sizes, dtypes, device)
        if refusal is not None and refusal.kind is not RefusalKind.NOT_FASTER:
            raise ValueError(f"attention backend {name!r} cannot run here: {refusal.text}")
        return backend
    reasons: dict[str, str] = {}
    for candidate, backend in BACKENDS.items():
        refusal = backend.why_not(sizes, dtypes, device)
        if refusal is None:
            if device.type == "cuda" and reasons:
                _warn_of_fallback(candidate, str(reasons))
            if not torch.compiler.is_compiling():
                log.debug("attention backend auto: %s; rejected: %s", candidate, reasons or "none")
            return backend
        reasons[candidate] = refusal.text
    raise ValueError(f"no attention backend can run here: {reasons}")


def may_be_faster_fused(name: str, dtypes: Dtypes) -> bool:
    """Return whether the backend `name`, or for "auto" any, is faster fused with these dtypes."""
    backends = BACKENDS.values() if name == "auto" else (named_backend(name),)
    return any(backend.is_faster(dtypes) for backend in backends)


@constant_when_traced  # said once for each reason
def _warn_of_fallback(chosen: str, reasons: str) -> None:
    """Log once for each reason that `auto` computes on a GPU with a backend that is slow there."""
    _log_fallback(chosen, reasons)


@cache
def _log_fallback(chosen: str, reasons: str) -> None:
    log.warning(
        "attention backend auto: %r computes on a GPU, where it is slow; rejected: %s",
        chosen,
        reasons,
    )


def rejected(chosen: str, sizes: Sizes, dtypes: Dtypes, device: torch.device) -> dict[str, str]:
    """Return the reason by name for each backend other than `chosen`, which runs the call."""
    refusals = {name: b.why_not(sizes, dtypes, device) for name, b in BACKENDS.items()}
    first = next(name for name, refusal in refusals.items() if refusal is None)
    selected_by = "'auto' selects" if first == chosen else "the config names"
    supported = f"supported; {selected_by} {chosen!r}"
    reasons = {}
    for name, refusal in refusals.items():
        if name != chosen:
            reasons[name] = supported if refusal is None else refusal.text
    return reasons
