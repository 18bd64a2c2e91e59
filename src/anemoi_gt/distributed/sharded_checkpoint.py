"""Checkpoints of a sharded model in torch.distributed.checkpoint (DCP) format.

Rows of nodes and edges (trainable features, and their optimiser state) are written as tables of the
whole graph, in the caller's order. So a checkpoint does not depend on the sharding, and any number
of ranks can read it. All other tensors are DTensors, of which each rank writes its own shard, or
the same on all ranks, and written once.

A job that is interrupted between the two renames of the folder last/ leaves last.former/.
"""

import io
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, BinaryIO
from zipfile import ZipFile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from anemoi_gt.distributed.consensus import (
    check_same,
    consensus,
    fingerprint,
    raise_on_all_ranks,
)
from anemoi_gt.distributed.halo import HaloExchange
from anemoi_gt.distributed.ownership import Ownership
from anemoi_gt.distributed.partition import Ranges


class DamagedError(ValueError):
    """A record does not have its checksum."""


def check_checksums(file: BinaryIO) -> None:
    """Raise DamagedError if a record of a file from `torch.save` does not have its checksum.

    `torch.load` does not compare them (torch 2.13). Raises one of a dozen types of errors, such as
    BadZipFile, if the file is no such archive.
    """
    damaged = ZipFile(file).testzip()
    if damaged is not None:
        raise DamagedError(f"{damaged} does not have its checksum")


