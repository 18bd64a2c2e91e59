"""`explain`: run a model once and record the operator calls of its layers.

Modules get no hooks of their own, because Anemoi's blocks fall back while a submodule has a hook.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops import edge_attention
from anemoi_gt.ops.backend import Dtypes
from anemoi_gt.ops.backends import rejected
from anemoi_gt.ops.operator import OPERATORS, ListedOperator


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of a layer.

    Parameters
    ----------
    name : {"forward", "backward"}
    operator : str
        As a profiler shows it, in eager and compiled runs.
    kernels : tuple of str
        Names of this library's kernels, as a profiler shows them, in launch order, without GEMMs of
        PyTorch. Empty if PyTorch operators compute the pass.
    """

    name: str
    operator: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One call of an operator of this library.

    Parameters
    ----------
    name, module : str
        Name and class of the module that called it; "" outside a module.
    sizes : dict of str to int
        Of an attention: batch, sources, destinations, edges, heads, channels, attributes; of an
        edge update: batch, sources, destinations, edges, hidden; of sums of edges: batch,
        destinations, edges, features; of a network: rows, inputs, outputs.
    features : {"none", "raw", "embedded", ""}
        Form of the edge features that an attention reads, else "". The weight of raw attributes is
        factored out of the sums over edges. Attributes are embedded before the operator if that
        moves fewer bytes, or if they do not fit a kernel program.
    dtype, device : str
        Dtype of the operands of products, and device.
    backend : str
        The backend that ran.
    rejected : dict of str to str
        For each of the other backends, the reason why it did not run.
    passes : tuple of Pass
        Forward, and backward if any operand needs a gradient.
    """

    name: str
    module: str
    sizes: dict[str, int]
    features: str
    dtype: str
    device: str
    backend: str
    rejected: dict[str, str]
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Explanation:
    """All layers of a model, in execution order."""

    layers: tuple[Layer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines: list[str] = []
        for _, group in groupby(self.layers, lambda layer: replace(layer, name="")):
            lines.extend(_layer_lines(list(group)))
        return "\n".join(lines)


def explain(model: nn.Module, *inputs: Any, **named: Any) -> Explanation:
    """Report backend, rejected backends, operators and kernels of each layer of a model.

    The model runs once on the inputs, in its current mode, under the caller's autocast and gradient
    mode. If gradients are enabled, the kernels of the backward pass are listed too. The states of
    random number generators are restored. A layer is one call of an operator of this library: an
    attention, a fused sub-layer of a block, an edge update, its sums or a network. Raises
    ValueError if the model is not a module or calls none.

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
            f"model must call an operator of anemoi_gt on these inputs, {type(model).__name__} "
            "called none; swap its layers, or explain a submodule that has some"
        )
    return explanation


def explain_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphStructure,
    *edges: Tensor | None,
    **options: Any,
) -> Explanation:
    """Run `anemoi_gt.edge_attention` once and explain the call, as one unnamed layer.

    Takes the arguments of `edge_attention`, and raises ValueError as it does.
    """

    def compute() -> object:
        return edge_attention(query, key, value, graph, *edges, **options)

    return _explain(compute, {}, _gpus_of(query))


def _explain(compute: Callable, names: dict, gpus: list[torch.device]) -> Explanation:
    """Call `compute` and describe each layer when it runs, so that no operands are kept."""
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


