"""Halo exchange: one all-to-all of remote rows forward and one reverse exchange backward.

    forward     y = the rows of x that this rank requested, from their owners
    backward    dx_j = dx_j of local use + sum over ranks p of dy_j on p, rank 0 first

A message contains each row once, so the scatter-add is one addition per rank, in rank order, and
bitwise reproducible. Starting and waiting are separate, forward and backward, so that computation
can overlap with communication:

    pending = exchange.start(x)    messages sent        backward:  4. reverse exchange added
    ...                            local work                      3. backward of the local work
    y = pending.wait()             messages arrived                2. reverse exchange sent
    ...                            work on y                       1. backward of the work on y
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from anemoi_gt.distributed.consensus import check_same
from anemoi_gt.distributed.partition import Ranges
from anemoi_gt.torch_compat import constants, is_fake, without_autograd

functional = torch.ops._c10d_functional  # traceable by torch.compile


class MessageConsensus:
    """Check, at the first message, that all ranks of a group send rows of the same shape and dtype.

    Messages of different sizes would end the process inside gloo, or hang. Later messages are not
    checked, because every check is a collective.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.is_reached = False

    def __getstate__(self) -> dict:
        # Process groups cannot be pickled, so copies do not check again.
        return {"group": None, "is_reached": True}

    def reach(self, sent: Tensor) -> None:
        """Raise ValueError on all ranks unless rows [S, .., F] agree. Collective the first time."""
        if self.is_reached or is_fake(sent):
            return
        if sent.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        message = {
            "batch size": tuple(sent.shape[1:-1]),
            "features": sent.shape[-1],
            "dtype (of the input, or by autocast)": sent.dtype,
            # otherwise the backward pass of one rank would wait for a rank without one
            "requires_grad": sent.requires_grad,
        }
        values = {f"{name} of the rows that ranks exchange": message[name] for name in message}
        check_same(values, self.group)
        self.is_reached = True


