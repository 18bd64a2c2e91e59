"""What torch.compile makes of a processor block and of the whole model: kernels, launches, time and memory of a pass.

    python benchmarks/compile_step.py --output benchmarks/results/compile_step.json
    python benchmarks/compile_step.py --grid O4 --refinement 1 --channels 32 --heads 2 --layers 1 --device cpu --repeats 2 --parts block

Counted are, for forward and backward apart: the operators that eager PyTorch dispatches and that compute something, and the calls
in the code that Inductor generates. On a GPU a profile adds the kernels and the calls of the host of one pass. Nothing is timed before
output and gradients agree with eager's. Mode reduce-overhead captures CUDA graphs, so it is left out on a CPU. Results are written after
each part and mode; one that fails is reported, and the others go on.
"""

import argparse
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import run_and_get_code
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src")]

from kernel_families import is_kernel  # noqa: E402
from parts import Parts  # noqa: E402
from suite.environment import describe  # noqa: E402

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder  # noqa: E402
from anemoi_gt.data.graphs import icosphere_graph  # noqa: E402
from anemoi_gt.data.grids import grid  # noqa: E402

MODES = ("default", "reduce-overhead")
PRECISIONS = {"bf16": torch.bfloat16, "16": torch.float16, "32": None}
AGREE = {None: 1e-4, torch.bfloat16: 5e-2, torch.float16: 2e-2}  # relative, of output and of all gradients together
FIELDS = 100  # in and out of the data grid
KINDS = {  # the first whose pattern is found in the name of an operator
    "attention": r"^anemoi_gt\.",
    "matrix product": r"^aten\.(addmm|mm|bmm|baddbmm|linear)\b",
    "everything else": "",
}
NOTHING = re.compile(r"^aten\.(empty|new_empty|detach|_unsafe_view|_reshape_alias|lift_fresh)\w*\b")  # no kernel
CALLS = {  # in generated code; each where it is called, not where it is defined
    "attention": r"^ +.*= torch\.ops\.anemoi_gt\.\w+\.default\(",
    "matrix product": r"^ +extern_kernels\.(?:addmm|mm|bmm|baddbmm|bias_addmm)\(",
    "fused kernel": r"^ +(?:triton_\w+\.run|cpp_\w+)\(",
    "everything else": r"^ +.*= torch\.ops\.(?!anemoi_gt)\w+\.\w+\.\w+\(|^ +extern_kernels\.(?!addmm|mm|bmm|baddbmm|bias_addmm)\w+\(",
}
BEHIND = re.compile(
    r"^def (?:get_args|benchmark_compiled_module)\b", re.MULTILINE
)  # Inductor's own benchmark of its code
HOST_CALL = re.compile(r"^cu(da)?(LaunchKernel|GraphLaunch|Memcpy|Memset)")


