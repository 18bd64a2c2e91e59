"""Checksums that `torch.save` writes and `torch.load` does not compare (torch 2.13)."""

from typing import BinaryIO
from zipfile import ZipFile


class DamagedError(ValueError):
    """A record does not have its checksum."""


def check_checksums(file: BinaryIO) -> None:
    """Raise DamagedError if a record of a file from `torch.save` does not have its checksum.

    Raises one of a dozen types of errors, such as BadZipFile, if the file is no such archive.
    """
    damaged = ZipFile(file).testzip()
    if damaged is not None:
        raise DamagedError(f"{damaged} does not have its checksum")
