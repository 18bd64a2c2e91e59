"""Versions of anemoi-models to test with, in folders of the test environment (Makefile), each put first on the path."""

import sys
from pathlib import Path

import pytest

OLD = ("0.9.3", "0.11.2", "0.16.0")  # operational checkpoints need them
PINNED = "0.19.0"  # as in constraints.txt
OTHERS = ("0.10.0", "0.12.0", "0.12.1", "0.13.1", "0.14.1", "0.15.1", "0.17.0", "0.18.0")
NEWEST = "newest"  # whichever it is: a release of theirs must not stop a change of ours


def folder_of(version: str) -> Path:
    """Return the folder with a version of anemoi-models."""
    folder = Path(sys.prefix) / "anemoi-models" / version
    assert folder.is_dir(), f"{folder} is missing: make test or make nightly installs it"
    return folder


def each(*versions: str) -> list:
    """Return the versions as parameters of a test that loads them; some only in `make nightly`."""
    parameters = []
    for version in versions:
        marks = [pytest.mark.upstream]
        if version in OTHERS or version == NEWEST:
            marks.append(pytest.mark.nightly)
        parameters.append(pytest.param(version, marks=marks))
    return parameters
