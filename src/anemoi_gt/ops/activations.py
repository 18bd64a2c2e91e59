"""The activations of fused feed-forward networks: one table for modules, kernels and tests.

The formulas are in `anemoi_gt.kernels.norms_and_activations`, whose `activate` has the same names.
"""

from typing import NamedTuple

from torch import nn


class Activation(NamedTuple):
    """An activation of PyTorch."""

    kind: type[nn.Module]
    approximate: str | None = None  # its attribute of that name; None if it has none

    def module(self) -> nn.Module:
        """Return a module that computes it."""
        return self.kind() if self.approximate is None else self.kind(approximate=self.approximate)


ACTIVATIONS = {
    "gelu": Activation(nn.GELU, "none"),
    "gelu_tanh": Activation(nn.GELU, "tanh"),
    "silu": Activation(nn.SiLU),
    "relu": Activation(nn.ReLU),
    "sigmoid": Activation(nn.Sigmoid),
    "mish": Activation(nn.Mish),
}
KIND_NAMES = ", ".join(
    dict.fromkeys(activation.kind.__name__ for activation in ACTIVATIONS.values())
)
# by class and `approximate`, for a lookup that torch.compile traces
ACTIVATION_NAMES = {tuple(activation): name for name, activation in ACTIVATIONS.items()}
