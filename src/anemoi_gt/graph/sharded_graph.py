"""The protocol of one rank's shard of a graph, and of the exchange of its halo."""

from collections.abc import Callable
from typing import Protocol, TypeGuard

from torch import Tensor

from anemoi_gt.graph.structure import GraphStructure


class ExchangeHandle(Protocol):
    """Async handle of remote source rows: call `wait`, or after `prepare` `wait_halo`, once."""

    own: Tensor  # local sources [.., N_local, F], to be read instead of the rows passed

    def wait(self) -> Tensor:
        """Return local sources concatenated with the halo [.., N_local + halo, F]."""

    def wait_halo(self) -> Tensor | None:
        """Return the halo [.., halo, F], None on a single rank."""


class ShardedGraph(Protocol):
    """One rank's shard of a graph, accepted as a `GraphStructure`; see `anemoi_gt.distributed`.

    If it has `chunks` of its structure, from `GraphShard.split`, layers exchange its halo before
    the first chunk.

    Attributes
    ----------
    structure : GraphStructure
        Edges from local and halo sources to local destinations.
    """

    structure: GraphStructure

    def start_exchange(
        self,
        x_src: Tensor,
        prepare: Callable[..., Tensor] | None = None,
        cond: Tensor | None = None,
    ) -> ExchangeHandle:
        """Send local source rows [.., N_local, F] to their readers; do not wait. Collective.

        `prepare` maps the rows to be sent, and with `cond` [.., N_local, K] their conditions, each
        row by itself; the local rows stay as they are.
        """


def is_sharded(graph: object) -> TypeGuard[ShardedGraph]:
    """Return whether a graph is a shard; `isinstance` of a protocol looks up all its members."""
    return hasattr(graph, "start_exchange")
