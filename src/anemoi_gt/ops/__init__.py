"""Edge attention on tensors: the operation, its weights, merging, and the choice of a backend."""

from anemoi_gt.ops.attention import edge_attention
from anemoi_gt.ops.attention_weights import attention_weights
from anemoi_gt.ops.merge import merge

__all__ = ["attention_weights", "edge_attention", "merge"]
