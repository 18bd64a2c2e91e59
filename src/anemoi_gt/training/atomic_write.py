"""Atomic writes: a file holds either its former content or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open a file that replaces `path` when the block ends without error, and is removed otherwise.

    The folder exists; the former file stays until all of the new one is on disk. Raises OSError, which names `path` and
    the reason, if it cannot be written, a full disk among the reasons.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with annotate_oserror(path), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # else a crash of the machine can leave an empty file under the new name
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def annotate_oserror(path: Path) -> Iterator[None]:
    """Raise an OSError with `path` and the reason, in place of one without, when the system refuses to write a file."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # PyTorch's writer wraps the system's refusal in a RuntimeError
        refusal = error if isinstance(error, OSError) else error.__context__
        if not isinstance(refusal, OSError):
            raise
        raise OSError(f"could not write {path}: {refusal.strerror or refusal}") from error
