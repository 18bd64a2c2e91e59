"""Helpers for tests of the applications: the smallest data and graph, restored logging, one-line errors.

Hydra composes every config twice, first to look for a mode, which no config of this library has, and
a third of the time reads YAML in Python.
"""

import logging
import sys
from contextlib import contextmanager

import pytest
import yaml
from hydra._internal.hydra import Hydra

Hydra.get_mode = lambda *_, **__: None
yaml.SafeLoader = yaml.CSafeLoader

SMALL = [
    "data.grid_name=O4",
    "data.train_size=8",
    "data.valid_size=2",
    "data.test_size=3",
    "graph.refinement=1",
    "model.num_layers=1",
]


def last_of_each(arguments):
    """Return arguments without those that a later one replaces: an option may be given once."""
    last = {argument.partition("=")[0]: argument for argument in arguments if "=" in argument}
    return [a for a in arguments if "=" not in a or last[a.partition("=")[0]] is a]


@contextmanager
def logging_as_before():
    """Undo changes of an application to logging."""
    root = logging.getLogger()
    handlers, level, raises = root.handlers[:], root.level, logging.raiseExceptions
    yield
    root.handlers[:], root.level, logging.raiseExceptions = handlers, level, raises


def without_pictures(patch):
    """Write empty files instead of plots, which take longer than a small run."""
    # Imported here, after the tests have switched on Triton's interpreter.
    from anemoi_gt.app import evaluate_command

    for name in ("draw_training_plot", "draw_rollout_plot"):
        patch.setattr(evaluate_command, name, lambda path, *_: path.touch())


def train_in(folder, *arguments):
    """Train in a folder, for several tests."""
    from anemoi_gt.app import train_command

    with logging_as_before(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        without_pictures(patch)
        patch.setattr(sys, "argv", ["anemoi_gt.train", *last_of_each(arguments)])
        train_command.main()


def last_error(capsys, function, *arguments):
    """Call a function that must exit with status 1; return the last line of standard error."""
    with pytest.raises(SystemExit, match="^1$"):
        function(*arguments)
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]
