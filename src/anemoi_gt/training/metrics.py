"""Metrics as JSON lines: one record a line, written as it happens, so that an interrupted run leaves all but the last."""

import json
from pathlib import Path


class MetricsFile:
    """A file of records; also keeps them for the picture.

    Parameters
    ----------
    path : Path
        The file; one that exists is begun anew.
    """

    def __init__(self, path: Path):
        self.path = path
        self.records: list[dict] = []
        self._file = path.open("w", encoding="utf-8")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, **record: int | float | str) -> None:
        """Append a record.

        Raises
        ------
        ValueError
            If a number is not finite: JSON has no word for it.
        """
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        self.records.append(record)


def curve(records: list[dict], split: str) -> tuple[list[int], list[float]]:
    """Return the steps and losses of the records of one split, "train" or "valid"."""
    chosen = [record for record in records if record["split"] == split]
    return [record["step"] for record in chosen], [record["loss"] for record in chosen]
