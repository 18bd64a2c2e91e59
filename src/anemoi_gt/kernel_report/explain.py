"""`explain` runs a model once and records the operator calls of its attentions.

Modules get no hooks of their own: Anemoi's blocks compute differently while one of their parts has a hook.
"""

import threading
from collections.abc import Callable
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_report.byte_counts import attention_in_block, bandwidth_of, features_of, passes_of
from anemoi_gt.kernel_report.explanation import BLOCK, OPERANDS, OPERATORS, Explanation, Layer, sizes_of
from anemoi_gt.ops import edge_attention
from anemoi_gt.ops.backends import rejected


def explain(model: nn.Module, *inputs, bandwidth: float | None = None, **named) -> Explanation:
    """Return the backend and the kernels of each attention of a model, with tiles, bytes and lower bounds.

    The model computes once on the inputs, in its mode, under the caller's autocast and with or without gradients. With
    gradients, the kernels of the backward pass are listed as well. The state of random generators is restored. Raises
    ValueError if the model is not a module or computes no attention of this library, or the bandwidth is not a positive
    number.

    Parameters
    ----------
    model : torch.nn.Module
        A model with layers of this library or layers swapped for them. Of a compiled module, the original one is
        explained.
    *inputs, **named
        Arguments of its call.
    bandwidth : float, optional
        Bytes per second for the lower bounds. None is what a copy attains on the GPU on which the kernels run; where
        Triton's interpreter runs them, what it attains on an H200; unknown for the `torch` backend.

    Returns
    -------
    Explanation
        `print` shows a table, `to_dict()` gives plain values, `with_profile(profile)` adds achieved times.

    Examples
    --------
    >>> from anemoi_gt import GraphStructure, GraphTransformerConv
    >>> conv = GraphTransformerConv(4, 8, heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    >>> found = explain(conv, torch.randn(2, 4), graph, torch.randn(3, 3))
    >>> found.layers[0].backend, [pass_.operator for pass_ in found.layers[0].passes]
    ('torch', ['anemoi_gt::edge_attention_torch', 'anemoi_gt::edge_attention_torch_backward'])
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose code has no modules
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; "
            "use explain_attention for one call of edge_attention"
        )
    names = {module: name for name, module in model.named_modules()}
    tensors = [*model.parameters(), *model.buffers()]
    found = _explain(lambda: model(*inputs, **named), names, bandwidth, _gpus_of(tensors, inputs, named))
    if not found.layers:
        raise ValueError(
            f"model must compute an attention of anemoi_gt on these inputs, {type(model).__name__} computed none; "
            "swap its layers, or explain a submodule that has some"
        )
    return found


def explain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    *edges: Tensor | None,
    bandwidth: float | None = None,
    **options,
) -> Explanation:
    """Return the same for one call of `anemoi_gt.edge_attention`, computed once, as one layer without a name.

    Takes the arguments of `edge_attention`, and the bandwidth as `explain` does. Raises ValueError as `edge_attention`
    does, and if the bandwidth is not a positive number.
    """
    return _explain(lambda: edge_attention(query, key, value, graph, *edges, **options), {}, bandwidth, _gpus_of(query))


def _explain(compute: Callable, names: dict, bandwidth: float | None, gpus: list[torch.device]) -> Explanation:
    """Compute once and describe each attention on the way, so that no layer's operands are kept."""
    if bandwidth is not None and not (isinstance(bandwidth, (int, float)) and bandwidth > 0 and isfinite(bandwidth)):
        raise ValueError(f"bandwidth must be a positive number of bytes per second, or None, got {bandwidth!r}")
    layers, known = [], set()

    def record(call: Call) -> None:
        attained = bandwidth or bandwidth_of(call)
        known.add(attained)
        layers.append(_layer(call, names, attained))

    recorder = _Recorder(record)
    with (
        torch.random.fork_rng(gpus),
        register_module_forward_pre_hook(recorder.enter_module),
        register_module_forward_hook(recorder.leave_module, always_call=True),
        recorder,
    ):
        compute()
    return Explanation(tuple(layers), min(known - {None}, default=None))


def _gpus_of(*tensors) -> list[torch.device]:
    """GPUs that hold tensors, in any containers: the state of their generators is restored."""
    devices = {leaf.device for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
    return sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index)


class Call(NamedTuple):
    """One attention, as its operator was called."""

    module: nn.Module | None  # the innermost that was computing
    operator: str
    backend: str
    arguments: dict[str, Any]  # by the names of the operator's schema
    grad_enabled: bool


class _Recorder(TorchDispatchMode):
    """Dispatch mode that passes the attentions of this thread, and the module that computes each, to `record`."""

    def __init__(self, record: Callable[[Call], None]):
        super().__init__()
        self._record = record
        self._thread = threading.get_ident()
        self._inside: list[tuple[nn.Module | None, bool]] = [(None, torch.is_grad_enabled())]

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().partition(".")[0]
        if name in OPERATORS:
            names = [argument.name for argument in operator._schema.arguments]
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            arguments = attention_in_block(arguments) if name == BLOCK else arguments
            module, grad_enabled = self._inside[-1]
            self._record(Call(module, name, OPERATORS[name], arguments, grad_enabled))
        return operator(*args, **(kwargs or {}))

    def enter_module(self, module: nn.Module, inputs) -> None:
        """Note the module that begins, and the grad mode: inside of an operator gradients are always off."""
        if threading.get_ident() == self._thread:
            self._inside.append((module, torch.is_grad_enabled()))

    def leave_module(self, module: nn.Module, inputs, output) -> None:
        if threading.get_ident() == self._thread:
            self._inside.pop()


def _layer(call: Call, names: dict, bandwidth: float | None) -> Layer:
    query = call.arguments["query"]
    sizes = sizes_of([getattr(call.arguments[name], "shape", ()) for name in OPERANDS])
    return Layer(
        name=names.get(call.module, ""),
        module="" if call.module is None else type(call.module).__name__,
        sizes=sizes,
        features=features_of(call),
        dtype=str(query.dtype).removeprefix("torch."),
        device=str(query.device),
        backend=call.backend,
        rejected=rejected(call.backend, query),
        passes=passes_of(call, sizes, bandwidth),
    )
