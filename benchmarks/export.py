"""A package of a model of N320 size: exported here, loaded in a process without this library; size and latency beside eager.

    python benchmarks/export.py --output benchmarks/results/export_h200.json --commit HASH
    python benchmarks/export.py --tiny                 on a CPU: does it run

The model is an encoder-processor-decoder with random weights. The package's numbers must be those of the model, within what
rounding in its precision explains, before its times are reported. Times are medians of single calls, from host to host. Results are
written as they come.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from parts import Parts
from suite.environment import describe

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.export import Autocast, export_model, write_package
from anemoi_gt.export.package import LIMITS, relative_error

FIELDS = 100  # in and out of the data grid
PRECISIONS = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
LIMIT = 300.0  # s, for the other process
LOADER = Path(__file__).parent / "suite" / "load_package.py"


def make_model(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """The model on its device, in the precision that is asked for."""
    torch.manual_seed(0)
    graph = icosphere_graph(grid(options.grid), refinement=options.refinement)
    sizes = {"channels": options.heads * options.channels, "heads": options.heads, "num_layers": options.layers}
    model = EncoderProcessorDecoder(graph, FIELDS, FIELDS, **sizes, config=AttentionConfig(backend=options.backend))
    dtype = PRECISIONS[options.precision]
    return (model if dtype == torch.float32 else Autocast(model, device.type, dtype)).to(device).eval()


def eager(model: torch.nn.Module, x: torch.Tensor, repeats: int) -> tuple[torch.Tensor, dict]:
    """Output, median time of a call, and peak of memory."""
    times = []
    with torch.no_grad():
        out = model(x)
        for _ in range(repeats):
            wait(x)
            begin = time.perf_counter()
            model(x)
            wait(x)
            times.append(1e3 * (time.perf_counter() - begin))
    peak = torch.cuda.max_memory_allocated() / 1e9 if x.is_cuda else None
    return out.cpu(), {"eager_ms": statistics.median(times), "eager_peak_gb": peak}


def wait(tensor: torch.Tensor) -> None:
    """Until its device is done."""
    if tensor.is_cuda:
        torch.cuda.synchronize()


def package(model: torch.nn.Module, x: torch.Tensor, max_batch: int, path: Path) -> dict:
    """Export and compile; how long either took, and how large the file is."""
    begin = time.perf_counter()
    program = export_model(model, x, max_batch)
    exported = time.perf_counter()
    write_package(program, path, {"max_batch": str(max_batch)})
    compiled = time.perf_counter()
    return {"export_s": exported - begin, "compile_s": compiled - exported, "package_mb": path.stat().st_size / 1e6}


def load(path: Path, x: torch.Tensor, repeats: int) -> tuple[torch.Tensor, dict]:
    """Output and times of the package in another process."""
    torch.save(x.cpu(), path.with_name("x.pt"))
    command = [sys.executable, "-I", LOADER, path, path.with_name("x.pt"), path.with_name("out.pt"), str(repeats)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)
    if result.returncode:
        raise RuntimeError(
            f"the package must run without this library, exit status {result.returncode}: {result.stderr[-2000:]}"
        )
    return torch.load(path.with_name("out.pt"), weights_only=True), json.loads(result.stdout.splitlines()[-1])


def run(options: argparse.Namespace, found: dict, keep: Callable[[], None] = lambda: None) -> dict:
    """Everything for one model; `found` is filled as figures come, `keep` called then, and `found` returned."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = make_model(options, device)
    num_nodes = len(next(part for name, part in model.named_modules() if name.endswith("nodes.data")))
    generator = torch.Generator().manual_seed(1)
    batches = [
        torch.randn(samples, num_nodes, FIELDS, generator=generator) for samples in sorted({1, options.max_batch})
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        outputs = []
        for x in batches:
            out, found[f"batch_{len(x)}"] = eager(model, x.to(device), options.repeats)
            outputs.append(out)
        keep()
        found |= package(model, batches[0].to(device), options.max_batch, path)
        keep()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the other process needs the memory
        for x, out in zip(batches, outputs, strict=True):
            actual, figures = load(path, x, options.repeats)
            error, limit = relative_error(actual, out), LIMITS[PRECISIONS[options.precision]]
            if not error <= limit:
                raise ValueError(f"the package must give the numbers of the model within {limit}, its error is {error}")
            found[f"batch_{len(x)}"] |= figures | {"error": error}
            keep()
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="N320")
    parser.add_argument("--refinement", type=int, default=6)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--channels", type=int, default=64, help="of each head")
    parser.add_argument("--layers", type=int, default=16, help="of the processor")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed")
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto")
    parser.add_argument("--max-batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="small enough for a CPU")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    options = parser.parse_args(arguments)
    if options.tiny:
        small = {"grid": "O4", "refinement": 1, "heads": 2, "channels": 8, "layers": 1, "repeats": 2}
        vars(options).update(small, precision="32-true")
    return options


def main(arguments: list[str] | None = None) -> None:
    """Run what the command line asks for."""
    options = parse(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = {name: value for name, value in vars(options).items() if name not in ("output", "commit", "tiny")}
    report = {"environment": describe(device, {"torch", "triton"}, options.commit), "case": case, "results": {}}
    parts = Parts(report, options.output, seconds=math.inf)
    parts.run("package", partial(run, options, report["results"], parts.write))
    print(json.dumps(parts.end(), indent=1))


if __name__ == "__main__":
    main()
