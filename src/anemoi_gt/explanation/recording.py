"""`explain`: run a model once and record the operator call of each attention.

Modules get no hooks of their own, because Anemoi's blocks fall back while a submodule has a hook.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anemoi_gt.custom_ops import NAMESPACE
from anemoi_gt.explanation.results import Explanation, Layer, Pass
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops import edge_attention
from anemoi_gt.ops.backends import rejected

SUBLAYER = f"{NAMESPACE}::attention_sublayer_triton"  # norm, projections and attention of a block
OPERATORS = {  # backend by operator name
    f"{NAMESPACE}::edge_attention_torch": "torch",
    f"{NAMESPACE}::edge_attention_triton": "triton",
    SUBLAYER: "triton",
}
OPERANDS = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")


def explain(model: nn.Module, *inputs, **named) -> Explanation:
    """Report backend, rejected backends, operators and kernels of each attention in a model.

    The model runs once on the inputs, in its current mode, under the caller's autocast and gradient
    mode. If gradients are enabled, the kernels of the backward pass are listed too. The states of
    random number generators are restored. Raises ValueError if the model is not a module or
    computes no attention of this library.

    Parameters
    ----------
    model : torch.nn.Module
        A model with layers of this library, or with layers swapped for them. If it was compiled by
        `torch.compile`, the original module is explained.
    *inputs, **named
        Arguments of its call.

    Returns
    -------
    Explanation
        Prints as text; `to_dict()` returns plain values.

    Examples
    --------
    >>> from anemoi_gt import GraphStructure, GraphTransformerConv
    >>> conv = GraphTransformerConv(4, 8, heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    >>> explanation = explain(conv, torch.randn(2, 4), graph, torch.randn(3, 3))
    >>> layer = explanation.layers[0]
    >>> layer.backend, [pass_.operator for pass_ in layer.passes]
    ('torch', ['anemoi_gt::edge_attention_torch', 'anemoi_gt::edge_attention_torch_backward'])
    """
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; use explain_attention "
            "for one call of edge_attention"
        )
    names = {module: name for name, module in model.named_modules()}
    tensors = [*model.parameters(), *model.buffers()]
    gpus = _gpus_of(tensors, inputs, named)
    explanation = _explain(lambda: model(*inputs, **named), names, gpus)
    if not explanation.layers:
        raise ValueError(
            f"model must compute an attention of anemoi_gt on these inputs, {type(model).__name__} "
            "computed none; swap its layers, or explain a submodule that has some"
        )
    return explanation


def explain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    *edges: Tensor | None,
    **options,
) -> Explanation:
    """Run `anemoi_gt.edge_attention` once and explain the call, as one unnamed layer.

    Takes the arguments of `edge_attention`, and raises ValueError as it does.
    """

    def compute() -> object:
        return edge_attention(query, key, value, graph, *edges, **options)

    return _explain(compute, {}, _gpus_of(query))


def _explain(compute: Callable, names: dict, gpus: list[torch.device]) -> Explanation:
    """Call `compute` and describe each attention when it runs, so that no operands are kept."""
    layers: list[Layer] = []
    recorder = _Recorder(lambda call: layers.append(_layer(call, names)))
    with (
        torch.random.fork_rng(gpus),
        register_module_forward_pre_hook(recorder.enter_module),
        register_module_forward_hook(recorder.leave_module, always_call=True),
        recorder,
    ):
        compute()
    return Explanation(tuple(layers))


def _gpus_of(*tensors) -> list[torch.device]:
    """Return the GPUs of all tensors in nested containers, sorted by index."""
    devices = {leaf.device for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
    gpus = [device for device in devices if device.type == "cuda"]
    return sorted(gpus, key=lambda gpu: gpu.index)


class Call(NamedTuple):
    """One attention, as a call of its operator."""

    module: nn.Module | None  # the innermost module that was running
    operator: str
    backend: str
    arguments: dict[str, Any]  # by name in the operator's schema
    grad_enabled: bool


class _Recorder(TorchDispatchMode):
    """Dispatch mode that calls `record` for each attention of this thread, with its module."""

    def __init__(self, record: Callable[[Call], None]):
        super().__init__()
        self._record = record
        self._thread = threading.get_ident()
        # the modules that are running, innermost last, with the grad mode at their entry
        self._running: list[tuple[nn.Module | None, bool]] = [(None, torch.is_grad_enabled())]

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name().partition(".")[0]
        if name in OPERATORS:
            names = [argument.name for argument in operator._schema.arguments]
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            if name == SUBLAYER:
                arguments = _attention_in_sublayer(arguments)
            module, grad_enabled = self._running[-1]
            self._record(Call(module, name, OPERATORS[name], arguments, grad_enabled))
        return operator(*args, **(kwargs or {}))

    def enter_module(self, module: nn.Module, inputs) -> None:
        """Push the module and the current grad mode, which is always off inside an operator."""
        if threading.get_ident() == self._thread:
            self._running.append((module, torch.is_grad_enabled()))

    def leave_module(self, module: nn.Module, inputs, output) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()


def _layer(call: Call, names: dict) -> Layer:
    query = call.arguments["query"]
    class_name = "" if call.module is None else type(call.module).__name__
    return Layer(
        name=names.get(call.module, ""),
        module=class_name,
        sizes=_sizes_of(call),
        features=_features_of(call),
        dtype=str(query.dtype).removeprefix("torch."),
        device=str(query.device),
        backend=call.backend,
        rejected=rejected(call.backend, query),
        passes=_passes_of(call),
    )


def _sizes_of(call: Call) -> dict[str, int]:
    query, key = call.arguments["query"], call.arguments["key"]
    weight = call.arguments["edge_weight"]
    return {
        "batch": query.shape[0] if query.dim() == 4 else 1,
        "sources": key.shape[-3],
        "destinations": query.shape[-3],
        "edges": call.arguments["row"].shape[0],
        "heads": query.shape[-2],
        "channels": query.shape[-1],
        "attributes": 0 if weight is None else weight.shape[1],
    }


def _features_of(call: Call) -> str:
    if call.arguments["edge_attr"] is None:
        return "none"
    return "embedded" if call.arguments["edge_weight"] is None else "raw"


def _passes_of(call: Call) -> tuple[Pass, ...]:
    """Return the forward pass, and the backward pass if any operand needs a gradient."""
    needs = {}
    for name in OPERANDS:
        operand = call.arguments[name]
        needs[name] = call.grad_enabled and operand is not None and operand.requires_grad
    forward: list[str] = []
    backward: list[str] = []
    if call.backend == "triton":
        forward, backward = _kernels_of(call, needs)
    passes = [Pass("forward", call.operator, tuple(forward))]
    if any(needs.values()):
        passes.append(Pass("backward", f"{call.operator}_backward", tuple(backward)))
    return tuple(passes)


def _kernels_of(call: Call, needs: dict[str, bool]) -> tuple[list[str], list[str]]:
    """Return the kernel names of the forward and the backward pass of backend `triton`."""
    from anemoi_gt.ops.operands import AttentionOperands, Needs
    from anemoi_gt.ops.triton_backend.launched_kernels import kernel_names
    from anemoi_gt.ops.triton_backend.sizes import IndexTensors

    operands = AttentionOperands(*(call.arguments[name] for name in AttentionOperands._fields))
    index = IndexTensors(*(call.arguments[name] for name in IndexTensors._fields))
    scale, dropout_p = call.arguments["scale"], call.arguments["dropout_p"]
    return kernel_names(operands, index, scale, dropout_p, Needs(**needs))


def _attention_in_sublayer(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the attention inside a sub-layer operator, as views without memory.

    The sub-layer differentiates query, key, value, weight and bias if any of its inputs needs a
    gradient.
    """
    heads, batch = arguments["heads"], arguments["batch"]
    dtype, save = arguments["dtype"], arguments["save"]
    width = arguments["query_weight"].shape[0]

    def expanded(x: Tensor, *shape: int, needs_grad: bool = save) -> Tensor:
        return x.detach().new_empty((), dtype=dtype).expand(shape).requires_grad_(needs_grad)

    def split_heads(x: Tensor, num_rows: int) -> Tensor:
        leading = (batch,) if batch > 1 else ()
        return expanded(x, *leading, num_rows // batch, heads, width // heads)

    x_dst, x_src, halo = arguments["x_dst"], arguments["x_src"], arguments["halo"]
    if x_src is None:
        x_src = x_dst
    num_src = x_src.shape[0]
    if halo is not None:
        num_src += halo.shape[0]
    key = split_heads(x_src, num_src)
    attr, weight = arguments["edge_attr"], arguments["edge_weight"]
    attr_shape = attr.shape
    if batch > 1 and attr.dim() == 2:
        attr_shape = (1, *attr_shape)
    bias = None
    if arguments["edge_bias"] is not None or arguments["value_bias"] is not None:
        bias = expanded(weight, width)
    attention = {
        "query": split_heads(x_dst, x_dst.shape[0]),
        "key": key,
        "value": key,
        "edge_attr": expanded(attr, *attr_shape, needs_grad=attr.requires_grad),
        "edge_weight": expanded(weight, *weight.shape),
        "edge_bias": bias,
        "scale": (width // heads) ** -0.5,
        "dropout_p": 0.0,
    }
    return arguments | attention
