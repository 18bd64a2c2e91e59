"""Residual: the connection from the input fields of a model to its output fields."""

from collections.abc import Mapping

import torch
from torch import Tensor

from anemoi_gt.nn.static_graph import IndexBuffers
from anemoi_gt.option_checks import is_integer


class Residual(IndexBuffers):
    """Residual connection from input to output channels; a zero network forecasts persistence.

        y[..., o] = y[..., o] + x[..., i]          for each pair o: i

    `channels` maps output channels to the input channels that are added to them: the positions of
    prognostic variables, in the input at the initial time of the forecast. Raise ValueError for a
    channel that is not one of `in_channels` or `out_channels` fields, or when `channels` is not a
    mapping of integers.

    Examples
    --------
    >>> residual = Residual({1: 0}, in_channels=3, out_channels=2)
    >>> residual(torch.zeros(1, 2), torch.tensor([[5.0, 6.0, 7.0]]))
    tensor([[0., 5.]])
    """

    outputs: Tensor  # buffers
    inputs: Tensor

    def __init__(self, channels: Mapping[int, int], in_channels: int, out_channels: int):
        if not isinstance(channels, Mapping) or not all(
            map(is_integer, [*channels.keys(), *channels.values()])
        ):
            raise ValueError(
                f"residual must map output channels to input channels, both integers, as in {{0: "
                f"2}}, got {channels!r}"
            )
        outputs, inputs = list(channels.keys()), list(channels.values())
        sides = {"output": (outputs, out_channels), "input": (inputs, in_channels)}
        for side, (numbers, size) in sides.items():
            out_of_range = [number for number in numbers if not 0 <= number < size]
            if out_of_range:
                raise ValueError(
                    f"residual must name {side} channels in 0 .. {size - 1}, got {out_of_range}"
                )
        super().__init__(
            {
                "outputs": torch.tensor(outputs, dtype=torch.int64),
                "inputs": torch.tensor(inputs, dtype=torch.int64),
            }
        )

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        """Return `y` [..., out_channels] with the channels of `x` [..., in_channels] added."""
        self.check_unchanged()
        # its gradient is a gather; that of `y[..., o] += x[..., i]` accumulates by index
        return y.index_add(-1, self.outputs, x.index_select(-1, self.inputs).to(y.dtype))
