"""Files of a run: checkpoints, metrics as JSON lines, and atomic writes.

A checkpoint is read without executing code. Metrics are flushed record by record, so that an
interrupted run loses at most the last. A file that is written atomically holds either its former
content or the new one, never a part.
"""

import io
import json
import os
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn


def save_checkpoint(path: str | Path, state: dict[str, Any]) -> None:
    """Write a checkpoint atomically: `path` holds either the former one or this one, never a part.

    The folder exists. `state` holds tensors, numbers, strings, and dicts, lists and tuples of them.
    Raises OSError if it cannot be written.
    """
    with atomic_write(path) as file:
        torch.save(state, file)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the state in a file of `save_checkpoint`, tensors on the CPU, without running code.

    Raises FileNotFoundError if there is no such file; OSError if the system cannot read it;
    ValueError if the file is not a checkpoint, or damaged.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no checkpoint {path}: give the last.pt or best.pt that a run left in its folder"
        )
    content = path.read_bytes()
    try:
        state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises a dozen types
        raise ValueError(
            f"a checkpoint must be a whole file that training wrote, {path} cannot be read"
        ) from error
    if not isinstance(state, dict):
        raise ValueError(
            f"a checkpoint must hold a dict of states, {path} holds a {type(state).__name__}"
        )
    return state


def load_weights(model: nn.Module, state: dict[str, Any], part: str = "average") -> None:
    """Load a checkpoint's weights into a model: averaged, for forecasts, or the optimiser's.

    `part` is "average" or "model". Raises ValueError if the checkpoint has none, or weights of
    another model.
    """
    weights = _weights(state, part)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError) as error:
        why = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(
            f"the checkpoint's weights must fit the configured model: {why}"
        ) from error


def load_fitting_weights(model: nn.Module, state: dict[str, Any]) -> list[str]:
    """Load a checkpoint's averaged weights that fit a model; return the names of the others.

    Raises ValueError if the checkpoint has no weights, or none fit.
    """
    weights, loaded = model.state_dict(), _weights(state, "average")
    fitting = {
        name: loaded[name]
        for name in weights
        if name in loaded and loaded[name].shape == weights[name].shape
    }
    if not fitting:
        raise ValueError(
            "the checkpoint must have weights of the configured model, none fits by name and shape"
        )
    model.load_state_dict(fitting, strict=False)
    return [
        f"{name} {list(weights[name].shape)}, "
        f"{list(loaded[name].shape) if name in loaded else 'absent'} in the file"
        for name in weights
        if name not in fitting
    ]


def _weights(state: dict[str, Any], part: str) -> dict[str, Any]:
    if part not in state:
        raise ValueError(
            f"the checkpoint must hold {part!r}, got {', '.join(map(str, state)) or 'nothing'}"
        )
    return state[part]


class MetricsFile:
    """A file of records, which also keeps them in memory for the plot.

    An existing file is truncated after step `until`, the step of the checkpoint that the run
    resumes from.
    """

    def __init__(self, path: str | Path, until: int = 0):
        self.path = path = Path(path)
        self.records: list[dict] = [
            record for record in read_metrics(path) if record["step"] <= until
        ]
        with atomic_write(path) as file:
            file.writelines(_line(record).encode() for record in self.records)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with annotate_oserror(self.path):
            self._file.close()

    def write(self, **record: int | float | str) -> None:
        """Append a record; ValueError if a number is not finite, OSError if writing fails."""
        with annotate_oserror(self.path):
            self._file.write(_line(record))
            self._file.flush()
        self.records.append(record)

    def sync(self) -> None:
        """Wait until all records are on disk, at least as recent as the next checkpoint."""
        with annotate_oserror(self.path):
            os.fsync(self._file.fileno())


def read_metrics(path: str | Path) -> list[dict]:
    """Return the records of a file, none if it does not exist; an incomplete last line is ignored.

    Raises ValueError if a line is not a record, with its number.
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
    """Return the steps and losses of the records of one split, "train" or "valid"."""
    selected = [record for record in records if record["split"] == split]
    return [record["step"] for record in selected], [record["loss"] for record in selected]


def _line(record: dict) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


@contextmanager
def atomic_write(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without error, and is removed otherwise.

    The folder exists; the former file stays until all of the new one is on disk. Raises OSError,
    which names `path` and the reason, if it cannot be written, a full disk among the reasons.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        with annotate_oserror(path), partial.open("wb") as file:
            yield file
            file.flush()
            # else a crash of the machine can leave an empty file under the new name
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def annotate_oserror(path: Path) -> Iterator[None]:
    """Add `path` and the reason to an OSError without them when writing a file fails."""
    try:
        yield
    except (
        OSError,
        RuntimeError,
    ) as error:  # PyTorch's writer wraps the system's refusal in a RuntimeError
        refusal = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refusal, OSError):
            raise
        raise OSError(f"could not write {path}: {refusal.strerror or refusal}") from error
