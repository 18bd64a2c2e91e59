"""Setup of a job: options, devices and errors; `test_application` runs jobs."""

import multiprocessing
import threading
import time

import pytest
import torch
import yaml
from support.refusals import raises, refused

from anemoi_gt import distributed
from anemoi_gt.distributed import ShardingConfig, is_launched
from anemoi_gt.distributed.process_group import (
    VARIABLES,
    drain_threads,
    exit_without_finalization,
    local_device,
)
from distributed.ranks import ROOT

INF = float("inf")


def test_the_config_file_has_the_defaults_of_the_class():
    options = yaml.safe_load((ROOT / "configs" / "sharding" / "none.yaml").read_text())
    del options["_target_"]
    assert ShardingConfig(**options) == ShardingConfig()


@refused(
    ({"strategy": "nodes"}, "sharding.strategy must be one of none, edges, got 'nodes'"),
    ({"strategy": "edges", "model": 0}, "sharding.model must be at least 1, got 0"),
    ({"model": 4}, "sharding.model must be 1 without sharding, got 4"),
    ({"parameters": "all"}, "sharding.parameters must be true or false, got 'all'"),
    *(
        ({"timeout": s}, f"sharding.timeout must be positive and finite, in seconds, got {s}")
        for s in (0.0, INF)
    ),
)
def test_options_without_meaning_are_refused(wrong, message):
    raises(lambda: ShardingConfig(**wrong), message)


def test_a_process_is_launched_if_it_has_all_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        assert not is_launched()
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
    assert is_launched()


@pytest.mark.parametrize(
    ("device_type", "device"), [("cpu", torch.device("cpu")), ("cuda", torch.device("cuda", 1))]
)
def test_a_rank_uses_the_gpu_of_its_local_rank_or_the_cpu(monkeypatch, device_type, device):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert local_device(device_type) == device


@pytest.mark.parametrize(
    "device_type", ["gpu", "cuda:0", torch.device("cuda", 0)]
)  # the last two: one GPU for all
def test_other_device_types_are_refused(device_type):
    raises(lambda: local_device(device_type), "^device_type must be one of cuda, cpu, got ")


def test_threads_end_before_finalisation():
    ended = []
    threading.Timer(0.1, ended.append, ["late"]).start()
    drain_threads()
    assert ended == ["late"]


def end_with_a_thread():
    threading.Thread(target=time.sleep, args=(60,)).start()
    print("printed", end="")
    exit_without_finalization(3)


def test_an_exit_without_finalisation_waits_for_no_thread_and_keeps_the_output(capfd):
    process = multiprocessing.get_context("fork").Process(target=end_with_a_thread)
    process.start()
    process.join(30)
    assert (process.exitcode, capfd.readouterr().out) == (3, "printed")


@pytest.mark.parametrize(
    "name", ["broadcast_from_rank0", "check_finite", "fingerprint", "raise_on_all_ranks"]
)
def test_helpers_of_the_former_release_warn_and_work(name):
    with pytest.warns(DeprecationWarning, match=f"distributed.{name} will be removed in 0.6.0"):
        assert getattr(distributed, name) is getattr(distributed.consensus, name)
