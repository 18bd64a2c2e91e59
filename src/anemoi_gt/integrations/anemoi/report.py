"""Outcomes for blocks: for `installed()`, `anemoi-gt info` and one log line per model.

Blocks of compiled code are not seen one by one, because blocks of a class share it: they are
reported by all that was traced of their class.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from anemoi_gt.integrations.anemoi.upstream import Upstream, wraps_any
from anemoi_gt.refusal import Refusal, RefusalKind
from anemoi_gt.torch_compat import constant_when_traced

log = logging.getLogger(__name__)
_log_once = cache(log.warning)
Recorded = tuple[str, str | None]  # outcome of a decision, and its reason

# those that have computed, in eager code
_BLOCKS: WeakKeyDictionary[nn.Module, Recorded] = WeakKeyDictionary()
# linear layers of mappers, networks, and attention of transformers, that upstream computes, and why
_LAYERS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
_FUSED_NETWORKS: WeakSet[nn.Module] = WeakSet()
_TRACED: dict[type, list[Recorded]] = {}  # each that was traced
# Anemoi models, in order of first use, and the lines that were logged of each
_MODELS: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
_CLEAN: WeakSet[nn.Module] = WeakSet()  # models without a change since their last line


class Computed(NamedTuple):
    """Outcome for a block, and why it is not fused."""

    path: str  # of the module in its model, empty for a block outside of a known model
    kind: str  # name of its class
    outcome: str  # of a decision, "networks only", "several" or "not yet"
    reason: str | None


@constant_when_traced
def warn_once(message: str) -> None:
    """Log a warning at the first call with this message; in compiled code, when it is traced."""
    _log_once(message)


def record(block: nn.Module, outcome: str, refusals: tuple[Refusal, ...]) -> None:
    """Keep how a block is computed; in compiled code, how blocks of its class are. Log why."""
    for refusal in refusals:
        if refusal.kind is not RefusalKind.NOT_FASTER:
            warn_once(f"an Anemoi block ({outcome}) is not fused as a whole: {refusal.text}")
    reason = "; ".join([refusal.text for refusal in refusals]) or None
    if torch.compiler.is_compiling():
        _record_traced(type(block), outcome, reason)
    elif _BLOCKS.get(block) != (outcome, reason):
        _BLOCKS[block] = (outcome, reason)
        _CLEAN.clear()


def record_layer(layer: nn.Module, reason: str | None) -> None:
    """Keep why upstream computes a linear layer or an attention; None if not, or if it may."""
    if _LAYERS.get(layer) != reason:
        if reason is None:
            del _LAYERS[layer]
        else:
            _LAYERS[layer] = reason
        _CLEAN.clear()


def record_network(network: nn.Module, modules: object) -> None:
    """Keep and log whether a network or linear layer is fused, and why not, if it could be.

    `modules` are as read for its operator, or the refusal.
    """
    reason = None
    is_fused = not isinstance(modules, Refusal)
    if isinstance(modules, Refusal) and modules.kind is not RefusalKind.NOT_FASTER:
        reason = modules.text
        warn_once(f"a layer of Anemoi ({type(network).__name__}) is not fused: {reason}")
    if torch.compiler.is_compiling():
        return
    if is_fused != (network in _FUSED_NETWORKS):
        if is_fused:
            _FUSED_NETWORKS.add(network)
        else:
            _FUSED_NETWORKS.discard(network)
        _CLEAN.clear()
    record_layer(network, reason)


@constant_when_traced
def _record_traced(kind: type, outcome: str, reason: str | None) -> None:
    """Keep how a block of this class is computed in compiled code, which several may share."""
    traced = _TRACED.setdefault(kind, [])
    if (outcome, reason) not in traced:
        traced.append((outcome, reason))
        _CLEAN.clear()


def clear() -> None:
    """Clear all records, so that models are logged again."""
    _BLOCKS.clear()
    _LAYERS.clear()
    _FUSED_NETWORKS.clear()
    _TRACED.clear()
    _MODELS.clear()
    _CLEAN.clear()


def add_model(model: nn.Module) -> None:
    """Register a model, so that its blocks have module paths."""
    _MODELS.setdefault(model, set())


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model that we compute, or a sub-layer of."""
    return [module for module in model.modules() if isinstance(module, _kinds())]


