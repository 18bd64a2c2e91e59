"""Kernels that one call of the `triton` backend launches: names, tiles and bytes.

The code of a call runs on tensors without memory, on a problem that notes launches instead of making them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.operands import AttentionOperands, Needs
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.op import gradients
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem, Sizes

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
TILE = {  # compile-time constants that make up a tile, and their names in a plan
    "NODES": "nodes", "TILES": "tiles", "HEADS": "heads", "CHANNELS": "channels", "UNROLL": "unroll", "K": "edges",
    "PACKED": "packed", "num_warps": "num_warps", "num_stages": "num_stages",
}  # fmt: skip
NOT_COUNTED = {"colptr", "rowptr", "pointers", "dst_schedule", "perm", "global_edge_id", "seed"}


@dataclass(frozen=True)
class PlannedLaunch:
    """One launch. `bytes` counts each tensor that the kernel reads or writes once, but not pointers of nodes."""

    name: str  # as a profiler shows it
    tile: dict[str, int]  # of one program, as it was compiled
    bytes: int


@dataclass(frozen=True)
class PlannedProblem(Problem):
    """A problem whose launches are noted."""

    launches: list[PlannedLaunch] = field(default_factory=list)

    def launch(self, launch_of: Callable[..., Launch], *how) -> Callable[..., None]:
        """Return what notes a launch on tensors by name."""
        bound = launch_of(self.sizes, *how)
        return lambda **tensors: self.launches.append(_planned(self.sizes, bound, tensors))


def plan(
    operands: AttentionOperands, index: IndexTensors, options: Options, needs: Needs
) -> tuple[list[PlannedLaunch], list[PlannedLaunch]]:
    """Return the launches of a forward pass, and of a backward pass for the gradients that are needed."""
    operands, index = (type(group)(*map(_without_memory, group)) for group in (operands, index))
    problem = PlannedProblem(operands, index, options)
    out, _, *saved = launch.attend(problem)
    forward = [*problem.launches]
    if any(needs):
        gradients(problem, launch.Saved(*saved), torch.empty_like(out), None, list(needs))
    return forward, problem.launches[len(forward) :]


def _without_memory(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _planned(sizes: Sizes, bound: Launch, tensors: dict[str, Tensor | None]) -> PlannedLaunch:
    name = bound.name({name: NAMES.get(tensor.dtype) for name, tensor in tensors.items() if tensor is not None})
    tile = {name: bound.constants[constant] for constant, name in TILE.items() if constant in bound.constants}
    if "packed" in tile:
        tile["packed"] = int(tile["packed"] is not None)
    there = {name: tensor.nbytes for name, tensor in tensors.items() if tensor is not None}
    moved = sum(there[name] for name in there.keys() - NOT_COUNTED - _unread(name, sizes, there))
    if "embed" in name:
        moved += there["rows"]  # read and written
    if "bwd_attributes" in name:
        moved += 4 * sizes.num_edges  # of a map
    return PlannedLaunch(name, tile, moved)


def _unread(name: str, sizes: Sizes, there: dict[str, int]) -> set[str]:
    """Return the tensors that a kernel is given and does not read, because of others that are not there."""
    unread = set()
    if "bwd_dst_hub" in name:
        unread |= set() if "dedge_attr" in there else {"query", "grad_out"}
        unread |= set() if "segment_dquery" in there else {"key", "row", "edge_attr"}
        unread |= {"edge_attr"} if sizes.edge_dim else set()
    elif "bwd_dst" in name:
        unread |= set() if sizes.embedded else {"query"}
        unread |= set() if sizes.edge_dim else {"attr_dp"}
    elif "bwd_attributes" in name and "dedge_attr" not in there:
        unread |= {"projected", "projected_grad"}
    elif "bwd_src" in name:
        unread |= {read for gradient, read in (("dkey", "query"), ("dvalue", "grad_out")) if gradient not in there}
    return unread
