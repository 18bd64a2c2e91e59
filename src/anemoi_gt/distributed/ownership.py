"""Ownership of a folder or file by one process of all hosts, through a lock file."""

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout


class Ownership:
    """A context in which this process, and no other on any host, holds a lock file.

    The lock is an `flock`, which ends with the process, even if it is killed, so no lock is ever
    stale. NFS, Lustre with the mount option `flock`, and other network file systems honour it
    between hosts. On a file system without `flock`, filelock warns and writes a marker instead,
    which a killed process leaves behind.

    Entering raises ValueError if another process holds the lock, which the message names, and
    OSError if the file cannot be written.

    Parameters
    ----------
    lock : Path
        The lock file, in an existing folder; removed at the end.
    must, remedy : str
        Begin and end of the message: what must hold, and what to do.
    """

    def __init__(self, lock: Path, must: str, remedy: str):
        self._lock = FileLock(lock)
        # a file of its own, because older releases of filelock truncate a lock file to open it
        self._note = lock.with_name(f"{lock.name}.owner")
        self._must = must
        self._remedy = remedy

    def __enter__(self) -> None:
        try:
            self._lock.acquire(blocking=False)
        except Timeout:
            raise ValueError(
                f"{self._must}, {self._describe_owner()} holds it: {self._remedy}"
            ) from None
        owner = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "since": datetime.now(UTC).isoformat(" ", "seconds"),
        }
        self._note.write_text(json.dumps(owner))

    def __exit__(self, *_: object) -> None:
        # filelock discards a lock on a removed file, so a process that has it open does not own it
        for file in (self._note, Path(self._lock.lock_file)):
            file.unlink(missing_ok=True)
        self._lock.release()

    def _describe_owner(self) -> str:
        try:
            owner = json.loads(self._note.read_text())
        except (OSError, ValueError):  # between its lock and its note
            return "another process"
        return f"process {owner['process']} on {owner['host']}, started {owner['since']},"