class Operators(TorchDispatchMode):
    """Counts, by kind, the operators that are dispatched and compute something: no views, no empty memory."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and not NOTHING.search(str(func)):
            self.counts[next(kind for kind, pattern in KINDS.items() if re.search(pattern, str(func)))] += 1
        return func(*args, **(kwargs or {}))


class Part:
    """A module of the model, with inputs and the gradient that arrives, on the device.

    Parameters
    ----------
    module : nn.Module
        What is compiled, and whose parameters get gradients.
    inputs : tuple
        What it is called with.
    leaves : list of Tensor
        Inputs that need a gradient.
    dtype : torch.dtype or None
        Of autocast; None computes in float32.
    """

    def __init__(self, module: nn.Module, inputs: tuple, leaves: list[Tensor], dtype: torch.dtype | None):
        self.module, self.inputs, self.dtype = module, inputs, dtype
        self.leaves, self.device = [*leaves, *module.parameters()], inputs[0].device
        shape, generator = self.forward(module).shape, torch.Generator().manual_seed(2)
        self.arriving = torch.randn(shape, generator=generator).to(self.device)

    def autocast(self):
        """The context of a forward pass."""
        return torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext()

    def forward(self, function: Callable) -> Tensor:
        """Output, without gradients."""
        with torch.no_grad(), self.autocast():
            return function(*self.inputs)

    def forward_backward(self, function: Callable, between: Callable = lambda: None) -> Tensor:
        """Output; gradients are left at the leaves. `between` is called before the backward pass."""
        for leaf in self.leaves:
            leaf.grad = None
        with self.autocast():
            out = function(*self.inputs)
        between()
        out.backward(self.arriving.to(out.dtype))
        return out.detach()

    def results(self, function: Callable) -> tuple[Tensor, Tensor]:
        """Output and all gradients, each as one vector."""
        out = self.forward_backward(function).flatten().float().clone()
        return out, torch.cat([leaf.grad.flatten().float() for leaf in self.leaves if leaf.grad is not None])


def make_parts(options: argparse.Namespace) -> dict[str, Part]:
    """The parts that were asked for, of one model."""
    device, dtype = torch.device(options.device), PRECISIONS[options.precision]
    torch.manual_seed(0)
    sizes = {"channels": options.channels, "heads": options.heads, "num_layers": options.layers}
    graph = icosphere_graph(grid(options.grid), refinement=options.refinement)
    model = EncoderProcessorDecoder(graph, FIELDS, FIELDS, config=AttentionConfig(options.backend), **sizes).to(device)
    made, generator = {}, torch.Generator().manual_seed(1)
    if "block" in options.parts:
        structure, attributes = model.processor_edges()
        x = torch.randn(1, structure.num_dst, options.channels, generator=generator).to(device).requires_grad_()
        attributes = attributes.detach().requires_grad_()
        made["block"] = Part(model.processor.proc[0], (x, structure, attributes), [x, attributes], dtype)
    if "model" in options.parts:
        fields = torch.randn(1, graph["data"].num_nodes, FIELDS, generator=generator).to(device)
        made["model"] = Part(model, (fields,), [], dtype)
    return made


def operators_of(part: Part) -> dict[str, dict[str, int]]:
    """Operators that eager PyTorch dispatches, forward and backward."""
    with Operators() as seen:
        forward = {}
        part.forward_backward(part.module, lambda: forward.update(seen.counts))
    return {"forward": forward, "backward": dict(seen.counts - Counter(forward))}


def calls_in(code: str) -> dict[str, int]:
    """Calls by kind in code that Inductor generated."""
    code = BEHIND.split(code)[0]
    found = {kind: len(re.findall(pattern, code, re.MULTILINE)) for kind, pattern in CALLS.items()}
    return {kind: number for kind, number in found.items() if number}


def compile_part(part: Part, mode: str) -> tuple[Callable, dict]:
    """The compiled module, and what was generated for forward and backward."""
    counters.clear()
    torch.compiler.reset()
    compiled = torch.compile(part.module, fullgraph=True, mode=mode)
    begin = time.perf_counter()
    with inductor.patch(force_disable_caches=True):  # code that comes out of a cache is not shown
        _, codes = run_and_get_code(part.forward_backward, compiled)
    if len(codes) != 2:
        raise ValueError(f"forward and backward must be one piece of code each, got {len(codes)} pieces")
    forward, backward = map(calls_in, codes)
    seconds = time.perf_counter() - begin
    return compiled, {"calls": {"forward": forward, "backward": backward}, "compile_seconds": seconds}


def difference(part: Part, compiled: Callable) -> dict[str, float]:
    """Relative distance of output and gradients from eager's; nothing is timed that is not right."""
    expected = part.results(part.module)
    torch.compiler.cudagraph_mark_step_begin()
    pairs = zip(("output", "gradients"), expected, part.results(compiled), strict=True)
    found, limit = {name: ((b - a).norm() / a.norm()).item() for name, a, b in pairs}, AGREE[part.dtype]
    if not max(found.values()) < limit:
        raise ValueError(f"nothing is timed that is not right; allowed {limit}, got {found}")
    return found


