"""Training loss: squared error of the normalised change, weighted by area."""

from torch import Tensor


def weighted_mse(output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """Return the mean over batch, nodes and channels of weight * (output - target)^2.

    Parameters
    ----------
    output, target : Tensor
        [B, N, C], normalised.
    weights : Tensor
        [N] of mean 1.

    Returns
    -------
    Tensor
        Scalar; about 1 for a forecast without skill, because targets have unit variance.

    Raises
    ------
    ValueError
        When output and target differ in shape, which PyTorch would broadcast.
    """
    if output.shape != target.shape:
        raise ValueError(f"output must have the shape of target, {tuple(target.shape)}, got {tuple(output.shape)}")
    return ((output - target).square().mean(dim=(0, 2)) * weights).mean()
