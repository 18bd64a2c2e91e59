"""StaticNodes: what a model knows of nodes that never move, as a module: where they are, and what it learns about them."""

import math

import torch
from torch import Tensor, nn

from anemoi_gt.option_checks import check_integer


class StaticNodes(nn.Module):
    """Features of fixed nodes: sine and cosine of latitude and longitude, and trained numbers.

    The positions follow from the graph and stay out of the state dict; `trainable` is in it.

    Parameters
    ----------
    positions : Tensor [N, 2], floating point
        Latitude and longitude in radians.
    trainable : int
        Number of trained features of each node; they begin at 0.

    Raises
    ------
    ValueError
        When positions are not [N, 2] or not finite, or a latitude lies beyond a pole, as it does in degrees.

    Examples
    --------
    >>> StaticNodes(torch.zeros(5, 2), trainable=8)().shape
    torch.Size([5, 12])
    """

    def __init__(self, positions: Tensor, trainable: int = 0):
        super().__init__()
        if not isinstance(positions, Tensor):
            raise ValueError(
                f"positions must be a tensor [N, 2], latitude and longitude in radians, got {type(positions).__name__}"
            )
        if positions.dim() != 2 or positions.shape[1] != 2 or not positions.is_floating_point():
            raise ValueError(
                "positions must be floating point of shape [N, 2], latitude and longitude in radians, "
                f"got {positions.dtype} {tuple(positions.shape)}"
            )
        if not bool(positions.isfinite().all()):
            raise ValueError("positions must be finite, got NaN or infinity")
        if not bool((positions[:, 0].abs() <= math.pi / 2 + 1e-4).all()):  # a pole in float32 may lie beyond pi / 2
            raise ValueError(
                f"latitudes must lie within +-pi/2 radians, got up to {float(positions[:, 0].abs().max()):g}; "
                "convert degrees with torch.deg2rad"
            )
        check_integer("trainable", trainable, least=0, note=", the number of trained features of a node")
        sin_cos_lat_lon = torch.cat([positions.sin(), positions.cos()], dim=-1).to(torch.get_default_dtype())
        self.register_buffer("sin_cos_lat_lon", sin_cos_lat_lon, persistent=False)
        self.trainable = nn.Parameter(torch.zeros(positions.shape[0], trainable)) if trainable else None

    def __len__(self) -> int:
        return self.num_nodes

    @property
    def num_nodes(self) -> int:
        """Number of nodes, which an export can leave open, while `len` would burn it in."""
        return self.sin_cos_lat_lon.shape[0]

    @property
    def channels(self) -> int:
        """Number of features of each node, given and trained."""
        return self.sin_cos_lat_lon.shape[1] + (0 if self.trainable is None else self.trainable.shape[1])

    def forward(self) -> Tensor:
        """Return the features [N, channels]: sin lat, sin lon, cos lat, cos lon, trained ones."""
        return (
            self.sin_cos_lat_lon
            if self.trainable is None
            else torch.cat([self.sin_cos_lat_lon, self.trainable], dim=-1)
        )
