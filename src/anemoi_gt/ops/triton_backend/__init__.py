"""The `triton` backend: fused GPU kernels without any edges x heads x channels tensor."""

from anemoi_gt.ops.triton_backend.device import why_not
from anemoi_gt.ops.triton_backend.edge_attention_triton import attend

__all__ = ["attend", "why_not"]
