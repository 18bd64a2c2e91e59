"""Tensors in, tensors out: edge attention, its parts, and the choice of a backend. No module, no channel dimension of a model."""

from anemoi_gt.ops.attention import attend_heads, edge_attention
from anemoi_gt.ops.merge import merge
from anemoi_gt.ops.weights import attention_weights

__all__ = ["attend_heads", "attention_weights", "edge_attention", "merge"]
