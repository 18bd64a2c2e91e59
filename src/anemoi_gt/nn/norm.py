"""Layer norms that keep the dtype or take a condition; `apply_norm` is correct on huge grids.

normal(x) = (x - mean x) / sqrt(var x + eps)          over the features of a node

AutocastLayerNorm       weight * normal(x) + bias
ConditionalLayerNorm    (1 + scale(c)) * normal(x) + bias(c)     linear in the condition c
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from anemoi_gt.graph.checks import check_shape
from anemoi_gt.option_checks import check_integer

# PyTorch's layer norm for CUDA addresses inputs with this many elements in 32 bits and silently
# normalises the wrong rows: seen with 2.11, reported as pytorch/pytorch#181555.
OVERFLOW_NUMEL = 2**32


class AutocastLayerNorm(nn.LayerNorm):
    """Layer norm that keeps the dtype of its input, even under autocast.

    Parameters and state dict equal `torch.nn.LayerNorm`.

    Examples
    --------
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     AutocastLayerNorm(4)(torch.randn(2, 4, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., *normalized_shape]."""
        return super().forward(x).type_as(x)


class ConditionalLayerNorm(nn.Module):
    """Layer norm whose scale and shift are linear functions of a condition.

    The state dict equals Anemoi's class of this name: scale.weight, scale.bias, bias.weight,
    bias.bias. They are initialised to zero, which gives a layer norm without parameters. The output
    has the dtype of the input.

    Parameters
    ----------
    normalized_shape : int
        Features of a node.
    condition_shape : int
        Features of the condition.

    Raises
    ------
    ValueError
        When one of them is not an integer, or below 1.

    Examples
    --------
    >>> norm = ConditionalLayerNorm(8, condition_shape=3)
    >>> norm(torch.randn(2, 5, 8), cond=torch.randn(2, 1, 3)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, normalized_shape: int, condition_shape: int = 16):
        super().__init__()
        check_integer("normalized_shape", normalized_shape)
        check_integer("condition_shape", condition_shape)
        self.norm = nn.LayerNorm(normalized_shape, elementwise_affine=False)
        self.scale = nn.Linear(condition_shape, normalized_shape)
        self.bias = nn.Linear(condition_shape, normalized_shape)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, cond: Tensor) -> Tensor:
        """Normalise `x` [..., N, normalized_shape] with `cond` [..., N or 1, condition_shape].

        Their batch dimensions broadcast; a batch dimension of the condition only is one of the
        result. Raise ValueError when the condition has other features, or other rows.
        """
        features = self.scale.in_features
        rows = x.shape[-2]
        wanted = f"[..., {rows} or 1, {features}]"
        check_shape(
            "cond",
            cond,
            wanted,
            lambda c: c.dim() >= 2 and c.shape[-1] == features and c.shape[-2] in (1, rows),
        )
        # autocast runs layer norms in float32 on a GPU, and the block would go on in it
        return ((1 + self.scale(cond)) * self.norm(x) + self.bias(cond)).type_as(x)


def apply_norm(norm: nn.Module, x: Tensor, cond: Tensor | None = None) -> Tensor:
    """Norm `x`, with a condition if there is one, in chunks where PyTorch's kernel would overflow.

    `norm` must treat each row of `x` [..., F] separately. Python raises TypeError if it accepts no
    condition, or requires one.
    """
    if overflows(norm, x):
        return norm_in_chunks(norm, x, cond, OVERFLOW_NUMEL // 2)
    return _norm(norm, x, cond)


def overflows(norm: nn.Module, x: Tensor) -> bool:
    """Return whether PyTorch's CUDA layer norm would misaddress `x`; False in compiled code."""
    is_eager = not isinstance(norm, nn.Identity) and not torch.compiler.is_compiling()
    return x.is_cuda and is_eager and x.numel() >= OVERFLOW_NUMEL


def norm_in_chunks(norm: nn.Module, x: Tensor, cond: Tensor | None, max_numel: int) -> Tensor:
    """Norm at most `max_numel` elements at once, split along the longest dimension.

    With `cond`, `x` is split along the nodes.
    """
    dim = x.dim() - 2 if cond is not None else max(range(x.dim() - 1), key=x.shape.__getitem__)
    rows = max(1, max_numel * x.shape[dim] // x.numel())
    chunks = x.split(rows, dim)
    conditions: Sequence[Tensor | None] = [cond] * len(chunks)
    if cond is not None and cond.shape[-2] != 1:
        conditions = cond.split(rows, -2)
    return torch.cat([_norm(norm, *pair) for pair in zip(chunks, conditions, strict=True)], dim)


def _norm(norm: nn.Module, x: Tensor, cond: Tensor | None) -> Tensor:
    return norm(x) if cond is None else norm(x, cond=cond)
