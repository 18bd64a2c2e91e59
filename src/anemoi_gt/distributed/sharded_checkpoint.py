"""Checkpoints of a sharded model in torch.distributed.checkpoint (DCP) format.

Rows of nodes and edges (trainable features, and their optimiser state) are written as the table of
the whole graph, in the caller's numbering, so a checkpoint does not depend on the sharding: it is
read on any number of ranks. All other tensors are the same on all ranks, and written once.

    one process   the file last.pt
    torchrun      the folder last/, or last.former/ if interrupted between the two renames
"""

import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from anemoi_gt.distributed.consensus import check_same, consensus, fingerprint
from anemoi_gt.distributed.halo import HaloExchange
from anemoi_gt.distributed.partition import Ranges

ONE_PROCESS, TORCHRUN = "one process", "torchrun"
REMEDY = {ONE_PROCESS: "resume=true without torchrun", TORCHRUN: "resume=true with torchrun"}


class ShardedTable:
    """Sharded rows of a table; the ranks together hold each row once. Construction is collective.

    Parameters
    ----------
    index : Tensor [n], int64
        Rows of the table that this rank holds, in its order: `GraphShard.edges`, or
        `Partition.nodes(rank)`.
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
        """Return all ranks' rows [n, ..] as a DTensor [size, ..] over model. Collective.

        Rows that `fully_shard` has divided over data are gathered first.
        """
        num_local = self.chunks.counts[self.mesh.get_local_rank("model")]
        rows = rows.detach()
        rows = rows.full_tensor() if isinstance(rows, DTensor) else rows
        rows = rows[self.order]
        chunk = self.exchange.scatter_add(
            self.exchange.send_reverse(rows), rows.new_zeros(num_local, *rows.shape[1:])
        )
        table = torch.empty((self.size, *rows.shape[1:]), device="meta")
        return DTensor.from_local(
            chunk,
            self.mesh,
            [Replicate(), Shard(0)],
            run_check=False,
            shape=table.shape,
            stride=table.stride(),
        )

    def from_dtensor(self, table: DTensor) -> Tensor:
        """Return this rank's rows [n, ..] of a table from `to_dtensor`. Collective."""
        chunk = table.to_local()
        rows = self.exchange(chunk.reshape(len(chunk), prod(chunk.shape[1:])))
        rows = rows.view(len(rows), *chunk.shape[1:])
        return torch.empty_like(rows).index_copy_(0, self.order, rows)


def save_checkpoint(
    folder: str | Path,
    state: dict[str, Any],
    tables: Mapping[str, ShardedTable],
    group: dist.ProcessGroup,
) -> None:
    """Write a checkpoint; `folder` always holds a complete one, old or new. Collective.

    Parameters
    ----------
    folder : str or Path
        On a file system that all ranks share; its parent exists.
    state : dict
        Tensors and plain values, and dicts and lists of them; the same on all ranks outside
        `tables`.
    tables : mapping of str to ShardedTable
        By the name of a parameter. A key that is this name, or ends in it after a dot, as in the
        state dict of DDP, `AveragedModel` or a compiled module, has rows of that table: a tensor,
        or a dict of them, such as the state of an optimiser by names
        (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`).
    group : ProcessGroup
        All ranks of the job.

    Raises
    ------
    ValueError
        On all ranks, before anything is written, when a table does not occur in the state, or a
        tensor without rows of a table differs between ranks: only one rank's values would be kept.
    OSError
        If it cannot be written; the former one is kept.
    """
    folder = Path(folder)
    partial, former = folder.with_name(folder.name + ".partial"), _former(folder)
    _check_saves_all(state, tables, group)
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier(group)
    try:
        dcp.save(_to_dtensors(state, tables), checkpoint_id=partial, process_group=group)
    except CheckpointException as error:
        raise OSError(f"could not write the checkpoint {partial}: {_reason(error)}") from error
    if is_first:
        if folder.exists():
            # not before: without `folder` it is the only complete one
            shutil.rmtree(former, ignore_errors=True)
            # a folder cannot be replaced atomically: `find_checkpoint` looks here too
            os.replace(folder, former)
        os.replace(partial, folder)
        shutil.rmtree(former, ignore_errors=True)
    dist.barrier(group)


def find_checkpoint(folder: str | Path) -> Path | None:
    """Return `folder` of `save_checkpoint`, or None.

    If the job was interrupted between the renames, return the former folder.
    """
    folder = Path(folder)
    return next((path for path in (folder, _former(folder)) if (path / ".metadata").exists()), None)


