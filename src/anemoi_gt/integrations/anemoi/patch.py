"""`install`, `swap_layers` and `uninstall`: methods of Anemoi's classes are replaced, and put back.

Nothing is written on a module, so state dicts, pickles, copies and `isinstance` are Anemoi's own, with or without us.
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
from anemoi_gt.integrations.anemoi import attention, cache, residual, whole_blocks
from anemoi_gt.integrations.anemoi.attention import SETTINGS, Settings

log = logging.getLogger(__name__)

BLOCK = ("anemoi.models.layers.block", "GraphTransformerBaseBlock")
PROVIDER = ("anemoi.models.layers.graph_provider", "StaticGraphProvider")
MAPPER = ("anemoi.models.layers.mapper", "GraphTransformerBaseMapper")
PROCESSOR = ("anemoi.models.layers.processor", "GraphTransformerProcessor")
PARTITION = ("anemoi.models.distributed.khop_edges", "GraphPartition")
MODEL = ("anemoi.models.models.encoder_processor_decoder", "AnemoiModelEncProcDec")
ENSEMBLE = ("anemoi.models.models.ens_encoder_processor_decoder", "AnemoiEnsModelEncProcDec")
PROCESSOR_BLOCK = (BLOCK[0], "GraphTransformerProcessorBlock")
MAPPER_BLOCK = (BLOCK[0], "GraphTransformerMapperBlock")
PATCHES = {  # (class, or module that holds a function, name of the method or function): what makes its replacement
    (BLOCK, "apply_gt"): attention.patch_apply_gt,
    (BLOCK, "attention_block"): attention.patch_attention_block,
    (BLOCK, "get_qkve"): attention.patch_get_qkve,
    (BLOCK, "prepare_qkve_edge_sharding"): attention.patch_prepare_qkve,
    (PROCESSOR_BLOCK, "forward"): whole_blocks.patch_processor_block,
    (MAPPER_BLOCK, "forward"): whole_blocks.patch_mapper_block,
    (PROVIDER, "_get_edges_impl"): cache.patch_get_edges,
    (MAPPER, "prepare_edge_sharding_wrapper"): cache.patch_prepare_edge_sharding,
    (PROCESSOR, "forward"): cache.patch_processor_forward,
    (PARTITION, "materialise"): cache.patch_materialise,
    (PARTITION[:1], "build_graph_partition"): cache.patch_build_partition,
    (MAPPER[:1], "build_graph_partition"): cache.patch_build_partition,
    (PARTITION[:1], "shard_tensor"): cache.patch_shard_tensor,
    (MAPPER[:1], "gather_tensor"): cache.patch_gather_tensor,
    (PROCESSOR[:1], "gather_tensor"): cache.patch_gather_tensor,
    (MODEL, "_assemble_output"): residual.patch_assemble_output,
    (ENSEMBLE, "_assemble_output"): residual.patch_assemble_ensemble_output,
}
_upstream: dict[tuple[type | ModuleType, str], object] = {}  # what was replaced


class Installation:
    """Result of `install`; as a context manager, it restores the previous settings at its end.

    It pickles as an empty context of the standard library, because layer kernels become part of Anemoi's checkpoints.
    """

    def __init__(self, settings: Settings, before: Settings | None):
        self._settings, self._before = settings, before

    def __enter__(self) -> "Installation":
        _apply_patches()  # they may have been removed, at the end of another `with` or by `uninstall`
        SETTINGS.everywhere = self._settings
        return self

    def __exit__(self, *error) -> None:
        SETTINGS.everywhere = self._before
        if self._before is None:
            _remove_patches_unless_used()
        else:  # `uninstall` may have been called in between
            _apply_patches()

    def __reduce__(self):
        return nullcontext, ()


def install(
    backend: str = "auto", precision: str | None = None, fuse_edges: bool = True, blocks: bool | None = None
) -> Installation:
    """Let all graph-transformer blocks of Anemoi, existing and future, compute their attention with anemoi_gt.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}
        As in `anemoi_gt.AttentionConfig`. Blocks that we cannot serve run Anemoi's own code with `auto`, which logs
        the reason once, and raise with a named backend; both in eager and in compiled code.
    precision : {None, "fp32", "bf16", "fp16"}
        As in `anemoi_gt.AttentionConfig`; None follows autocast.
    fuse_edges : bool
        Hand raw edge attributes to the attention, which then makes no tensor of edges x heads x channels. False embeds
        every edge as Anemoi does.
    blocks : {None, True, False}
        Compute whole blocks by one operator: norms, projections, attention and feed-forward network. True does so for
        all blocks of the default options, and says once why another has its attention alone computed, or raises with a
        named backend. None, the default, is False until that is faster in every measurement.

    Returns
    -------
    Installation
        Use it in a `with` statement to end it there; otherwise it lasts until `uninstall`. A backward pass belongs
        inside, because checkpointed activations are computed again there.

    Raises
    ------
    ValueError
        For another backend or precision.
    ImportError
        If anemoi-models is missing, or its blocks do not have the `apply_gt` of a supported version.

    Notes
    -----
    The first installation and the end of the last one call `torch.compiler.reset`: compiled code would go on with the
    methods it was made from. It is compiled again when it is called.
    """
    settings = _switch_on(AttentionConfig(backend=backend, precision=precision), fuse_edges, blocks)
    installation = Installation(settings, before=SETTINGS.everywhere)
    SETTINGS.everywhere = settings
    return installation


def uninstall() -> None:
    """Let all blocks of Anemoi, those of `swap_layers` included, compute with Anemoi's own code again."""
    SETTINGS.clear()
    _remove_patches_unless_used()


