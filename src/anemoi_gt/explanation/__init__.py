"""Reports on a model: backend, operators and kernels of each attention call."""

from anemoi_gt.explanation.recording import explain, explain_attention
from anemoi_gt.explanation.results import Explanation, Layer, Pass

__all__ = ["Explanation", "Layer", "Pass", "explain", "explain_attention"]