class ShardedTable:
    """Rows of a table, sharded so that exactly one rank holds each. Construction is collective.

    Parameters
    ----------
    index : Tensor [n], int64
        Rows of the table that this rank holds, in local order: `GraphShard.edges` or
        `Partition.nodes(rank)`.
    size : int
        Number of rows of the table.
    mesh : DeviceMesh
        With axes (data, model).
    """

    def __init__(self, index: Tensor, size: int, mesh: DeviceMesh):
        self.index = index
        self.size = size
        self.mesh = mesh
        ascending, self.order = torch.sort(index)
        num_ranks = mesh["model"].size()
        chunk = -(-size // num_ranks)  # the split of DTensor's Shard(0)
        self.chunks = Ranges(tuple(min(rank * chunk, size) for rank in range(num_ranks + 1)))
        self.exchange = HaloExchange.of_requests(ascending, self.chunks, mesh.get_group("model"))

    def to_dtensor(self, rows: Tensor) -> DTensor:
        """Return the rows [n, ..] of all ranks as a DTensor [size, ..] over model. Collective."""
        num_local = self.chunks.counts[self.mesh.get_local_rank("model")]
        rows = rows.detach()
        returned = self.exchange.send_reverse(rows[self.order])
        chunk = self.exchange.scatter_add(returned, rows.new_zeros(num_local, *rows.shape[1:]))
        # for its shape and strides: DTensor would assume chunks of equal size
        table = torch.empty((self.size, *rows.shape[1:]), device="meta")
        return DTensor.from_local(
            chunk,
            self.mesh,
            [Replicate(), Shard(0)],
            run_check=False,  # a check would communicate
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
    """Write a checkpoint; a complete one, old or new, exists at any time. Collective.

    Parameters
    ----------
    folder : str or Path
        A folder on a file system that all ranks share; its parent must exist.
    state : dict
        Tensors and plain values, also in nested dicts and lists. Everything outside `tables` must
        be the same on all ranks.
    tables : mapping of str to ShardedTable
        Tables by parameter name. They are found in the state under keys that equal this name or end
        in it after a dot, as in the state dict of DDP, `AveragedModel` or a compiled module. The
        value is a tensor or a dict of tensors, such as the optimiser state by parameter name
        (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`).
    group : ProcessGroup
        All ranks of the job.

    Raises
    ------
    ValueError
        On all ranks, before anything is written, if a table does not occur in the state, or any
        other tensor differs between ranks, because only the values of one rank would be kept.
    OSError
        If it cannot be written, or another job writes it; the former checkpoint is kept.
    """
    folder = Path(folder)
    _check_saves_all(state, tables, group)
    with _sole_writer(folder, group):
        _write_checkpoint(folder, state, tables, group)
    dist.barrier(group)  # no rank returns before the checkpoint is whole, and free for other jobs


@contextmanager
def _sole_writer(folder: Path, group: dist.ProcessGroup) -> Iterator[None]:
    """Keep other jobs from writing a checkpoint in the block. Collective when the block begins.

    Raises OSError on all ranks if another job writes it.
    """
    ownership = Ownership(
        folder.with_name(f".{folder.name}.lock"),
        "one job at a time may write it",
        "give every job a folder of its own",
    )
    problem = None
    with ExitStack() as stack:
        if dist.get_rank(group) == 0:
            try:
                stack.enter_context(ownership)
            except (ValueError, OSError) as error:
                problem = f"could not write the checkpoint {folder}: {error}"
        raise_on_all_ranks(problem, group, OSError)
        yield


def _write_checkpoint(
    folder: Path,
    state: dict[str, Any],
    tables: Mapping[str, ShardedTable],
    group: dist.ProcessGroup,
) -> None:
    """Write a checkpoint under another name, and rename it when it is complete. Collective."""
    partial = folder.with_name(folder.name + ".partial")
    former = _former(folder)
    is_first = dist.get_rank(group) == 0
    if is_first:
        shutil.rmtree(partial, ignore_errors=True)  # of a job that was killed
    dist.barrier(group)
    try:
        dcp.save(_to_dtensors(state, tables), checkpoint_id=partial, process_group=group)
    except CheckpointException as error:  # on all ranks, once all have ended their writes
        if is_first:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"could not write the checkpoint {partial}: {_reason(error)}") from error
    if is_first:
        if folder.exists():
            # only now: while `folder` is missing, `former` is the only complete checkpoint
            shutil.rmtree(former, ignore_errors=True)
            # A folder cannot be replaced atomically, so `find_checkpoint` looks for `former` too.
            os.replace(folder, former)
        os.replace(partial, folder)
        shutil.rmtree(former, ignore_errors=True)


def find_checkpoint(folder: str | Path) -> Path | None:
    """Return the folder of a checkpoint of `save_checkpoint`, or None if there is none.

    If the job was interrupted between the renames, this is the former folder.
    """
    folder = Path(folder)
    for path in (folder, _former(folder)):
        if (path / ".metadata").exists():
            return path
    return None


def require_checkpoint(folder: str | Path) -> Path:
    """Return `find_checkpoint(folder)`; raise FileNotFoundError if there is none."""
    path = find_checkpoint(folder)
    if path is None:
        raise FileNotFoundError(f"there must be a checkpoint in {folder}, found none")
    return path


def load_checkpoint(
    folder: str | Path,
    state: dict[str, Any],
    tables: Mapping[str, ShardedTable],
    group: dist.ProcessGroup,
) -> dict[str, Any]:
    """Load a checkpoint and return its state with the rows of this rank. Collective.

    Any number of ranks may have written it.

    Parameters
    ----------
    folder : str or Path
        A folder that `save_checkpoint` wrote.
    state : dict
        The state as it would be saved now: the keys to read, and the tensors to read into.
    tables, group
        As for `save_checkpoint`, for the ranks of this job.

    Raises
    ------
    FileNotFoundError
        If there is no checkpoint.
    ValueError
        On all ranks, if it is damaged, by the checksums in it, or belongs to another model, or a
        table does not occur in the state.
    """
    path = require_checkpoint(folder)
    with consensus(group):
        _check_tables(state, tables)
    with consensus(group), _reading(path, Exception):
        _check_share(path, dist.get_rank(group), dist.get_world_size(group))
    whole = _to_dtensors(state, tables)
    with _reading(path):
        dcp.load(whole, checkpoint_id=path, process_group=group)
    return _from_dtensors(whole, tables)


def _check_share(checkpoint: Path, rank: int, num_ranks: int) -> None:
    """Compare a share of the records of a checkpoint with their checksums.

    Every rank checks every `num_ranks`-th record, so that all ranks together read the files once.
    """
    records = dcp.FileSystemReader(checkpoint).read_metadata().storage_data
    for index, record in list(records.items())[rank::num_ranks]:
        with (checkpoint / record.relative_path).open("rb") as file:
            file.seek(record.offset)
            content = file.read(record.length)
        try:
            check_checksums(io.BytesIO(content))
        except DamagedError as error:
            raise DamagedError(f"{error}: {index.fqn} in {record.relative_path}") from error


def load_values(folder: str | Path, key: str) -> Any:
    """Return the (nested) dict of plain values at a key of a checkpoint. Not collective.

    Empty dicts are left out. Raise FileNotFoundError if `folder` has no checkpoint, ValueError if
    it is corrupt.
    """
    path = require_checkpoint(folder)
    with _reading(path, Exception), warnings.catch_warnings():
        # reading on a single rank is intended
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        state = _without_values(path, key)
        dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[key]


def _without_values(checkpoint: Path, key: str) -> dict[str, Any]:
    """Return the nested dicts at a key of a checkpoint, with None in place of the values."""
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
    """Convert errors of reading to a ValueError with the path of the checkpoint.

    These are CheckpointException and `errors`. For a single rank pass Exception, because truncated
    files raise a dozen types of errors.
    """
    kinds: tuple[type[BaseException], ...] = (CheckpointException, *errors)
    try:
        yield
    except kinds as error:
        reason = _reason(error)
        raise ValueError(
            f"a checkpoint must be complete and of this model, cannot read {checkpoint}: {reason}"
        ) from error


def _reason(error: BaseException) -> str:
    """Return the error, of the first rank that failed, on one line."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _former(folder: Path) -> Path:
    """Return the folder that holds the former checkpoint while it is replaced."""
    return folder.with_name(folder.name + ".former")


def _check_saves_all(
    state: dict[str, Any], tables: Mapping[str, ShardedTable], group: dist.ProcessGroup
) -> None:
    """Raise ValueError on all ranks if a tensor outside tables differs. Collective."""
    same = {}
    with consensus(group):
        for key, name, tensor in _check_tables(state, tables):
            if name is None and not isinstance(tensor, DTensor):  # each rank writes its own shard
                same[key] = fingerprint(tensor)
    try:
        check_same(same, group)
    except ValueError as error:
        raise ValueError(
            f"{error}; one rank's would be lost. A key of rows must end in the name of their "
            f"table, one of {[*tables]}: name the state of an optimiser by get_optimizer_state_dict"
        ) from None


def _check_tables(
    state: dict[str, Any], tables: Mapping[str, ShardedTable]
) -> list[tuple[str, str | None, Tensor]]:
    """Return (key, table name or None, tensor) of each tensor in a state.

    Raise ValueError if a table is missing or has another number of rows.
    """
    tensors: list[tuple[str, str | None, Tensor]] = []

    def collect(key: str, name: str | None, tensor: Tensor) -> Tensor:
        tensors.append((key, name, tensor))
        return tensor

    _map_tensors(state, tables, collect)
    for key, name, tensor in tensors:
        if name is not None and len(tensor) != len(tables[name].index):
            raise ValueError(
                f"{key} must have the {len(tables[name].index)} rows of {name} that this rank "
                f"holds, got {tuple(tensor.shape)}"
            )
    missing = sorted(tables.keys() - {name for _, name, _ in tensors})
    if missing:
        raise ValueError(
            "the state must have a key that ends in the name of each table, got none for "
            f"{', '.join(missing)}: name parameters as state_dict() and get_optimizer_state_dict do"
        )
    return tensors


def _to_dtensors(state: dict[str, Any], tables: Mapping[str, ShardedTable]) -> dict[str, Any]:
    """Return a state in which DTensors of whole tables replace local rows. Collective."""

    def to_dtensor(_: str, name: str | None, tensor: Tensor) -> Tensor:
        return tensor if name is None else tables[name].to_dtensor(tensor)

    return _map_tensors(state, tables, to_dtensor)


def _from_dtensors(whole: dict[str, Any], tables: Mapping[str, ShardedTable]) -> dict[str, Any]:
    """Return a state of `_to_dtensors` with local rows. Collective."""

    def from_dtensor(_: str, name: str | None, tensor: Tensor) -> Tensor:
        if name is None or not isinstance(tensor, DTensor):
            return tensor
        return tables[name].from_dtensor(tensor)

    return _map_tensors(whole, tables, from_dtensor)


def _map_tensors(
    value: Any,
    tables: Mapping[str, ShardedTable],
    function: Callable[[str, str | None, Tensor], Tensor],
    path: tuple[str, ...] = (),
    name: str | None = None,
) -> Any:
    """Map `function(key, name, tensor)` over the tensors in nested dicts, lists and tuples.

    `key` is the path to the tensor, joined by dots; `name` is its table, or None.
    """
    if isinstance(value, dict):
        names = _names_of_tables(value, tables)
        return {
            key: _map_tensors(item, tables, function, (*path, str(key)), names.get(key, name))
            for key, item in value.items()
        }
    # a named tuple is a plain value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        items = (
            _map_tensors(item, tables, function, (*path, str(i)), name)
            for i, item in enumerate(value)
        )
        return type(value)(items)
    if isinstance(value, Tensor):
        if value.dim() == 0:  # such as the step of an optimiser state
            name = None
        return function(".".join(path), name, value)
    return value


def _names_of_tables(keys: Iterable[Any], tables: Mapping[str, ShardedTable]) -> dict[str, str]:
    """Return the table name for each key that equals it or ends in it after a dot.

    If there is a key `module.weight`, a key `module.conv.weight` does not belong to the table
    `weight`, because its module is inside the table's module.
    """
    names = {}
    for name in sorted(tables, key=len):  # longer names are more specific and replace shorter ones
        matches = [key for key in keys if isinstance(key, str) and f".{key}".endswith(f".{name}")]
        prefixes = [key.removesuffix(name) for key in matches]
        for prefix in prefixes:
            if not any(prefix != outer and prefix.startswith(outer) for outer in prefixes):
                names[prefix + name] = name
    return names