def swap_layers(
    model: nn.Module,
    backend: str = "auto",
    precision: str | None = None,
    fuse_edges: bool = True,
    blocks: bool | None = None,
) -> nn.Module:
    """Let the graph-transformer blocks of one model compute their attention with anemoi_gt.

    Parameters
    ----------
    model : torch.nn.Module
        It is not changed: its blocks are registered. A copy or an unpickled model has to be swapped again.
    backend, precision, fuse_edges, blocks
        As for `install`; they take precedence over those of `install`.

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
    found = [module for module in model.modules() if isinstance(module, _find(*BLOCK))]
    if not found:
        raise ValueError(f"model must have a graph-transformer block of Anemoi, got {type(model).__name__} without one")
    settings = _switch_on(config, fuse_edges, blocks)
    for each in found:
        SETTINGS.choose(each, settings)
    return model


def graph_transformer_processor(
    *,
    backend: str = "auto",
    precision: str | None = None,
    fuse_edges: bool = True,
    blocks: bool | None = None,
    **options,
) -> nn.Module:
    """Build Anemoi's `GraphTransformerProcessor` with swapped blocks; a target for configs whose validation is off.

    Parameters
    ----------
    backend, precision, fuse_edges, blocks
        As for `install`.
    **options
        Of `anemoi.models.layers.processor.GraphTransformerProcessor`.
    """
    return swap_layers(_find(*PROCESSOR)(**options), backend, precision, fuse_edges, blocks)


def graph_transformer_forward_mapper(
    *,
    backend: str = "auto",
    precision: str | None = None,
    fuse_edges: bool = True,
    blocks: bool | None = None,
    **options,
) -> nn.Module:
    """Build Anemoi's `GraphTransformerForwardMapper`, the encoder, with a swapped block; a target, too.

    Parameters
    ----------
    backend, precision, fuse_edges, blocks
        As for `install`.
    **options
        Of `anemoi.models.layers.mapper.GraphTransformerForwardMapper`.
    """
    return swap_layers(
        _find(MAPPER[0], "GraphTransformerForwardMapper")(**options), backend, precision, fuse_edges, blocks
    )


def graph_transformer_backward_mapper(
    *,
    backend: str = "auto",
    precision: str | None = None,
    fuse_edges: bool = True,
    blocks: bool | None = None,
    **options,
) -> nn.Module:
    """Build Anemoi's `GraphTransformerBackwardMapper`, the decoder, with a swapped block; a target, too.

    Parameters
    ----------
    backend, precision, fuse_edges, blocks
        As for `install`.
    **options
        Of `anemoi.models.layers.mapper.GraphTransformerBackwardMapper`.
    """
    return swap_layers(
        _find(MAPPER[0], "GraphTransformerBackwardMapper")(**options), backend, precision, fuse_edges, blocks
    )


def _switch_on(config: AttentionConfig, fuse_edges: bool, blocks: bool | None) -> Settings:
    """Apply the patches; edges can be fused where all methods of the block were replaced."""
    if not isinstance(fuse_edges, bool):
        raise ValueError(f"fuse_edges must be True or False, got {fuse_edges!r}")
    if blocks is not None and not isinstance(blocks, bool):
        raise ValueError(f"blocks must be True, False or None, got {blocks!r}")
    _apply_patches()
    replaced = {name for _, name in _upstream}
    return Settings(
        config, fuse_edges and replaced.issuperset(name for place, name in PATCHES if place == BLOCK), blocks
    )


def _find(module: str, *name: str) -> type | ModuleType:
    """Return a class by module and name, or a module."""
    try:
        return attrgetter(*name)(import_module(module)) if name else import_module(module)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}); anemoi-models pins an older torch, so: "
            "pip install --no-deps anemoi-models==0.19.0 anemoi-utils anemoi-graphs"
        ) from error


def _apply_patches() -> None:
    if _upstream:
        return
    found = {}
    for (place, name), patch in PATCHES.items():
        try:
            owner = _find(*place)
        except ImportError:
            if place == BLOCK:
                raise
            owner = None
        upstream = vars(owner).get(name) if owner is not None else None
        if upstream is not None and _parameters(upstream) == _parameters(patch(upstream)):
            found[owner, name] = (upstream, patch(upstream))
        elif name == "apply_gt":
            raise ImportError(
                f"anemoi-models must have {BLOCK[1]}.apply_gt as 0.18.0 and 0.19.0 have it, "
                f"got {version('anemoi-models')}"
            )
        else:
            log.warning("this anemoi-models has another %s.%s: expect less speed, not other results", place[-1], name)
    attention.resolve_upstream(_find(*BLOCK))
    for (owner, name), (upstream, replacement) in found.items():
        _upstream[owner, name] = upstream
        setattr(owner, name, replacement)
    _reset_compiled()


def _parameters(function) -> list[str]:
    return list(signature(function, follow_wrapped=False).parameters)


def _remove_patches_unless_used() -> None:
    if SETTINGS.is_empty and _upstream:
        for (owner, name), method in _upstream.items():
            setattr(owner, name, method)
        _upstream.clear()
        cache.clear_cache()
        residual.clear_indices()
        _reset_compiled()


def _reset_compiled() -> None:
    """Drop compiled code, which holds the methods it was made from; PyTorch does not notice that a class got others."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