def computed() -> tuple[Computed, ...]:
    """Return a record of each block of all known models, and of other blocks that have run.

    Linear layers of mappers, and attention of transformers, follow if upstream computes them.
    """
    named = [module for model in list(_MODELS) for module in model.named_modules()]
    return _records([*named, *[("", module) for module in (*_BLOCKS, *_LAYERS)]])


def computed_in(model: nn.Module) -> tuple[Computed, ...]:
    """Return the same of one model."""
    return _records(model.named_modules())


def _records(modules: Iterable[tuple[str, nn.Module]]) -> tuple[Computed, ...]:
    blocks: dict[nn.Module, Computed] = {}
    layers: dict[nn.Module, Computed] = {}
    for path, module in modules:
        if isinstance(module, _kinds()):
            blocks.setdefault(module, _of_block(path, module))
        elif module in _LAYERS:
            record = Computed(path, type(module).__name__, "upstream", _LAYERS[module])
            layers.setdefault(module, record)
    return (*blocks.values(), *layers.values())


def _kinds() -> tuple[type[nn.Module], ...]:
    return (Upstream.block, *Upstream.graph_networks, *Upstream.transformers)


def _of_block(path: str, block: nn.Module) -> Computed:
    kind = type(block).__name__
    recorded = _TRACED.get(type(block), [])
    # a block with compiled code of its own runs no other; else it is what ran last in eager code
    if block in _BLOCKS and (block._compiled_call_impl is None or not recorded):
        recorded = [_BLOCKS[block]]
    if not recorded:
        reason = Upstream.why_not_replaced(type(block))
        if reason is not None:
            return Computed(path, kind, "upstream", reason)
        return Computed(path, kind, "not yet", None)
    if len(recorded) > 1:
        texts = []
        for outcome, why in recorded:
            texts.append(f"{outcome} ({why})" if why else outcome)
        reason = f"compiled blocks of its class are {', or '.join(texts)}"
        return Computed(path, kind, "several", reason)
    ((outcome, reason),) = recorded
    if outcome == "upstream" and any(module in _FUSED_NETWORKS for module in block.modules()):
        outcome = "networks only"
    return Computed(path, kind, outcome, reason)


def summary(blocks: tuple[Computed, ...]) -> str:
    """Summarise the outcomes of the blocks of each class in one line, with reasons if not fused."""
    of_kinds = []
    for kind in dict.fromkeys(block.kind for block in blocks):
        counts = Counter((block.outcome, block.reason) for block in blocks if block.kind == kind)
        texts = []
        for (outcome, reason), count in counts.items():
            text = f"{count} {outcome}"
            if reason is not None:
                same = [block for block in blocks if block[1:] == (kind, outcome, reason)]
                paths = ", ".join(_shortened([block.path for block in same if block.path]))
                text += f" ({paths}: {reason})" if paths else f" ({reason})"
            texts.append(text)
        of_kinds.append(f"{kind}: {', '.join(texts)}")
    return "; ".join(of_kinds) or "no block has computed yet"


def _shortened(paths: list[str]) -> list[str]:
    """Return the paths of layers in a row as one: processor.proc.0 to processor.proc.15."""
    if len(paths) <= 3:
        return paths
    stems = dict.fromkeys(path.rpartition(".")[0] for path in paths)
    groups = [[path for path in paths if path.rpartition(".")[0] == stem] for stem in stems]
    return [group[0] if len(group) == 1 else f"{group[0]} to {group[-1]}" for group in groups]


def after_step(model: nn.Module) -> None:
    """Log a line about a model after its first forward pass, and again when an outcome changes."""
    if model in _CLEAN:
        return
    add_model(model)
    _CLEAN.add(model)
    if not any(block in _BLOCKS or type(block) in _TRACED for block in blocks_of(model)):
        return
    line = summary(computed_in(model))
    if line not in _MODELS[model]:
        _MODELS[model].add(line)
        log.info("anemoi_gt computes blocks of %s: %s", type(model).__name__, line)


@wraps_any
def update_metadata(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Log it if a model that was just built has no block that anemoi_gt computes."""
    result = upstream(self, *args, **kwargs)
    add_model(self.model)  # its own forward pass defines the paths of its blocks
    if not blocks_of(self.model):
        message = "%s has no block that anemoi_gt computes: it is not used"
        log.warning(message, type(self.model).__name__)
    return result


@wraps_any
def assert_valid_sharding(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Register a model at the start of its forward pass."""
    if not torch.compiler.is_compiling():
        add_model(self)
    return upstream(self, *args, **kwargs)
