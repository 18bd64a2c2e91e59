"""Running checks on several ranks at once, as torchrun would: one process a rank, started once for all checks of a file.

A check is a function of a process group. It makes all its collectives first and reports through a `Verdict`, which raises nothing; the
ranks then agree. So a check that fails cannot leave another rank waiting. A check that breaks ends the processes; what it broke is reported.
"""

import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.mesh import exit_without_finalization

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
WORLD_SIZE, ALL = 4, 0  # ranks of the tests; a check on all of them
TIMEOUT = 300  # s, of all checks of a file, on a busy machine
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 2e-2}  # of the largest value


class Ended(NamedTuple):
    """How a process ended."""

    status: int
    output: str
    time: float  # as time.time() counts


class Verdict:
    """What a rank found wrong in a check."""

    def __init__(self):
        self.problems = []

    def that(self, holds, problem):
        """Note a problem unless `holds`."""
        if not holds:
            self.problems.append(problem)

    def same(self, name, actual, expected):
        """Note unless both are the same, bit by bit."""
        equal = torch.equal(actual, expected) if torch.is_tensor(actual) else actual == expected
        self.that(equal, f"{name}: {str(actual)[:200]} is not {str(expected)[:200]}")

    def close(self, name, actual, expected):
        """Note unless both agree to the rounding of their dtype."""
        if actual is None or actual.shape != expected.shape:
            self.problems.append(
                f"{name}: {None if actual is None else tuple(actual.shape)}, not {tuple(expected.shape)}"
            )
            return
        finite = torch.isfinite(expected)
        self.that(torch.equal(torch.isfinite(actual), finite), f"{name}: not finite in other places")
        size = expected[finite].abs().max().item() if finite.any() else 0.0
        error = (actual - expected)[finite].abs().max().item() if finite.any() else 0.0
        limit = TOLERANCE[expected.dtype] * max(size, 1.0)
        self.that(error <= limit, f"{name}: off by {error:.1e}, allowed {limit:.1e}")

    def raises(self, error, words, function):
        """Note unless `function()` raises `error` with these words."""
        try:
            function()
        except error as caught:
            self.that(words in str(caught), f"said {str(caught)!r}, not {words!r}")
        else:
            self.problems.append(f"did not raise {error.__name__} with {words!r}")


def checks_of(module_name, world_size=WORLD_SIZE):
    """The checks of a module by name, with the numbers of ranks that each runs on."""
    module = importlib.import_module(module_name)
    checks = {name: check.ranks for name, check in vars(module).items() if hasattr(check, "ranks")}
    return {name: tuple(ranks or world_size for ranks in numbers) for name, numbers in checks.items()}


def cases(module_name):
    """The checks of a module, one for each number of ranks, as pytest's parameters."""
    return [
        pytest.param(name, ranks, id=f"{name}-{ranks}")
        for name, numbers in checks_of(module_name).items()
        for ranks in numbers
    ]


def on_ranks(*ranks):
    """Mark a function of (group, verdict) as a check that runs on these numbers of ranks."""

    def mark(check):
        check.ranks = ranks
        return check

    return mark


def on_all_ranks(check):
    """Mark a function of (group, verdict) as a check that runs on all ranks there are, two at least."""
    check.ranks = (ALL,)
    return check


def fitting(*shapes):
    """Those shapes (data, model) of meshes for which there are ranks."""
    return [shape for shape in shapes if shape[0] * shape[1] <= dist.get_world_size()]


def device_type():
    """Of the run, within `without_default_device` too."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def mesh_of(data, model, axes=("data", "model")):
    """The first ranks on a mesh; the others have no place in it."""
    ranks = [[row * model + column for column in range(model)] for row in range(data)]
    return DeviceMesh(device_type(), ranks, mesh_dim_names=axes)


def seeded(seed):
    """A generator on the device of the run."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextmanager
def without_default_device():
    """Nothing but tensors says where they are: the mode of a default device does not compile."""
    device = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(None if device.type == "cpu" else device)


