"""Integrations with anemoi-models and PyTorch Geometric; import each by its own name."""

from anemoi_gt.nn.layer_kernels import hooks_of

__all__ = ["hooks_of"]
