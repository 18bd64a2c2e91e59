"""Which kernel served what: for each attention of a model the backend, the kernels by name, tiles, bytes and times."""

from anemoi_gt.explanation.explain import explain, explain_attention
from anemoi_gt.explanation.value import Alternative, Explanation, Kernel, Layer, Pass

__all__ = ["Alternative", "Explanation", "Kernel", "Layer", "Pass", "explain", "explain_attention"]
