"""The start and the end of a job on several ranks, as torchrun launches it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.grad_sync import check_device_type, make_mesh
from anemoi_gt.distributed.launcher import join_store, local_rank, missing_variables
from anemoi_gt.distributed.watch import watched
from anemoi_gt.option_checks import check_integer, check_number

STRATEGIES = ("none", "edges")


@dataclass(frozen=True)
class ShardingConfig:
    """How the ranks of a job share the work.

    Parameters
    ----------
    strategy : {"none", "edges"}
        How the ranks of one model divide it; "none": every rank has a model of its own, and they share the batches.
    model : int
        Ranks that share one model. All others are data parallel: ranks / model models.
    timeout : float
        Seconds after the last sign of life of a rank by which the others end.

    Raises
    ------
    ValueError
        For an unknown strategy, a number out of range, or more than one rank for a model that is not divided.
    """

    strategy: str = "none"
    model: int = 1
    timeout: float = 300.0

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"sharding.strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        check_integer("sharding.model", self.model)
        check_number("sharding.timeout", self.timeout)
        if self.model > 1 and self.strategy == "none":
            raise ValueError(
                f"sharding.model must be 1 when nothing is divided, got {self.model}: choose sharding=edges"
            )
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"sharding.timeout must be positive and finite, in seconds, got {self.timeout}")


def own_device(device_type: str) -> torch.device:
    """Return the device of this rank: for "cuda" the GPU of its local rank.

    Raises
    ------
    ValueError
        For another type of device, or when this host has no such GPU.
    """
    check_device_type(device_type)
    if device_type != "cuda":
        return torch.device(device_type)
    local, count = local_rank(), torch.cuda.device_count()
    if local >= count:
        raise ValueError(f"ranks of a host must have a GPU each, got local rank {local} and {count} GPUs")
    return torch.device("cuda", local)


def check_model_options(options: Mapping[str, Any]) -> None:
    """Raise before a model is made where its options say that the ranks cannot share it; `shard_model` looks at what is made.

    Parameters
    ----------
    options : mapping of str to values
        Of `EncoderProcessorDecoder`, by name; one that is not there says nothing.

    Raises
    ------
    ValueError
        For mappers that work in chunks.
    """
    if options.get("mapper_chunks", 1) != 1:
        pieces = options["mapper_chunks"]
        raise ValueError(
            f"model.mapper_chunks must be 1 under torchrun, got {pieces}: a rank's part is a piece already"
        )


@contextmanager
def started(config: ShardingConfig, device_type: str) -> Iterator[DeviceMesh]:
    """Join the ranks of a job, and end with them: all together, or all when one fails. Collective.

    Parameters
    ----------
    config : ShardingConfig
        The same on all ranks.
    device_type : str
        "cuda" takes the GPU of the local rank and NCCL, "cpu" gloo.

    Yields
    ------
    DeviceMesh
        With axes (data, model).

    Raises
    ------
    ValueError
        When no launcher started this process, a rank has no GPU of its own, or the ranks cannot be shared out.
    """
    if not isinstance(config, ShardingConfig):
        raise ValueError(f"config must be a ShardingConfig, got {config!r}")
    if missing := missing_variables():
        raise ValueError(f"several ranks must be started by torchrun, {', '.join(missing)} are not set")
    timeout, device = timedelta(seconds=config.timeout), own_device(device_type)
    patience = 2 * timeout  # of collectives: the watch is to speak first
    store, rank, size = join_store("group", patience)
    joining = {"store": store, "rank": rank, "world_size": size, "timeout": patience}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", **joining, device_id=device)
    else:
        dist.init_process_group("gloo", **joining)
    with watched(timeout):
        yield make_mesh(device_type, config.model, patience)
    dist.destroy_process_group()
