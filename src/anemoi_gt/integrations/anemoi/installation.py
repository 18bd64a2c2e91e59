"""`install`, `swap_layers` and `uninstall`: replace methods of Anemoi's classes and restore them.

Nothing is written on a module, so state dicts, pickles, copies and `isinstance` stay Anemoi's.
"""

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from inspect import signature
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from anemoi_gt.integrations.anemoi import (
    assemble_output,
    blocks,
    decision,
    edge_lists,
    graph_networks,
    mappers,
    report,
    sharding,
    transformer_attention,
)
from anemoi_gt.integrations.anemoi.checkpointing_modes import maybe_checkpoint, torchs_checkpoint
from anemoi_gt.integrations.anemoi.settings import (
    DEPRECATED_OPTIONS,
    FUSIONS,
    SETTINGS,
    Checkpointing,
    Settings,
    accepts_deprecated_options,
)
from anemoi_gt.integrations.anemoi.upstream import (
    Replacement,
    Upstream,
    find,
    recognise_modules,
    resolve_upstream,
)
from anemoi_gt.integrations.anemoi.versions import NEWEST, OLDEST, unknown_body
from anemoi_gt.kernel_config import KernelConfig
from anemoi_gt.nn import plain

log = logging.getLogger(__name__)

BLOCK = ("anemoi.models.layers.block", "GraphTransformerBaseBlock")
PROVIDER = ("anemoi.models.layers.graph_provider", "StaticGraphProvider")
MAPPER = ("anemoi.models.layers.mapper", "GraphTransformerBaseMapper")
ENCODER = (MAPPER[0], "GraphTransformerForwardMapper")
DECODER = (MAPPER[0], "GraphTransformerBackwardMapper")
PROCESSOR = ("anemoi.models.layers.processor", "GraphTransformerProcessor")
PARTITION = ("anemoi.models.distributed.khop_edges", "GraphPartition")
INTERFACE = ("anemoi.models.interface", "AnemoiModelInterface")
BASE = ("anemoi.models.models.base", "BaseGraphModel")
MODEL = ("anemoi.models.models.encoder_processor_decoder", "AnemoiModelEncProcDec")
ENSEMBLE = ("anemoi.models.models.ens_encoder_processor_decoder", "AnemoiEnsModelEncProcDec")
TARGETS = ("anemoi.models.layers.target_features",)
NODES = ("anemoi.models.layers.graph", "NamedNodesAttributes")
NOISE = ("anemoi.models.layers.ensemble", "NoiseConditioning")
PROCESSOR_BLOCK = (BLOCK[0], "GraphTransformerProcessorBlock")
MAPPER_BLOCK = (BLOCK[0], "GraphTransformerMapperBlock")
GRAPH_NETWORK_BLOCK = (BLOCK[0], "GraphConvProcessorBlock")
GRAPH_NETWORK_MAPPER_BLOCK = (BLOCK[0], "GraphConvMapperBlock")
NETWORK = ("anemoi.models.layers.mlp", "MLP")
TRANSFORMER_BLOCK = (BLOCK[0], "TransformerProcessorBlock")
TRANSFORMER_MAPPER_BLOCK = (BLOCK[0], "TransformerMapperBlock")
SDPA = ("anemoi.models.layers.attention", "SDPAAttentionWrapper")
FLASH = (SDPA[0], "FlashAttentionWrapper")
# (class, or module that holds a function, name of the method or function): its replacement
PATCHES = {
    (PROCESSOR_BLOCK, "forward"): blocks.processor_block,
    (MAPPER_BLOCK, "forward"): blocks.mapper_block,
    (GRAPH_NETWORK_BLOCK, "forward"): graph_networks.processor_block,
    (GRAPH_NETWORK_MAPPER_BLOCK, "forward"): graph_networks.mapper_block,
    (NETWORK, "forward"): graph_networks.network,
    (TRANSFORMER_BLOCK, "forward"): blocks.transformer_processor_block,
    (TRANSFORMER_MAPPER_BLOCK, "forward"): blocks.transformer_mapper_block,
    (SDPA, "forward"): transformer_attention.sdpa_wrapper,
    (FLASH, "__init__"): transformer_attention.flash_wrapper,
    (FLASH, "forward"): transformer_attention.flash_attention,
    (ENCODER, "pre_process"): mappers.pre_process,
    (DECODER, "pre_process"): mappers.pre_process,
    (DECODER, "post_process"): mappers.post_process,
    (MAPPER, "run_processor_chunk_edge_sharding"): mappers.mapper_chunk,
    (PROVIDER, "_get_edges_impl"): edge_lists.get_edges,
    (MAPPER, "prepare_edge_sharding_wrapper"): edge_lists.prepare_edge_sharding,
    (PROCESSOR, "forward"): edge_lists.processor_forward,
    (PARTITION, "materialise"): edge_lists.materialise,
    (PARTITION[:1], "build_graph_partition"): edge_lists.build_graph_partition,
    (MAPPER[:1], "build_graph_partition"): edge_lists.build_graph_partition,
    (PARTITION[:1], "shard_tensor"): edge_lists.shard_tensor,
    (MAPPER[:1], "gather_tensor"): edge_lists.gather_tensor,
    (PROCESSOR[:1], "gather_tensor"): edge_lists.gather_tensor,
    (MAPPER[:1], "maybe_checkpoint"): maybe_checkpoint,
    (PROCESSOR[:1], "maybe_checkpoint"): maybe_checkpoint,
    (MAPPER[:1], "checkpoint"): torchs_checkpoint,
    (PROCESSOR[:1], "checkpoint"): torchs_checkpoint,
    (PROVIDER[:1], "checkpoint"): torchs_checkpoint,
    (INTERFACE, "_update_metadata"): report.update_metadata,
    (MODEL, "_assert_valid_sharding"): report.assert_valid_sharding,
    (MODEL, "_assemble_output"): assemble_output.assemble_output,
    (ENSEMBLE, "_assemble_output"): assemble_output.assemble_ensemble_output,
}
# replaced, above the replacements of `PATCHES`, all or none of them
SHARDING: dict[tuple, Replacement] = {
    (PROVIDER, "_get_edges_impl"): sharding.get_edges,
    (MAPPER, "prepare_edge_sharding_wrapper"): sharding.prepare_edge_sharding,
    (MAPPER, "mapper_forward_with_edge_sharding"): sharding.mapper_forward,
    (MODEL, "_assert_valid_sharding"): sharding.assert_valid_sharding,
    **{(path[:1], "shard_tensor"): sharding.shard_tensor for path in (MODEL, ENSEMBLE, TARGETS)},
    **{(path[:1], "get_shard_sizes"): sharding.get_shard_sizes for path in (MODEL, ENSEMBLE)},
    (NODES, "forward"): sharding.node_attributes,
    (NOISE, "forward"): sharding.noise,
}
# Functions that sharding calls; sharding is replaced only if they match a known version.
CALLED = (
    (MAPPER[:1], "build_graph_partition"),
    (PARTITION[:1], "shard_tensor"),
    (MAPPER[:1], "gather_tensor"),
)
AS_A_WHOLE = "sharding is replaced as a whole, or not at all"
OLDER = {  # the classes that had these methods in 0.9.6 to 0.11
    (MODEL, "_assert_valid_sharding"): BASE,
    (ENCODER, "pre_process"): (MAPPER[0], "ForwardMapperPreProcessMixin"),
    (DECODER, "post_process"): (MAPPER[0], "BackwardMapperPostProcessMixin"),
}
# by owner and name: the replaced methods and functions, and what replaces them
_upstream: dict[tuple[Any, str], tuple[Any, Any]] = {}


