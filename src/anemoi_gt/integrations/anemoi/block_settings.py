"""Which of Anemoi's blocks compute with us, and how: the only place that keeps it, outside of the blocks."""

import weakref
from dataclasses import dataclass

from anemoi_gt.attention_config import AttentionConfig


@dataclass(frozen=True)
class Settings:
    """How a block computes.

    Parameters
    ----------
    config : AttentionConfig
        Backend and precision of the attention.
    fuse_edges : bool
        Hand raw edge attributes and the weight of `lin_edge` to the attention, so that no edge is embedded.
    """

    config: AttentionConfig
    fuse_edges: bool


class Chosen:
    """The settings of all blocks, and of single ones, which come first.

    Blocks are known by their identity and forgotten when they die: nothing is written on them, so that they pickle, copy
    and compare as before. A dictionary of numbers can be read by torch.compile, a weak one cannot.
    """

    def __init__(self):
        self.everywhere: Settings | None = None
        self._single: dict[int, Settings] = {}

    def of(self, block) -> Settings | None:
        """Return the settings of a block, None when it computes with Anemoi's own code."""
        if not self._single:  # an identity would make torch.compile compile every block anew
            return self.everywhere
        return self._single.get(id(block), self.everywhere)

    def choose(self, block, settings: Settings) -> None:
        """Set the settings of one block for as long as it lives."""
        if id(block) not in self._single:
            weakref.finalize(block, self._single.pop, id(block), None).atexit = False
        self._single[id(block)] = settings

    @property
    def is_empty(self) -> bool:
        """Whether every block computes with Anemoi's own code."""
        return self.everywhere is None and not self._single

    def clear(self) -> None:
        """Forget everything."""
        self.everywhere = None
        self._single.clear()


CHOSEN = Chosen()
