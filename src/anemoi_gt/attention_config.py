"""`AttentionConfig`, the name of `KernelConfig` before 0.5.0: pickles and configs hold it."""

from anemoi_gt.kernel_config import KernelConfig as AttentionConfig

__all__ = ["AttentionConfig"]