class Match(NamedTuple):
    """A method of anemoi-models and its replacement, or the reason why it is not replaced."""

    owner: type | ModuleType | None
    upstream: Any  # a function
    replacement: Any  # a function
    reason: str | None


class Installation:
    """Result of `install`; as a context manager, it restores the previous settings on exit.

    It pickles as an empty context of the standard library, because layer kernels become part of
    Anemoi's checkpoints.
    """

    def __init__(self, settings: Settings, before: Settings | None):
        self._settings = settings
        self._before = before

    def __enter__(self) -> "Installation":
        # another `with` or `uninstall` may have removed them
        _apply_patches(self._settings)
        SETTINGS.everywhere = self._settings
        return self

    def __exit__(self, *error: object) -> None:
        SETTINGS.everywhere = self._before
        if self._before is None:
            _remove_patches_unless_used()
        else:  # `uninstall` may have been called in between
            _apply_patches(self._before)

    def __reduce__(self) -> tuple[Callable, tuple]:
        return nullcontext, ()

    def __repr__(self) -> str:
        state = "in force" if SETTINGS.everywhere is self._settings else "ended"
        return f"Installation({self._settings}; {state})"


@accepts_deprecated_options
def install(
    backend: str = "auto",
    precision: str | None = None,
    *,
    fusion: str = "auto",
    sharding: bool = True,
    activation_checkpointing: str | Mapping[str, str | None] | None = None,
    keep_hidden: bool = True,
    replay: bool = True,
) -> Installation:
    """Switch all blocks of Anemoi's graph transformers and graph networks to anemoi_gt.

    That is existing and future blocks, the MLPs that embed rows of graph networks, and attention of
    transformers within a window of nodes, which then needs no flash-attn.

    Parameters
    ----------
    backend : {"auto", "triton", "torch"}
        As in `anemoi_gt.KernelConfig`. Unsupported blocks fall back to Anemoi's own code with
        `auto`, which logs the reason once, and raise with a named backend; both in eager and in
        compiled code.
    precision : {None, "fp32", "bf16", "fp16"}
        As in `anemoi_gt.KernelConfig`, of the attention; None follows autocast. With a precision,
        graph networks are left to Anemoi's own code.
    fusion : {"auto", "none", "attention", "sublayers"}
        What is fused. "none" replaces the attention and embeds every edge, as Anemoi does.
        "attention" fuses the embedding of edges into it, so that a tensor of edges x heads x
        channels is never materialised. "sublayers" fuses the attention and feed-forward sub-layers
        of blocks, linear layers of mappers, and the updates and MLPs of graph networks; what cannot
        be fused is computed by the block's own modules, which is logged once, and raises with a
        named backend. "auto" is "sublayers" where it was measured to be faster, under 16-bit
        autocast on a GPU with backend "triton", and "attention" elsewhere, and does not raise.
    sharding : bool
        Exchange halo rows only, if Anemoi shards a model over several ranks: graph transformers
        with strategy "edges", for graphs of any symmetry, batches and ensembles, and graph
        networks. False keeps Anemoi's own sharding, as does a version whose methods differ, which
        is logged.
    activation_checkpointing : {None, "none", "full"} or mapping
        Save everything ("none") or the inputs of each chunk ("full") for the backward pass, for all
        components or by "encoder", "processor" and "decoder". None follows the
        `gradient_checkpointing` of Anemoi's config. Of no effect in anemoi-models before 0.12.1,
        which is logged.
    keep_hidden : bool
        Keep the hidden layer [N, K] of fused feed-forward sub-layers for the backward pass. False
        computes it again there, with the same bits: less memory than no activation checkpointing
        and less time than checkpointing everything.
    replay : bool
        As in `anemoi_gt.KernelConfig`.

    Returns
    -------
    Installation
        In a `with` statement it ends with the block; otherwise it lasts until `uninstall`. Put the
        backward pass inside too, because checkpointed activations are recomputed there.

    Raises
    ------
    ValueError
        For another backend, precision, fusion or activation checkpointing.
    ImportError
        If anemoi-models is missing; for a named backend, or fusion "sublayers", if its blocks
        match no version that was reviewed. With backend "auto" they are left to Anemoi's code.

    Notes
    -----
    The first installation and the end of the last one call `torch.compiler.reset`, because compiled
    code keeps the methods it was traced with. It is compiled again when called.
    """
    checkpointing = None  # made first, because it refuses what is wrong
    if activation_checkpointing is not None:
        checkpointing = Checkpointing.of(activation_checkpointing)
    settings = _switch_on(
        KernelConfig(backend=backend, precision=precision, replay=replay),
        fusion=fusion,
        sharding=sharding,
        keep_hidden=keep_hidden,
    )
    settings = replace(settings, checkpointing=checkpointing)
    installation = Installation(settings, before=SETTINGS.everywhere)
    if SETTINGS.everywhere != settings:  # Anemoi's configs install once for each component
        log.info(
            "anemoi_gt computes blocks of graph transformers and graph networks of anemoi-models "
            "%s, where a model has them: %s",
            version("anemoi-models"),
            settings,
        )
        replaced = {name for _, name in _upstream}
        if settings.checkpointing is not None and "maybe_checkpoint" not in replaced:
            log.warning(
                "activation_checkpointing has no effect in anemoi-models %s: its components follow "
                "their gradient_checkpointing",
                version("anemoi-models"),
            )
    SETTINGS.everywhere = settings
    return installation


