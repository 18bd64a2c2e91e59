"""What a watched call of attention consists of: its passes, the bytes that each cannot do without, and its kernels.

With s bytes a number, R = s H C a row, everything read or written once, and gradients of all operands:

    forward      R (2 N_dst + 2 N_src) + 4 H N_dst + E (a + 4)     q, out, k, v; lse; attributes and source
    backward     R (3 N_dst + 4 N_src) + 8 H N_dst + E (a + 8)     q, do, dq, k, v, dk, dv; statistics; edges

where a = s D, or R for embedded edges. A batch repeats what belongs to nodes.
"""

from collections.abc import Iterable
from math import isfinite

from anemoi_gt.explanation.observe import Call
from anemoi_gt.explanation.value import Alternative, Kernel, Pass

OPERANDS = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")


def sizes_of(call: Call) -> dict[str, int]:
    """Sizes of a call, by the words of `anemoi_gt.explanation.Layer`."""
    query, weight = call.arguments["query"], call.arguments["edge_weight"]
    return {
        "samples": query.shape[0] if query.dim() == 4 else 1,
        "sources": call.arguments["key"].shape[-3],
        "destinations": query.shape[-3],
        "edges": call.arguments["row"].shape[0],
        "heads": query.shape[-2],
        "channels": query.shape[-1],
        "attributes": 0 if weight is None else weight.shape[1],
    }


def features_of(call: Call) -> str:
    """What came of the edges."""
    if call.arguments["edge_attr"] is None:
        return "none"
    return "embedded" if call.arguments["edge_weight"] is None else "raw"


def bandwidth_of(call: Call) -> float | None:
    """Bytes per second of the device whose kernels computed; None where they were PyTorch's own."""
    if call.backend != "triton":
        return None
    from anemoi_gt.ops.triton_backend.device import device_of

    return device_of(call.arguments["query"].device).bandwidth


def passes_of(call: Call, bandwidth: float | None) -> tuple[Pass, ...]:
    """Forward, and backward where some operand gets a gradient."""
    needs = {name: call.records and _gets_gradient(call.arguments[name]) for name in OPERANDS}
    forward, backward = _kernels(call, needs) if call.backend == "triton" else ((), ())
    bounds = _forward_bytes(call), _backward_bytes(call, needs)
    passes = [_pass("forward", call.operator, bounds[0], forward, bandwidth)]
    if any(needs.values()):
        passes.append(_pass("backward", f"{call.operator}_backward", bounds[1], backward, bandwidth))
    return tuple(passes)


def _gets_gradient(operand) -> bool:
    return operand is not None and operand.requires_grad


def _pass(name: str, operator: str, moved: int, kernels: Iterable, bandwidth: float | None) -> Pass:
    return Pass(name, operator, moved, _ms(moved, bandwidth), tuple(_kernel(each, bandwidth) for each in kernels))


def _kernel(planned, bandwidth: float | None) -> Kernel:
    runners_up = tuple(Alternative(tile, _predicted(seconds)) for tile, seconds in planned.others)
    expected = _ms(planned.bytes, bandwidth)
    return Kernel(planned.name, planned.tile, _predicted(planned.seconds), runners_up, planned.bytes, expected)


def _predicted(seconds: float | None) -> float | None:
    """Milliseconds; None where nothing is predicted, and where the tile does not fit."""
    return 1e3 * seconds if seconds is not None and isfinite(seconds) else None


def _ms(moved: int, bandwidth: float | None) -> float | None:
    return None if bandwidth is None else 1e3 * moved / bandwidth


def _kernels(call: Call, needs: dict[str, bool]) -> tuple[tuple, tuple]:
    """What the two passes launch."""
    from anemoi_gt.ops.operands import AttentionOperands
    from anemoi_gt.ops.triton_backend import launch_plan
    from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem

    groups = (AttentionOperands, IndexTensors, Options)
    sizes = Problem(*(group(*(call.arguments[name] for name in group._fields)) for group in groups)).sizes
    return tuple(launch_plan.forward_kernels(sizes)), tuple(
        launch_plan.backward_kernels(sizes, launch_plan.Needs(**needs))
    )


def _forward_bytes(call: Call) -> int:
    sizes, row = sizes_of(call), _row_bytes(call)
    nodes = row * (2 * sizes["destinations"] + 2 * sizes["sources"]) + 4 * sizes["heads"] * sizes["destinations"]
    return sizes["samples"] * nodes + _attribute_bytes(call) + 4 * sizes["edges"]


def _backward_bytes(call: Call, needs: dict[str, bool]) -> int:
    sizes, row = sizes_of(call), _row_bytes(call)
    nodes = row * (
        (2 + needs["query"]) * sizes["destinations"] + (2 + needs["key"] + needs["value"]) * sizes["sources"]
    )
    nodes += 8 * sizes["heads"] * sizes["destinations"]
    return sizes["samples"] * nodes + _attribute_bytes(call) + 8 * sizes["edges"]


def _row_bytes(call: Call) -> int:
    query = call.arguments["query"]
    return query.element_size() * query.shape[-2] * query.shape[-1]


def _attribute_bytes(call: Call) -> int:
    attributes = call.arguments["edge_attr"]
    return 0 if attributes is None else attributes.numel() * attributes.element_size()
