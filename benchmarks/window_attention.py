r"""Attention within a window, of Anemoi's transformers: its mask of all pairs beside `install`.

    python benchmarks/window_attention.py --output benchmarks/results/window_attention_h100.json
    python benchmarks/window_attention.py --nodes 700 --heads 2 --windows 20 --device cpu

O96 has 40,320 nodes. Both contenders are `SDPAAttentionWrapper` of the installed anemoi-models,
without flash-attn. For each window and dtype:

    first ms      the first call of the process with this window and dtype, with what it compiles
    forward ms    median, without gradients
    both ms       median of forward and backward
    GB            peak memory of both passes beyond the operands and their gradients
    error         RMS error relative to float64, of the output and of the gradients of query, key
                  and value, on 4,096 nodes

The accuracy of `install` may be at most twice (output) or three times (gradients) the error of the
mask; nothing is timed that is less accurate.
"""

import gc
import statistics
import time
from contextlib import nullcontext
from functools import partial

import torch
from anemoi.models.layers.attention import SDPAAttentionWrapper
from suite.command_line import make_parser
from suite.environment import describe
from suite.results import Results
from suite.timing import CLOCKS, seconds_of

from anemoi_gt.integrations import anemoi as integration

PACKAGES = {"torch", "triton", "anemoi-models"}
CONTENDERS = {"mask": nullcontext, "install": integration.install}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ORACLE_NODES = 4096
FACTORS = (2, 3, 3, 3)  # of the error of the mask: output; gradients of query, key and value


def draw(nodes, options, dtype):
    """Return query, key, value and an upstream gradient [1, heads, nodes, channels]."""
    generator = torch.Generator(options.device).manual_seed(0)
    rows = []
    for _ in range(4):
        row = torch.randn(
            1, nodes, options.heads, options.channels, device=options.device, generator=generator
        )
        rows.append(row.to(dtype).transpose(1, 2))  # as Anemoi splits heads
    return rows


def differentiate(attention, operands, window):
    """Return the output and the gradients of query, key and value."""
    *operands, direction = operands
    leaves = [operand.detach().requires_grad_() for operand in operands]
    out = attention(*leaves, 1, window_size=window)
    return out.detach(), *torch.autograd.grad(out, leaves, direction)


def errors(options, dtype, window):
    """Return the relative errors of each contender: of output, and gradients.

    Raises
    ------
    ValueError
        If `install` is less accurate than `FACTORS` allow.
    """
    operands = draw(min(options.nodes, ORACLE_NODES), options, dtype)
    doubles = [operand.double() for operand in operands]
    exact = differentiate(SDPAAttentionWrapper(), doubles, window)
    off = {}
    for name, installed in CONTENDERS.items():
        with installed():
            results = differentiate(SDPAAttentionWrapper(), operands, window)
        off[name] = [
            ((result.double() - right).norm() / right.norm()).item()
            for result, right in zip(results, exact, strict=True)
        ]
    for ours, theirs, factor in zip(off["install"], off["mask"], FACTORS, strict=True):
        if not ours <= factor * theirs + 4 * torch.finfo(dtype).eps:
            raise ValueError(f"nothing is timed that is less accurate, got {off}")
    return off


def measure(name, options, dtype, window):
    """Return times in ms and memory in GB of a contender."""
    clock = CLOCKS[options.device]
    operands = draw(options.nodes, options, dtype)
    attention = SDPAAttentionWrapper()
    gc.collect()
    with CONTENDERS[name]():
        clock.synchronize()
        begin = time.perf_counter()
        with torch.no_grad():
            attention(*operands[:3], 1, window_size=window)
        clock.synchronize()
        first = time.perf_counter() - begin

        def forward():
            with torch.no_grad():
                attention(*operands[:3], 1, window_size=window)

        both = partial(differentiate, attention, operands, window)
        line = {"contender": name, "first_ms": 1e3 * first}
        for key, call in (("forward_ms", forward), ("both_ms", both)):
            call()
            times = seconds_of(call, options.repeats, options.device)
            line[key] = 1e3 * statistics.median(times)
        line["peak_gb"] = None
        if options.device == "cuda":
            line["peak_gb"] = clock.peak_bytes(both) / 1e9
            if attention.attn_mask is not None:
                line["peak_gb"] += attention.attn_mask.nbytes / 1e9
    return line


def main(arguments=None):
    """Compare the errors, measure, and write and return the report."""
    parser = make_parser(__doc__, seconds=200, repeats=20, nodes=40320, heads=16, channels=64)
    parser.add_argument("--windows", type=int, nargs="+", default=[512, 1120])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float16", "float32"])
    options = parser.parse_args(arguments)
    report = {"environment": describe(options.device, PACKAGES, options.commit)}
    report |= {"options": vars(options) | {"output": None}, "errors": {}, "results": []}
    results = Results(report, options.output, options.seconds)
    for dtype in options.dtypes:
        for window in options.windows:
            case = f"{dtype}, window {window}"
            off = results.run(f"errors, {case}", partial(errors, options, DTYPES[dtype], window))
            if off is None:
                continue
            report["errors"][case] = off
            print(case, {name: [f"{error:.1e}" for error in off[name]] for name in off})
            for name in CONTENDERS:
                line = results.run(
                    f"{name}, {case}", partial(measure, name, options, DTYPES[dtype], window)
                )
                if line is not None:
                    report["results"].append({"dtype": dtype, "window": window} | line)
                    print(*report["results"][-1].values(), flush=True)
    return results.end()


if __name__ == "__main__":
    main()
