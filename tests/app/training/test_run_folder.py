"""Which run a folder holds, whichever launch wrote it, from where it continues, and who owns it."""

import json
import multiprocessing
import os
import re
import time
from pathlib import Path

import pytest

from anemoi_gt.app.training.run_folder import (
    CONFIG,
    ONE_PROCESS,
    TORCHRUN,
    checkpoint_to_continue,
    own,
    read_config,
)

FORMS = {"last.pt": ONE_PROCESS, "last/.metadata": TORCHRUN, "last.former/.metadata": TORCHRUN}
OTHERS = [
    ("last.pt", TORCHRUN),
    ("last/.metadata", ONE_PROCESS),
    ("last.former/.metadata", ONE_PROCESS),
]
BEGINS = "another hydra.run.dir starts a new one"


@pytest.fixture
def folder_with(tmp_path):
    """Return a function that makes the folder of a run with a file."""

    def folder_with(file):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"a run")
        return tmp_path

    return folder_with


@pytest.mark.parametrize(("form", "writer"), FORMS.items())
def test_a_run_is_continued_from_its_own_form_with_resume_and_refused_without(
    folder_with, form, writer
):
    folder = folder_with(form)
    expected = folder / form.removesuffix("/.metadata")
    assert checkpoint_to_continue(folder, writer, resume=True) == expected
    message = f"^{re.escape(str(folder))} holds a run.* continues it, {BEGINS}$"
    with pytest.raises(ValueError, match=message):
        checkpoint_to_continue(folder, writer, resume=False)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(("form", "writer"), OTHERS)
def test_a_run_of_the_other_form_is_refused_with_the_command_that_continues_it(
    folder_with, form, writer, resume
):
    folder = folder_with(form)
    command = "resume=true with torchrun"
    if writer == TORCHRUN:
        command = "resume=true without torchrun"
    run = f"{folder} holds a run of {FORMS[form]}, in {form.removesuffix('/.metadata')}"
    with pytest.raises(ValueError, match="holds a run of") as refused:
        checkpoint_to_continue(folder, writer, resume=resume)
    assert str(refused.value) == f"{run}: {command} continues it, {BEGINS}"


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("writer", [ONE_PROCESS, TORCHRUN])
@pytest.mark.parametrize(
    ("best", "missing"),
    [("best.pt", "last.pt"), ("best/.metadata", "last"), ("best.former/.metadata", "last.former")],
)
def test_a_best_checkpoint_without_the_last_one_is_refused_and_the_missing_file_named(
    folder_with, best, missing, writer, resume
):
    folder = folder_with(best)
    with pytest.raises(ValueError, match=f"a copy of best.* named {missing} continues it"):
        checkpoint_to_continue(folder, writer, resume=resume)


def test_metrics_without_a_checkpoint_are_a_run_that_only_resume_starts_again(folder_with):
    folder = folder_with("metrics.jsonl")
    assert checkpoint_to_continue(folder, ONE_PROCESS, resume=True) is None
    with pytest.raises(ValueError, match="ended before its first checkpoint: resume=true starts"):
        checkpoint_to_continue(folder, ONE_PROCESS, resume=False)
    (folder / "metrics.jsonl").write_text("")  # no step was recorded
    assert checkpoint_to_continue(folder, ONE_PROCESS, resume=False) is None


def hold(folder, owned):
    with own(folder):
        owned.set()
        time.sleep(600)


@pytest.fixture
def owner(tmp_path):
    """A process that owns a folder."""
    context = multiprocessing.get_context("fork")
    owned = context.Event()
    process = context.Process(target=hold, args=(tmp_path, owned), daemon=True)
    process.start()
    assert owned.wait(60)
    yield process
    process.kill()
    process.join()


def test_the_owner_of_a_folder_is_named_and_its_death_frees_the_folder(owner, tmp_path):
    host = os.uname().nodename
    message = f"one run at a time .* process {owner.pid} on {host}, started 20.*: wait for its end"
    with pytest.raises(ValueError, match=message), own(tmp_path):
        pass
    owner.kill()
    owner.join()
    with own(tmp_path):
        note = json.loads(Path(tmp_path / ".lock.owner").read_text())
        assert note["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_an_owner_without_its_note_is_another_process(owner, tmp_path):
    (tmp_path / ".lock.owner").unlink()
    with pytest.raises(ValueError, match=", another process holds it: "), own(tmp_path):
        pass


def test_the_config_of_a_run_of_0_4_0_has_the_names_of_this_version(folder_with):
    folder = folder_with(CONFIG)
    (folder / CONFIG).write_text("attention:\n  backend: torch\nresume: true\n")
    assert read_config(folder) == {"kernels": {"backend": "torch"}, "resume": True}
