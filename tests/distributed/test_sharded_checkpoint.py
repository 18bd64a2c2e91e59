"""Checkpoints of sharded models, and of runs of either launch."""

import os
import re
import resource
import runpy
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.refusals import raises

from anemoi_gt.app import train_command as train
from anemoi_gt.app.training.run_files import load_checkpoint as load_file
from anemoi_gt.app.training.run_folder import find_run
from anemoi_gt.app.training.sharded import write_as_file
from anemoi_gt.distributed import (
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from anemoi_gt.distributed.ownership import Ownership
from anemoi_gt.distributed.sharded_checkpoint import load_values


@pytest.fixture
def folder_with(tmp_path):
    """Return a function that makes the folder of a run with a file, and returns the path of its last.pt."""

    def folder_with(file):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_bytes(b"a run")
        return tmp_path / "last.pt"

    return folder_with


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_incomplete_checkpoints_do_not_count_as_a_run(folder_with):
    for leftover in (
        "metrics.jsonl",
        "best.pt",
        "last.pt.partial",
        "last.partial/.metadata",
        "last/a",
    ):
        assert find_run(folder_with(leftover)) is None, leftover


def test_a_run_interrupted_between_the_renames_keeps_its_checkpoint_until_the_next(
    alone, tmp_path, monkeypatch
):
    last = tmp_path / "last"
    former = tmp_path / "last.former"
    replace = os.replace
    save_checkpoint(last, {"step": 1}, {}, alone)
    last.rename(former)
    assert load_checkpoint(last, {"step": 0}, {}, alone) == {"step": 1}

    def watched(source, target):
        assert (former / ".metadata").exists()
        assert target == last
        replace(source, target)

    monkeypatch.setattr(os, "replace", watched)
    save_checkpoint(last, {"step": 2}, {}, alone)
    assert load_checkpoint(last, {"step": 0}, {}, alone) == {"step": 2}
    assert not former.exists()


@pytest.fixture
def written(alone, tmp_path):
    """Path of a checkpoint of one rank, with a config in it."""
    config = {"seed": 1, "model": {"heads": 4}, "none": {}}
    save_checkpoint(tmp_path / "last", {"weight": torch.arange(5.0), "config": config}, {}, alone)
    return tmp_path / "last"


def test_values_are_read_by_key_and_a_dropped_empty_config_group_is_no_change(written, recwarn):
    config = load_values(written, "config")
    assert config == {"seed": 1, "model": {"heads": 4}}
    assert not recwarn.list
    train.check_same_config(written, config, config | {"none": {}})
    raises(
        lambda: train.check_same_config(written, config, config | {"none": 0}),
        "written with none=None, not 0$",
    )


def test_paths_may_be_strings(alone, tmp_path):
    folder = str(tmp_path / "last")
    assert find_checkpoint(folder) is None
    state = {"weight": torch.arange(5.0), "config": {"seed": 1}}
    save_checkpoint(folder, state, {}, alone)
    assert find_checkpoint(folder) == find_run(f"{folder}.pt") == tmp_path / "last"
    assert load_values(folder, "config") == {"seed": 1}
    assert torch.equal(load_checkpoint(folder, state, {}, alone)["weight"], torch.arange(5.0))
    write_as_file(f"{folder}.pt")
    assert torch.equal(load_file(f"{folder}.pt")["weight"], torch.arange(5.0))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
def test_a_truncated_checkpoint_is_refused_by_name(written, alone, file):
    torn = written / file
    torn.write_bytes(torn.read_bytes()[:20])
    message = (
        f"^(rank 0: )?a checkpoint must be complete and of this model, cannot read {written}: "
    )
    raises(lambda: load_values(written, "config"), message)
    raises(lambda: load_checkpoint(written, {"weight": torch.zeros(5)}, {}, alone), message)


def test_an_overwritten_byte_of_a_tensor_is_found_and_its_record_named(written, alone):
    file = written / "__0_0.distcp"
    content = file.read_bytes()
    weight = torch.arange(5.0).numpy().tobytes()
    assert content.count(weight) == 1
    file.write_bytes(content.replace(weight, weight[:-1] + b"A"))
    message = f"cannot read {written}: DamagedError: .*checksum: weight in __0_0.distcp"
    raises(lambda: load_checkpoint(written, {"weight": torch.zeros(5)}, {}, alone), message)


def test_another_model_is_refused_by_name_and_a_lost_rank_is_not_a_corrupt_checkpoint(
    written, alone, monkeypatch
):
    with pytest.raises(ValueError, match=f"of this model, cannot read {written}: .*bias"):
        load_checkpoint(written, {"bias": torch.zeros(5)}, {}, alone)

    def lost(*_, **__):
        raise dist.DistNetworkError("Connection closed by peer")

    monkeypatch.setattr(dcp, "load", lost)
    with pytest.raises(dist.DistNetworkError):
        load_checkpoint(written, {"weight": torch.zeros(5)}, {}, alone)


def test_a_checkpoint_that_cannot_be_written_is_named(written, alone):
    written.with_name("last.partial").write_text("in the way")
    with pytest.raises(
        OSError, match="^could not write the checkpoint .*last.partial: FileExistsError"
    ):
        save_checkpoint(written, {"weight": torch.zeros(5)}, {}, alone)
    assert load_values(written, "config")["seed"] == 1


def test_a_checkpoint_that_does_not_fit_leaves_the_former_one_and_no_other_file(written, alone):
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (2**16, hard)
    )  # the next write fails, as on a full disk
    try:
        with pytest.raises(OSError, match="^could not write the checkpoint .*last.partial: "):
            save_checkpoint(written, {"weight": torch.zeros(2**16)}, {}, alone)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not written.with_name("last.partial").exists()
    assert load_values(written, "config")["seed"] == 1


