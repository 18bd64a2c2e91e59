"""`swap_layers`, for a model with layers of Anemoi, of PyG, or of both."""

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from anemoi_gt.integrations import pyg


def swap_layers(
    model: nn.Module,
    backend: str = "auto",
    precision: str | None = None,
    *,
    fusion: str = "auto",
    sharding: bool = True,
    keep_hidden: bool = True,
    replay: bool = True,
    stable_sort: bool = True,
    subclasses: Sequence[type[nn.Module]] = (),
) -> nn.Module:
    """Switch the layers of Anemoi and of PyG in one model to anemoi_gt, and return the model.

    Blocks of Anemoi's graph transformers, graph networks and transformers are registered, and
    compute as under `anemoi_gt.install`. Each `TransformerConv` of PyG is replaced by a
    `GraphTransformerConv` with the same parameters.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place. A copy of Anemoi's blocks, or an unpickled one, must be swapped again.
    backend, precision, replay
        As in `anemoi_gt.KernelConfig`. With backend "auto", unsupported layers stay upstream's,
        which is logged with the reason.
    fusion, sharding, keep_hidden
        For Anemoi's blocks, as in `anemoi_gt.install`, over which they take precedence.
    stable_sort
        For PyG's layers, as in `anemoi_gt.KernelConfig`.
    subclasses : sequence of type
        Classes that inherit from PyG's `TransformerConv` and compute the same, to replace as well.
        Methods that they add are not called.

    Raises
    ------
    ValueError
        For a model without such a layer, or that is itself a `TransformerConv`; for an option of
        layers that it does not have, or another value. Nothing is swapped then. For a layer of PyG
        that a named backend does not support: no layer of PyG is swapped then.
    ImportError
        As for `anemoi_gt.install`.

    Examples
    --------
    >>> from torch_geometric.nn import TransformerConv
    >>> layers = {"first": TransformerConv(4, 8), "second": TransformerConv(8, 2)}
    >>> swap_layers(torch.nn.ModuleDict(layers))
    ModuleDict(
      (first): GraphTransformerConv(4, 8, heads=1)
      (second): GraphTransformerConv(8, 2, heads=1)
    )
    """
    is_of_pyg = any(isinstance(module, pyg.KINDS) for module in model.modules())
    is_of_anemoi = _has_blocks_of_anemoi(model)
    kind = type(model).__name__
    if not is_of_pyg and not is_of_anemoi:
        raise ValueError(
            "model must have a TransformerConv of PyG, or a block of Anemoi's graph transformers, "
            f"graph networks or transformers, got {kind} without one"
        )
    if not is_of_pyg and (stable_sort is not True or subclasses):
        raise ValueError(
            "stable_sort and subclasses must be left out without layers of PyG, got "
            f"stable_sort={stable_sort!r} and subclasses={subclasses!r} for {kind}"
        )
    of_anemoi: dict[str, Any] = {
        "fusion": fusion,
        "sharding": sharding,
        "keep_hidden": keep_hidden,
    }
    if not is_of_anemoi and of_anemoi != {"fusion": "auto", "sharding": True, "keep_hidden": True}:
        raise ValueError(
            "fusion, sharding and keep_hidden must be left out without blocks of Anemoi, got "
            f"fusion={fusion!r}, sharding={sharding!r} and keep_hidden={keep_hidden!r} for {kind}"
        )
    if is_of_anemoi:
        from anemoi_gt.integrations.anemoi import installation

        installation.swap_layers(model, backend, precision, replay=replay, **of_anemoi)
    if is_of_pyg:
        of_pyg: dict[str, Any] = {"stable_sort": stable_sort, "subclasses": subclasses}
        pyg.swap_layers(model, backend, precision, replay=replay, **of_pyg)
    return model


def _has_blocks_of_anemoi(model: nn.Module) -> bool:
    # nothing in a process that did not import anemoi-models is a block of it
    if "anemoi.models.layers.block" not in sys.modules:
        return False
    from anemoi_gt.integrations.anemoi import installation

    return bool(installation.blocks_in(model))
