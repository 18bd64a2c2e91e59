"""The residual of Anemoi's models: `_assemble_output` whose gradient is a gather.

    out[..., i_k] = x_out[..., i_k] + x_skip[..., j_k]        for the prognostic variables k

Upstream writes it as `x_out[..., i] += x_skip[..., j]`, whose gradient is an indexed accumulation
over the whole grid (10 ms of a step of Anemoi's benchmark on an H200) and which copies i and j to
the device at every step. As `index_add` of `index_select` the gradients are a gather, and i and j
stay on the device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anemoi_gt.integrations.anemoi.report import after_step
from anemoi_gt.integrations.anemoi.upstream import replaces

# {index of a model: {(device, version): the same on the device}}
_ON_DEVICE = WeakTensorKeyDictionary()


@replaces
def assemble_output(
    _: Any,
    self: Any,
    x_out: Tensor,
    x_skip: Tensor | None,
    batch_size: int,
    ensemble_size: int,
    dtype: torch.dtype,
    dataset_name: str,
) -> Tensor:
    """Return the output [batch, time, ensemble, grid, variables] with residual and boundings."""
    steps = self.n_step_output
    x_out = x_out.reshape(batch_size, ensemble_size, -1, steps, x_out.shape[-1] // steps)
    x_out = x_out.permute(0, 3, 1, 2, 4).to(dtype)
    if x_skip is None:
        x_out = x_out.clone()  # a bounding may write into it
    else:
        if x_skip.ndim != 5 or x_skip.shape[1] != x_out.shape[1]:
            raise AssertionError(
                "residual must have shape [batch, time, ensemble, grid, variables] with "
                f"{x_out.shape[1]} output steps, got {tuple(x_skip.shape)}"
            )
        skip = x_skip.index_select(
            -1, _on_device(self._internal_input_idx[dataset_name], x_out.device)
        )
        x_out = x_out.index_add(
            -1, _on_device(self._internal_output_idx[dataset_name], x_out.device), skip.to(dtype)
        )
    for bounding in self.boundings[dataset_name]:
        x_out = bounding(x_out)
    if not torch.compiler.is_compiling():
        after_step(self)
    return x_out


@replaces
def assemble_ensemble_output(
    upstream: Callable,
    self: Any,
    x_out: Tensor,
    x_skip: Tensor | None,
    batch_size: int,
    batch_ens_size: int,
    dtype: torch.dtype,
    dataset_name: str | None = None,
) -> Tensor:
    """Return the output of a model that is called with batch size times ensemble size."""
    sizes = batch_size, batch_ens_size // batch_size
    return assemble_output.function(upstream, self, x_out, x_skip, *sizes, dtype, dataset_name)


def _on_device(index: Tensor | list[int], device: torch.device) -> Tensor:
    """Return an index on a device, copied there once."""
    if not isinstance(index, Tensor) or index.device == device or torch.compiler.is_compiling():
        return torch.as_tensor(index, device=device)
    copies = _ON_DEVICE.setdefault(index, {})
    key = (device, index._version)
    if key not in copies:
        with torch.inference_mode(mode=False):
            copies.clear()
            copies[key] = index.to(device)
    return copies[key]
