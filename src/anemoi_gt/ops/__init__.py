"""Edge attention on tensors: the operation, its weights, merging of partial results, and the choice of a backend."""

from anemoi_gt.ops.attention import edge_attention
from anemoi_gt.ops.merge import merge
from anemoi_gt.ops.weights import attention_weights

__all__ = ["attention_weights", "edge_attention", "merge"]