@dataclass(frozen=True)
class Installed(Settings):
    """The active settings, and how blocks have been computed since.

    Attributes
    ----------
    computed : tuple of Computed
        For each block of a model that has run: path, class, "fused", "attention only",
        "feed-forward only", "edge update only", "networks only" (Anemoi's forward with fused MLPs),
        "upstream", "several" (compiled blocks of its class differ) or "not yet", and the reason if
        it was not fused as a whole. Embeddings and output layers of mappers, MLPs of graph
        networks, and the attention of transformers are listed only if a reason keeps them with
        upstream.
    """

    computed: tuple[report.Computed, ...] = ()

    def __repr__(self) -> str:
        return f"Installed({self}; {report.summary(self.computed)})"


def installed() -> Installed | None:
    """Return the active settings of `install` and how each block is computed, or None.

    Models of `swap_layers` have their own settings; their blocks are listed too.
    """
    if SETTINGS.everywhere is None:
        return None
    return Installed(**vars(SETTINGS.everywhere), computed=report.computed())


def replacements() -> dict[str, str | None]:
    """Return None for each method that `install` would replace, by name, else the reason.

    Raise ImportError without anemoi-models. Nothing is replaced.
    """
    matches = _matches()
    matches = _matches_of_sharding(matches) | matches
    return {f"{owner[-1]}.{name}": match.reason for (owner, name), match in matches.items()}


