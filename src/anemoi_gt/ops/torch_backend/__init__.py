"""The `torch` backend: edge attention in plain PyTorch, optimised for CPUs."""

from anemoi_gt.ops.torch_backend.edge_attention_torch import attend

__all__ = ["attend"]
