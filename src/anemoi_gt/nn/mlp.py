"""MLP: linear maps with an activation or a gate between them, applied to each row.

y = W_out act(W_in x)                                    "mlp"
y = W_out (gate(W_gate x) * W_value x)                   "glu", "swiglu", "geglu", "reglu"
"""

import math

from torch import Tensor, nn

from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.norm import apply_norm
from anemoi_gt.option_checks import check_integer

GATES = {"glu": nn.Sigmoid, "swiglu": nn.SiLU, "geglu": nn.GELU, "reglu": nn.ReLU}
IMPLEMENTATIONS = ("mlp", *GATES)


class GatedLinear(nn.Module):
    """Gated linear map, gate(W_gate x) * W_value x (Shazeer 2020, GLU Variants, section 2)."""

    def __init__(self, in_features: int, out_features: int, gate: nn.Module, kernels: LayerKernels):
        super().__init__()
        self.gate_proj = kernels.Linear(in_features, out_features)
        self.value_proj = kernels.Linear(in_features, out_features)
        self.gating = gate

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., in_features] to [..., out_features]."""
        return self.gating(self.gate_proj(x)) * self.value_proj(x)


class MLP(nn.Module):
    """Network of hidden layers and a linear map, with the state dict of Anemoi's `MLP`.

    Of the implementations, "mlp" uses `kernels.Activation`, the others a gate of Shazeer (2020),
    with 1.5 times the parameters. Raise ValueError for a width or a number of hidden layers below
    1, or another name.
    """

    def __init__(
        self,
        in_features: int,
        hidden_dim: int,
        out_features: int,
        implementation: str,
        kernels: LayerKernels,
        hidden_layers: int = 1,
    ):
        super().__init__()
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(
                f"mlp_implementation must be one of {', '.join(IMPLEMENTATIONS)}, got "
                f"{implementation!r}"
            )
        check_integer("hidden_dim", hidden_dim)
        check_integer("hidden_layers", hidden_layers)
        layers: list[nn.Module] = []
        width = in_features
        for _ in range(hidden_layers):
            if implementation == "mlp":
                layers += [kernels.Linear(width, hidden_dim), kernels.Activation()]
            else:
                gate = GATES[implementation]()
                layers.append(GatedLinear(width, hidden_dim, gate, kernels))
            width = hidden_dim
        self.mlp = nn.Sequential(*layers, kernels.Linear(width, out_features))

    def forward(self, x: Tensor) -> Tensor:
        """Map `x` [..., in_features] to [..., out_features]."""
        return self.mlp(x)


class NormedMLP(MLP):
    """MLP whose output is normalised by `kernels.LayerNorm`."""

    def __init__(
        self,
        in_features: int,
        hidden_dim: int,
        out_features: int,
        implementation: str,
        kernels: LayerKernels,
        hidden_layers: int = 1,
    ):
        super().__init__(
            in_features, hidden_dim, out_features, implementation, kernels, hidden_layers
        )
        self.layer_norm = kernels.LayerNorm(normalized_shape=out_features)

    def forward(self, x: Tensor, cond: Tensor | None = None) -> Tensor:
        """Map `x` [..., in_features] to [..., out_features]; a conditional norm takes `cond`."""
        return apply_norm(self.layer_norm, self.mlp(x), cond)


def hidden_width(channels: int, ratio: float) -> int:
    """Return the hidden width: `ratio` times `channels`, halves rounded up as Anemoi does."""
    return math.floor(ratio * channels + 0.5)  # not round(), which rounds halves to even