def examine(model: nn.Module) -> tuple[report.Computed, ...]:
    """Predict how each block of a model is computed under `install()` here.

    On the first GPU if there is one, under autocast to bfloat16. Conditional norms are recognised
    by their classes.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    x = torch.empty(0, 1, device=device)  # decisions do not depend on the number of features
    edge_index = torch.empty(2, 0, dtype=torch.int64, device=device)
    with install(), torch.autocast(device.type, torch.bfloat16):
        for block in report.blocks_of(model):
            if isinstance(block, Upstream.graph_networks):
                graph_networks.decide(block, x, edge_index, graph_networks.Call(None, None))
            elif isinstance(block, Upstream.transformers):
                decision.decide_transformer(block, x, None)
            else:
                decision.decide(block, x, decision.Call.of(x, x, edge_index), gathers=False)
        return report.computed_in(model)


def uninstall() -> None:
    """Restore Anemoi's own code in all blocks, including blocks of `swap_layers`."""
    SETTINGS.clear()
    _remove_patches_unless_used()


@accepts_deprecated_options
def swap_layers(
    model: nn.Module,
    backend: str = "auto",
    precision: str | None = None,
    *,
    fusion: str = "auto",
    sharding: bool = True,
    keep_hidden: bool = True,
    replay: bool = True,
) -> nn.Module:
    """Switch the blocks of graph transformers and graph networks of one model to anemoi_gt.

    Parameters
    ----------
    model : torch.nn.Module
        Returned unchanged: its blocks are only registered. A copy, or an unpickled or rebuilt
        model, must be swapped again.
    backend, precision, fusion, sharding, keep_hidden, replay
        As for `install`, over which they take precedence.

    Raises
    ------
    ValueError
        If it has no such block, or for another backend, precision or fusion.
    ImportError
        As for `install`.
    """
    config = KernelConfig(backend=backend, precision=precision, replay=replay)
    count_blocks(model)
    settings = _switch_on(config, fusion=fusion, sharding=sharding, keep_hidden=keep_hidden)
    for block in report.blocks_of(model):
        SETTINGS.choose(block, settings)
    kinds = (Upstream.network, find(*SDPA), find(*FLASH))
    for module in model.modules():
        if isinstance(module, kinds):
            SETTINGS.choose(module, settings)
    return model


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of graph transformers, graph networks and transformers in a model."""
    paths = (
        BLOCK,
        GRAPH_NETWORK_BLOCK,
        GRAPH_NETWORK_MAPPER_BLOCK,
        TRANSFORMER_BLOCK,
        TRANSFORMER_MAPPER_BLOCK,
    )
    kinds = tuple(find(*path) for path in paths)
    return [module for module in model.modules() if isinstance(module, kinds)]


def count_blocks(model: nn.Module) -> int:
    """Return the number of `blocks_in` a model. Raise ValueError if there is none."""
    number = len(blocks_in(model))
    if number == 0:
        raise ValueError(
            "model must have a block of Anemoi's graph transformers, graph networks or "
            f"transformers, got {type(model).__name__} without one"
        )
    return number


def graph_transformer_processor(**options: Any) -> nn.Module:
    """Build Anemoi's `GraphTransformerProcessor` with swapped blocks, for unvalidated configs.

    Keyword arguments are the options of `swap_layers` and of Anemoi's class.
    """
    return _build_swapped(find(*PROCESSOR), options)


def graph_transformer_forward_mapper(**options: Any) -> nn.Module:
    """Build Anemoi's `GraphTransformerForwardMapper`, the encoder, with swapped blocks."""
    return _build_swapped(find(*ENCODER), options)


