"""The settings of blocks, as `install` and `swap_layers` choose them."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from torch import nn

from anemoi_gt.integrations.anemoi import report
from anemoi_gt.kernel_config import KernelConfig

MODES = "none", "full"
FUSIONS = "auto", "none", "attention", "sublayers"
FUSES_SUBLAYERS = "auto", "sublayers"
DEPRECATED_OPTIONS = "blocks", "fuse_edges"  # of 0.4, which `fusion` replaces
P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Checkpointing:
    """The mode of each component, one of `MODES`, or None for its own switch."""

    encoder: str | None = None  # forward mappers
    processor: str | None = None
    decoder: str | None = None  # backward mappers

    @classmethod
    def of(cls, choice: str | Mapping[str, str | None] | None) -> "Checkpointing":
        """Return the modes of a choice: one for all components, or one by name of a component."""
        names = [field.name for field in fields(cls)]
        modes = dict(choice) if isinstance(choice, Mapping) else dict.fromkeys(names, choice)
        if not set(modes) <= set(names) or not all(
            mode in (None, *MODES) for mode in modes.values()
        ):
            raise ValueError(
                f"activation_checkpointing must be one of {', '.join(MODES)}, or one for some of "
                f"{', '.join(names)}, or None for the switches of Anemoi's config, got {choice!r}"
            )
        return cls(**modes)


@dataclass(frozen=True)
class Settings:
    """Settings of a block, as `install` describes them."""

    config: KernelConfig
    fusion: str  # one of FUSIONS
    sharding: bool = False
    keep_hidden: bool = True
    checkpointing: Checkpointing | None = None  # only set by `install`

    def __str__(self) -> str:
        values = {"backend": self.config.backend, "precision": self.config.precision}
        names = ("fusion", "sharding", "keep_hidden", "checkpointing")
        values |= {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return ", ".join(f"{name}={value!r}" for name, value in values.items())


def accepts_deprecated_options(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with an option `fusion` accept `DEPRECATED_OPTIONS` too, with a warning."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> R:
        deprecated = {name: options.pop(name) for name in DEPRECATED_OPTIONS if name in options}
        if deprecated:
            former = ", ".join(f"{name}={value!r}" for name, value in deprecated.items())
            fusion = _fusion_of(**deprecated)
            if options.get("fusion", "auto") not in ("auto", fusion):
                raise ValueError(
                    f"fusion must be given alone, got {options['fusion']!r} and {former}"
                )
            message = f"{former}: deprecated since 0.5.0, use fusion={fusion!r}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            report.warn_once(message)  # Python hides the warning where Hydra makes the call
            options["fusion"] = fusion
        return function(*args, **options)

    return call


def _fusion_of(*, blocks: bool | None = None, fuse_edges: bool = True) -> str:
    """Return the fusion of options of 0.4; edges that are embedded exclude fused sub-layers."""
    if blocks is not None and not isinstance(blocks, bool):
        raise ValueError(f"blocks must be True, False or None, got {blocks!r}")
    if not isinstance(fuse_edges, bool):
        raise ValueError(f"fuse_edges must be True or False, got {fuse_edges!r}")
    if not fuse_edges:
        return "none"
    return {None: "auto", True: "sublayers", False: "attention"}[blocks]


class SettingsRegistry:
    """The settings of all blocks, and of single blocks, which take precedence.

    Blocks are identified by `id` and dropped when they die: nothing is written on them, so they
    pickle, copy and compare as before. torch.compile can read a dictionary of integers, and guards
    on it. A `WeakKeyDictionary` it reads without a guard (tried with 2.13): a block that was not
    swapped then ran the code compiled for one that was.
    """

    def __init__(self) -> None:
        self.everywhere: Settings | None = None
        self._single: dict[int, Settings] = {}

    def of(self, block: nn.Module) -> Settings | None:
        """Return the settings of a block, None if it computes with upstream code."""
        # reading an id would make torch.compile compile every block separately
        if not self._single:
            return self.everywhere
        return self._single.get(id(block), self.everywhere)

    def choose(self, block: nn.Module, settings: Settings) -> None:
        """Set the settings of one block for as long as it lives."""
        if id(block) not in self._single:
            weakref.finalize(block, self._single.pop, id(block), None).atexit = False
        self._single[id(block)] = settings

    @property
    def any_sharding(self) -> bool:
        """True if some block uses anemoi_gt's halo exchange."""
        return any(
            settings is not None and settings.sharding
            for settings in (self.everywhere, *self._single.values())
        )

    @property
    def is_empty(self) -> bool:
        """True if every block computes with upstream code."""
        return self.everywhere is None and not self._single

    def clear(self) -> None:
        """Drop all settings."""
        self.everywhere = None
        self._single.clear()


SETTINGS = SettingsRegistry()
