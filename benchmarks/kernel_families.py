"""Time of the kernels in a profile, by family."""

import re
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

FAMILIES = {  # patterns of kernel names; the first match counts
    "remainders of products, ours": r"anemoi_gt_add_outer",
    "norms, activations and sums, ours": r"anemoi_gt_",
    "attention, ours": r"edge_attention|edge_attr|group_edges",
    "attention of PyTorch or flash-attn": r"flex_attention|fmha|flash",
    "fused by Inductor": r"^triton_(poi|red|per|tem|for|mm)_|^cpp_fused",
    "attention, Anemoi's": r"_gt_fwd|_gt_bwd|graph_transformer",
    "sort, scan, unique": r"sort|scan|radix|unique|histogram|bincount|DeviceSelect|merge",
    "matrix products": r"gemm|cutlass|nvjet|cublas|splitK|addmm|aten::mm|aten::bmm",
    "layer norms": r"layer_norm|LayerNorm|GammaBeta",
    "optimiser": r"multi_tensor|adam|foreach|amp_",
    "gather, scatter, index": r"index|gather|scatter|embedding",
    "copies and casts": r"copy|Memcpy|Memset|_to_copy|cat|fill",
    "sums": r"reduce|sum",
    "elementwise": r"elementwise|vectorized|gelu|add|mul",
}
GROUPS = {  # groups of families; all other families are in "other"
    "products": ("matrix products", "remainders of products, ours"),
    "attention": ("attention, ours", "attention, Anemoi's", "attention of PyTorch or flash-attn"),
    "rows, norms, elementwise": (
        "norms, activations and sums, ours",
        "fused by Inductor",
        "layer norms",
        "copies and casts",
        "sums",
        "elementwise",
    ),
    "other": (),
}
LONGEST = 25  # number of kernels to list
NAME = 160  # maximum length of their names


def family_of(kernel):
    """Return the family of a kernel."""
    for family, pattern in FAMILIES.items():
        if re.search(pattern, kernel, re.IGNORECASE):
            return family
    return "other"


def group_of(family):
    """Return the group of a family."""
    for group, families in GROUPS.items():
        if family in families:
            return group
    return "other"


def profile_of(step, steps, wait, device_type):
    """Return milliseconds per step by family, and the longest kernels (on a CPU, operators)."""
    on_gpu = device_type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as trace:
        for _ in range(steps):
            step()
        wait()
    kernels, launches = Counter(), Counter()
    for event in trace.events():
        if on_gpu and not is_kernel(event):
            continue
        microseconds = event.device_time_total if on_gpu else event.self_cpu_time_total
        kernels[event.name] += microseconds / 1e3 / steps
        launches[event.name] += 1 / steps
    families = Counter()
    for kernel, ms in kernels.items():
        families[family_of(kernel)] += ms
    groups = dict.fromkeys(GROUPS, 0.0)
    for family, ms in families.items():
        groups[group_of(family)] += ms
    longest = [
        {"name": name[:NAME], "ms": ms, "launches": launches[name]}
        for name, ms in kernels.most_common(LONGEST)
    ]
    return {
        "total_ms": sum(kernels.values()),
        "groups_ms": groups,
        "families_ms": dict(families.most_common()),
        "kernels": longest,
    }


def is_kernel(event):
    """Return whether a profile event is device work and not a user-defined range."""
    is_device_work = event.device_type == torch.autograd.DeviceType.CUDA
    return is_device_work and not getattr(event, "is_user_annotation", False)
