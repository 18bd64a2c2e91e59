"""Ridge regression at every point of a grid by itself: a baseline that knows no neighbours."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Ridge:
    """A linear model for each of N points, least squares with a penalty on the slopes.

        prediction[n] = target_mean[n] + <predictors[n] - predictor_mean[n], slope[n]>
        slope[n]      = (X_n^T X_n + penalty I)^-1 X_n^T y_n            X_n, y_n centred, [S, F] and [S]

    Parameters
    ----------
    predictor_mean, slope : Tensor
        [N, F] float64.
    target_mean : Tensor
        [N] float64.
    """

    predictor_mean: Tensor
    slope: Tensor
    target_mean: Tensor

    @classmethod
    def fit(cls, predictors: Tensor, target: Tensor, penalty: float = 1.0) -> "Ridge":
        """Fit to S examples.

        Parameters
        ----------
        predictors : Tensor
            [S, N, F].
        target : Tensor
            [S, N].
        penalty : float
            In squared units of the predictors.

        Returns
        -------
        Ridge
            The model.
        """
        x, y = predictors.double(), target.double()
        x_mean, y_mean = x.mean(dim=0), y.mean(dim=0)
        x, y = (x - x_mean).transpose(0, 1), (y - y_mean).T[..., None]  # [N, S, F], [N, S, 1]
        gram = x.mT @ x + penalty * torch.eye(x.shape[-1], dtype=x.dtype)
        return cls(x_mean, torch.linalg.solve(gram, x.mT @ y)[..., 0], y_mean)

    def __call__(self, predictors: Tensor) -> Tensor:
        """Predict from `predictors` [..., N, F]: [..., N] float32."""
        return (self.target_mean + ((predictors.double() - self.predictor_mean) * self.slope).sum(dim=-1)).float()
