"""The forward pass of the `triton` backend for export: the same launches, as nodes of a graph instead of calls.

A process without our Python code cannot run our operator, of which it knows only the name.
`edge_attention_triton_exported` does the same by `torch.library.triton_op`: AOTInductor looks into it and puts the
kernels into its package. An export takes it by decomposition (`anemoi_gt.export.export_program`); eager and compiled
models never do.

What is compiled into a kernel is decided once, while exporting. Sizes may be symbols then, so what depends on how many
edges a node has (the tile) follows from the example that was exported with, and offsets have 64 bits unless the ranges
of the sizes prove that 32 do. Grids and sizes stay symbols.

Nothing here runs under Triton's interpreter, which leaves no graph behind.
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import triton_op, wrap_triton

from anemoi_gt.custom_ops import flat_arguments
from anemoi_gt.kernels.jit_launch import Launch
from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend import launch
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem, Sizes
from anemoi_gt.ops.triton_backend.tiles import BUSY_DEGREE, ContractionTile, RowTile


class TracedSizes(Sizes):
    """Sizes that may be symbols. Their ratios, which choose tiles, are those of the example."""

    def degree(self, num_nodes: int) -> float:
        """Return the mean number of edges of a node in the example; a busy node's where there is no example."""
        edges, nodes = _example(self.num_edges), _example(num_nodes)
        return float(BUSY_DEGREE) if None in (edges, nodes) else edges / max(nodes, 1)


class TracedProblem(Problem):
    """A problem whose launches become nodes of the graph that is being traced."""

    @cached_property
    def sizes(self) -> Sizes:
        """Read once from the operands."""
        return TracedSizes(*super().sizes)

    def needs_int64(self) -> bool:
        """Return whether an offset may pass 2^31 for sizes that the program admits."""
        return not all(statically_known_true(elements < 2**31) for elements in self.largest_offsets())

    def segments_of(self, hubs: Tensor | None) -> int:
        """Return the edges of a segment of hubs in the example; 0 without hubs."""
        return 0 if hubs is None else _example(hubs.shape[0]) // 2

    def is_at_most(self, size: int, bound: int) -> bool:
        """Return whether a size is at most `bound` for all sizes that the program admits."""
        return statically_known_true(size <= bound)

    def launch(self, launch_of: Callable[..., Launch], *how: RowTile | ContractionTile | int | None) -> Callable:
        """Return what traces a launch on tensors by name; nothing is kept, because symbols are no keys."""
        found = launch_of.__wrapped__(self.sizes, *how)
        kernel = wrap_triton(found.kernel)[found.grid]
        return lambda **tensors: kernel(**tensors, **found.scalars, **found.constants)


@triton_op("anemoi_gt::edge_attention_triton_exported", mutates_args=())
@flat_arguments
def edge_attention_triton_exported(
    operands: AttentionOperands, colptr: Tensor, row: Tensor, perm: Tensor | None, dst_schedule: Tensor | None,
    dst_hubs: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return out like query and lse [B, N_dst, H], without B as query; without dropout and fixed-degree kernels."""
    tensors = (*operands, colptr, row, perm, dst_schedule)
    *operands, colptr, row, perm, dst_schedule = (None if each is None else each.contiguous() for each in tensors)
    index = IndexTensors(colptr, row, perm, dst_schedule=dst_schedule, dst_hubs=dst_hubs)
    problem = TracedProblem(AttentionOperands(*operands), index, Options(scale=scale))
    return launch.attend(problem)[:2]


@flat_arguments
def decompose(operands: AttentionOperands, index: IndexTensors, options: Options, save: bool) -> tuple[Tensor, ...]:
    """Stand for `edge_attention_triton` in an exported program, nothing saved for a backward; raise with dropout."""
    if options.seed is not None:
        p = options.dropout_p
        raise ValueError(f"a program is exported for inference, got dropout_p={p}; call model.eval() first")
    structure = (index.colptr, index.row, index.perm, index.dst_schedule, index.dst_hubs)
    out, lse = edge_attention_triton_exported(*operands, *structure, options.scale)
    return out, lse, *(lse.new_empty(0) for _ in range(3))


def _example(size: int | torch.SymInt) -> int | None:
    """Return the number that a size had in the example; None where it had none."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None
