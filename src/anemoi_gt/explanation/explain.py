"""`explain`: which kernel serves what in a model, found by watching it compute once."""

from collections.abc import Callable
from math import isfinite

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from anemoi_gt.explanation.observe import Call, watching
from anemoi_gt.explanation.passes import bandwidth_of, features_of, passes_of, sizes_of
from anemoi_gt.explanation.value import Explanation, Layer
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops import edge_attention
from anemoi_gt.ops.backends import rejected


def explain(model: nn.Module, *inputs, bandwidth: float | None = None, **named) -> Explanation:
    """Say for each attention of a model which backend and kernels serve it, with what tiles, bytes and times.

    The model computes once on the inputs, as it is: in its mode, under the autocast and with or without the gradients of
    the caller. With gradients the kernels of the backward pass are told as well. Random numbers are given back.

    Parameters
    ----------
    model : torch.nn.Module
        Ours, one that holds our layers, or one whose layers were swapped for ours. Of a compiled module, the module inside.
    *inputs, **named
        What it is called with.
    bandwidth : float, optional
        Bytes per second for the expected times. None is what a copy attains on the GPU on which the kernels run; where
        Triton's interpreter runs them, what it attains on an H200; unknown for the `torch` backend.

    Returns
    -------
    Explanation
        `print` shows a table, `to_dict()` gives plain values, `with_profile(profile)` adds achieved times.

    Raises
    ------
    ValueError
        If the model is no module, or computes no attention of ours, or the bandwidth is no positive number.

    Examples
    --------
    >>> from anemoi_gt import GraphStructure, GraphTransformerConv
    >>> conv = GraphTransformerConv(4, 8, heads=2, edge_dim=3)
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    >>> found = explain(conv, torch.randn(2, 4), graph, torch.randn(3, 3))
    >>> found.layers[0].backend, [pass_.operator for pass_ in found.layers[0].passes]
    ('torch', ['anemoi_gt::edge_attention_torch', 'anemoi_gt::edge_attention_torch_backward'])
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile, whose code knows no modules
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model must be a torch.nn.Module, whose parts have names, got {type(model).__name__}; "
            "explain_attention explains one call of edge_attention"
        )
    names = {module: name for name, module in model.named_modules()}
    held = [*model.parameters(), *model.buffers()]
    found = _watch(lambda: model(*inputs, **named), names, bandwidth, _gpus_of(held, inputs, named))
    if not found.layers:
        raise ValueError(
            f"model must compute an attention of anemoi_gt on these inputs, {type(model).__name__} computed none; "
            "swap its layers, or explain a part of it that does"
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
    """Say the same of one call of `anemoi_gt.edge_attention`.

    Parameters
    ----------
    query, key, value, graph, *edges, **options
        Of `anemoi_gt.edge_attention`, which computes once.
    bandwidth : float, optional
        As for `explain`.

    Returns
    -------
    Explanation
        Of one layer, which has no name.

    Raises
    ------
    ValueError
        As `anemoi_gt.edge_attention` does, and if the bandwidth is no positive number.
    """
    return _watch(lambda: edge_attention(query, key, value, graph, *edges, **options), {}, bandwidth, _gpus_of(query))


def _watch(compute: Callable, names: dict, bandwidth: float | None, gpus: list[torch.device]) -> Explanation:
    """Compute under watch, and describe what is seen."""
    if bandwidth is not None and not (isinstance(bandwidth, (int, float)) and bandwidth > 0 and isfinite(bandwidth)):
        raise ValueError(f"bandwidth must be a positive number of bytes per second, or None, got {bandwidth!r}")
    layers, known = [], set()

    def see(call: Call) -> None:
        attained = bandwidth or bandwidth_of(call)
        known.add(attained)
        layers.append(_layer(call, names, attained))

    with torch.random.fork_rng(gpus), watching(see):
        compute()
    return Explanation(tuple(layers), min(known - {None}, default=None))


def _gpus_of(*tensors) -> list[torch.device]:
    """The GPUs that hold tensors, in any containers: their random numbers are given back."""
    devices = {leaf.device for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor)}
    return sorted((device for device in devices if device.type == "cuda"), key=lambda device: device.index)


def _layer(call: Call, names: dict, bandwidth: float | None) -> Layer:
    query = call.arguments["query"]
    return Layer(
        name=names.get(call.module, ""),
        module="" if call.module is None else type(call.module).__name__,
        sizes=sizes_of(call),
        features=features_of(call),
        dtype=str(query.dtype).removeprefix("torch."),
        device=str(query.device),
        backend=call.backend,
        rejected=rejected(call.backend, query),
        passes=passes_of(call, bandwidth),
    )
