"""Checkpoints of a divided model, by torch.distributed.checkpoint: written on some ranks, read on any other number, or on one.

Rows that belong to nodes and edges (trained features, and what the optimiser keeps for them) are written as the table of the whole graph,
in the caller's numbering, each rank a piece of it. So the file does not know how the graph was divided.
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from anemoi_gt.distributed.halo import HaloExchange
from anemoi_gt.distributed.partition import Ranges


class ShardedTable:
    """Rows of a table of which each rank of a model holds some, and all ranks together each row once. Made collectively.

    Parameters
    ----------
    numbers : Tensor [n], int64
        The rows of the table that this rank holds, in its order: `GraphShard.edges`, or `Partition.nodes(rank)`.
    size : int
        Rows of the table.
    mesh : DeviceMesh
        With axes (data, model).
    """

    def __init__(self, numbers: Tensor, size: int, mesh: DeviceMesh):
        self.numbers, self.size, self.mesh = numbers, size, mesh
        rising, self.order = torch.sort(numbers)
        parts = mesh["model"].size()
        piece = -(-size // parts)  # as DTensor cuts
        self.pieces = Ranges(tuple(min(rank * piece, size) for rank in range(parts + 1)))
        self.exchange = HaloExchange.of_requests(rising, self.pieces, mesh.get_group("model"))

    def whole(self, rows: Tensor) -> DTensor:
        """The table [size, F] that the ranks' rows [n, F] make, in pieces. Collective."""
        own = self.pieces.counts[self.mesh.get_local_rank("model")]
        rows = rows.detach()[self.order]
        piece = self.exchange.sum_back(self.exchange.send_back(rows), rows.new_zeros(own, *rows.shape[1:]))
        shape = torch.Size((self.size, *rows.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            piece, self.mesh, [Replicate(), Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def own(self, table: DTensor) -> Tensor:
        """Rows [n, F] of this rank, of a table in pieces. Collective."""
        rows = self.exchange(table.to_local())
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def save_checkpoint(
    folder: Path, state: dict[str, Any], tables: Mapping[str, ShardedTable], group: dist.ProcessGroup
) -> None:
    """Write a checkpoint so that `folder` holds either the former one or this one, never a part. Collective.

    Parameters
    ----------
    folder : Path
        On a file system that all ranks see; its parent exists.
    state : dict
        Tensors and plain values, and dicts of them. What is not in `tables` is the same on all ranks.
    tables : mapping of str to ShardedTable
        By the name of a parameter. Whatever `state` holds below a key of that name, with rows, is rows of that table.
    group : ProcessGroup
        All ranks of the job.

    Raises
    ------
    OSError
        If it cannot be written; the former one is whole.
    """
    partial, former = folder.with_name(folder.name + ".partial"), _former(folder)
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier(group)
    try:
        dcp.save(_map_rows(state, tables, ShardedTable.whole), checkpoint_id=partial, process_group=group)
    except CheckpointException as error:
        raise OSError(f"a checkpoint could not be written to {partial}: {_reason(error)}") from error
    if is_first:
        if folder.exists():
            shutil.rmtree(former, ignore_errors=True)  # not before: without `folder` it is the only one under a name
            os.replace(folder, former)  # a folder cannot be replaced in one step: `find_checkpoint` looks here too
        os.replace(partial, folder)
        shutil.rmtree(former, ignore_errors=True)
    dist.barrier(group)


def find_checkpoint(folder: Path) -> Path | None:
    """Return where the checkpoint of a name is: the folder, the former one if a job ended between the two, or None.

    Parameters
    ----------
    folder : Path
        What `save_checkpoint` wrote.
    """
    return next((place for place in (folder, _former(folder)) if (place / ".metadata").exists()), None)


def require_checkpoint(folder: Path) -> Path:
    """Return what `find_checkpoint` finds; raises a FileNotFoundError when there is none."""
    found = find_checkpoint(folder)
    if found is None:
        raise FileNotFoundError(f"there must be a checkpoint in {folder}, found none")
    return found


def load_checkpoint(
    folder: Path, state: dict[str, Any], tables: Mapping[str, ShardedTable], group: dist.ProcessGroup
) -> dict[str, Any]:
    """Read a checkpoint, written on any number of ranks. Collective.

    Parameters
    ----------
    folder : Path
        What `save_checkpoint` wrote.
    state : dict
        As it would be saved now; says what is read, and where to.
    tables, group
        As for `save_checkpoint`, of the ranks that are here now.

    Returns
    -------
    dict
        The state that was saved, with this rank's rows.

    Raises
    ------
    FileNotFoundError
        When there is none.
    ValueError
        On all ranks, when it is damaged, or of another model.
    """
    found = require_checkpoint(folder)
    whole = _map_rows(state, tables, ShardedTable.whole)
    with _reading(found):
        dcp.load(whole, checkpoint_id=found, process_group=group)
    return _map_rows(whole, tables, ShardedTable.own)


def load_values(folder: Path, key: str) -> Any:
    """Read the plain values below a key of a checkpoint. On one rank.

    Parameters
    ----------
    folder : Path
        What `save_checkpoint` wrote.
    key : str
        Of the state that was saved; what it held was a dict of plain values, and dicts of them. Empty dicts are left out.

    Raises
    ------
    FileNotFoundError
        When there is no checkpoint.
    ValueError
        When it is damaged.
    """
    found = require_checkpoint(folder)
    with _reading(found, Exception), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is meant to be: one rank reads
        state = _without_values(found, key)
        dcp.load(state, checkpoint_id=found, no_dist=True)
    return state[key]


def _without_values(found: Path, key: str) -> dict[str, Any]:
    """The dicts below a key of a checkpoint, with None in place of values."""
    state: dict[str, Any] = {key: {}}
    for path in dcp.FileSystemReader(found).read_metadata().planner_data.values():
        if path[0] == key:
            place = state
            for name in path[:-1]:
                place = place.setdefault(name, {})
            place[path[-1]] = None
    return state


@contextmanager
def _reading(found: Path, *errors: type[Exception]) -> Iterator[None]:
    """Say which checkpoint it is that cannot be read. On many ranks all do when one fails, and other errors, such as the loss of a rank,
    stay what they are; on one rank `errors` are added: torn bytes raise one of a dozen types.
    """
    try:
        yield
    except (CheckpointException, *errors) as error:
        raise ValueError(
            f"a checkpoint must be whole and of this model, {found} cannot be read: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """What the first rank said that could not read or write, on one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _former(folder: Path) -> Path:
    return folder.with_name(folder.name + ".former")


def _map_rows(
    value: Any, tables: Mapping[str, ShardedTable], function: Callable, table: ShardedTable | None = None
) -> Any:
    """`value` with `function(table, rows)` in place of every tensor of rows of a table."""
    if isinstance(value, dict):
        return {key: _map_rows(part, tables, function, tables.get(key, table)) for key, part in value.items()}
    if table is not None and isinstance(value, Tensor) and value.dim() > 0:
        return function(table, value)
    return value
