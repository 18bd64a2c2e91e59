"""Rows that travel: from the rank that owns a row to the ranks that read it, and gradients back. The only place that sends rows.

    forward     y = rows of x that this rank asked for, from their owners
    backward    dx_j = sum over ranks p of dy_j on p, rank 0 first          the transposed exchange, summed in a fixed order

A message carries each row once, so the sum is one addition for each rank, in order of ranks, and repeats bit by bit. `append` puts
the rows behind own ones, whose gradient is where the sum begins. Sending and waiting are two steps, forward and backward, so that
work can be done in between:

    pending = rows.start(x)        messages leave                 backward:  4. they are waited for and summed
    ...                            work                                      3. backward of this work
    y = pending.wait()             messages are there                        2. gradients leave
    ...                            work on y                                 1. backward of this work
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from anemoi_gt.distributed.partition import Ranges

functional = torch.ops._c10d_functional  # what torch.compile traces


@dataclass(frozen=True, eq=False)
class RowExchange:
    """The rows that the ranks of a group send each other, again and again.

    Parameters
    ----------
    group_name : str
        Of the process group.
    send_rows : Tensor [S], int64
        Own rows that others read: those for rank 0 first, no row twice for one rank.
    send_counts, recv_counts : tuple of int
        How many go to each rank, and come from each.
    """

    group_name: str
    send_rows: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]

    @classmethod
    def of_requests(cls, wanted: Tensor, ranges: Ranges, group: dist.ProcessGroup) -> "RowExchange":
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
        RowExchange
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
        return cls(group.group_name, requested - own.start, tuple(sends), tuple(recvs))

    @classmethod
    def of_everything(
        cls, ranges: Ranges, group: dist.ProcessGroup, device: torch.device | str | None = None
    ) -> "RowExchange":
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
        return _AppendRows.apply(x, self)

    def start(self, x: Tensor) -> "Pending":
        """Send own rows and go on. Collective; takes what `__call__` takes."""
        sent = _SendRows.apply(x.movedim(-2, 0), self)
        return Pending(sent, self.send(sent.detach()), self)

    def send(self, sent: Tensor) -> Tensor:
        """Start to send rows [S, ...]; return [R, ...], not to be read before it was waited for."""
        return functional.all_to_all_single(sent, self.recv_counts, self.send_counts, self.group_name)

    def send_back(self, y: Tensor) -> Tensor:
        """Start to bring rows [R, ...] home, one for each wanted row; return [S, ...], to be waited for and summed."""
        return functional.all_to_all_single(y.contiguous(), self.send_counts, self.recv_counts, self.group_name)

    def sum_back(self, returning: Tensor, total: Tensor) -> Tensor:
        """Wait for what `send_back` started, [S, ...], and add it to the own rows of `total` [N, ...], rank 0 first."""
        received = functional.wait_tensor(returning)
        for rows, part in zip(self.send_rows.split(self.send_counts), received.split(self.send_counts), strict=True):
            if rows.shape[0]:
                total.index_add_(0, rows, part)  # no row twice: one addition each
        return total


class Pending(NamedTuple):
    """Rows on their way. Wait for them once."""

    sent: Tensor  # [S, ..., F], what gradients come back to
    arriving: Tensor  # [R, ..., F], not to be read before it was waited for
    exchange: RowExchange

    def wait(self) -> Tensor:
        """Return the rows [R, F] or [B, R, F]."""
        return _ReceiveRows.apply(self.sent, self.arriving, self.exchange).movedim(0, -2)


class _SendRows(torch.autograd.Function):
    """x [N, ...] to the rows [S, ...] that others read; backward waits for their gradients and sums them."""

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange, ctx.size = exchange, x.shape[0]
        return x.index_select(0, exchange.send_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.exchange.sum_back(grad, grad.new_zeros(ctx.size, *grad.shape[1:])), None


class _ReceiveRows(torch.autograd.Function):
    """Rows [R, ...] once they are there; backward sends their gradients home, and does not wait for them to arrive."""

    @staticmethod
    def forward(ctx, sent, arriving, exchange):
        ctx.exchange = exchange
        return functional.wait_tensor(arriving)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return ctx.exchange.send_back(grad), None, None


class _AppendRows(torch.autograd.Function):
    """x [.., N, F] to [.., N + R, F]: one buffer that own rows and what arrives are written to, and one in backward.

    Own rows are copied while messages travel, forward and backward.
    """

    @staticmethod
    def forward(ctx, x, exchange):
        ctx.exchange = exchange
        own, wanted = x.shape[-2], exchange.num_received
        arriving = exchange.send(x.movedim(-2, 0).index_select(0, exchange.send_rows))
        rows = x.new_empty(*x.shape[:-2], own + wanted, x.shape[-1])
        rows.narrow(-2, 0, own).copy_(x)
        rows.narrow(-2, own, wanted).copy_(functional.wait_tensor(arriving).movedim(0, -2))
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        exchange, wanted = ctx.exchange, ctx.exchange.num_received
        own = grad.shape[-2] - wanted
        returning = exchange.send_back(grad.narrow(-2, own, wanted).movedim(-2, 0))
        total = grad.narrow(-2, 0, own).clone(memory_format=torch.contiguous_format)
        exchange.sum_back(returning, total.movedim(-2, 0))
        return total, None
