"""Rows that travel: from the rank that owns a row to the ranks that read it, and gradients back. The only place that sends rows.

    forward     y = rows of x that this rank asked for, from their owners
    backward    dx_j = dx_j of this rank's own use + sum over ranks p of dy_j on p, rank 0 first

A message carries each row once, so the sum is one addition for each rank, in order of ranks, and repeats bit by bit. Sending and
waiting are two steps, forward and backward, so that work can be done in between:

    pending = rows.start(x)        messages leave                 backward:  4. they are waited for and summed
    ...                            work                                      3. backward of this work
    y = pending.wait()             messages are there                        2. gradients leave
    ...                            work on y                                 1. backward of this work
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from anemoi_gt.distributed.partition import Ranges

functional = torch.ops._c10d_functional  # what torch.compile traces


@dataclass(frozen=True, eq=False)
class HaloExchange:
    """The rows that the ranks of a group send each other, again and again.

    Parameters
    ----------
    group_name : str
        Of the process group.
    send_rows : Tensor [S], int64
        Own rows that others read: those for rank 0 first, no row twice for one rank.
    send_counts, recv_counts : tuple of int
        How many go to each rank, and come from each.
    returned : Tensor [P, N], int64, optional
        For each of the P ranks that read any of the N own rows, which of the S rows that come home is each own row's; -1 where none is.
        What a compiler fuses the sum of gradients from; None leaves it to additions one after the other.
    """

    group_name: str
    send_rows: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    returned: Tensor | None = None

    @classmethod
    def of_requests(cls, wanted: Tensor, ranges: Ranges, group: dist.ProcessGroup) -> "HaloExchange":
        """Find out who sends what, by telling each owner which of its rows are wanted. Collective.

        Parameters
        ----------
        wanted : Tensor [R], int64
            Numbers of the rows that this rank reads, rising, on a device that the group communicates from.
        ranges : Ranges
            Who owns which.
        group : ProcessGroup

        Returns
        -------
        HaloExchange
            It brings the wanted rows in their order.
        """
        ends = torch.tensor(ranges.bounds[1:], device=wanted.device)
        recv_counts = torch.searchsorted(wanted, ends).diff(prepend=ends.new_zeros(1))
        send_counts = torch.empty_like(recv_counts)
        dist.all_to_all_single(send_counts, recv_counts, group=group)
        sends, recvs = send_counts.tolist(), recv_counts.tolist()
        requested = wanted.new_empty(sum(sends))
        dist.all_to_all_single(requested, wanted.contiguous(), sends, recvs, group=group)
        own = ranges.of(dist.get_rank(group))
        rows = requested - own.start
        return cls(group.group_name, rows, tuple(sends), tuple(recvs), _places(rows, sends, own.stop - own.start))

    @classmethod
    def of_everything(
        cls, ranges: Ranges, group: dist.ProcessGroup, device: torch.device | str | None = None
    ) -> "HaloExchange":
        """Bring all rows of all ranks to every rank, in order of ranks; nothing has to be asked."""
        rank = dist.get_rank(group)
        own = torch.arange(ranges.counts[rank], device=device)
        return cls(group.group_name, own.repeat(ranges.parts), (len(own),) * ranges.parts, ranges.counts)

    @property
    def num_sent(self) -> int:
        """Rows that leave this rank."""
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        """Rows that come to this rank."""
        return sum(self.recv_counts)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the wanted rows. Collective, and so is its backward.

        Parameters
        ----------
        x : Tensor [N, F] or [B, N, F]
            This rank's own rows, along the last dimension but one.

        Returns
        -------
        Tensor [R, F] or [B, R, F]
        """
        return self.start(x).wait()

    def append(self, x: Tensor) -> Tensor:
        """Return own rows and the wanted ones behind them. Collective, and so is its backward.

        Parameters
        ----------
        x : Tensor [N, F] or [B, N, F]
            This rank's own rows.

        Returns
        -------
        Tensor [N + R, F] or [B, N + R, F]
        """
        return self.start(x).joined()

    def start(self, x: Tensor) -> "PendingExchange":
        """Send own rows and go on. Collective; takes what `__call__` takes."""
        own, sent = _SendRows.apply(x, self)
        return PendingExchange(own, sent, self.send(sent.detach()), self)

    def send(self, sent: Tensor) -> Tensor:
        """Start to send rows [S, ...]; return [R, ...], not to be read before it was waited for."""
        return functional.all_to_all_single(sent, self.recv_counts, self.send_counts, self.group_name)

    def send_back(self, y: Tensor) -> Tensor:
        """Start to bring rows [R, ...] home, one for each wanted row; return [S, ...], to be waited for and summed."""
        return functional.all_to_all_single(y.contiguous(), self.send_counts, self.recv_counts, self.group_name)

    def sum_back(self, returning: Tensor, total: Tensor) -> Tensor:
        """Wait for what `send_back` started, [S, ...], and return its sum with `total` [N, ...], rank 0 first; `total` may be written to."""
        received = functional.wait_tensor(returning)
        if self.returned is not None and torch.compiler.is_compiling():
            for places in self.returned:
                is_read = (places >= 0).view(-1, *[1] * (total.dim() - 1))
                # No scattering: this is a part of the kernel that makes total. Where a row was not sent, -1 takes the last.
                total = total + torch.where(is_read, received[places], 0)
            return total
        for rows, part in zip(self.send_rows.split(self.send_counts), received.split(self.send_counts), strict=True):
            if rows.shape[0]:
                total.index_add_(0, rows, part)  # no row twice: one addition each
        return total


