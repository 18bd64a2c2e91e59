"""Kernels listed by `anemoi_gt.explain_attention` match a profile, eager and compiled."""

import torch
from torch.profiler import ProfilerActivity, profile

from anemoi_gt import edge_attention, explain_attention
from gpu_checks.execution import HERE, TRITON, Work

PREFIX = "edge_attention_"  # of kernel names


def kernel_names() -> str:
    """Compare the kernels of traces with the explanation."""
    work = Work(HERE)
    query, key, value, *edges = work.leaves
    (layer,) = explain_attention(query, key, value, work.graph, *edges, config=TRITON).layers
    named = {kernel for pass_ in layer.passes for kernel in pass_.kernels}
    _assert_same(named, _profiled(work), "eager")

    @torch.compile(fullgraph=True)
    def attend(*operands):
        return edge_attention(*operands[:3], work.graph, *operands[3:], config=TRITON)[0] * 2

    def step():
        torch.autograd.grad(attend(*work.leaves), work.leaves, work.grad_out)

    compiled = _profiled(step)
    _assert_same(named, compiled, "compiled")
    explained = {pass_.operator for pass_ in layer.passes}
    operators = explained & {event.name for event in compiled.events()}
    others = _kernels(compiled) - named
    if len(operators) != 2 or not any(name.startswith("triton_") for name in others):
        raise AssertionError(
            f"a compiled trace needs two operators and kernels of Inductor, got {operators}, "
            f"{others}"
        )
    return f"{len(named)} names, eager and compiled"


def _profiled(step) -> profile:
    """Profile the second and third call."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        step()
        step()
        torch.cuda.synchronize()
    return trace


def _kernels(trace: profile) -> set[str]:
    names = set()
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            names.add(event.name)
    return names


def _assert_same(named: set[str], trace: profile, mode: str) -> None:
    traced = {name for name in _kernels(trace) if name.startswith(PREFIX)}
    if traced != named:
        raise AssertionError(
            f"{mode}: the trace has {sorted(traced)}, the explanation {sorted(named)}"
        )
