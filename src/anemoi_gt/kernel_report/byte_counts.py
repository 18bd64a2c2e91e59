"""Passes of one recorded attention: the bytes that no implementation can avoid, and the kernels launched.

With s bytes an element, R = s H C a row, everything read or written once, and gradients of all operands:

    forward      R (2 N_dst + 2 N_src) + 4 H N_dst + E (a + 4)     q, out, k, v; lse; attributes and source
    backward     R (3 N_dst + 4 N_src) + 8 H N_dst + E (a + 8)     q, do, dq, k, v, dk, dv; statistics; edges

where a = s D, or R for embedded edges. What belongs to nodes is repeated for each batch entry. The lower bound of the
time is these bytes over the memory bandwidth.
"""

from collections.abc import Iterable

from anemoi_gt.kernel_report.report import Kernel, Pass

OPERANDS = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")


def sizes_of(call) -> dict[str, int]:
    """Return the sizes of a call, by the names of `anemoi_gt.kernel_report.Layer`."""
    query, weight = call.arguments["query"], call.arguments["edge_weight"]
    return {
        "batch": query.shape[0] if query.dim() == 4 else 1,
        "sources": call.arguments["key"].shape[-3],
        "destinations": query.shape[-3],
        "edges": call.arguments["row"].shape[0],
        "heads": query.shape[-2],
        "channels": query.shape[-1],
        "attributes": 0 if weight is None else weight.shape[1],
    }


def features_of(call) -> str:
    """Return the form of the edge features, as `anemoi_gt.kernel_report.Layer` has it."""
    if call.arguments["edge_attr"] is None:
        return "none"
    if call.arguments.get("embedded_first"):
        return "embedded first"
    return "embedded" if call.arguments["edge_weight"] is None else "raw"


def bandwidth_of(call) -> float | None:
    """Return the bytes per second of a copy on the device of Triton's kernels; None for PyTorch's own."""
    if call.backend != "triton":
        return None
    from anemoi_gt.ops.triton_backend.device import copy_bandwidth

    return copy_bandwidth(call.arguments["query"].device)


def passes_of(call, bandwidth: float | None) -> tuple[Pass, ...]:
    """Return the forward pass, and the backward pass if some operand gets a gradient."""
    operands = {name: call.arguments[name] for name in OPERANDS}
    needs = {n: call.grad_enabled and operand is not None and operand.requires_grad for n, operand in operands.items()}
    forward, backward = _kernels(call, needs) if call.backend == "triton" else ((), ())
    passes = [_pass("forward", call.operator, _forward_bytes(call), forward, bandwidth)]
    if any(needs.values()):
        passes.append(_pass("backward", f"{call.operator}_backward", _backward_bytes(call, needs), backward, bandwidth))
    return tuple(passes)


def _pass(name: str, operator: str, moved: int, launches: Iterable, bandwidth: float | None) -> Pass:
    kernels = (Kernel(each.name, each.tile, each.bytes, _ms(each.bytes, bandwidth)) for each in launches)
    return Pass(name, operator, moved, _ms(moved, bandwidth), tuple(kernels))


def _ms(moved: int, bandwidth: float | None) -> float | None:
    return None if bandwidth is None else 1e3 * moved / bandwidth


def _kernels(call, needs: dict[str, bool]) -> tuple[tuple, tuple]:
    """Launches of the two passes."""
    from anemoi_gt.ops.operands import AttentionOperands
    from anemoi_gt.ops.triton_backend import launched_kernels
    from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem

    groups = (AttentionOperands, IndexTensors, Options)
    sizes = Problem(*(group(*(call.arguments[name] for name in group._fields)) for group in groups)).sizes
    backward = launched_kernels.backward_kernels(sizes, launched_kernels.Needs(**needs))
    return tuple(launched_kernels.forward_kernels(sizes)), tuple(backward)


def _forward_bytes(call) -> int:
    sizes, row = sizes_of(call), _row_bytes(call)
    nodes = row * (2 * sizes["destinations"] + 2 * sizes["sources"]) + 4 * sizes["heads"] * sizes["destinations"]
    return sizes["batch"] * nodes + _attribute_bytes(call) + 4 * sizes["edges"]


def _backward_bytes(call, needs: dict[str, bool]) -> int:
    sizes, row = sizes_of(call), _row_bytes(call)
    destinations = (2 + needs["query"]) * sizes["destinations"]
    sources = (2 + needs["key"] + needs["value"]) * sizes["sources"]
    nodes = row * (destinations + sources) + 8 * sizes["heads"] * sizes["destinations"]
    return sizes["batch"] * nodes + _attribute_bytes(call) + 8 * sizes["edges"]


def _row_bytes(call) -> int:
    query = call.arguments["query"]
    return query.element_size() * query.shape[-2] * query.shape[-1]


def _attribute_bytes(call) -> int:
    attributes = call.arguments["edge_attr"]
    return 0 if attributes is None else attributes.numel() * attributes.element_size()
