"""Norms that PyTorch does not have: one that gives the dtype back, one whose scale and shift follow a condition.

The only place that calls norms, `apply_norm`, which PyTorch's own are wrong without on very large grids.

normal(x) = (x - mean x) / sqrt(var x + eps)          over the features of a node

AutocastLayerNorm       weight * normal(x) + bias
ConditionalLayerNorm    (1 + scale(c)) * normal(x) + bias(c)          c is the condition; scale and bias are linear
"""

from inspect import signature

import torch
from torch import Tensor, nn

from anemoi_gt.nn.input_validation import check_dtype
from anemoi_gt.option_checks import check_integer

# PyTorch's layer norm for CUDA addresses an input of so many numbers in 32 bits and normalises other rows than those that
# it was given, without a word: seen with 2.11, reported as pytorch/pytorch#181555.
WRAPS = 2**32


class AutocastLayerNorm(nn.LayerNorm):
    """Layer norm whose output has the dtype of its input, under autocast too, where PyTorch's gives float32.

    Parameters and state dict are those of `torch.nn.LayerNorm`.

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
    """Layer norm whose scale and shift are linear functions of a condition: (1 + scale(c)) * normal(x) + bias(c).

    The state dict is that of Anemoi's class of this name: scale.weight, scale.bias, bias.weight, bias.bias. They begin at
    zero, which makes it a plain layer norm without parameters. Its output has the dtype of its input.

    Parameters
    ----------
    normalized_shape : int
        Features of a node.
    condition_shape : int
        Features of the condition.

    Raises
    ------
    ValueError
        When one of them is no whole number, or below 1.

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
        """Normalise `x` [..., N, normalized_shape] under the condition `cond` [..., N or 1, condition_shape].

        Raises
        ------
        ValueError
            When the features or the condition are of another shape or dtype. Where both have samples these are as many, or
            one; samples of the condition alone are those of the result.
        """
        channels, features = self.scale.out_features, self.scale.in_features
        if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[-1] != channels:
            raise ValueError(f"x must have shape [..., N, {channels}], got {_shape(x)}")
        rows = x.shape[-2]
        shape = cond.shape if isinstance(cond, Tensor) and cond.dim() >= 2 else (0, 0)
        if shape[-1] != features or shape[-2] not in (1, rows):
            raise ValueError(f"cond must have shape [..., {rows} or 1, {features}], got {_shape(cond)}")
        if not _fits(shape[:-2], x.shape[:-2]):
            raise ValueError(f"cond must have as many samples as x {_shape(x)}, or one, or none, got {_shape(cond)}")
        check_dtype("cond", cond, like=self.scale.weight)
        return ((1 + self.scale(cond)) * self.norm(x) + self.bias(cond)).type_as(x)


def apply_norm(norm: nn.Module, x: Tensor, cond: Tensor | None = None) -> Tensor:
    """Norm `x` under a condition where there is one, in pieces where PyTorch cannot in one.

    `norm` is whatever computes each row of `x` [..., F] alone.

    Raises
    ------
    ValueError
        When the norm takes no condition, or cannot be without.
    """
    return norm_in_pieces(norm, x, cond, WRAPS // 2) if wraps(norm, x) else _norm(norm, x, cond)


def wraps(norm: nn.Module, x: Tensor) -> bool:
    """Whether PyTorch's layer norm would take other rows than those of `x`; compiled code has kernels of its own."""
    return x.is_cuda and not isinstance(norm, nn.Identity) and not torch.compiler.is_compiling() and x.numel() >= WRAPS


def norm_in_pieces(norm: nn.Module, x: Tensor, cond: Tensor | None, most: int) -> Tensor:
    """Norm at most so many numbers of `x` at once, or one row of its longest dimension; with a condition, of its nodes."""
    dim = x.dim() - 2 if cond is not None else max(range(x.dim() - 1), key=x.shape.__getitem__)
    rows = max(1, most * x.shape[dim] // x.numel())
    pieces = x.split(rows, dim)
    shared = cond is None or cond.shape[-2] == 1
    conditions = [cond] * len(pieces) if shared else cond.split(rows, -2)
    return torch.cat([_norm(norm, *pair) for pair in zip(pieces, conditions, strict=True)], dim)


def _norm(norm: nn.Module, x: Tensor, cond: Tensor | None) -> Tensor:
    options = {} if cond is None else {"cond": cond}
    try:
        return norm(x, **options)
    except TypeError as error:
        if _takes(norm, x, **options):
            raise
        kind = type(norm).__name__
        if cond is None:
            raise ValueError(
                f"cond must be given, for the norms are of class {kind}, which need it; got None"
            ) from error
        raise ValueError(
            f"cond must be None, for the norms are of class {kind}, which take none; got {_shape(cond)}; "
            "make conditional norms with LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=...))"
        ) from error


def _fits(samples: tuple[int, ...], of_features: tuple[int, ...]) -> bool:
    """Whether samples of a condition and of features spread over each other."""
    return all(1 in pair or pair[0] == pair[1] for pair in zip(samples[::-1], of_features[::-1], strict=False))


def _shape(cond: object) -> tuple[int, ...] | str:
    """What came as a condition, for messages."""
    return tuple(cond.shape) if isinstance(cond, Tensor) else type(cond).__name__


def _takes(module: nn.Module, *inputs, **options) -> bool:
    """Whether a module's signature has room for these inputs; True where it has none, as a scripted module's."""
    try:
        call = signature(module.forward)
    except (TypeError, ValueError):
        return True
    try:
        call.bind(*inputs, **options)
    except TypeError:
        return False
    return True
