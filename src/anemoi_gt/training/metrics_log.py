"""Metrics as JSON lines, flushed record by record, so that an interrupted run loses at most the last."""

import json
import os
from pathlib import Path

from anemoi_gt.training.atomic_write import annotate_oserror, atomic_write


class MetricsFile:
    """A file of records, which also keeps them in memory for the plot.

    An existing file is truncated after step `until`, that of the checkpoint that the run resumes from.
    """

    def __init__(self, path: Path, until: int = 0):
        self.path = path
        self.records: list[dict] = [record for record in read_metrics(path) if record["step"] <= until]
        with atomic_write(path) as file:
            file.writelines(_line(record).encode() for record in self.records)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with annotate_oserror(self.path):
            self._file.close()

    def write(self, **record: int | float | str) -> None:
        """Append a record; raise ValueError if a number is not finite, OSError with the reason if writing fails."""
        with annotate_oserror(self.path):
            self._file.write(_line(record))
            self._file.flush()
        self.records.append(record)

    def sync(self) -> None:
        """Wait until all records are on disk, so that they are at least as recent as the next checkpoint."""
        with annotate_oserror(self.path):
            os.fsync(self._file.fileno())


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a file, none if it does not exist; an incomplete last line is ignored.

    Raises ValueError if a line is not a record, with its number.
    """
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    try:
        return [json.loads(line) for line in lines if line.endswith("\n")]
    except json.JSONDecodeError as error:
        number = next(n for n, line in enumerate(lines, 1) if line == error.doc)
        raise ValueError(f"every line of {path} must be a record in JSON, line {number} is not: remove it") from None


def curve(records: list[dict], split: str) -> tuple[list[int], list[float]]:
    """Return the steps and losses of the records of one split, "train" or "valid"."""
    selected = [record for record in records if record["split"] == split]
    return [record["step"] for record in selected], [record["loss"] for record in selected]


def _line(record: dict) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
