"""Explanation of a model: backend, kernels, tiles, bytes, lower bounds and achieved times of each attention."""

from anemoi_gt.kernel_report.explain import explain, explain_attention
from anemoi_gt.kernel_report.explanation import Explanation, Kernel, Layer, Pass

__all__ = ["Explanation", "Kernel", "Layer", "Pass", "explain", "explain_attention"]
