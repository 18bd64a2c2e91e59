"""The release of PyTorch, for claims that do not hold for the oldest ones: (2, 13)."""

import torch

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
