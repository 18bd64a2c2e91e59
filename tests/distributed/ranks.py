"""Checks on several ranks: one process per rank, as under torchrun, started once per test run.

A check is a function of a process group and a `Verdict`, which collects problems and raises
nothing, so a check that fails leaves no rank in a collective. A check that raises ends the
processes; its traceback is the result of all later checks.
"""

import importlib
import json
import os
import socket
import sys
import tempfile
import traceback
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.forked import Program
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from anemoi_gt.distributed.process_group import exit_without_finalization

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPUS = torch.cuda.device_count()
ON_GPU = GPUS > 1  # NCCL, one GPU per rank; else gloo
WORLD_SIZE = min(GPUS, 4) if ON_GPU else 4
ALL = 0  # marks a check that runs on all ranks
# Groups of single ranks, in rank order. NCCL makes a group by splitting the communicator of all ranks,
# so all ranks make them, at the start, and not some of them in a check.
ALONE = []
TIMEOUT = 300  # s, of all checks of a module, on a busy machine
# relative to the largest value
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.bfloat16: 2e-2,
}


class Verdict:
    """Problems of one rank in a check."""

    def __init__(self):
        self.problems = []

    def that(self, holds, problem):
        if not holds:
            self.problems.append(problem)

    def same(self, name, actual, expected):
        """Record a problem unless both are bitwise equal."""
        equal = torch.equal(actual, expected) if torch.is_tensor(actual) else actual == expected
        if not equal:
            self.problems.append(f"{name}: {str(actual)[:200]} is not {str(expected)[:200]}")

    def close(self, name, actual, expected, terms=None):
        """Record a problem unless both agree to rounding, relative to `expected` or to `terms` that cancel."""
        shape = getattr(actual, "shape", None)
        if shape != expected.shape:
            self.problems.append(f"{name}: {shape}, not {expected.shape}")
            return
        finite = torch.isfinite(expected)
        same_finite = torch.equal(torch.isfinite(actual), finite)
        self.that(same_finite, f"{name}: other elements are not finite")
        scale = expected[finite] if terms is None else terms
        size = scale.abs().max().item() if scale.numel() else 0.0
        error = (actual - expected)[finite].abs().max().item() if finite.any() else 0.0
        limit = TOLERANCE[expected.dtype] * size
        self.that(error <= limit, f"{name}: off by {error:.1e}, allowed {limit:.1e}")

    def raises(self, error, words, function):
        """Record a problem unless `function()` raises `error` with these words."""
        try:
            function()
        except error as caught:
            self.that(words in str(caught), f"message {str(caught)!r} lacks {words!r}")
        else:
            self.problems.append(f"did not raise {error.__name__} with {words!r}")


def checks_of(modules):
    """Yield (module, check, ranks) for each check in modules of this folder and each of its numbers of ranks."""
    for module in modules:
        for name, check in list(vars(importlib.import_module(f"distributed.{module}")).items()):
            for ranks in getattr(check, "ranks", ()):
                if ranks <= WORLD_SIZE:
                    yield module, name, ranks or WORLD_SIZE


def cases():
    """Return the parameters of all checks."""
    found = checks_of(sorted(path.stem for path in HERE.glob("checks_*.py")))
    return [pytest.param(*case, marks=pytest.mark.ranks) for case in found]


def on_ranks(*ranks):
    """Mark a function of (group, verdict) as a check that runs on these numbers of ranks."""

    def mark(check):
        check.ranks = ranks
        return check

    return mark


def on_all_ranks(check):
    """Mark a function of (group, verdict) as a check that runs on all ranks, two or more."""
    check.ranks = (ALL,)
    return check


def fitting(*shapes):
    """Return the shapes (data, model) of meshes that need no more ranks than there are."""
    return [shape for shape in shapes if shape[0] * shape[1] <= dist.get_world_size()]


def meshes_with_this_rank(*shapes):
    """Yield the shapes that fit, each with its mesh, if this rank is in the mesh."""
    for shape in fitting(*shapes):
        mesh = mesh_of(*shape)
        if mesh.get_coordinate() is not None:
            yield shape, mesh


def device_type():
    """Return the device type of the run, also within `without_default_device`."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


@cache  # ranks connect anew for each group
def mesh_of(data, model, axes=("data", "model")):
    """Return a mesh of the first ranks; the others are not in it. All ranks make it together."""
    ranks = [[row * model + column for column in range(model)] for row in range(data)]
    return DeviceMesh(device_type(), ranks, mesh_dim_names=axes)


def mesh_of_group(group):
    """Return the mesh (1, ranks) of one model on the ranks of a check."""
    alone = ALONE[dist.get_rank()]
    names = ("data", "model")
    ranks = [dist.get_process_group_ranks(group)]
    return DeviceMesh.from_group([alone, group], device_type(), ranks, mesh_dim_names=names)


@cache
def cpu_group():
    """Return a group of all ranks, which make it together, that communicates from the CPU."""
    return dist.new_group(backend="gloo")


def whole_tensor(tensor):
    """Return a tensor, or the tensor of which this rank has a part. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def seeded(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextmanager
def without_default_device():
    """Unset the default device, whose mode does not compile; on a CPU, `main` sets none."""
    if not ON_GPU:
        yield
        return
    device = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(device)


def everywhere(value, group):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shared_folder(group):
    folder = tempfile.mkdtemp() if dist.get_rank(group) == 0 else None
    return Path(everywhere(folder, group)[0])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_checks(modules, folder):
    """Run the checks of modules of this folder on all ranks; return problems by "module-check-ranks" and rank."""
    folder.mkdir()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
    }
    processes = []
    for rank in map(str, range(WORLD_SIZE)):
        environment = shared | {"RANK": rank, "LOCAL_RANK": rank}
        process = Program(__file__, folder, *modules, folder=folder, environment=environment)
        processes.append(process)
    results = []
    ends = []
    for rank, process in enumerate(processes):
        status, output, error = process.finish(TIMEOUT * len(modules))
        ends.append(f"rank {rank} ended with {status} before: {(output + error)[-1500:]}")
        report = folder / f"{rank}.json"
        results.append(json.loads(report.read_text()) if report.exists() else {})
    problems = {}
    for module, name, ranks in checks_of(modules):
        key = f"{module}-{name}-{ranks}"
        problems[key] = {}
        for rank in range(ranks):
            result = results[rank].get(key, ends[rank])
            if result != "fine":
                problems[key][rank] = result
    return problems


def main(folder, *modules):
    """Run the checks of modules as one rank, with NCCL if every rank has a GPU; write the results after each."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    timeout = timedelta(seconds=TIMEOUT)
    if ON_GPU:
        dist.init_process_group("nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    groups = {size: dist.new_group(range(size)) for size in range(1, WORLD_SIZE)}
    groups[WORLD_SIZE] = dist.group.WORLD
    # Checks import this module by its name; the one that runs is `__main__`.
    importlib.import_module("distributed.ranks").ALONE.extend(
        [dist.new_group([rank]) for rank in range(WORLD_SIZE)]
    )
    tempfile.tempdir = folder
    rank = dist.get_rank()
    results = {}
    for module, name, ranks in checks_of(modules):
        if rank < ranks:
            check = getattr(sys.modules[f"distributed.{module}"], name)
            results[f"{module}-{name}-{ranks}"] = run(check, groups[ranks])
            Path(folder, f"{rank}.json").write_text(json.dumps(results))


def run(check, group):
    """Run one check; return "fine" if no rank has problems, else the problems of all ranks."""
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