def graph_transformer_backward_mapper(**options: Any) -> nn.Module:
    """Build Anemoi's `GraphTransformerBackwardMapper`, the decoder, with swapped blocks."""
    return _build_swapped(find(*DECODER), options)


def _build_swapped(kind: Any, options: dict[str, Any]) -> nn.Module:
    """Build a component of Anemoi and swap its blocks; both take their share of the options."""
    # Anemoi's classes silently ignore unknown keyword arguments, so ours must not reach them.
    if "activation_checkpointing" in options:
        raise ValueError(
            "activation_checkpointing must be passed to install, which applies it to all "
            f"components, got {options['activation_checkpointing']!r} for one {kind.__name__}: set "
            "its gradient_checkpointing to True or False instead"
        )
    _, *names = signature(swap_layers).parameters  # the first one is the model
    for_swapping = {}
    for name in (*names, *DEPRECATED_OPTIONS):
        if name in options:
            for_swapping[name] = options.pop(name)
    return swap_layers(kind(**options), **for_swapping)


def _switch_on(
    config: KernelConfig,
    *,
    fusion: str,
    sharding: bool,
    keep_hidden: bool,
) -> Settings:
    """Apply the patches; return the settings. `sharding` needs all of its methods replaced."""
    if fusion not in FUSIONS:
        raise ValueError(f"fusion must be one of {', '.join(FUSIONS)}, got {fusion!r}")
    for name, value in (("sharding", sharding), ("keep_hidden", keep_hidden)):
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")
    settings = Settings(config, fusion, sharding, keep_hidden)
    _apply_patches(settings)
    replaced = {name for _, name in _upstream}
    replaces_sharding = replaced.issuperset(name for _, name in SHARDING)
    return replace(settings, sharding=sharding and replaces_sharding)


def _apply_patches(settings: Settings) -> None:
    """Replace methods; for a named backend, or fusion, blocks must fit."""
    if _upstream:
        return
    is_named = settings.config.backend != "auto" or settings.fusion == "sublayers"
    matches = _matches()
    reasons = [matches[path, "forward"].reason for path in (PROCESSOR_BLOCK, MAPPER_BLOCK)]
    if is_named and None not in reasons:
        raise ImportError(
            "a named backend, or fusion='sublayers', needs graph-transformer blocks as in a "
            f"reviewed version of anemoi-models, {OLDEST} to {NEWEST}, got "
            f"{version('anemoi-models')}: {PROCESSOR_BLOCK[1]}.forward {reasons[0]}"
        )
    missing = [
        f"{path[-1]}.{name} ({match.reason})"
        for (path, name), match in matches.items()
        if match.reason is not None and PATCHES[path, name].stands_in
    ]
    if missing:
        log.warning(
            "not replaced in anemoi-models %s: %s; results are the same, slower",
            version("anemoi-models"),
            "; ".join(missing),
        )
    replacements = {
        (match.owner, target[1]): match for target, match in matches.items() if match.reason is None
    }
    shards = _matches_of_sharding(matches)
    called = {target: matches[target] for target in CALLED}
    changed = [
        f"{path[-1]}.{name}"
        for (path, name), match in (called | shards).items()
        if match.reason not in (None, AS_A_WHOLE)
    ]
    if changed:
        log.warning("%s changed in this version; keeping Anemoi's sharding", ", ".join(changed))
    for (path, name), match in shards.items():
        if match.reason is None:
            key = match.owner, name
            below = replacements[key].replacement if key in replacements else match.upstream
            replacements[key] = match._replace(replacement=SHARDING[path, name].of(below))
    resolve_upstream()
    for (path, name), match in matches.items():
        if name == "forward" and match.reason is not None and path[0] == BLOCK[0]:
            Upstream.not_replaced[find(*path)] = match.reason
    for (owner, name), match in replacements.items():
        _upstream[owner, name] = (match.upstream, match.replacement)
        setattr(owner, name, match.replacement)
    recognise_modules()  # with the replacements as their methods
    _reset_compiled()


