"""The `triton` backend: fused GPU kernels without any edges x heads x channels tensor."""

from anemoi_gt.ops.triton_backend.device import auto_unsupported_reason, unsupported_reason
from anemoi_gt.ops.triton_backend.edge_attention_triton import attend

__all__ = ["attend", "unsupported_reason", "auto_unsupported_reason"]
