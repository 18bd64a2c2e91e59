"""Explanation of a model: backend, operators and kernels of each attention."""

from anemoi_gt.kernel_report.explain import explain, explain_attention
from anemoi_gt.kernel_report.explanation import Explanation, Layer, Pass

__all__ = ["Explanation", "Layer", "Pass", "explain", "explain_attention"]