def _matches() -> dict[tuple, Match]:
    """Return the replacement in this version, or the reason for none, by target."""
    matches = {target: _match(target, PATCHES[target]) for target in _targets()}
    provider = (PROVIDER, "_get_edges_impl")
    partition = (PARTITION, "materialise")
    if matches[provider].reason is None and matches[partition].reason is not None:
        reason = "its lists are sorted afterwards, where GraphPartition.materialise is not replaced"
        matches[provider] = Match(None, None, None, reason)
    return matches


def _targets() -> list[tuple]:
    """Return the methods to replace in this version.

    Before 0.12.1, components call PyTorch's `checkpoint`. Since 0.16, chunks of mappers are cut by
    GraphPartition.
    """
    is_old = not hasattr(find(*MAPPER[:1]), "maybe_checkpoint")
    name = "maybe_checkpoint" if is_old else "checkpoint"
    absent: list[tuple] = [(MAPPER[:1], name), (PROCESSOR[:1], name)]
    if hasattr(find(*PARTITION[:1]), PARTITION[1]):
        absent.append((MAPPER, "run_processor_chunk_edge_sharding"))
    return [target for target in PATCHES if target not in absent]


def _match(target: tuple, patch: Replacement) -> Match:
    """Find the method of a target, if its body is known."""
    reason: str | None = f"this anemoi-models has no {'.'.join(target[0])}"
    name = target[1]
    for path in filter(None, (target[0], OLDER.get(target))):
        try:
            owner = find(*path)
        except ImportError:
            continue
        # of a replacement of now, or of one that a user's patch brought back after `uninstall`
        upstream = plain.original_of(vars(owner).get(name))
        if upstream is None:
            reason = f"it has no {name}"
        else:
            reason = unknown_body(upstream) if patch.stands_in else None
        if reason is None and path in (PROCESSOR_BLOCK, MAPPER_BLOCK):
            reason = plain.recognise(owner, unknown_body)
        if reason is None:
            return Match(owner, upstream, patch.of(upstream), None)
    return Match(None, None, None, reason)


def _matches_of_sharding(matches: dict[tuple, Match]) -> dict[tuple, Match]:
    """Return the replacements of `SHARDING`, all or none; `matches` has those that they call."""
    shards = {target: _match(target, patch) for target, patch in SHARDING.items()}
    needed = [*shards.values(), *(matches[target] for target in CALLED)]
    if any(match.reason is not None for match in needed):
        shards = {
            target: match._replace(reason=match.reason or AS_A_WHOLE)
            for target, match in shards.items()
        }
    return shards


def _remove_patches_unless_used() -> None:
    if SETTINGS.is_empty and _upstream:
        for (owner, name), (method, replacement) in _upstream.items():
            if vars(owner).get(name) is replacement:
                setattr(owner, name, method)
            else:
                log.warning(
                    "%s.%s was patched after install() and is left as it is; what it may call of "
                    "anemoi_gt computes as Anemoi does",
                    owner.__name__,
                    name,
                )
        _upstream.clear()
        plain.forget("anemoi")
        Upstream.not_replaced.clear()
        edge_lists.clear_cache()
        report.clear()
        _reset_compiled()


def _reset_compiled() -> None:
    """Drop compiled code, which holds the old methods: torch.compile does not detect the change."""
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
