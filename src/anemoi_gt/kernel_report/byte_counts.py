"""Passes of one recorded attention: the bytes that no implementation can avoid, and the kernels launched.

With s bytes an element, R = s H C a row, everything read or written once, and gradients of all operands:

    forward      R (2 N_dst + 2 N_src) + 4 H N_dst + E (a + 4)     q, out, k, v; lse; attributes and source
    backward     R (3 N_dst + 4 N_src) + 8 H N_dst + E (a + 8)     q, do, dq, k, v, dk, dv; statistics; edges

where a = s D, or R for embedded edges. What belongs to nodes is repeated for each batch entry. The lower bound of the
time is these bytes over the memory bandwidth.
"""

from collections.abc import Iterable

from torch import Tensor

from anemoi_gt.kernel_report.explanation import OPERANDS, Kernel, Pass


def attention_in_block(arguments: dict) -> dict:
    """Return the arguments of the attention in a block, from those of the block's operator; their rows have no memory.

    It differentiates query, key, value, weight and bias as soon as the block has any gradient.
    """
    heads, batch, dtype, save = (arguments[name] for name in ("heads", "batch", "dtype", "save"))
    width = arguments["query_weight"].shape[0]

    def rows(x: Tensor, *shape: int, needs_grad: bool = save) -> Tensor:
        return x.detach().new_empty((), dtype=dtype).expand(shape).requires_grad_(needs_grad)

    def split_heads(x: Tensor) -> Tensor:
        return rows(x, *((batch,) if batch > 1 else ()), x.shape[0] // batch, heads, width // heads)

    x_dst, attr, weight = (arguments[name] for name in ("x_dst", "edge_attr", "edge_weight"))
    x_src = x_dst if arguments["x_src"] is None else arguments["x_src"]
    attention = {"query": split_heads(x_dst), "key": split_heads(x_src), "value": split_heads(x_src)}
    attention["edge_attr"] = rows(attr, *attr.shape, needs_grad=attr.requires_grad)
    attention |= {"edge_weight": rows(weight, *weight.shape), "edge_bias": rows(weight, width)}
    options = {"seed": None, "scale": (width // heads) ** -0.5, "dropout_p": 0.0}
    options |= {"embedded_first": False}
    return arguments | attention | options


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


def passes_of(call, sizes: dict[str, int], bandwidth: float | None) -> tuple[Pass, ...]:
    """Return the forward pass, and the backward pass if some operand gets a gradient."""
    operands = {name: call.arguments[name] for name in OPERANDS[:-2]}  # indices have no gradient
    needs = {n: call.grad_enabled and operand is not None and operand.requires_grad for n, operand in operands.items()}
    forward, backward = _kernels(call, needs) if call.backend == "triton" else ((), ())
    moved = _moved(call, sizes, needs)
    passes = [_pass("forward", call.operator, moved[0], forward, bandwidth)]
    if any(needs.values()):
        passes.append(_pass("backward", f"{call.operator}_backward", moved[1], backward, bandwidth))
    return tuple(passes)


def _moved(call, sizes: dict[str, int], needs: dict[str, bool]) -> tuple[int, int]:
    """Return the bytes of the two passes by the formulas above, with the gradients that are needed."""
    batch, num_src, num_dst, num_edges, heads, channels, _ = sizes.values()
    row = call.arguments["query"].element_size() * heads * channels
    attributes = 0 if call.arguments["edge_attr"] is None else call.arguments["edge_attr"].nbytes
    forward = row * (2 * num_dst + 2 * num_src) + 4 * heads * num_dst
    gradients = needs["query"] * num_dst + (needs["key"] + needs["value"]) * num_src
    backward = row * (2 * num_dst + 2 * num_src + gradients) + 8 * heads * num_dst
    return batch * forward + attributes + 4 * num_edges, batch * backward + attributes + 8 * num_edges


def _pass(name: str, operator: str, moved: int, launches: Iterable, bandwidth: float | None) -> Pass:
    kernels = (Kernel(each.name, each.tile, each.bytes, _ms(each.bytes, bandwidth)) for each in launches)
    return Pass(name, operator, moved, _ms(moved, bandwidth), tuple(kernels))


def _ms(moved: int, bandwidth: float | None) -> float | None:
    return None if bandwidth is None else 1e3 * moved / bandwidth


def _kernels(call, needs: dict[str, bool]) -> tuple[list, list]:
    """Launches of the two passes."""
    from anemoi_gt.ops.operands import AttentionOperands, Needs
    from anemoi_gt.ops.triton_backend.launched_kernels import plan
    from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options

    groups = (AttentionOperands, IndexTensors, Options)
    return plan(*(group(*(call.arguments[name] for name in group._fields)) for group in groups), Needs(**needs))
