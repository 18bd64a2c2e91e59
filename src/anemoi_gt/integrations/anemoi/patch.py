"""Switching Anemoi's blocks to our attention and back: the only place that changes Anemoi's classes.

Methods are replaced on classes. Nothing is written on a module, so that state dicts, pickles, copies and `isinstance` are
Anemoi's own, whoever trained the model.
"""

import logging
import sys
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from operator import attrgetter
from types import ModuleType

import torch
from torch import nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.integrations.anemoi import attention, edge_cache, edge_lists
from anemoi_gt.integrations.anemoi.block_settings import CHOSEN, Settings

log = logging.getLogger(__name__)

BLOCK = ("anemoi.models.layers.block", "GraphTransformerBaseBlock")
PROVIDER = ("anemoi.models.layers.graph_provider", "StaticGraphProvider")
MAPPER = ("anemoi.models.layers.mapper", "GraphTransformerBaseMapper")
PARTITION = ("anemoi.models.distributed.khop_edges", "GraphPartition")
PROCESSORS = ("anemoi.models.layers.processor",)
METHODS = {  # of a class, or of a module that holds a function under its name: what stands in for it
    (BLOCK, "apply_gt"): attention.attending,
    (BLOCK, "attention_block"): attention.blocking,
    (BLOCK, "get_qkve"): attention.projecting,
    (BLOCK, "prepare_qkve_edge_sharding"): attention.splitting,
    (PROVIDER, "_expand_edges"): edge_lists.expanding,
    (PROVIDER, "_get_edges_impl"): edge_lists.sharding,
    (MAPPER, "prepare_edge_sharding_wrapper"): edge_lists.localising,
    (PARTITION, "materialise"): edge_lists.materialising,
    (PARTITION[:1], "build_graph_partition"): edge_lists.partitioning,
    (MAPPER[:1], "build_graph_partition"): edge_lists.partitioning,
    (MAPPER[:1], "gather_tensor"): edge_lists.gathering,
    (PROCESSORS, "gather_tensor"): edge_lists.gathering,
}
_theirs: dict[tuple[type | ModuleType, str], object] = {}


class Installation:
    """What `install` returns: as a context manager, it brings back at its end what was before.

    It pickles as an empty context of the standard library, for layer kernels become part of Anemoi's checkpoints.
    """

    def __init__(self, settings: Settings, before: Settings | None):
        self._settings, self._before = settings, before

    def __enter__(self) -> "Installation":
        _put_in_place()  # it may have ended, at the end of another `with` or by `uninstall`
        CHOSEN.everywhere = self._settings
        return self

    def __exit__(self, *error) -> None:
        CHOSEN.everywhere = self._before
        if self._before is None:
            _put_back_unless_used()
        else:  # `uninstall` may have been called in between
            _put_in_place()

    def __reduce__(self):
        return nullcontext, ()


def install(backend: str = "auto", precision: str | None = None, fuse_edges: bool = True) -> Installation:
    """Let every graph-transformer block of Anemoi, already built or not yet, compute its attention with us.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}
        As in `anemoi_gt.AttentionConfig`. What we cannot serve runs Anemoi's own code with `auto`, which says so once with
        the reason, and raises with a backend that is named.
    precision : {None, "fp32", "bf16", "fp16"}
        As in `anemoi_gt.AttentionConfig`; None follows autocast.
    fuse_edges : bool
        Hand raw edge attributes to the attention, which then makes no tensor of edges x heads x channels. False embeds
        every edge as Anemoi does.

    Returns
    -------
    Installation
        Use it in a `with` statement to end it there; otherwise it lasts until `uninstall`. A backward pass belongs inside,
        because checkpointed activations are computed again there.

    Raises
    ------
    ValueError
        For another backend or precision.
    ImportError
        If anemoi-models is missing, or a version whose blocks have no `apply_gt` that we know.

    Notes
    -----
    The first installation and the end of the last one drop all code that torch.compile has made in this process, which
    would go on with the methods it was made from; it is compiled again when it is called.
    """
    settings = _switch_on(AttentionConfig(backend=backend, precision=precision), fuse_edges)
    installation = Installation(settings, before=CHOSEN.everywhere)
    CHOSEN.everywhere = settings
    return installation


def uninstall() -> None:
    """Let every block of Anemoi, those of `swap_layers` included, compute with Anemoi's own code again."""
    CHOSEN.clear()
    _put_back_unless_used()


def swap_layers(
    model: nn.Module, backend: str = "auto", precision: str | None = None, fuse_edges: bool = True
) -> nn.Module:
    """Let the graph-transformer blocks of one model compute their attention with us.

    Parameters
    ----------
    model : torch.nn.Module
        It is not changed: its blocks are remembered. A copy or an unpickled model has to be swapped again.
    backend, precision, fuse_edges
        As for `install`; they come before those of `install`.

    Returns
    -------
    torch.nn.Module
        `model`.

    Raises
    ------
    ValueError
        If it has no graph-transformer block, or for another backend or precision.
    ImportError
        As for `install`.
    """
    config = AttentionConfig(backend=backend, precision=precision)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {model!r}")
    blocks = [module for module in model.modules() if isinstance(module, _find(*BLOCK))]
    if not blocks:
        raise ValueError(f"model must have a graph-transformer block of Anemoi, got {type(model).__name__} without one")
    settings = _switch_on(config, fuse_edges)
    for each in blocks:
        CHOSEN.choose(each, settings)
    return model


def _switch_on(config: AttentionConfig, fuse_edges: bool) -> Settings:
    """Put our methods in place; edges can be fused where all methods of the block are."""
    if not isinstance(fuse_edges, bool):
        raise ValueError(f"fuse_edges must be True or False, got {fuse_edges!r}")
    _put_in_place()
    in_place = {name for owner, name in _theirs}
    return Settings(config, fuse_edges and in_place.issuperset(name for place, name in METHODS if place == BLOCK))


def _find(module: str, *name: str) -> type | ModuleType:
    """Return a class by module and name, or a module."""
    try:
        return attrgetter(*name)(import_module(module)) if name else import_module(module)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}); anemoi-models pins an older torch, so: "
            "pip install --no-deps anemoi-models==0.19.0 anemoi-utils anemoi-graphs"
        ) from error


def _put_in_place() -> None:
    if _theirs:
        return
    for (place, name), stand_in in METHODS.items():
        owner = _find(*place)
        theirs = vars(owner).get(name)
        if theirs is not None and _parameters(theirs) == _parameters(stand_in(theirs)):
            _theirs[owner, name] = theirs
            setattr(owner, name, stand_in(theirs))
        elif name == "apply_gt":  # the first
            raise ImportError(
                f"anemoi-models must have {BLOCK[1]}.apply_gt as 0.18.0 and 0.19.0 have it, got {version('anemoi-models')}"
            )
        else:
            log.warning(
                "this anemoi-models has another %s.%s: expect less speed, not other results", owner.__name__, name
            )
    _forget_compiled()


def _parameters(function) -> list[str]:
    return list(signature(function, follow_wrapped=False).parameters)


def _put_back_unless_used() -> None:
    if CHOSEN.is_empty and _theirs:
        for (owner, name), method in _theirs.items():
            setattr(owner, name, method)
        _theirs.clear()
        edge_lists.forget()
        edge_cache.forget()
        _forget_compiled()


def _forget_compiled() -> None:
    """Compiled code holds the methods it was compiled from, and PyTorch does not notice when a class gets others."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