def everywhere(value, group):
    """What every rank has."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shared_folder(group):
    """A new folder that all ranks of a check know."""
    return Path(everywhere(tempfile.mkdtemp() if dist.get_rank(group) == 0 else None, group)[0])


def free_port():
    """A port of this machine on which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def spawn(arguments, world_size, *, hosts=1, environment=None, timeout=TIMEOUT):
    """Run `python *arguments` once for each rank with the environment that torchrun gives; return how each ended.

    Ranks that are told that they are on several hosts talk to those of others as hosts do, and may share the GPUs of this one.
    """
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world_size)}
    shared |= {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    processes = []
    try:
        for rank in range(world_size):
            host, local_rank = divmod(rank, -(-world_size // hosts))
            own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "NCCL_HOSTID": f"host {host}"}
            variables = os.environ | shared | own | (environment or {})
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    env=variables,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        end = time.monotonic() + timeout
        results = []
        for process in processes:
            try:
                output, _ = process.communicate(timeout=max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                output = process.communicate()[0] + f"\nstill running after {timeout} s"
            results.append(Ended(process.returncode, output, time.time()))
        return results
    finally:
        for process in processes:
            process.kill()
            process.wait()


def verdicts(name, world_size, folder, timeout=TIMEOUT):
    """Run all checks of a module of this folder; return {(check, ranks): problems by rank}, made once for all workers of a test run."""
    (folder / name).mkdir(exist_ok=True)
    report = folder / name / "verdicts.json"
    with (folder / name / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not report.exists():
            ended = spawn_checks([name], world_size, folder, timeout)
            report.write_text(json.dumps(found(f"distributed.{name}", folder / name, ended)))
    return {
        (check, int(ranks)): said
        for key, said in json.loads(report.read_text()).items()
        for check, ranks in [key.split("-")]
    }


def spawn_checks(names, world_size, folder, timeout, hosts=1):
    """Run the checks of modules of this folder one after another in the same processes; how each ended.

    What they found so far is in a folder for each module, which `found` reads. Hosts are those of `spawn`.
    """
    for name in names:
        (folder / name).mkdir(parents=True, exist_ok=True)
    arguments = [__file__, folder, *names]
    return spawn(arguments, world_size, hosts=hosts, environment=of_kernels(), timeout=timeout)


def of_kernels():
    """The environment in which kernels run here: on a GPU, or interpreted."""
    return {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}


def found(module_name, folder, ended):
    """What the checks of a module found, by "check-ranks": problems by rank, of those too that were not reached."""
    said = [
        json.loads(path.read_text()) if path.exists() else {}
        for path in (folder / f"{rank}.json" for rank in range(len(ended)))
    ]
    ends = [
        f"rank {rank} ended with {status} before: {output[-1500:]}" for rank, (status, output, _) in enumerate(ended)
    ]
    return {
        f"{name}-{ranks}": {
            rank: problem
            for rank in range(ranks)
            if (problem := said[rank].get(f"{name}-{ranks}", ends[rank])) != "fine"
        }
        for name, numbers in checks_of(module_name, len(ended)).items()
        for ranks in numbers
        if ranks <= len(ended)
    }


def main(folder, *module_names):
    """Run the checks of modules as one rank, each with what it writes in its part of the folder; with NCCL where every rank has a GPU."""
    torch.set_num_threads(1)
    gpu = torch.cuda.device_count() > int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group("nccl" if gpu else "gloo", timeout=timeout, device_id=device if gpu else None)
    world_size = dist.get_world_size()
    groups = {size: dist.new_group(range(size)) for size in range(1, world_size)} | {world_size: dist.group.WORLD}
    for name in module_names:
        tempfile.tempdir = str(Path(folder) / name)
        run_module(f"distributed.{name}", Path(folder) / name, groups)


def run_module(module_name, folder, groups):
    """Run the checks of a module on the groups of so many ranks; write what this rank found behind each."""
    module = importlib.import_module(module_name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    said = {}
    for name, numbers in checks_of(module_name, world_size).items():
        for ranks in numbers:
            if rank < ranks <= world_size:
                said[f"{name}-{ranks}"] = run(getattr(module, name), groups[ranks])
                (folder / f"{rank}.json").write_text(json.dumps(said))


def run(check, group):
    """Run one check, agree, and say what this rank found: "fine", or problems."""
    verdict = Verdict()
    torch.manual_seed(0)
    try:
        check(group, verdict)
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # the others notice: their connections close
    problems = everywhere(verdict.problems, group)
    return "fine" if not any(problems) else f"problems by rank: {problems}"


if __name__ == "__main__":
    main(*sys.argv[1:])
    exit_without_finalization(0)
