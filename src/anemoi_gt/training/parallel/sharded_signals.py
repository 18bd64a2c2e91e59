"""The end of a run on several ranks by signal: all stop after the same step, whoever was told."""

import signal

import torch
import torch.distributed as dist

from anemoi_gt.training.signals import StopRequest


class AgreedStop(StopRequest):
    """A stop request that all ranks heed after the same step, when one of them has received it.

    After every step the ranks start a vote and count that of the step before, so nobody waits for it: a run ends one step after the
    signal.

    Parameters
    ----------
    group : ProcessGroup
        All ranks, communicating from the CPU (gloo).
    """

    def __init__(self, group: dist.ProcessGroup):
        super().__init__()
        self._group, self._vote = group, None
        self._loudest = torch.zeros((), dtype=torch.int64, device="cpu")

    def __exit__(self, kind, *rest):
        if kind is None:  # a rank that failed must not wait for others, who wait for it
            self._count()
        super().__exit__(kind, *rest)

    def due(self) -> signal.Signals | None:
        """Return the signal on which all ranks agree, or None. Collective."""
        agreed = self._count()
        if agreed:
            return signal.Signals(agreed)
        self._loudest.fill_(self.received or 0)
        self._vote = dist.all_reduce(self._loudest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        return None

    def _count(self) -> int:
        """The signal that the last vote found, 0 for none."""
        if self._vote is None:
            return 0
        self._vote.wait()
        self._vote = None
        return int(self._loudest)