def require_checkpoint(folder: str | Path) -> Path:
    """Return `find_checkpoint(folder)`, or raise FileNotFoundError when there is none."""
    if (path := find_checkpoint(folder)) is None:
        raise FileNotFoundError(f"there must be a checkpoint in {folder}, found none")
    return path


def load_checkpoint(
    folder: str | Path,
    state: dict[str, Any],
    tables: Mapping[str, ShardedTable],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Return the state of a checkpoint with this rank's rows. Collective.

    Any number of ranks may have written it.

    Parameters
    ----------
    folder : str or Path
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
        On all ranks, when it is corrupt or of another model, or a table does not occur in the
        state.
    """
    path = require_checkpoint(folder)
    with consensus(group):
        _check_tables(state, tables)
    whole = _to_dtensors(state, tables)
    with _reading(path):
        dcp.load(whole, checkpoint_id=path, process_group=group)
    return _from_dtensors(whole, state, tables)


def load_values(folder: str | Path, key: str) -> Any:
    """Return the dict of plain values, and dicts of them, at a key of a checkpoint; not collective.

    Empty dicts are left out. Raise FileNotFoundError when `folder` has no checkpoint, ValueError
    when it is corrupt.
    """
    path = require_checkpoint(folder)
    with _reading(path, Exception), warnings.catch_warnings():
        # intended: one rank reads
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state = _without_values(path, key)
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[key]


def _without_values(checkpoint: Path, key: str) -> dict[str, Any]:
    """Return the dicts below a key of a checkpoint, with None instead of values."""
    state: dict[str, Any] = {key: {}}
    for path in dcp.FileSystemReader(checkpoint).read_metadata().planner_data.values():
        if path[0] == key:
            values = state
            for name in path[:-1]:
                values = values.setdefault(name, {})
            values[path[-1]] = None
    return state


@contextmanager
def _reading(checkpoint: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise ValueError with the path of an unreadable checkpoint; let other errors pass.

    On one rank pass Exception in `errors`: truncated files raise one of a dozen types.
    """
    kinds: tuple[type[BaseException], ...] = (CheckpointException, *errors)
    try:
        yield
    except kinds as error:
        why = _reason(error)
        raise ValueError(
            f"a checkpoint must be complete and of this model, cannot read {checkpoint}: {why}"
        ) from error


def _reason(error: BaseException) -> str:
    """Return the error of the first rank that failed, on one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _former(folder: Path) -> Path:
    return folder.with_name(folder.name + ".former")


def _check_saves_all(
    state: dict[str, Any], tables: Mapping[str, ShardedTable], group: dist.ProcessGroup
) -> None:
    """Raise ValueError on all ranks if a tensor is neither a table nor equal on all. Collective."""
    same = {}
    with consensus(group):
        for key, name, tensor in _check_tables(state, tables):
            if name is None and not isinstance(tensor, DTensor):  # each rank writes its own part
                same[key] = fingerprint(tensor)
    try:
        check_same(same, group)
    except ValueError as error:
        raise ValueError(
            f"{error}; one rank's would be lost. A key of rows must end in the name of their "
            "table, one of "
            f"{[*tables]}: name the state of an optimiser by get_optimizer_state_dict"
        ) from None


def _check_tables(
    state: dict[str, Any], tables: Mapping[str, ShardedTable]
) -> list[tuple[str, str | None, Tensor]]:
    """Return key, table name or None, and tensor of each; ValueError if a table is missing."""
    tensors: list[tuple[str, str | None, Tensor]] = []

    def note(key: str, name: str | None, tensor: Tensor) -> Tensor:
        tensors.append((key, name, tensor))
        return tensor

    _map_tensors(state, tables, note)
    for key, name, tensor in tensors:
        if name is not None and len(tensor) != len(tables[name].index):
            raise ValueError(
                f"{key} must have the {len(tables[name].index)} rows of {name} that this rank "
                "holds, "
                f"got {tuple(tensor.shape)}"
            )
    if missing := sorted(tables.keys() - {name for _, name, _ in tensors}):
        raise ValueError(
            "the state must have a key that ends in the name of each table, got none for "
            f"{', '.join(missing)}: "
            "name parameters as state_dict() and get_optimizer_state_dict do"
        )
    return tensors


def _to_dtensors(state: dict[str, Any], tables: Mapping[str, ShardedTable]) -> dict[str, Any]:
    """Return a state with tables of the whole graph instead of rows. Collective."""

    def to_dtensor(_: str, name: str | None, tensor: Tensor) -> Tensor:
        return tensor if name is None else tables[name].to_dtensor(tensor)

    return _map_tensors(state, tables, to_dtensor)


def _from_dtensors(
    whole: dict[str, Any], state: dict[str, Any], tables: Mapping[str, ShardedTable]
) -> dict[str, Any]:
    """Return a state of `_to_dtensors` as this rank's rows, laid out as in `state`. Collective."""
    layouts = {key: tensor for key, _, tensor in _check_tables(state, tables)}

    def from_dtensor(key: str, name: str | None, tensor: Tensor) -> Tensor:
        if name is None or not isinstance(tensor, DTensor):
            return tensor
        rows, layout = tables[name].from_dtensor(tensor), layouts[key]
        if isinstance(layout, DTensor):  # of fully_shard; all ranks have the rows: nothing is sent
            return distribute_tensor(
                rows, layout.device_mesh, layout.placements, src_data_rank=None
            )
        return rows

    return _map_tensors(whole, tables, from_dtensor)


def _map_tensors(
    value: Any,
    tables: Mapping[str, ShardedTable],
    function: Callable[[str, str | None, Tensor], Tensor],
    path: tuple[str, ...] = (),
    name: str | None = None,
) -> Any:
    """Map `function(key, name, tensor)` over the tensors in nested dicts, lists and tuples.

    The key is the path of keys to the tensor, joined by dots; the name is of the table whose rows
    it has, or None.
    """
    if isinstance(value, dict):
        names = _names_of_tables(value, tables)
        return {
            key: _map_tensors(part, tables, function, (*path, str(key)), names.get(key, name))
            for key, part in value.items()
        }
    # a named tuple is a plain value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        parts = (
            _map_tensors(part, tables, function, (*path, str(n)), name)
            for n, part in enumerate(value)
        )
        return type(value)(parts)
    if isinstance(value, Tensor):
        # 0-dim: the steps of an optimiser
        return function(".".join(path), name if value.dim() else None, value)
    return value


