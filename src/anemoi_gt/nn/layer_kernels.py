"""LayerKernels: the classes that blocks are built from, replaced by one value."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from anemoi_gt.nn.norm import AutocastLayerNorm
from anemoi_gt.ops.dtypes import cast_for_autocast

QKNorm = partial(AutocastLayerNorm, bias=False)


@dataclass(frozen=True)
class LayerKernels:
    """Constructors of the submodules of a block, by the names of Anemoi's configs.

    The result of Anemoi's `load_layer_kernels`, which has the same five attributes, works too.

    Parameters
    ----------
    Linear : callable
        Takes (in_features, out_features) and `bias=False` or not; has `weight` and `bias` of
        `torch.nn.Linear`.
    LayerNorm : callable
        Takes `normalized_shape`, the features of a node. With a condition the norm is called as
        norm(x, cond=...), as `ConditionalLayerNorm` is.
    Activation : callable
        Takes nothing; of networks without a gate, and of `edge_pre_mlp`.
    QueryNorm, KeyNorm : callable
        Take the channels of a head; used with `qk_norm`.

    Examples
    --------
    >>> from anemoi_gt.nn import ConditionalLayerNorm
    >>> kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=4))
    >>> kernels.LayerNorm(normalized_shape=8).scale
    Linear(in_features=4, out_features=8, bias=True)
    """

    Linear: Callable[..., Any] = nn.Linear  # Any: a module with parameters of these names
    LayerNorm: Callable[..., nn.Module] = nn.LayerNorm
    Activation: Callable[[], nn.Module] = nn.GELU
    QueryNorm: Callable[[int], nn.Module] = QKNorm
    KeyNorm: Callable[[int], nn.Module] = QKNorm


def cast_for_projections(x: Tensor, *projections: nn.Module) -> Tensor:
    """Cast `x` to autocast's dtype if all projections are `nn.Linear`; others cast themselves."""
    if all(type(projection) is nn.Linear for projection in projections):
        return cast_for_autocast(x)
    return x
