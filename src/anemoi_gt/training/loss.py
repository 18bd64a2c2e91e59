"""The loss: squared error of the normalised change, each node by its share of the area."""

from torch import Tensor


def weighted_mse(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over samples, nodes and channels of weight * (output - target)^2.

    Parameters
    ----------
    output, target : Tensor
        [B, N, C], normalised.
    weights : Tensor
        [N] of mean 1.

    Returns
    -------
    Tensor
        Scalar; about 1 for a forecast of no skill, since targets have unit variance.
    """
    return ((output - target).square().mean(dim=(0, 2)) * weights).mean()
