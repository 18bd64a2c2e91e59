"""The `torch` backend: edge attention in plain PyTorch, fast enough for real use on a CPU."""

from anemoi_gt.ops.torch_backend.edge_attention_torch import attend

__all__ = ["attend"]