def _gpus_of(*tensors: Any) -> list[torch.device]:
    """Return the GPUs of all tensors in nested containers, sorted by index."""
    devices = {leaf.device for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
    gpus = [device for device in devices if device.type == "cuda"]
    return sorted(gpus, key=lambda gpu: gpu.index)


class Call(NamedTuple):
    """A call of an operator."""

    module: nn.Module | None  # the innermost module that was running
    operator: ListedOperator
    arguments: tuple
    grad_enabled: bool

    @property
    def name(self) -> str:
        """Name of the operator in a profile."""
        return self.operator.op.name().partition(".")[0]


class _Recorder(TorchDispatchMode):
    """Dispatch mode that calls `record` for each operator of this thread, with its module."""

    def __init__(self, record: Callable[[Call], None]):
        super().__init__()
        self._record = record
        self._thread = threading.get_ident()
        # the modules that are running, innermost last, with the grad mode at their entry
        self._running: list[tuple[nn.Module | None, bool]] = [(None, torch.is_grad_enabled())]

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operator in OPERATORS:
            module, grad_enabled = self._running[-1]
            self._record(Call(module, OPERATORS[operator], args, grad_enabled))
        return operator(*args, **(kwargs or {}))

    def enter_module(self, module: nn.Module, inputs: Any) -> None:
        """Push the module and the current grad mode, which is always off inside an operator."""
        if threading.get_ident() == self._thread:
            self._running.append((module, torch.is_grad_enabled()))

    def leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()


def _layer(call: Call, names: dict) -> Layer:
    backend = call.operator.backend
    sizes, dtype, features = call.operator.sizes_of(call.arguments)
    x = next(tensor for tensor in call.arguments if tensor is not None)
    class_name = "" if call.module is None else type(call.module).__name__
    return Layer(
        name=names.get(call.module, ""),
        module=class_name,
        sizes=sizes,
        features=features,
        dtype=str(dtype).removeprefix("torch."),
        device=str(x.device),
        backend=backend,
        rejected=rejected(backend, sizes, Dtypes(dtype), x.device),
        passes=_passes_of(call),
    )


def _passes_of(call: Call) -> tuple[Pass, ...]:
    """Return the forward pass, and the backward pass if a tensor needs a gradient."""
    needs = []
    for tensor in call.arguments[: call.operator.num_tensors]:
        needs.append(call.grad_enabled and tensor is not None and tensor.requires_grad)
    forward, backward = call.operator.kernels(call.arguments, needs)
    passes = [Pass("forward", call.name, tuple(forward))]
    if any(needs):
        name = call.operator.op_backward.name().partition(".")[0]
        passes.append(Pass("backward", name, tuple(backward)))
    return tuple(passes)


def _layer_lines(layers: list[Layer]) -> Iterator[str]:
    """Yield the lines for consecutive layers that differ only in their names."""
    first = layers[0]
    sizes = first.sizes
    yield _title(layers) or "attention"
    of_graph = ""
    if "edges" in sizes:
        sources = f"{sizes['sources']:,} " if "sources" in sizes else ""
        nodes = f"{sources}to {sizes['destinations']:,} nodes"
        of_graph = f"{sizes['edges']:,} edges, {nodes}, batch {sizes['batch']}, "
    if "heads" in sizes:
        features = {
            "none": "no attributes",
            "raw": f"attributes {sizes['attributes']}",
            "embedded": "embedded edges",
        }
        of_layer = f"heads {sizes['heads']} x {sizes['channels']}, {features[first.features]}"
    elif "rows" in sizes:
        of_layer = f"{sizes['rows']:,} rows, {sizes['inputs']} to {sizes['outputs']} features"
    elif "hidden" in sizes:
        of_layer = f"{sizes['hidden']} hidden features"
    else:
        of_layer = f"{sizes['features']} features"
    yield f"  {of_graph}{of_layer}, {first.dtype}, {first.device}"
    reasons = [f"{name}: {reason}" for name, reason in first.rejected.items()]
    yield "; ".join([f"  backend {first.backend}", *reasons])
    for pass_ in first.passes:
        yield f"  {pass_.name}: {pass_.operator}"
        for kernel in pass_.kernels:
            yield f"    {kernel}"


def _title(layers: list[Layer]) -> str:
    """Return the first and last name, the number of layers if several, and their class."""
    first_and_last = [layers[0].name, layers[-1].name]
    names = " .. ".join(dict.fromkeys(name for name in first_and_last if name))
    count = "" if len(layers) == 1 else f"{len(layers)} alike"
    label = ": ".join(text for text in (names, count) if text)
    return " ".join(text for text in (label, layers[0].module) if text)
