"""Checkpoints of a sharded model by torch.distributed.checkpoint (DCP), and the last checkpoint of a run.

Rows of nodes and edges (trainable features, and their optimiser state) are written as the table of the whole graph, in
the caller's numbering, so a checkpoint does not depend on the sharding: it is read on any number of ranks.

    one process   the file last.pt
    torchrun      the folder last/, or last.former/ when the job was interrupted between the two renames
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

ONE_PROCESS, TORCHRUN = "one process", "torchrun"
REMEDY = {ONE_PROCESS: "resume=true without torchrun", TORCHRUN: "resume=true with torchrun"}


class ShardedTable:
    """Rows of a table of which each rank of a model holds some, and together each row once. Construction is collective.

    Parameters
    ----------
    index : Tensor [n], int64
        Rows of the table that this rank holds, in its order: `GraphShard.edges`, or `Partition.nodes(rank)`.
    size : int
        Rows of the table.
    mesh : DeviceMesh
        With axes (data, model).
    """

    def __init__(self, index: Tensor, size: int, mesh: DeviceMesh):
        self.index, self.size, self.mesh = index, size, mesh
        ascending, self.order = torch.sort(index)
        num_ranks = mesh["model"].size()
        chunk = -(-size // num_ranks)  # as DTensor splits
        self.chunks = Ranges(tuple(min(rank * chunk, size) for rank in range(num_ranks + 1)))
        self.exchange = HaloExchange.of_requests(ascending, self.chunks, mesh.get_group("model"))

    def to_dtensor(self, rows: Tensor) -> DTensor:
        """Return the table [size, F] of all ranks' rows [n, F], as a DTensor sharded over model. Collective."""
        own = self.chunks.counts[self.mesh.get_local_rank("model")]
        rows = rows.detach()[self.order]
        chunk = self.exchange.scatter_add(self.exchange.send_reverse(rows), rows.new_zeros(own, *rows.shape[1:]))
        table = torch.empty((self.size, *rows.shape[1:]), device="meta")
        layout = {"run_check": False, "shape": table.shape, "stride": table.stride()}
        return DTensor.from_local(chunk, self.mesh, [Replicate(), Shard(0)], **layout)

    def from_dtensor(self, table: DTensor) -> Tensor:
        """Return this rank's rows [n, F] of a table from `to_dtensor`. Collective."""
        rows = self.exchange(table.to_local())
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def save_checkpoint(
    folder: Path, state: dict[str, Any], tables: Mapping[str, ShardedTable], group: dist.ProcessGroup
) -> None:
    """Write a checkpoint so that `folder` always holds a complete one, the former or this one. Collective.

    Parameters
    ----------
    folder : Path
        On a file system that all ranks share; its parent exists.
    state : dict
        Tensors and plain values, and dicts of them; the same on all ranks outside `tables`.
    tables : mapping of str to ShardedTable
        By the name of a parameter. Tensors with rows below a key of that name are rows of that table.
    group : ProcessGroup
        All ranks of the job.

    Raises
    ------
    OSError
        If it cannot be written; the former one is kept.
    """
    partial, former = folder.with_name(folder.name + ".partial"), _former(folder)
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier(group)
    try:
        dcp.save(_map_rows(state, tables, ShardedTable.to_dtensor), checkpoint_id=partial, process_group=group)
    except CheckpointException as error:
        raise OSError(f"could not write the checkpoint {partial}: {_reason(error)}") from error
    if is_first:
        if folder.exists():
            shutil.rmtree(former, ignore_errors=True)  # not before: without `folder` it is the only complete one
            os.replace(folder, former)  # a folder cannot be replaced atomically: `find_checkpoint` looks here too
        os.replace(partial, folder)
        shutil.rmtree(former, ignore_errors=True)
    dist.barrier(group)


def find_checkpoint(folder: Path) -> Path | None:
    """Return `folder` of `save_checkpoint`, the former one if the job was interrupted between the renames, or None."""
    return next((place for place in (folder, _former(folder)) if (place / ".metadata").exists()), None)


def require_checkpoint(folder: Path) -> Path:
    """Return `find_checkpoint(folder)`, or raise FileNotFoundError when there is none."""
    if (found := find_checkpoint(folder)) is None:
        raise FileNotFoundError(f"there must be a checkpoint in {folder}, found none")
    return found


