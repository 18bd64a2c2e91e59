"""The `torch` backend: edge attention in plain PyTorch, optimised for CPUs."""

from anemoi_gt.ops.backend import Backend
from anemoi_gt.ops.torch_backend.edge_attention_torch import attend

BACKEND = Backend("torch", attention=attend)  # runs wherever PyTorch does

__all__ = ["BACKEND"]
