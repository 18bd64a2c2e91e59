"""The kernels under NVIDIA's compute-sanitizer: out-of-bounds accesses and shared-memory races.

    python benchmarks/gpu_checks/sanitize.py     the work: odd shapes, all forms, dtypes

`check` runs the work under the tool. PyTorch's caching allocator is off, because it returns parts
of large blocks, which hides overruns.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

TOOLS = ("memcheck", "racecheck")
FORMS = ("raw", "raw_without_bias", "embedded", "none")
EQUAL = ("nearest", "one_each")  # fixed in-degree, which has kernels of its own


def check() -> str:
    """Run the work under memcheck and racecheck."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(program).exists():
        raise AssertionError(
            "compute-sanitizer must be on the path: install the CUDA toolkit or its package"
        )
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    _work_alone(environment)  # kernels are compiled here, not under the tool
    for tool in TOOLS:
        command = [program, "--tool", tool, "--error-exitcode", "9", sys.executable, __file__]
        result = subprocess.run(command, capture_output=True, text=True, env=environment)
        clean = re.search(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards", result.stdout)
        if result.returncode or not clean:
            raise AssertionError(f"{tool}: {(result.stdout + result.stderr)[-2000:]}")
    return f"{' and '.join(TOOLS)} found nothing"


def _work_alone(environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, env=environment
    )
    if result.returncode:
        raise AssertionError(f"the work fails even without the tool: {result.stderr[-2000:]}")


def work() -> None:
    """Run both passes on shapes that fill no tile, or several warps, with unsorted structures."""
    import torch
    from support.graphs import GRAPHS
    from support.oracle import make_problem
    from support.run import attend

    from anemoi_gt import GraphStructure
    from gpu_checks import DEVICE, sublayers

    def run(name, shape, form, dtype, dropout_p):
        edge_index, sizes = GRAPHS[name]
        problem = make_problem(GRAPHS[name], *shape, form, dtype)
        graph = GraphStructure.from_edge_index(edge_index.to(DEVICE), sizes, stable=False)
        attend(problem, graph, "triton", dropout_p=dropout_p)

    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for form, dtype in product(FORMS, dtypes if DEVICE.type == "cuda" else dtypes[1:2]):
        run("isolated", (6, 10, 3), form, dtype, 0.3)
    for name in ("no_edges", "hub", "shuffled"):
        run(name, (6, 10, 3), "raw", torch.bfloat16, 0.0)
    run("shuffled", (16, 64, 11), "raw", torch.bfloat16, 0.0)
    for name, dtype in product(EQUAL, dtypes if DEVICE.type == "cuda" else dtypes[1:2]):
        run(name, (6, 10, 3), "raw", dtype, 0.3)
    run("nearest", (16, 64, 11), "raw", torch.bfloat16, 0.0)
    run("duplicates", (2, 1100, 3), "raw", torch.bfloat16, 0.0)
    sublayers.run_some()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import gpu_checks  # noqa: F401  makes the package and the tests' oracle importable

    work()
