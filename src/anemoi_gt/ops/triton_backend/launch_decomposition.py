"""The forward pass of the `triton` backend for export: the same launches, as graph nodes.

Without our Python code a process cannot run our operator. `edge_attention_triton_exported` computes
the same through `torch.library.triton_op`, which AOTInductor traces into, so the kernels become
part of the package. Only exports use it, by decomposition (`anemoi_gt.export.export_program`).

All constexpr arguments are fixed at export. Sizes may be symbolic, so the tile, which depends on
the mean degree, follows from the example inputs, and offsets have 64 bits unless the ranges of the
sizes prove that 32 suffice. Grids and sizes stay symbolic.

Nothing here runs under Triton's interpreter, which records no graph.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.library import triton_op, wrap_triton

from anemoi_gt.ops.dropout import refuse_in_export
from anemoi_gt.ops.tensors import AttentionOperands, IndexTensors
from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall, attend
from anemoi_gt.ops.triton_backend.edge_attention_triton import (
    edge_attention_triton,
    kept_layout,
)
from anemoi_gt.ops.triton_backend.plan import Buffer, KernelStep, PlanBuilder
from anemoi_gt.ops.triton_backend.sizes import Kept, Sizes, sizes_of
from anemoi_gt.ops.triton_backend.tiles import BUSY_DEGREE


class TracedSizes(Sizes):
    """Sizes that may be symbols. Their ratios, which choose tiles, come from the example."""

    def degree(self, num_nodes: int) -> float:
        """Return the mean degree of the example, or a busy node's degree without example."""
        edges, nodes = _example(self.num_edges), _example(num_nodes)
        if edges is None or nodes is None:
            return float(BUSY_DEGREE)
        return edges / max(nodes, 1)


@triton_op("anemoi_gt::edge_attention_triton_exported", mutates_args=())
def edge_attention_triton_exported(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_attr: Tensor | None,
    edge_weight: Tensor | None,
    edge_bias: Tensor | None,
    colptr: Tensor,
    row: Tensor,
    perm: Tensor | None,
    dst_hubs: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out and lse [B, N_dst, H] without dropout and fixed-degree kernels.

    `out` is like query; without B, `lse` has no B either.
    """
    operands = AttentionOperands(query, key, value, edge_attr, edge_weight, edge_bias)
    index = IndexTensors(colptr, row, perm, dst_hubs=dst_hubs)
    inputs = [None if x is None else x.contiguous() for x in (*operands, *index)]
    builder = PlanBuilder(
        [None if tensor is None else (tensor.shape, tensor.dtype) for tensor in inputs]
    )
    num_operands = len(operands)
    buffers: AttentionOperands[Buffer] = AttentionOperands._make(builder.inputs[:num_operands])
    index_buffers: IndexTensors[Buffer] = IndexTensors._make(builder.inputs[num_operands:])
    sizes = TracedSizes(*sizes_of(buffers, index_buffers, scale, holds=statically_known_true))
    kept = Kept(**builder.empty_tensors(kept_layout(buffers, index_buffers), together=False))
    out = builder.empty_like(buffers.query)
    lse = attend(AttentionCall(builder, sizes, buffers, index_buffers), kept, out)

    tensors: list[Any] = list(inputs)  # None where there is none
    for storage in builder.storages[len(inputs) :]:
        assert storage is not None  # only an absent input is
        tensors.append(tensors[0].new_empty(storage.shape, dtype=storage.dtype))
    for step in builder.steps:  # all of them launch kernels on whole storages
        assert isinstance(step, KernelStep)
        launch = step.launch
        ordered = [None if buffer is None else tensors[buffer.storage] for buffer in step.buffers]
        named = dict(zip(launch.tensors, ordered, strict=True))
        wrap_triton(launch.kernel)[launch.grid](**named, **launch.scalars, **launch.constants)
    return tensors[out.storage], tensors[lse.storage]


def decompose(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Replace `edge_attention_triton` in an exported inference program; raise with dropout."""
    operands, constants, options = edge_attention_triton.split(arguments)
    index: IndexTensors[Tensor] = constants.graph
    refuse_in_export(constants.seed, options.dropout_p)
    structure = (index.colptr, index.row, index.perm, index.dst_hubs)
    out, lse = edge_attention_triton_exported(*operands, *structure, options.scale)
    return out, lse, lse.new_empty(0, dtype=torch.uint8)


def _example(size: int | torch.SymInt) -> int | None:
    """Return the size in the example; None where it had none."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else None