def test_a_checkpoint_that_another_job_writes_is_not_touched(written, alone):
    (written.parent / "last.partial").mkdir()
    other = Ownership(written.with_name(".last.lock"), "one job", "wait")
    message = f"^rank 0: could not write the checkpoint {written}: one job at a time may write it, "
    with other, pytest.raises(OSError, match=f"{message}process {os.getpid()} on "):
        save_checkpoint(written, {"weight": torch.zeros(5)}, {}, alone)
    assert (written.parent / "last.partial").exists()
    assert load_values(written, "config")["seed"] == 1
    (written.parent / "last.partial").rmdir()
    save_checkpoint(written, {"weight": torch.zeros(5)}, {}, alone)
    assert [path.name for path in written.parent.iterdir() if path.name != "store"] == ["last"]


@pytest.mark.parametrize("form", ["best", "best.former"])
def test_best_pt_is_replaced_when_the_new_file_is_complete(alone, form, monkeypatch, tmp_path):
    dcp.save({"average": {"weight": torch.arange(5.0)}}, checkpoint_id=tmp_path / form)
    best = tmp_path / "best.pt"
    write = torch.save
    best.write_bytes(b"former")

    def watched(state, file):
        write(state, file)
        assert best.read_bytes() == b"former"

    monkeypatch.setattr(torch, "save", watched)
    write_as_file(best)
    assert torch.equal(load_file(best)["average"]["weight"], torch.arange(5.0))
    assert not best.with_name("best.pt.partial").exists()


@pytest.mark.parametrize("name", ["last.pt", "last"])
@pytest.mark.parametrize("form", ["last", "last.former"])
def test_a_folder_in_place_of_a_file_is_refused_with_the_command_to_convert(
    written, name, form, capfd, monkeypatch
):
    written.rename(written.with_name(form))
    message = f"one file, got the folder {written.with_name(form)} of several ranks"
    with pytest.raises(ValueError, match=message) as refused:
        load_file(written.with_name(name))
    module, *words = re.search(r"python -m (.*) FILE.pt", str(refused.value))[1].split()
    monkeypatch.setattr(sys, "argv", [module, *words, str(written.with_name("file.pt"))])
    monkeypatch.delitem(sys.modules, module, raising=False)  # as in a process of its own
    runpy.run_module(module, run_name="__main__")
    assert torch.equal(load_file(written.with_name("file.pt"))["weight"], torch.arange(5.0))


def test_a_missing_best_checkpoint_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=f"^there must be a checkpoint in {tmp_path / 'best'}, found none$"
    ):
        write_as_file(tmp_path / "best.pt")
