"""Replacement of PyG's `TransformerConv` in existing models by `GraphTransformerConv`, and back."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.nn import Linear, TransformerConv

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn import GraphTransformerConv
from anemoi_gt.nn.plain import (
    PYG_ATTENTION,
    PYG_HOOKS,
    PYG_LINEAR,
    qualified_name,
    why_not_plain,
    why_overridden,
)
from anemoi_gt.refusal import Refusal, RefusalKind, permanent

__all__ = ["GraphData", "swap_back", "swap_layers"]

log = logging.getLogger(__name__)

KINDS = (TransformerConv, GraphTransformerConv)
# What every module has for its hooks, and layers of PyG besides: it moves with the layer as it is.
HOOKS = frozenset(vars(nn.Module())) - {
    *("training", "_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")
} | set(PYG_HOOKS)
SAME_OPTIONS = (
    "heads",
    "concat",
    "beta",
    "dropout",
    "edge_dim",
    "root_weight",
    "aggr",
    "flow",
    "decomposed_layers",
)


def swap_layers(
    model: nn.Module,
    backend: str = "auto",
    precision: str | None = None,
    *,
    replay: bool = True,
    stable_sort: bool = True,
    subclasses: Sequence[type[TransformerConv]] = (),
) -> nn.Module:
    """Replace each `TransformerConv` of a model by a `GraphTransformerConv`; return the model.

    Parameters are moved, not copied, so an existing optimiser stays valid. Hooks, the training
    mode, the state dict and added attributes are kept, and a layer that appears twice in the model
    still does. Each `GraphTransformerConv` of the model is kept and gets the options of this call.
    `swap_back` reverses it.

    Parameters
    ----------
    model : torch.nn.Module
        Its layers are replaced in place.
    backend, precision, replay, stable_sort
        As in `anemoi_gt.KernelConfig`. With backend "auto", unsupported layers stay PyG's,
        which is logged with the reason.
    subclasses : sequence of type
        Classes that inherit from `TransformerConv` and compute the same, to replace as well.
        Methods that they add are not called.

    Raises
    ------
    ValueError
        For another backend or precision; for a model without such a layer, or that is itself a
        layer; for an unsupported layer, if `backend` names one. Nothing is replaced then.

    Examples
    --------
    >>> layers = {"first": TransformerConv(4, 8), "second": TransformerConv(8, 2)}
    >>> model = torch.nn.ModuleDict(layers)
    >>> swap_layers(model)
    ModuleDict(
      (first): GraphTransformerConv(4, 8, heads=1)
      (second): GraphTransformerConv(8, 2, heads=1)
    )
    """
    config = KernelConfig(backend, precision, stable_sort=stable_sort, replay=replay)
    subclasses = _checked_subclasses(subclasses)
    layers = _layers_of(model, "a TransformerConv of PyG", lambda layer: isinstance(layer, KINDS))
    upstream = {id(layer): layer for layer in layers if isinstance(layer, TransformerConv)}
    ours = {key: _replacement(layer, config, subclasses) for key, layer in upstream.items()}
    _replace(model, ours)
    for layer in layers:
        if isinstance(layer, GraphTransformerConv):
            layer.config = config
    return model


def swap_back(model: nn.Module) -> nn.Module:
    """Restore each replaced layer, with the parameters, hooks and mode of its replacement.

    Parameters
    ----------
    model : torch.nn.Module
        Its layers are replaced in place, and it is returned; a `GraphTransformerConv` that was
        built as such stays.

    Raises
    ------
    ValueError
        For a model without a layer of `swap_layers`, or that is itself a layer.
    """
    swapped = _layers_of(
        model, "a layer of swap_layers", lambda layer: getattr(layer, "_upstream", None) is not None
    )
    _replace(model, {id(layer): _restored(layer) for layer in swapped})
    return model


class GraphData(Data):
    """PyG `Data` with a `GraphStructure`; batches hold one structure, joined by `disjoint`.

    PyG's own `Data` leaves a list of structures in a batch. Joining sorts nothing. It works
    wherever PyG makes a `Batch`, its `DataLoader` included; a batch with structures cannot be
    indexed (`batch[i]`).

    Parameters
    ----------
    *args, **kwargs
        Of `torch_geometric.data.Data`, such as `x`; structures have any name, such as `graph`.

    Examples
    --------
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1], [1, 0]]), 2)
    >>> batch = Batch.from_data_list([GraphData(x=torch.ones(2, 4), graph=graph) for _ in range(3)])
    >>> batch.graph
    GraphStructure(num_src=6, num_dst=6, num_edges=6, reverse=True, fixed_in_degree=1, int32, cpu)
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.__dict__["_store"] = _GraphStorage(dict(self._store.items()), _parent=self)


class _GraphStorage(GlobalStorage):
    """Attributes of a `GraphData`; PyG's collate stores lists of unknown types here."""

    def __setitem__(self, key: str, value: Any) -> None:
        are_graphs = (
            isinstance(value, list)
            and value
            and all(isinstance(item, GraphStructure) for item in value)
        )
        # PyG 2.8 keeps a weak reference to the Data or Batch of a storage
        parent = self.__dict__.get("_parent", lambda: None)()
        if are_graphs and isinstance(parent, Batch):
            value = GraphStructure.disjoint(value)
        super().__setitem__(key, value)