def load_checkpoint(
    folder: Path, state: dict[str, Any], tables: Mapping[str, ShardedTable], group: dist.ProcessGroup
) -> dict[str, Any]:
    """Return the state in a checkpoint, written on any number of ranks, with this rank's rows. Collective.

    Parameters
    ----------
    folder : Path
        Written by `save_checkpoint`.
    state : dict
        As it would be saved now: the keys to read, and the tensors to read into.
    tables, group
        As for `save_checkpoint`, of the ranks of this job.

    Raises
    ------
    FileNotFoundError
        When there is none.
    ValueError
        On all ranks, when it is corrupt or of another model.
    """
    found = require_checkpoint(folder)
    whole = _map_rows(state, tables, ShardedTable.to_dtensor)
    with _reading(found):
        dcp.load(whole, checkpoint_id=found, process_group=group)
    return _map_rows(whole, tables, ShardedTable.from_dtensor)


def load_values(folder: Path, key: str) -> Any:
    """Return the dict of plain values, and dicts of them, below a key of a checkpoint; not collective.

    Empty dicts are left out. Raise FileNotFoundError when `folder` has no checkpoint, ValueError when it is corrupt.
    """
    found = require_checkpoint(folder)
    with _reading(found, Exception), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended: one rank reads
        state = _without_values(found, key)
        dcp.load(state, checkpoint_id=found, no_dist=True)
    return state[key]


def _without_values(found: Path, key: str) -> dict[str, Any]:
    """Return the dicts below a key of a checkpoint, with None in place of values."""
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
    """Raise ValueError with the path of a checkpoint that cannot be read; let other errors, as of a lost rank, pass.

    On one rank pass Exception in `errors`: truncated files raise one of a dozen types.
    """
    try:
        yield
    except (CheckpointException, *errors) as error:
        why = _reason(error)
        raise ValueError(f"a checkpoint must be complete and of this model, cannot read {found}: {why}") from error


def _reason(error: BaseException) -> str:
    """Return the error of the first rank that failed, on one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _former(folder: Path) -> Path:
    return folder.with_name(folder.name + ".former")


def _map_rows(
    value: Any, tables: Mapping[str, ShardedTable], function: Callable, table: ShardedTable | None = None
) -> Any:
    """Return `value` with `function(table, rows)` in place of every tensor of rows of a table."""
    if isinstance(value, dict):
        return {key: _map_rows(part, tables, function, tables.get(key, table)) for key, part in value.items()}
    if table is not None and isinstance(value, Tensor) and value.dim() > 0:
        return function(table, value)
    return value


def sharded(path: Path) -> Path:
    """Return the folder that several ranks write in place of a file: `last` for `last.pt`."""
    return path.with_suffix("")


def find_run(last: Path) -> Path | None:
    """Return the last checkpoint of a run, of either form, or None. `last` is its name for one process."""
    return last if last.exists() else find_checkpoint(sharded(last))


def require_file(path: Path) -> None:
    """Raise ValueError, with the command that converts it, when only a folder of several ranks exists for a file."""
    found = None if path.is_file() else find_checkpoint(sharded(path))
    if found is not None:
        raise ValueError(
            f"the checkpoint must be one file, got the folder {found} of several ranks "
            "(they write best.pt at the end); convert it with "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {found} FILE.pt"
        )


def checkpoint_to_continue(last: Path, writer: str, *, resume: bool) -> Path | None:
    """Return the checkpoint that a run continues from, or None: it starts from scratch.

    `last` is its name for one process, such as folder / "last.pt"; `writer` the current launch, ONE_PROCESS or
    TORCHRUN, which continues only its own form. Without `resume` the folder must not hold a run. Raise ValueError if it
    holds one that must not be continued, or not by this writer.
    """
    if not isinstance(resume, bool):
        raise ValueError(f"resume must be true or false, got {resume!r}")
    if (found := find_run(last)) is None:
        return None
    former_writer = ONE_PROCESS if found == last else TORCHRUN
    if resume and writer == former_writer:
        return found
    of, remedy = "", "resume=true"
    if writer != former_writer:
        of, remedy = f" of {former_writer}, in {found.name}", REMEDY[former_writer]
    raise ValueError(f"{last.parent} holds a run{of}: {remedy} continues it, another hydra.run.dir starts a new one")
