"""Which kernel served what: for each attention of a model the backend, the kernels by name, tiles, bytes and times."""

from anemoi_gt.provenance.explain import explain, explain_attention
from anemoi_gt.provenance.value import Alternative, Explanation, Kernel, Layer, Pass

__all__ = ["Alternative", "Explanation", "Kernel", "Layer", "Pass", "explain", "explain_attention"]
