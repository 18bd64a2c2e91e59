"""Normalisation and encodings as modules, for data sets and for models in physical units.

    channels, reference = inputs(fields, time)
    forecast            = reference + change_mean + model(channels) * change_std

`fields` are physical values; `time` is the start of each forecast in seconds since 1970-01-01 00:00
UTC.
"""

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

SECONDS_PER_DAY = 86_400
SECONDS_PER_YEAR = 31_556_952  # mean Gregorian year


class PhysicalInputs(nn.Module, ABC):
    """Convert physical values to a model's input channels and the reference of its change.

    Attributes
    ----------
    names, units : tuple of str
        Names and units of the channels of `fields`.
    needs_time : bool
        True if `forward` takes `time`.
    """

    names: tuple[str, ...]
    units: tuple[str, ...]
    needs_time: bool = True

    @abstractmethod
    def forward(self, fields: Tensor, time: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return normalised channels [B, N, in_channels] and the physical reference [B, N, V].

        `fields` is [B, N, P] float32; `time` [B] float64, seconds since 1970-01-01 00:00 UTC.
        """

    def channels(self, *inputs: Tensor) -> Tensor:
        """Return the channels [N, in_channels] of one sample: fields [N, P], and time if needed."""
        channels, _ = self(*(values[None] for values in inputs))
        return channels[0]


class PhysicalModel(nn.Module):
    """A model that takes and returns physical values, [B, N, P] to [B, N, V].

    Parameters
    ----------
    inputs : PhysicalInputs
    model : nn.Module
        Maps normalised channels to the normalised change.
    change_mean, change_std : Tensor [V]
    """

    change_mean: Tensor  # buffers
    change_std: Tensor

    def __init__(
        self, inputs: PhysicalInputs, model: nn.Module, change_mean: Tensor, change_std: Tensor
    ):
        super().__init__()
        self.inputs = inputs
        self.model = model
        self.register_buffer("change_mean", change_mean)
        self.register_buffer("change_std", change_std)

    def forward(self, fields: Tensor, time: Tensor | None = None) -> Tensor:
        """Return the forecast at one lead time; `inputs` describes `fields` and `time`."""
        inputs = (fields,) if time is None else (fields, time)
        channels, reference = self.inputs(*inputs)
        return reference + self.change_mean + self.model(channels).float() * self.change_std

    def normalised_change(self, forecast: Tensor, *inputs: Tensor) -> Tensor:
        """Recover the normalised change, which the model predicted, from a forecast, in float64."""
        _, reference = self.inputs(*inputs)
        return (forecast.double() - reference - self.change_mean) / self.change_std

    def rounding(self, forecast: Tensor) -> float:
        """Return the relative error of the normalised change due to rounding to float32."""
        largest = (forecast.abs().amax(dim=(0, 1)) / self.change_std).max().item()
        return torch.finfo(torch.float32).eps * largest


def day_angle(time: Tensor) -> Tensor:
    """Return the time of day (UTC) as an angle from midnight, [B] float64."""
    return 2 * math.pi * torch.remainder(time, SECONDS_PER_DAY) / SECONDS_PER_DAY


def year_angle(time: Tensor) -> Tensor:
    """Return the time since 1 January as an angle of a mean Gregorian year, [B] float64.

    The year is computed from the day count in integers, by eras of 400 years that begin on 1 March.
    """
    days = torch.floor(time / SECONDS_PER_DAY).long() + 719_468  # since 1 March of year 0
    era = torch.div(days, 146_097, rounding_mode="floor")
    day = days - era * 146_097
    year = (day - day // 1_460 + day // 36_524 - day // 146_096) // 365
    day_of_year = day - (365 * year + year // 4 - year // 100)  # from 1 March
    # January and February belong to the next calendar year
    year = year + era * 400 + (day_of_year >= 306).long()
    era_year = year - 1  # 1 January belongs to the era year that began in March before
    era = torch.div(era_year, 400, rounding_mode="floor")
    rest = era_year - era * 400
    new_year = era * 146_097 + rest * 365 + rest // 4 - rest // 100 + 306 - 719_468
    return 2 * math.pi * (time - new_year.double() * SECONDS_PER_DAY) / SECONDS_PER_YEAR
