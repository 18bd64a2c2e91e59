"""PyG's `TransformerConv` in existing models, replaced by `GraphTransformerConv` with the same parameters."""

import logging

import torch
from torch import nn
from torch_geometric.nn import Linear, TransformerConv

from anemoi_gt.attention_config import AttentionConfig, check_config
from anemoi_gt.integrations import hooks_of
from anemoi_gt.nn import GraphTransformerConv

log = logging.getLogger(__name__)


def swap_layers(model: nn.Module, config: AttentionConfig = AttentionConfig()) -> nn.Module:  # noqa: B008  frozen
    """Replace every `TransformerConv` of a model by a `GraphTransformerConv` that holds its parameters.

    Parameters are moved, not copied: an existing optimiser stays valid. Hooks, the training mode,
    the state dict and what else the layer was given stay. A layer that appears twice in the model still does.

    Parameters
    ----------
    model : torch.nn.Module
        Its layers are replaced in place; a `TransformerConv` itself cannot be, use what is returned.
    config : AttentionConfig
        Backend and precision of the attention. With backend "auto" a layer that ours cannot stand for stays PyG's,
        and the log says so with the reason.

    Returns
    -------
    torch.nn.Module
        `model`, or its replacement when it is a `TransformerConv`.

    Raises
    ------
    ValueError
        If there is no `TransformerConv`, or one that ours cannot stand for while `config` names a backend.

    Examples
    --------
    >>> model = torch.nn.ModuleDict({"first": TransformerConv(4, 8), "second": TransformerConv(8, 2)})
    >>> swap_layers(model)
    ModuleDict(
      (first): GraphTransformerConv(4, 8, heads=1)
      (second): GraphTransformerConv(8, 2, heads=1)
    )
    """
    check_config(config)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {model!r}")
    upstream = {id(module): module for module in model.modules() if isinstance(module, TransformerConv)}
    if not upstream:
        raise ValueError(f"model must have a TransformerConv of PyG, got {type(model).__name__} without one")
    ours = {key: _replacement(layer, config) for key, layer in upstream.items()}  # all, before the model changes
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in ours:
                parent.register_module(name, ours[id(child)])
    return ours.get(id(model), model)


def _replacement(upstream: TransformerConv, config: AttentionConfig) -> nn.Module:
    """Return our layer with the parameters of `upstream`, or `upstream` itself if `config` allows that."""
    reason = _unsupported_reason(upstream)
    if reason is None:
        try:
            return _with_parameters_of(upstream, config)
        except ValueError as error:  # an option that our constructor refuses
            reason = str(error)
    if config.backend != "auto":
        raise ValueError(
            f"attention backend {config.backend!r} cannot serve {upstream}: {reason}; backend 'auto' leaves it as it is"
        )
    log.warning("%s stays PyG's own: %s", upstream, reason)
    return upstream


def _unsupported_reason(upstream: TransformerConv) -> str | None:
    """Return why our layer cannot stand for this one, or None when it can."""
    if type(upstream) is not TransformerConv:
        return f"{type(upstream).__qualname__} is a class of its own, which may compute something else"
    replaced = [name for name in vars(upstream) if callable(getattr(TransformerConv, name, None))]
    if replaced:
        return f"its {replaced[0]} was replaced on the layer itself"
    for name in ("lin_query", "lin_key"):
        kind = type(getattr(upstream, name))
        if not issubclass(kind, Linear):
            return f"its {name} is {kind.__qualname__}, and PyG's Linear is needed, which knows its in_channels"
    embed = upstream.lin_edge
    if embed is None:
        return None
    if type(embed) is not Linear:
        return f"its lin_edge is {type(embed).__qualname__}, and PyG's Linear is needed, whose weight is all it does"
    if embed.bias is not None:
        return "its lin_edge has a bias, which PyG's does not have and ours would leave out"
    if any(getattr(hook, "__func__", None) is not Linear.initialize_parameters for hook in hooks_of(embed)):
        return "hooks watch its lin_edge, which would not be called"  # that of a lazy Linear apart, which ours runs
    return None


def _with_parameters_of(upstream: TransformerConv, config: AttentionConfig) -> GraphTransformerConv:
    with torch.device("meta"):  # parameters that are replaced at once: neither memory nor random numbers
        ours = GraphTransformerConv(
            upstream.in_channels,
            upstream.out_channels,
            heads=upstream.heads,
            concat=upstream.concat,
            beta=upstream.beta,
            dropout=upstream.dropout,
            edge_dim=upstream.edge_dim,
            bias=upstream.lin_key.bias is not None,
            root_weight=upstream.root_weight,
            config=config,
            aggr=upstream.aggr,
            flow=upstream.flow,
            decomposed_layers=upstream.decomposed_layers,
        )
    for name, held in (upstream._modules | upstream._parameters).items():  # what else somebody has put there, too
        setattr(ours, name, held)
    for name, buffer in upstream._buffers.items():
        ours.register_buffer(name, buffer, persistent=name not in upstream._non_persistent_buffers_set)
    vars(ours).update({n: value for n, value in vars(upstream).items() if "_hooks" in n or not hasattr(ours, n)})
    ours.training = upstream.training
    if upstream.explain is not None:
        ours.explain = upstream.explain
    return ours
