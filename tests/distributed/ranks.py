"""Checks on several ranks: one process per rank, as under torchrun, started once for all checks of a test run.

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
from pathlib import Path

import torch
import torch.distributed as dist
from support.forked import Program
from support.interpreter import speed_up_interpreter
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.process_group import exit_without_finalization

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GPUS = torch.cuda.device_count()
ON_GPU = GPUS > 1  # NCCL, one GPU per rank; else gloo
WORLD_SIZE, ALL = min(GPUS, 4) if ON_GPU else 4, 0  # ranks of the tests; marks a check on all ranks
TIMEOUT = 300  # s, of all checks of a module, on a busy machine
# of the largest value, whatever its size
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 4e-6,
    torch.bfloat16: 2e-2,
}


class Verdict:
    """Problems that one rank found in a check."""

    def __init__(self):
        self.problems = []

    def that(self, holds, problem):
        if not holds:
            self.problems.append(problem)

    def same(self, name, actual, expected):
        """Note unless both are the same, bit by bit."""
        equal = torch.equal(actual, expected) if torch.is_tensor(actual) else actual == expected
        if not equal:
            self.problems.append(f"{name}: {str(actual)[:200]} is not {str(expected)[:200]}")

    def close(self, name, actual, expected, terms=None):
        """Note unless both agree to rounding of their dtype, at the scale of `expected` or of `terms` that cancel."""
        if (shape := getattr(actual, "shape", None)) != expected.shape:
            self.problems.append(f"{name}: {shape}, not {expected.shape}")
            return
        finite = torch.isfinite(expected)
        self.that(torch.equal(torch.isfinite(actual), finite), f"{name}: not finite elsewhere")
        scale = expected[finite] if terms is None else terms
        size = scale.abs().max().item() if scale.numel() else 0.0
        error = (actual - expected)[finite].abs().max().item() if finite.any() else 0.0
        limit = TOLERANCE[expected.dtype] * size
        self.that(error <= limit, f"{name}: off by {error:.1e}, allowed {limit:.1e}")

    def raises(self, error, words, function):
        """Note unless `function()` raises `error` with these words."""
        try:
            function()
        except error as caught:
            self.that(words in str(caught), f"said {str(caught)!r}, not {words!r}")
        else:
            self.problems.append(f"did not raise {error.__name__} with {words!r}")


def checks_of(modules):
    """(module, check, ranks) of all checks in modules of this folder, for each number of ranks that each runs on."""
    for module in modules:
        for name, check in list(vars(importlib.import_module(f"distributed.{module}")).items()):
            for ranks in getattr(check, "ranks", ()):
                if ranks <= WORLD_SIZE:
                    yield module, name, ranks or WORLD_SIZE


def cases():
    return list(checks_of(sorted(path.stem for path in HERE.glob("checks_*.py"))))


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
    """Those shapes (data, model) of meshes for which there are ranks."""
    return [shape for shape in shapes if shape[0] * shape[1] <= dist.get_world_size()]


def meshes_with_this_rank(*shapes):
    """Yield those shapes that fit, with their meshes, of which this rank is part."""
    for shape in fitting(*shapes):
        mesh = mesh_of(*shape)
        if mesh.get_coordinate() is not None:
            yield shape, mesh


def device_type():
    """Device type of the run, also within `without_default_device`."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def mesh_of(data, model, axes=("data", "model")):
    """Mesh of the first ranks; the others are not part of it."""
    ranks = [[row * model + column for column in range(model)] for row in range(data)]
    return DeviceMesh(device_type(), ranks, mesh_dim_names=axes)


def mesh_of_group(group):
    """Mesh (1, ranks) of one model on the ranks of a check, which others take no part in."""
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    names = ("data", "model")
    ranks = [dist.get_process_group_ranks(group)]
    return DeviceMesh.from_group([alone, group], device_type(), ranks, mesh_dim_names=names)


def seeded(seed):
    return torch.Generator(torch.get_default_device()).manual_seed(seed)


@contextmanager
def without_default_device():
    """Unset the default device, whose mode does not compile."""
    device = torch.get_default_device()
    torch.set_default_device(None)
    yield
    torch.set_default_device(None if device.type == "cpu" else device)


def everywhere(value, group):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def shared_folder(group):
    return Path(everywhere(tempfile.mkdtemp() if dist.get_rank(group) == 0 else None, group)[0])


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_checks(modules, folder):
    """Run the checks of modules of this folder on all ranks; return problems by rank, by "module-check-ranks"."""
    folder.mkdir()
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
    }
    ranks = []
    for rank in map(str, range(WORLD_SIZE)):
        environment = shared | {"RANK": rank, "LOCAL_RANK": rank}
        ranks.append(Program(__file__, folder, *modules, folder=folder, environment=environment))
    ended = [rank.finish(TIMEOUT * len(modules)) for rank in ranks]
    reports = [folder / f"{rank}.json" for rank in range(WORLD_SIZE)]
    said = [json.loads(report.read_text()) if report.exists() else {} for report in reports]
    ends = [
        f"rank {rank} ended with {end[0]} before: {''.join(end[1:])[-1500:]}"
        for rank, end in enumerate(ended)
    ]
    found = {}
    for module, name, ranks in checks_of(modules):
        key = f"{module}-{name}-{ranks}"
        problems = {rank: said[rank].get(key, ends[rank]) for rank in range(ranks)}
        found[key] = {rank: problem for rank, problem in problems.items() if problem != "fine"}
    return found


def main(folder, *modules):
    """Run the checks of modules as one rank, with NCCL where every rank has a GPU; write the results after each."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    else:
        speed_up_interpreter()
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", timeout=timeout, device_id=device if ON_GPU else None
    )
    groups = {size: dist.new_group(range(size)) for size in range(1, WORLD_SIZE)} | {
        WORLD_SIZE: dist.group.WORLD
    }
    tempfile.tempdir, rank, said = folder, dist.get_rank(), {}
    for module, name, ranks in checks_of(modules):
        if rank < ranks:
            check = getattr(sys.modules[f"distributed.{module}"], name)
            said[f"{module}-{name}-{ranks}"] = run(check, groups[ranks])
            Path(folder, f"{rank}.json").write_text(json.dumps(said))


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
