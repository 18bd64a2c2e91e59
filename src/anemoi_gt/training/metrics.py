"""Metrics as JSON lines: one record a line, written as it happens, so that an interrupted run leaves all but the last."""

import json
import os
from pathlib import Path

from anemoi_gt.training.atomic_write import annotate_oserror, atomic_write


class MetricsFile:
    """A file of records; also keeps them for the picture.

    Parameters
    ----------
    path : Path
        The file; one that exists is begun anew, except for what `until` keeps.
    until : int
        The step of the checkpoint that the run continues from: records up to there are kept, later ones will come again.
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
        """Append a record.

        Raises
        ------
        ValueError
            If a number is not finite: JSON has no word for it.
        OSError
            If it cannot be written, with the file and the reason.
        """
        with annotate_oserror(self.path):
            self._file.write(_line(record))
            self._file.flush()
        self.records.append(record)

    def sync(self) -> None:
        """Wait until all records are on disk, so that no later checkpoint can outlive them."""
        with annotate_oserror(self.path):
            os.fsync(self._file.fileno())


def read_metrics(path: Path) -> list[dict]:
    """Return the records of a file, none if there is no file; a last line that was cut off is left out.

    Raises
    ------
    ValueError
        If a line holds no record, with its number.
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
    chosen = [record for record in records if record["split"] == split]
    return [record["step"] for record in chosen], [record["loss"] for record in chosen]


def _line(record: dict) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