def _checked_subclasses(
    subclasses: Sequence[type[TransformerConv]],
) -> tuple[type[TransformerConv], ...]:
    """Return the subclasses as a tuple; raise ValueError unless all compute as TransformerConv."""
    kinds = tuple(subclasses) if isinstance(subclasses, (tuple, list)) else (subclasses,)
    for kind in kinds:
        if not isinstance(kind, type) or not issubclass(kind, TransformerConv):
            raise ValueError(
                f"subclasses must be classes that inherit from TransformerConv, got {kind!r}"
            )
        reason = why_overridden(kind, TransformerConv)
        if reason is not None:
            raise ValueError(
                f"subclasses must compute what TransformerConv does, got {kind.__qualname__}, "
                f"which {reason}; leave it out, or put what it adds into a module around the layer"
            )
    return kinds


def _layers_of(
    model: nn.Module, wanted: str, accepts: Callable[[nn.Module], bool]
) -> list[nn.Module]:
    """Return the layers of a module that are `wanted`; ValueError if none, or if `model` is one."""
    if isinstance(model, KINDS):
        raise ValueError(
            f"model must be a module that holds layers, got a bare {type(model).__name__}, which "
            "cannot be replaced in place; put it into a container: layers = "
            "torch.nn.ModuleList([layer]), and use layers[0] afterwards"
        )
    layers = [module for module in model.modules() if accepts(module)]
    if not layers:
        raise ValueError(f"model must have {wanted}, got {type(model).__name__} without one")
    return layers


def _replace(model: nn.Module, replacements: dict[int, nn.Module]) -> None:
    """Register the replacement of each submodule, by its `id`, under all its names."""
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in replacements:
                parent.register_module(name, replacements[id(child)])


def _replacement(
    upstream: TransformerConv, config: KernelConfig, subclasses: tuple[type, ...]
) -> nn.Module:
    """Return the new layer with the parameters of `upstream`, or `upstream` if unsupported."""
    refusal = _why_not(upstream, subclasses)
    if refusal is None:
        try:
            return _with_parameters_of(upstream, config)
        except ValueError as error:  # an option that GraphTransformerConv rejects
            refusal = permanent(str(error))
    # it stays so when a tool that watches it now has gone
    permanent(refusal.text).raise_if_named(config.backend, upstream, "leaves it as it is")
    log.warning("%s stays PyG's own: %s", upstream, refusal.text)
    return upstream


def _why_not(upstream: TransformerConv, subclasses: tuple[type, ...]) -> Refusal | None:
    """Return why a layer cannot be replaced, or None if it can.

    Hooks move with the layer, which runs them; other tools are found at each of its calls.
    """
    kind = type(upstream)
    if kind is not TransformerConv and kind not in subclasses:
        return permanent(
            f"{qualified_name(kind)} is a subclass, which may compute something else; see "
            "`subclasses`"
        )
    refusal = why_not_plain(("", upstream, (PYG_ATTENTION,)))
    if refusal is not None and refusal.kind is RefusalKind.PERMANENT:
        return refusal
    for name in ("lin_query", "lin_key"):
        kind = type(getattr(upstream, name))
        if not issubclass(kind, Linear):
            return permanent(
                f"its {name} is {qualified_name(kind)}; PyG's Linear is needed, because its "
                "in_channels are read"
            )
    embed = upstream.lin_edge
    if embed is None:
        return None
    refusal = why_not_plain(("lin_edge", embed, (PYG_LINEAR,)))
    if refusal is not None and refusal.kind is RefusalKind.PERMANENT:
        return refusal
    return None


def _with_parameters_of(upstream: TransformerConv, config: KernelConfig) -> GraphTransformerConv:
    # the new parameters are replaced at once, so they need neither memory nor random numbers
    with torch.device("meta"):
        options = {name: getattr(upstream, name) for name in SAME_OPTIONS} | {
            "bias": upstream.lin_key.bias is not None
        }
        ours = GraphTransformerConv(
            upstream.in_channels, upstream.out_channels, **options, config=config
        )
    added = [name for name in vars(upstream) if name in HOOKS or not hasattr(ours, name)]
    _move(upstream, ours, added)
    ours._upstream = (upstream, added)  # in a tuple, so that it is no submodule
    return ours


def _restored(ours: Any) -> TransformerConv:
    """Return the layer that `ours` replaced, with the current contents of `ours`."""
    upstream, added = ours._upstream
    _move(ours, upstream, [name for name in added if name in vars(ours)])
    upstream.dropout = ours.dropout
    return upstream


def _move(source: nn.Module, target: nn.Module, attributes: Sequence[str]) -> None:
    """Move modules, parameters, buffers, mode and these attributes, such as hooks, between layers.

    Entries that the source lacks are removed, so that both state dicts are the same.
    """
    vars(target).update({name: vars(source)[name] for name in attributes})
    registered = source._modules | source._parameters | source._buffers
    for name, state in (target._modules | target._parameters | target._buffers).items():
        if state is not None and name not in registered:
            delattr(target, name)
    # with anything else stored on the layer
    for name, module_or_parameter in (source._modules | source._parameters).items():
        setattr(target, name, module_or_parameter)
    for name, buffer in source._buffers.items():
        target.register_buffer(
            name, buffer, persistent=name not in source._non_persistent_buffers_set
        )
    target.training, target.explain = source.training, source.explain
