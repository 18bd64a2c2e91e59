"""Files of a run: checkpoints, metrics as JSON lines, and atomic writes.

Reading a checkpoint executes no code. Metrics are flushed record by record, so that an interrupted
run loses at most the last record. A file that is written atomically has either its former content
or the new content, never a part of it.
"""

import io
import json
import math
import os
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import nn

from anemoi_gt.distributed.sharded_checkpoint import (
    DamagedError,
    check_checksums,
    find_checkpoint,
)

UNREADABLE = "a checkpoint must be a whole file that training wrote"


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically to an existing folder.

    `state` may hold tensors, numbers and strings, and dicts, lists and tuples of them. Raises
    OSError if it cannot be written.
    """
    with atomic_write(path) as file:
        torch.save(state, file)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Load the state of a checkpoint, with tensors on the CPU, without executing code.

    Raises FileNotFoundError if there is no such file, OSError if it cannot be read, and ValueError
    if it is not a checkpoint, or a folder of several ranks, or is damaged, by the checksums in it.
    """
    path = Path(path)
    if not path.is_file():
        folder = find_checkpoint(sharded(path))
        if folder is not None:
            raise ValueError(
                f"the checkpoint must be one file, got the folder {folder} of several ranks (they "
                "write best.pt at the end); convert it with python -m "
                f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} FILE.pt"
            )
        raise FileNotFoundError(
            f"no checkpoint {path}: give the last.pt or best.pt that a run left in its folder"
        )
    # read once, so that the checksums are those of the bytes that are loaded
    content = io.BytesIO(path.read_bytes())
    try:
        check_checksums(content)
        content.seek(0)
        state = torch.load(content, map_location="cpu", weights_only=True)
    except DamagedError as error:
        raise ValueError(f"{UNREADABLE}, {path} is damaged: {error}") from error
    except Exception as error:  # zipfile and torch.load raise a dozen types
        raise ValueError(f"{UNREADABLE}, {path} cannot be read") from error
    if not isinstance(state, dict):
        raise ValueError(
            f"a checkpoint must hold a dict of states, {path} holds a {type(state).__name__}"
        )
    return state


def sharded(path: str | Path) -> Path:
    """Return the folder that several ranks write in place of a file: `last` for `last.pt`."""
    return Path(path).with_suffix("")


def read_best_loss(path: str | Path) -> float:
    """Return the lowest validation loss in a checkpoint, infinity if there is no such file."""
    if not Path(path).exists():
        return math.inf
    return load_checkpoint(path)["best_loss"]


def load_weights(model: nn.Module, state: dict[str, Any], part: str = "average") -> None:
    """Load the weights of a checkpoint into a model.

    `part` is "average" for the averaged weights, which make forecasts, or "model" for the weights
    that the optimiser updates. Raises ValueError if the checkpoint has none, or weights of another
    model.
    """
    weights = _weights(state, part)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(
            f"the checkpoint's weights must fit the configured model: {reason}"
        ) from error


def load_fitting_weights(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load the averaged weights of a checkpoint that fit a model; describe the others.

    Return one text for each weight of the model that the checkpoint does not have in this shape.
    Raises ValueError if the checkpoint has no weights, or none fit.
    """
    weights = model.state_dict()
    loaded = _weights(state, "average")
    fitting = {}
    unfit = []
    for name, weight in weights.items():
        if name not in loaded:
            unfit.append(f"{name} {list(weight.shape)}, absent in the file")
        elif loaded[name].shape != weight.shape:
            unfit.append(f"{name} {list(weight.shape)}, {list(loaded[name].shape)} in the file")
        else:
            fitting[name] = loaded[name]
    if not fitting:
        raise ValueError(
            "the checkpoint must have weights of the configured model, none fits by name and shape"
        )
    model.load_state_dict(fitting, strict=False)  # the others keep their initial values
    return unfit


def _weights(state: dict[str, Any], part: str) -> dict[str, Any]:
    """Return the weights under a key of a checkpoint; raise ValueError if it has none."""
    if part not in state:
        keys = ", ".join(map(str, state)) or "nothing"
        raise ValueError(f"the checkpoint must hold {part!r}, got {keys}")
    return state[part]


class MetricsFile:
    """A file of records; the records are also kept in memory for the plot.

    Records of an existing file after step `until`, the step from which the run continues, are
    removed. `log_record` is called with each record after it is written.
    """

    def __init__(
        self, path: str | Path, until: int = 0, log_record: Callable[[dict], None] | None = None
    ):
        self.path = Path(path)
        self._log_record = log_record
        former = read_metrics(self.path)
        self.records: list[dict] = [record for record in former if record["step"] <= until]
        with atomic_write(self.path) as file:
            file.writelines(_line(record).encode() for record in self.records)
        self._file = self.path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with annotate_oserror(self.path):
            self._file.close()

    def write(self, **record: int | float | str) -> None:
        """Append a record, with the time in UTC.

        Raises ValueError if a number is not finite, OSError if writing fails.
        """
        record["time"] = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        with annotate_oserror(self.path):
            self._file.write(_line(record))
            self._file.flush()
        self.records.append(record)
        if self._log_record is not None:
            self._log_record(record)

    def sync(self) -> None:
        """Wait until all records are on disk, so that they are as recent as the next checkpoint."""
        with annotate_oserror(self.path):
            os.fsync(self._file.fileno())


def read_metrics(path: str | Path) -> list[dict]:
    """Return the records of a file, or none if it does not exist.

    An incomplete last line is ignored. Raises ValueError, with the line number, if a line is not a
    record.
    """
    path = Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except json.JSONDecodeError as error:
        number = next(n for n, line in enumerate(lines, 1) if line == error.doc)
        raise ValueError(
            f"every line of {path} must be a record in JSON, line {number} is not: remove it"
        ) from None


def curve(records: list[dict], split: str) -> tuple[list[int], list[float]]:
    """Return the steps and the losses in the records of a split, "train" or "valid"."""
    selected = [record for record in records if record["split"] == split]
    return [record["step"] for record in selected], [record["loss"] for record in selected]


def _line(record: dict) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` if the block ends without an error, and is removed if not.

    The folder must exist. The former file stays until the new one is completely on disk. Raises an
    OSError that names `path` and the reason, such as a full disk, if it cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with annotate_oserror(path), partial.open("wb") as file:
            yield file
            file.flush()
            # Without it, a crash of the machine could leave an empty file under the new name.
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def annotate_oserror(path: Path) -> Iterator[None]:
    """Raise an OSError with `path` and the reason if writing a file fails in the block."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        # PyTorch's writer raises a RuntimeError while it handles the OSError.
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise OSError(f"could not write {path}: {cause.strerror or cause}") from error
