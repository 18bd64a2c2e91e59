"""Compile the row kernels of sub-layers and graph networks for a GPU that need not be there.

One JSON line is printed for each:

python compile_row_kernels.py resources cuda:90    registers and spills of rows of 512 and 1024
python compile_row_kernels.py offsets cuda:90      with 32-bit and with 64-bit offsets, and TTIR
"""

import json
import sys

import torch
from compile_all import ALIGNED, WARP, compile_launch, resources, ttir_of
from triton.backends.compiler import GPUTarget

from anemoi_gt.ops.tensors import NormOptions
from anemoi_gt.ops.triton_backend import row_launches

NORM = NormOptions(1e-5)
SINGLE = torch.float32
HALF = torch.bfloat16
INDEX = torch.int32
SUMS = {"programs": 528, "sums": 8192, "first_sum": 0}


def launches(features, x, half, num_rows=1000):
    """Yield every launch for rows of `features`, with the dtypes of its tensors by name."""
    parameters = {"scale": SINGLE, "shift": SINGLE}
    modulation = {"modulation": half}
    for norm in (parameters, modulation):
        yield row_launches.norm_forward(num_rows, features, NORM), {"x": x, "out": half} | norm
        backward = row_launches.norm_backward(num_rows, features, NORM, total=True, **SUMS)
        tensors = {"x": x, "grad_normed": half, "grad_total": x, "dx": x, "normed": half}
        if norm is modulation:
            tensors["grad_scale"] = half
        yield backward, tensors | norm | {"partial": SINGLE}
    sizes = (num_rows, 16, features // 16, NORM)
    head_norm = row_launches.head_norm_forward(*sizes, stride=4 * features)
    yield head_norm, {"x": half, "scale": SINGLE, "out": half}
    head_norm = row_launches.head_norm_backward(*sizes, stride=4 * features, **SUMS)
    tensors = {"x": half, "grad_normed": half, "scale": SINGLE, "dx": half, "partial": SINGLE}
    yield head_norm, tensors
    for activation, gated in (
        ("gelu", False),
        ("gelu_tanh", False),
        ("gelu", True),
        ("silu", True),
    ):
        forward = row_launches.activation_forward(num_rows, 4 * features, activation, gated=gated)
        yield forward, {"hidden": half, "out": half}
        names = ("hidden", "grad_activated", "activated", "grad_hidden")
        backward = row_launches.activation_backward(
            num_rows, 4 * features, activation, gated=gated, **SUMS
        )
        yield backward, dict.fromkeys(names, half) | {"partial": SINGLE}
    yield from launches_of_networks(features, x, half, num_rows)


def launches_of_networks(features, x, half, num_rows):
    """Yield the launches of graph networks, for as many nodes of a batch of two as rows."""
    kernels = row_launches
    ends = kernels.edge_ends(num_rows, num_rows * features)
    yield ends, dict.fromkeys(("colptr", "row", "perm", "dst", "src"), INDEX)
    of_edges = {"first_row": 7, "num_edges": num_rows, "batch": 2}
    for activation, gated in (("silu", False), ("gelu", False), ("silu", True)):
        gather = kernels.gather_activation(
            num_rows,
            features,
            activation,
            gated=gated,
            num_dst=num_rows,
            num_src=num_rows,
            **of_edges,
        )
        tensors = dict.fromkeys(("p", "at_dst", "at_src", "out"), half)
        yield gather, tensors | {"dst": INDEX, "src": INDEX}
    parameters = {"scale": SINGLE, "shift": SINGLE}
    forward = kernels.residual_norm_forward(num_rows, features, NORM)
    yield forward, {"r": half, "x": x, "y": x} | parameters
    backward = kernels.residual_norm_backward(
        num_rows,
        features,
        NORM,
        is_first=False,
        **SUMS,
    )
    tensors = {"r": half, "grad": x, "scale": SINGLE, "dr": half, "dx": x, "partial": SINGLE}
    yield backward, tensors
    sizes = {"num_nodes": num_rows, "num_edges": num_rows, "batch": 2}
    for rows, segment in ((x, 0), (half, 0), (half, 128)):
        sums = kernels.segment_sum(features, segment=segment, **sizes)
        tensors = {"x": rows, "out": rows} | dict.fromkeys(("pointers", "order", "perm"), INDEX)
        yield sums, tensors | ({"segments": SINGLE} if segment else {})
    joined = kernels.join_segment_sums(features, segment=128, **sizes)
    yield joined, {"segments": SINGLE, "pointers": INDEX, "out": half}
    gather = kernels.gather_to_edges(features, num_dst=num_rows, num_edges=num_rows, batch=2)
    for added in ({}, {"addend": half}):
        yield gather, {"x": half, "colptr": INDEX, "perm": INDEX, "out": half} | added


def arguments(launch, dtypes):
    """Return the arguments of a launch on tensors of these dtypes."""
    tensors = dict.fromkeys(launch.tensors)
    for name, dtype in dtypes.items():
        tensors[name] = torch.empty(0, dtype=dtype)
    return tensors | launch.scalars | launch.constants


def main(what, where):
    backend, _, arch = where.partition(":")
    target = GPUTarget(backend, int(arch) if arch.isdigit() else arch, WARP[backend])
    if what == "resources":
        cases = [*launches(512, SINGLE, HALF), *launches(1024, SINGLE, HALF)]
        cases += [*launches(1024, HALF, HALF), *launches(512, SINGLE, SINGLE)]
    else:
        cases = [*launches(512, SINGLE, HALF), *launches(512, SINGLE, HALF, 2**31 // 512)]
    for launch, dtypes in cases:
        kernel = launch.kernel
        args = arguments(launch, dtypes)
        line = {"kernel": kernel.fn.__name__}
        line["dtypes"] = {name: str(dtype) for name, dtype in dtypes.items()}
        if what == "offsets":
            line |= {"wide": launch.constants["INT64"], "ir": ttir_of(kernel, args, target)}
            print(json.dumps(line), flush=True)
            continue
        one = compile_launch(kernel, args, target, ALIGNED)
        line["name"] = one.metadata.name
        line |= resources(one) | {"num_warps": one.metadata.num_warps}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