@dataclass(frozen=True, eq=False)
class HaloExchange:
    """Halo exchange of one rank; it can be used any number of times.

    Parameters
    ----------
    group_name : str
        Name of the process group.
    send_rows : Tensor [S], int64
        Local rows that other ranks read, grouped by rank in rank order; each rank's rows are
        distinct.
    send_counts, recv_counts : tuple of int
        Number of rows sent to and received from each rank.
    sent_position : Tensor [P, N], int64, optional
        For each of the P ranks that read rows of this rank, the position of each of the N local
        rows among the S sent rows, or -1 if it is not sent. With it, a compiler can fuse the sum of
        gradients into one kernel; if None, gradients are added rank by rank.
    consensus : MessageConsensus, optional
        Checked at the first exchange that is neither compiled nor captured. None if ranks are known
        to agree.
    """

    group_name: str
    send_rows: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    sent_position: Tensor | None = None
    consensus: MessageConsensus | None = None

    @classmethod
    def of_requests(
        cls, wanted: Tensor, ranges: Ranges, group: dist.ProcessGroup
    ) -> "HaloExchange":
        """Set up an exchange by sending the requests of each rank to the owners. Collective.

        `wanted` [R], int64, are the positions of the rows that this rank reads, sorted ascending,
        on a device that the group communicates from. `ranges` are the owners of all positions.
        """
        recv_counts = torch.bincount(ranges.owner(wanted), minlength=ranges.num_ranks)
        send_counts = torch.empty_like(recv_counts)
        dist.all_to_all_single(send_counts, recv_counts, group=group)
        sends, recvs = send_counts.tolist(), recv_counts.tolist()
        requested = wanted.new_empty(sum(sends))
        dist.all_to_all_single(requested, wanted.contiguous(), sends, recvs, group=group)
        local = ranges.of(dist.get_rank(group))
        rows = requested - local.start
        positions = _sent_position(rows, sends, local.stop - local.start)
        return cls(
            group.group_name, rows, tuple(sends), tuple(recvs), positions, MessageConsensus(group)
        )

    @classmethod
    def of_all_requests(
        cls, wanted: Sequence[Tensor], ranges: Ranges, rank: int, group_name: str
    ) -> "HaloExchange":
        """Set up an exchange without communication, because the requests of all ranks are known.

        `wanted` are, for each rank, the positions [R], int64, that it reads but does not own,
        sorted ascending.
        """
        local = ranges.of(rank)
        sent = [rows[ranges.owns(rank, rows)] - local.start for rows in wanted]
        send_counts = [len(rows) for rows in sent]
        send_rows = torch.cat(sent)
        recv_counts = torch.bincount(ranges.owner(wanted[rank]), minlength=ranges.num_ranks)
        positions = _sent_position(send_rows, send_counts, local.stop - local.start)
        return cls(
            group_name, send_rows, tuple(send_counts), tuple(recv_counts.tolist()), positions
        )

    @property
    def num_sent(self) -> int:
        """Number of rows that this rank sends."""
        return sum(self.send_counts)

    @property
    def num_received(self) -> int:
        """Number of rows that this rank receives."""
        return sum(self.recv_counts)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the requested rows [.., R, F] of all ranks' x [.., N, F]. Collective.

        The backward pass is collective too.
        """
        return self.start(x).wait_halo()

    def start(
        self, x: Tensor, prepare: Callable[..., Tensor] | None = None, cond: Tensor | None = None
    ) -> "PendingExchange":
        """Send local rows x [N, F] or [B, N, F] and return immediately. Collective, also backward.

        `prepare` computes the rows to send from rows [S, .., F], and with `cond` [.., N, K] also
        from their conditions [S, .., K]; local rows are not prepared. The first time, raise
        ValueError on all ranks unless batch size, features, dtype and requires_grad are the same.
        """
        local, sent = _SendRows.apply(x, self)
        if prepare is not None and cond is not None:
            _, sent_cond = _SendRows.apply(cond, self)
            sent = prepare(sent, sent_cond)
        elif prepare is not None:
            sent = prepare(sent)
        if not torch.compiler.is_compiling() and self.consensus is not None:
            self.consensus.reach(sent)
        arriving = self.send(sent.detach())
        return PendingExchange(local, sent, arriving, self, is_prepared=prepare is not None)

    def send(self, sent: Tensor) -> Tensor:
        """Start to send rows [S, ...]; return [R, ...], readable after `functional.wait_tensor`."""
        return self._all_to_all(sent, self.recv_counts, self.send_counts)

    def send_reverse(self, y: Tensor) -> Tensor:
        """Start to return rows [R, ...] to their owners; `scatter_add` awaits the result."""
        return self._all_to_all(y, self.send_counts, self.recv_counts)

    def _all_to_all(
        self, rows: Tensor, recv_counts: Sequence[int], send_counts: Sequence[int]
    ) -> Tensor:
        """Start to exchange rows between all ranks."""
        # constants, since torch 2.10 mixes up dynamic counts in compiled backward passes
        counts = constants(*recv_counts), constants(*send_counts)
        with without_autograd():
            return functional.all_to_all_single(rows.contiguous(), *counts, self.group_name)

    def scatter_add(self, returned: Tensor, total: Tensor) -> Tensor:
        """Wait for rows [S, ...] of `send_reverse` and add them to `total` [N, ...], rank 0 first.

        May modify `total`.
        """
        received = _wait(returned)
        if self.sent_position is not None and torch.compiler.is_compiling():
            for position in self.sent_position:
                is_sent = (position >= 0).view(-1, *[1] * (total.dim() - 1))
                # Unlike a scatter, a gather fuses with the kernel that computes `total`. Index -1
                # reads the last row, which is then masked.
                total = total + torch.where(is_sent, received[position], 0)
            return total
        send_rows = self.send_rows.split(self.send_counts)
        gradients = received.split(self.send_counts)
        for rows, gradient in zip(send_rows, gradients, strict=True):
            if rows.shape[0] > 0:
                total.index_add_(0, rows, gradient)  # rows are distinct: one addition each
        return total


class PendingExchange:
    """Async handle of a halo exchange, to be completed once, by `wait` or `wait_halo`.

    Attributes
    ----------
    own : Tensor [N, F] or [B, N, F]
        The local rows. Use them instead of `x`, so that their gradients are added once.
    """

    def __init__(
        self,
        own: Tensor,
        sent: Tensor,
        arriving: Tensor,
        exchange: HaloExchange,
        *,
        is_prepared: bool,
    ):
        self.own, self.exchange, self.is_prepared = own, exchange, is_prepared
        self._in_flight: tuple[Tensor, Tensor] | None = (sent, arriving)

    def wait(self) -> Tensor:
        """Return local rows and halo, [N + R, F] or [B, N + R, F].

        Raise ValueError like `wait_halo`, and after `prepare`, because local rows are not prepared.
        """
        check_unprepared(is_prepared=self.is_prepared)
        return torch.cat([self.own, self.wait_halo()], dim=-2)

    def wait_halo(self) -> Tensor:
        """Return the halo [R, F] or [B, R, F].

        Raise ValueError the second time, because autograd would add the gradients of both uses
        before they have arrived.
        """
        if self._in_flight is None:
            raise ValueError(
                "exchange already completed: start one for each use, or keep the rows that wait() "
                "returned; with activation checkpointing, start it inside the checkpointed function"
            )
        sent, arriving = self._in_flight
        self._in_flight = None
        return _ReceiveRows.apply(sent, arriving, self.exchange, self.is_prepared)


class _SendRows(torch.autograd.Function):
    """Select the rows [S, .., F] to send from x [.., N, F]; backward adds their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: "HaloExchange") -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return x.view_as(x), x.movedim(-2, 0).index_select(0, exchange.send_rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, returned: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        return ctx.exchange.scatter_add(returned, total.movedim(-2, 0)).movedim(0, -2), None


class _ReceiveRows(torch.autograd.Function):
    """Wait for the received rows [.., R, F]; backward starts the reverse exchange.

    If rows were prepared, backward also waits for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sent: Tensor,
        arriving: Tensor,
        exchange: "HaloExchange",
        is_prepared: bool,  # noqa: FBT001  `apply` takes no names
    ) -> Tensor:
        ctx.exchange = exchange
        ctx.is_prepared = is_prepared
        return _wait(arriving).movedim(0, -2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        returned = ctx.exchange.send_reverse(grad.movedim(-2, 0))
        checks_anomalies = not torch.compiler.is_compiling() and torch.is_anomaly_enabled()
        if ctx.is_prepared or checks_anomalies:
            # the backward of `prepare`, or anomaly detection, reads the values next
            returned = _wait(returned)
        return returned, None, None, None


def _wait(rows: Tensor) -> Tensor:
    """Return rows that a message carries, once they have arrived."""
    with without_autograd():
        return functional.wait_tensor(rows)


def check_unprepared(*, is_prepared: bool) -> None:
    """Raise ValueError for `wait` after `prepare`."""
    if is_prepared:
        raise ValueError(
            "prepared rows must be awaited by wait_halo(), got wait(): local rows are not prepared"
        )


def _sent_position(rows: Tensor, counts: list[int], size: int) -> Tensor:
    """Return the position of each local row among the sent `rows` [P, size], -1 if not sent."""
    counts = [count for count in counts if count > 0]
    num_readers = len(counts)
    counts_of_readers = torch.tensor(counts, dtype=torch.int64, device=rows.device)
    readers = torch.arange(num_readers, device=rows.device)
    reader_of_row = torch.repeat_interleave(readers, counts_of_readers)
    position = rows.new_full((num_readers, size), -1)
    position[reader_of_row, rows] = torch.arange(len(rows), device=rows.device)
    return position
