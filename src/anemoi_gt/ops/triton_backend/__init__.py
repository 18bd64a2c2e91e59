"""The `triton` backend: edge attention by fused GPU kernels that never build an edge tensor."""

from anemoi_gt.ops.triton_backend.availability import why_not, why_not_auto
from anemoi_gt.ops.triton_backend.op import attend

__all__ = ["attend", "why_not", "why_not_auto"]
