"""What a profile has seen of attentions: the only place that reads its events. It knows operators and shapes, nothing of layers."""

from collections import defaultdict
from statistics import fmean
from typing import NamedTuple

from anemoi_gt.explanation.observe import ATTENTIONS

BACKWARD = "_backward"
FIRST = {"": 0, BACKWARD: 2}  # place of query among the operator's arguments; grad_out and grad_lse come before it
OPERANDS = 8  # query, key, value, edge_attr, edge_weight, edge_bias, colptr, row: what the shapes are of


class Times(NamedTuple):
    """Means over the calls of one operator on operands of the same sizes, in milliseconds."""

    host: float
    device: float | None  # of all kernels of a call; None unless every call launched some that the profile has seen
    kernels: dict[str, float]  # of one launch, by the kernel's name


def times_of(profile) -> dict[tuple[str, tuple[int, ...]], Times]:
    """Return the times of all attentions in a profile.

    Parameters
    ----------
    profile : torch.profiler.profile
        That has ended, recorded with shapes.

    Returns
    -------
    dict
        By the operator's name and the sizes of its operands: samples, sources, destinations, edges, heads, channels, attributes.

    Raises
    ------
    ValueError
        If it is no profile, or has no attention with its shapes.
    """
    if not hasattr(profile, "events"):
        raise ValueError(f"profile must be a torch.profiler.profile that has ended, got {type(profile).__name__}")
    seen = defaultdict(list)
    for event in profile.events():
        operator = event.name.removesuffix(BACKWARD)
        if operator in ATTENTIONS and event.input_shapes:
            first = FIRST[event.name.removeprefix(operator)]
            seen[event.name, _sizes(event.input_shapes[first : first + OPERANDS])].append(event)
    if not seen:
        raise ValueError(
            f"profile must hold calls of {' or '.join(ATTENTIONS)} with their shapes, got none: "
            "profile(activities=[...], record_shapes=True) around the model, and wait until it has ended"
        )
    return {call: _times(events) for call, events in seen.items()}


def _sizes(shapes: list) -> tuple[int, ...]:
    """The sizes of a call, from the shapes of its operands."""
    query, key, _, _, weight, _, _, row = shapes
    return (query[0] if len(query) == 4 else 1, key[-3], query[-3], row[0], *query[-2:], weight[1] if weight else 0)


def _times(events: list) -> Times:
    launched, kernels = [_launched(event) for event in events], defaultdict(list)
    for kernel in (kernel for each in launched for kernel in each):
        kernels[kernel.name].append(kernel.duration)
    return Times(
        host=1e-3 * fmean(event.cpu_time_total for event in events),
        device=1e-3 * fmean(sum(kernel.duration for kernel in each) for each in launched) if all(launched) else None,
        kernels={name: 1e-3 * fmean(durations) for name, durations in kernels.items()},
    )


def _launched(event) -> list:
    """Kernels of an event and of those inside it: autograd's node, and what the operator calls."""
    return [*event.kernels, *(kernel for child in event.cpu_children for kernel in _launched(child))]
