import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import yaml

from anemoi_gt.distributed import ShardingConfig, is_launched, started
from anemoi_gt.distributed.launcher import VARIABLES, join_store
from anemoi_gt.distributed.mesh import check_model_options, own_device
from distributed.ranks import HERE, ROOT, free_port


def test_ranks_are_data_parallel_by_default():
    assert ShardingConfig() == ShardingConfig(strategy="none", model=1, timeout=300.0)


def test_the_config_file_holds_what_holds_without_it():
    options = yaml.safe_load((ROOT / "configs" / "sharding" / "none.yaml").read_text())
    assert ShardingConfig(**{name: value for name, value in options.items() if name != "_target_"}) == ShardingConfig()


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"strategy": "nodes"}, "sharding.strategy must be one of none, edges, got 'nodes'"),
        ({"strategy": "edges", "model": 0}, "sharding.model must be at least 1, got 0"),
        ({"model": 4}, "sharding.model must be 1 when nothing is divided, got 4"),
        ({"timeout": 0.0}, "sharding.timeout must be positive and finite, in seconds, got 0.0"),
        ({"timeout": float("inf")}, "sharding.timeout must be positive and finite, in seconds, got inf"),
    ],
)
def test_configs_that_mean_nothing_are_refused(numbers, message):
    with pytest.raises(ValueError, match=message):
        ShardingConfig(**numbers)


def test_a_model_that_ranks_cannot_share_is_known_by_its_options():
    check_model_options({"heads": 4, "mapper_chunks": 1})
    with pytest.raises(ValueError, match="^model.mapper_chunks must be 1 under torchrun, got 2: "):
        check_model_options({"mapper_chunks": 2})


def test_a_process_without_launcher_is_told_of_torchrun(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not is_launched()
    with (
        pytest.raises(ValueError, match="must be started by torchrun, RANK, .* are not set"),
        started(ShardingConfig(), "cpu"),
    ):
        pass


@pytest.mark.parametrize(("device_type", "device"), [("cpu", torch.device("cpu")), ("cuda", torch.device("cuda", 1))])
def test_a_rank_takes_the_gpu_of_its_number_on_the_host_or_the_cpu(monkeypatch, device_type, device):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert own_device(device_type) == device


@pytest.mark.parametrize(
    "device_type", ["gpu", "cuda:0", torch.device("cuda", 0)]
)  # the last two are one GPU for all ranks
def test_what_names_no_type_of_device_is_refused(device_type):
    with pytest.raises(ValueError, match="^device_type must be one of cuda, cpu, got "):
        own_device(device_type)


def test_what_is_no_sharding_config_is_refused():
    with (
        pytest.raises(ValueError, match="config must be a ShardingConfig, got {'model': 2}"),
        started({"model": 2}, "cpu"),
    ):
        pass


def test_more_ranks_of_a_host_than_gpus_are_refused(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ValueError, match="^ranks of a host must have a GPU each, got local rank 2 and 2 GPUs$"):
        own_device("cuda")


def test_each_start_of_a_rank_has_keys_of_its_own_in_the_store_of_its_launcher(monkeypatch):
    held = dist.HashStore()
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(held, 0, 1)]))
    first, *_ = join_store("group", timedelta(seconds=1))
    first.set("address of rank 1", "nobody listens there any more")
    for purpose in ("group", "meeting"):
        store, rank, size = join_store(purpose, timedelta(seconds=1))
        assert (rank, size) == (0, 1) and not store.check(["address of rank 1"])


@pytest.fixture
def counted(tmp_path):
    """Start two ranks under a launcher, so many times in the same processes; the ranks that each counted, and what the launcher said."""

    def starting(*arguments, restarts=0):
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
        command += [f"--master-port={free_port()}", "--master-addr=127.0.0.1", f"--max-restarts={restarts}"]
        command += [HERE / "starting.py", tmp_path, *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        files = (tmp_path / f"{rank}.txt" for rank in range(2))
        return [file.read_text() if file.exists() else "" for file in files], ended.stderr[-2000:]

    return starting


def test_ranks_of_a_launcher_start_again_and_again(counted):
    ranks, said = counted("6")
    assert ranks == ["2 2 2 2 2 2 "] * 2, said


def test_ranks_start_anew_when_one_died_before_it_had_joined(counted):
    ranks, said = counted("2", "dying", restarts=1)
    assert ranks == ["2 2 "] * 2, said
    assert "timed out" not in said  # nor does a rank that waits say so


def test_a_process_with_all_of_its_variables_is_launched(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "0")
    assert is_launched()