def launches(step: Callable) -> dict[str, int]:
    """What one pass starts on the device, and calls of the host that start it."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    on_device = [event.name for event in trace.events() if is_kernel(event)]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in on_device)
    called = sum(bool(HOST_CALL.match(event.name)) for event in trace.events())
    return {"kernels": len(on_device) - copies, "copies": copies, "host_calls": called}


def measure(part: Part, function: Callable, repeats: int) -> dict:
    """Median time in ms of a forward pass without gradients and of forward and backward; peak memory and launches on a GPU."""
    on_gpu, found = part.device.type == "cuda", {}
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    for name, call in (("forward", part.forward), ("forward_backward", part.forward_backward)):

        def step(call=call):
            torch.compiler.cudagraph_mark_step_begin()
            call(function)

        for _ in range(3):  # the first records, the second captures
            step()
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            step()
            wait()
            times.append(1e3 * (time.perf_counter() - begin))
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times
        found[name] = {"median_ms": statistics.median(times), "quartiles_ms": quartiles}
        if on_gpu:
            found[name] |= {"peak_gb": torch.cuda.max_memory_allocated() / 1e9, "launches": launches(step)}
    return found


def study(part: Part, way: str, repeats: int) -> dict:
    """What was counted and timed of a part, eager or compiled in a mode."""
    if way == "eager":
        return {"operators": operators_of(part), "passes": measure(part, part.module, repeats)}
    compiled, made = compile_part(part, way)
    made["difference_from_eager"] = difference(part, compiled)
    made["passes"] = measure(part, compiled, repeats)
    made["graphs"] = counters["stats"]["unique_graphs"]
    made["cudagraph_skips"] = counters["inductor"]["cudagraph_skips"]
    return made


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("block", "model"), default=["block", "model"])
    parser.add_argument("--modes", nargs="*", choices=MODES, help="default: all that have a meaning on the device")
    parser.add_argument("--grid", default="N320")
    parser.add_argument("--refinement", type=int, default=6)
    parser.add_argument("--channels", type=int, default=512)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=16, help="of the processor")
    parser.add_argument("--backend", default="auto", help="of the attention")
    parser.add_argument("--precision", choices=PRECISIONS, default="bf16" if on_gpu else "32")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=480, help="after which nothing more is begun")
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("--commit", help="what to record where git cannot tell")
    options = parser.parse_args(arguments)
    options.modes = options.modes or (list(MODES) if options.device == "cuda" else ["default"])
    return options


def show(name: str, way: str, found: dict) -> None:
    """Print what was counted and timed, a line for each pass."""
    counted = found.get("operators") or found["calls"]
    for direction, kinds in counted.items():
        print(f"{name:6s} {way:16s} {direction:17s} {sum(kinds.values())}: {dict(sorted(kinds.items()))}")
    for direction, timed in found["passes"].items():
        print(
            f"{name:6s} {way:16s} {direction:17s} {timed['median_ms']:.2f} ms {timed.get('launches', '')}", flush=True
        )


def main(arguments: list[str] | None = None) -> dict:
    """Study every part; write and return the report."""
    options = parse(arguments)
    report = {"environment": describe(torch.device(options.device).type, {"torch", "triton"}, options.commit)}
    report |= {"options": vars(options) | {"output": None}, "parts": {}}
    parts = Parts(report, options.output, options.seconds)
    for name, part in make_parts(options).items():
        report["parts"][name] = {}
        for way in ("eager", *options.modes):
            found = parts.run(f"{name}, {way}", partial(study, part, way, options.repeats))
            if found is not None:
                report["parts"][name][way] = found
                show(name, way, found)
    return parts.end()


if __name__ == "__main__":
    main()
