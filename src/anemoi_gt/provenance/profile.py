"""Times of a profile, brought to the layers that took them. An operator's name and the shapes of its operands tell layers apart."""

from collections import defaultdict
from dataclasses import replace
from statistics import fmean

from anemoi_gt.provenance.observe import ATTENTIONS
from anemoi_gt.provenance.value import Explanation, Kernel, Layer, Pass

BACKWARD = "_backward"
FIRST = {"": 0, BACKWARD: 2}  # place of query among the operator's arguments; grad_out and grad_lse come before it
OPERANDS = 8  # query, key, value, edge_attr, edge_weight, edge_bias, colptr, row: what the shapes are of


def add_times(explanation: Explanation, profile) -> Explanation:
    """Return `explanation` with the times that `profile` has seen; `Explanation.with_profile` says the rest."""
    if not hasattr(profile, "events"):
        raise ValueError(f"profile must be a torch.profiler.profile that has ended, got {type(profile).__name__}")
    seen = _calls(profile)
    if not seen:
        raise ValueError(
            f"profile must hold calls of {' or '.join(ATTENTIONS)} with their shapes, got none: "
            "profile(activities=[...], record_shapes=True) around the model, and wait until it has ended"
        )
    layers = tuple(
        replace(layer, passes=tuple(_timed(layer, pass_, seen) for pass_ in layer.passes))
        for layer in explanation.layers
    )
    if all(pass_.achieved_ms is None for layer in layers for pass_ in layer.passes):
        raise ValueError(f"profile must be of the calls that were explained, it holds others: {sorted(map(str, seen))}")
    return replace(explanation, layers=layers)


def _calls(profile) -> dict[tuple, list]:
    """Events of attention in a profile, by operator and sizes."""
    seen = defaultdict(list)
    for event in profile.events():
        operator = event.name.removesuffix(BACKWARD)
        if operator in ATTENTIONS and event.input_shapes:
            first = FIRST[event.name.removeprefix(operator)]
            seen[event.name, _sizes(event.input_shapes[first : first + OPERANDS])].append(event)
    return dict(seen)


def _sizes(shapes: list) -> tuple[int, ...]:
    """The sizes that tell layers apart, in the order of `Layer.sizes`, from the shapes of an operator's operands."""
    query, key, _, _, weight, _, _, row = shapes
    return (query[0] if len(query) == 4 else 1, key[-3], query[-3], row[0], *query[-2:], weight[1] if weight else 0)


def _timed(layer: Layer, pass_: Pass, seen: dict[tuple, list]) -> Pass:
    events = seen.get((pass_.operator, tuple(layer.sizes.values())))
    if events is None:
        return pass_
    launched = [_launched(event) for event in events]
    kernels = tuple(_with_time(kernel, launched) for kernel in pass_.kernels)
    if all(launched):
        achieved = fmean(sum(kernel.duration for kernel in each) for each in launched)
    elif layer.device.startswith("cpu"):
        achieved = fmean(event.cpu_time_total for event in events)
    else:
        return pass_  # a profile of the host alone does not know what the device does
    return replace(pass_, kernels=kernels, achieved_ms=1e-3 * achieved)


def _launched(event) -> list:
    """Kernels of an event and of those inside it: autograd's node, and what the operator calls."""
    return [*event.kernels, *(kernel for child in event.cpu_children for kernel in _launched(child))]


def _with_time(kernel: Kernel, launched: list[list]) -> Kernel:
    times = [each.duration for kernels in launched for each in kernels if each.name == kernel.name]
    return replace(kernel, achieved_ms=1e-3 * fmean(times)) if times else kernel
