"""Process groups of a job that torchrun launched: initialisation, device mesh, exit.

- Launch: torchrun sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
- Initialisation: one device per rank, a process group by env:// (NCCL between GPUs, gloo between
  CPUs), and a mesh (data, model).
- If a rank fails, torchrun ends the others and reports the first error that a rank recorded.
- If a rank freezes, collectives of the others fail after `ShardingConfig.timeout`, and torchrun
  kills the frozen rank 30 s later.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from anemoi_gt.distributed.consensus import check_same, is_consequence, is_timeout
from anemoi_gt.option_checks import check_integer, check_positive

AXES = ("data", "model")
DEVICE_TYPES = ("cuda", "cpu")
STRATEGIES = ("none", "edges")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
DRAIN_SECONDS = 0.2
# torchrun orders errors by whole seconds, and takes a few to notice that a rank has ended
CONSEQUENCE_SECONDS = 5.0


@dataclass(frozen=True)
class ShardingConfig:
    """Division of the work among the ranks of a job.

    Parameters
    ----------
    strategy : {"none", "edges"}
        "edges" shards each model by its nodes, with all edges into them; "none" gives every rank a
        replica of the model and a share of each batch.
    model : int
        Number of ranks that share one model; there are ranks / model replicas (data parallel).
    parameters : bool
        Divide parameters, gradients, optimiser states and weight averages among all ranks: less
        memory, but slower steps. Read by `anemoi-gt train`; your own loop calls `shard_parameters`.
    timeout : float
        Seconds after which a collective fails if a rank does not take part. It must exceed the time
        in which rank 0 builds graph and model, because the other ranks wait for it.

    Raises
    ------
    ValueError
        For an unknown strategy, a value out of range, or more than one rank for a model that is
        not sharded.
    """

    strategy: str = "none"
    model: int = 1
    parameters: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ValueError(
                f"sharding.strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}"
            )
        check_integer("sharding.model", self.model)
        if self.model > 1 and self.strategy == "none":
            raise ValueError(
                f"sharding.model must be 1 without sharding, got {self.model}: choose "
                "sharding=edges"
            )
        if not isinstance(self.parameters, bool):
            raise ValueError(f"sharding.parameters must be true or false, got {self.parameters!r}")
        check_positive("sharding.timeout", self.timeout, ", in seconds")


def is_launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return all(name in os.environ for name in VARIABLES)


def local_device(device_type: str) -> torch.device:
    """Return the device of this rank: for "cuda", the GPU of its local rank.

    Raise ValueError for an unknown device type.
    """
    check_device_type(device_type)
    if device_type != "cuda":
        return torch.device(device_type)
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


@contextmanager
def init_distributed(config: ShardingConfig, device_type: str) -> Iterator[DeviceMesh]:
    """Initialise the process group and mesh of a job; destroy the group at the end. Collective.

    An error in the block is recorded for torchrun's report. If the error is due to another rank,
    this process first waits for torchrun to end it, so that the report names the rank that failed
    first. After an error the group is not destroyed, because other ranks may no longer take part:
    end the process, preferably with `exit_without_finalization`.

    Parameters
    ----------
    config : ShardingConfig
        The same on all ranks.
    device_type : str
        "cuda" uses the GPU of the local rank and NCCL, "cpu" uses gloo.

    Yields
    ------
    DeviceMesh
        With axes (data, model).

    Raises
    ------
    ValueError
        If the process was not launched by torchrun, or the config differs between ranks or does
        not fit their number.
    """
    timeout = timedelta(seconds=config.timeout)
    # When torchrun restarts the ranks, the store may still hold addresses of the former ones.
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    device = local_device(device_type)
    store = dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    options = {"store": store, "rank": rank, "world_size": world_size, "timeout": timeout}
    if device.type == "cuda":
        torch.cuda.set_device(device)  # object collectives copy their pickles to this device
        # with device_id, NCCL connects here, and not in the first collective of a step
        dist.init_process_group("nccl", **options, device_id=device)
    else:
        dist.init_process_group("gloo", **options)
    with _recorded_error(config.timeout):
        values = {f"sharding.{name}": value for name, value in asdict(config).items()}
        check_same(values, world_group())
        yield make_mesh(device_type, config.model, timeout)
    dist.destroy_process_group()
    drain_threads()


@contextmanager
def _recorded_error(timeout: float) -> Iterator[None]:
    """Record an error of the block in torchrun's error file, later than errors that caused it.

    `timeout` is that of the collectives, in seconds, which a note names where it has passed.
    """
    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        if is_consequence(error):
            error.add_note(
                "This error follows from an error of another rank, which ended or raised first."
            )
            _wait_for_end()
            error.add_note(
                "No rank of this host ended before it: another host, or a rank there, was lost."
            )
        elif is_timeout(error):
            error.add_note(
                f"A rank did not take part in time, sharding.timeout={timeout:g} s: it froze, or "
                "it is slow and needs a longer timeout, as rank 0 may while it builds the graph."
            )
        handler.record_exception(error)
        raise


def _wait_for_end() -> None:
    """Wait for torchrun to end this process by SIGTERM."""
    if threading.current_thread() is threading.main_thread():  # others cannot set handlers
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # no message from this process's own handler
    time.sleep(CONSEQUENCE_SECONDS)


def world_group() -> dist.ProcessGroup:
    """Return the group of all ranks; RuntimeError if `torch.distributed` is not initialised."""
    group = dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "torch.distributed must be initialised, got no process group; see init_distributed"
        )
    return group


def make_mesh(device_type: str, model: int, timeout: timedelta | None = None) -> DeviceMesh:
    """Return a device mesh of all ranks with axes (data, model). Collective.

    Parameters
    ----------
    device_type : str
        "cuda", if every rank has set its device, or "cpu".
    model : int
        Number of ranks that share one model. They are consecutive, so that they are on one host if
        possible.
    timeout : timedelta, optional
        For collectives along one axis; None is PyTorch's default.

    Raises
    ------
    ValueError
        For an unknown device type, or if the number of ranks is not a multiple of `model`.
    """
    world_size = dist.get_world_size()
    check_device_type(device_type)
    check_integer("sharding.model", model, least=None)
    if model < 1 or world_size % model != 0:
        raise ValueError(
            f"sharding.model must divide the number of ranks {world_size}, got {model}"
        )
    ranks = torch.arange(world_size).view(-1, model)
    groups = [
        _group_along("data", ranks.T.tolist(), timeout),
        _group_along("model", ranks.tolist(), timeout),
    ]
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=AXES)


def check_mesh(mesh: DeviceMesh) -> None:
    """Raise ValueError unless a mesh has the axes (data, model), in this order."""
    if mesh.mesh_dim_names != AXES:
        raise ValueError(f"mesh must have the axes {AXES}, got {mesh.mesh_dim_names}")


def check_device_type(device_type: object) -> None:
    """Raise ValueError unless it is a device type without an index, which ranks would share."""
    if device_type not in DEVICE_TYPES:
        raise ValueError(
            f"device_type must be one of {', '.join(DEVICE_TYPES)}, got {device_type!r}"
        )


def make_cpu_group(config: ShardingConfig) -> dist.ProcessGroup:
    """Return a gloo group of all ranks with the timeout of the job. Collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=config.timeout))


def drain_threads() -> None:
    """Give gloo's threads time to release the tensors of the last collectives.

    The threads need the interpreter for that. Before Python 3.14, a thread that waits for the
    interpreter when finalisation begins aborts the process ("terminate called without an active
    exception").
    """
    if sys.version_info < (3, 14):
        time.sleep(DRAIN_SECONDS)


def exit_without_finalization(status: int) -> NoReturn:
    """Flush the output and exit immediately.

    Finalisation aborts if a gloo thread still waits for the interpreter (`drain_threads`), and can
    hang on a GPU whose collective waits for a lost rank.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _group_along(axis: str, ranks: list[list[int]], timeout: timedelta | None) -> dist.ProcessGroup:
    """Create a group for each list of ranks; return the group of this rank. Collective.

    `init_device_mesh` would split groups off the world group, where PyTorch 2.11 segfaults if the
    process has had another NCCL group (github.com/pytorch/pytorch/pull/192109).
    """
    if len(ranks) == 1:
        return world_group()
    group, _ = dist.new_subgroups_by_enumeration(ranks, timeout, group_desc=f"ranks along {axis}")
    return group