def _names_of_tables(keys: Iterable[Any], tables: Mapping[str, ShardedTable]) -> dict[str, str]:
    """Return the name of the table for each key that is this name, or ends in it after a dot.

    Next to `module.weight`, a key `module.conv.weight` is no table `weight`: its module is inside
    the table's module.
    """
    names = {}
    for name in sorted(tables, key=len):  # a longer name is more specific: it replaces shorter ones
        ends = [key for key in keys if isinstance(key, str) and f".{key}".endswith(f".{name}")]
        prefixes = [key.removesuffix(name) for key in ends]
        for prefix in prefixes:
            if not any(prefix != outer and prefix.startswith(outer) for outer in prefixes):
                names[prefix + name] = name
    return names


def sharded(path: str | Path) -> Path:
    """Return the folder that several ranks write instead of a file: `last` for `last.pt`."""
    return Path(path).with_suffix("")


def find_run(last: str | Path) -> Path | None:
    """Return the last checkpoint of a run, file or folder, or None. `last` is the file."""
    last = Path(last)
    return last if last.exists() else find_checkpoint(sharded(last))


def require_file(path: str | Path) -> None:
    """Raise ValueError with the conversion command if only a folder exists for a file."""
    checkpoint = None if Path(path).is_file() else find_checkpoint(sharded(path))
    if checkpoint is not None:
        raise ValueError(
            f"the checkpoint must be one file, got the folder {checkpoint} of several ranks "
            "(they write best.pt at the end); convert it with "
            f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {checkpoint} FILE.pt"
        )


def checkpoint_to_continue(last: str | Path, writer: str, *, resume: bool) -> Path | None:
    """Return the checkpoint that a run continues from, or None: it starts from scratch.

    `last` is its name for one process, such as folder / "last.pt"; `writer` the current launch,
    ONE_PROCESS or TORCHRUN, which continues only its own form. Without `resume` the folder must not
    hold a run. Raise ValueError if it holds one that must not be continued, or not by this writer.
    """
    if not isinstance(resume, bool):
        raise ValueError(f"resume must be true or false, got {resume!r}")
    last = Path(last)
    if (checkpoint := find_run(last)) is None:
        return None
    former_writer = ONE_PROCESS if checkpoint == last else TORCHRUN
    if resume and writer == former_writer:
        return checkpoint
    of, remedy = "", "resume=true"
    if writer != former_writer:
        of, remedy = f" of {former_writer}, in {checkpoint.name}", REMEDY[former_writer]
    raise ValueError(
        f"{last.parent} holds a run{of}: {remedy} continues it, another hydra.run.dir starts a "
        "new one"
    )