class PendingExchange:
    """Rows on their way, to be waited for once: by `wait` or by `joined`.

    Attributes
    ----------
    own : Tensor [N, F] or [B, N, F]
        The rows that were sent from, to be read in their place: then gradients meet in one sum.
    exchange : HaloExchange
        What carries them.
    """

    def __init__(self, own: Tensor, sent: Tensor, arriving: Tensor, exchange: HaloExchange):
        self.own, self.exchange = own, exchange
        self._travelling: tuple[Tensor, Tensor] | None = (sent, arriving)  # until they are waited for

    def wait(self) -> Tensor:
        """Return the rows [R, F] or [B, R, F].

        Raises
        ------
        ValueError
            The second time: gradients of both would be added before they are there.
        """
        if self._travelling is None:
            raise ValueError(
                "rows must be waited for once, got a second wait: start an exchange for each use, or keep what came; "
                "what is computed again for backward must start it too"
            )
        (sent, arriving), self._travelling = self._travelling, None
        return _ReceiveRows.apply(sent, arriving, self.exchange).movedim(0, -2)

    def joined(self) -> Tensor:
        """Return own rows and behind them those that arrive, [N + R, F] or [B, N + R, F]; raises as `wait` does."""
        return torch.cat([self.own, self.wait()], dim=-2)


class _SendRows(torch.autograd.Function):
    """x [.., N, F] to itself and to the rows [S, .., F] that others read; backward waits for their gradients and sums all."""

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        return x.view_as(x), x.movedim(-2, 0).index_select(0, exchange.send_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, own, returning):
        total = own.clone(memory_format=torch.contiguous_format)
        return ctx.exchange.sum_back(returning, total.movedim(-2, 0)).movedim(0, -2), None


class _ReceiveRows(torch.autograd.Function):
    """Rows [R, ...] once they are there; backward sends their gradients home, and does not wait for them to arrive."""

    @staticmethod
    def forward(ctx, sent, arriving, exchange):
        ctx.exchange = exchange
        return functional.wait_tensor(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        returning = ctx.exchange.send_back(grad)
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            returning = functional.wait_tensor(returning)  # anomaly detection reads it at once
        return returning, None, None


def _places(rows: Tensor, counts: list[int], size: int) -> Tensor:
    """For each rank that reads any of `size` rows, where each of them lies among those that are sent, -1 where it does not."""
    counts = torch.tensor([count for count in counts if count], dtype=torch.int64, device=rows.device)
    places = rows.new_full((len(counts), size), -1)
    readers = torch.repeat_interleave(torch.arange(len(counts), device=rows.device), counts)
    places[readers, rows] = torch.arange(len(rows), device=rows.device)
    return places
