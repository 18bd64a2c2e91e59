"""CUDA-graphed steps of Anemoi models: `capture_step`, and values that Anemoi keeps on the host.

Anemoi indexes device tensors with tensors and lists on the host, which are copied to the device at
every step; a CUDA graph cannot capture such copies. During capture, device copies replace them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from anemoi_gt.replay.cuda_graph import Capture, CUDAGraphedStep, capture_cuda_graph
from anemoi_gt.replay.slots import Slot, replaced_values, slot_at, values_of


def capture_step(
    function: Callable[[Any], Any], module: nn.Module, capture: Capture = capture_cuda_graph
) -> CUDAGraphedStep:
    """Return a function that replays forward and backward of a step from a CUDA graph.

    The step is captured at the first batch; results are bitwise identical. With Lightning, use
    `CUDAGraphCallback`.

    Parameters
    ----------
    function : callable
        As for `CUDAGraphedStep`, of a batch of tensors on the device in any nesting. A loss is
        scaled inside, weights are updated outside.
    module : torch.nn.Module
        Module on one device; its parameters get the gradients.
    capture : callable
        As for `CUDAGraphedStep`.

    Returns
    -------
    CUDAGraphedStep
        Called with a batch, it assigns the gradients to the parameters and returns what `function`
        returns. Gradients are overwritten by the next call; `install` must stay active. `reset()`
        makes the next batch capture again, as after a change of rollout.

    Raises
    ------
    ValueError
        If the module is not on a GPU, or a submodule is compiled to replay CUDA graphs of its own,
        as with mode "max-autotune"; at a call, as `CUDAGraphedStep`, or if layers with dropout are
        checkpointed.

    Examples
    --------
    >>> def forward_backward(batch):
    ...     loss = (model(batch["x"]) - batch["y"]).square().mean()
    ...     scaler.scale(loss).backward()
    ...     return loss.detach()
    >>> step = capture_step(forward_backward, model)  # doctest: +SKIP
    >>> loss = step({"x": x, "y": y})  # doctest: +SKIP
    """
    device = next(module.parameters()).device
    check_device(device, capture)
    check_submodules(module, "call the function itself")
    indices = indices_on_device(module, device)
    return CUDAGraphedStep(
        replaced_values(indices)(function),
        module,
        device,
        capture,
        "call the function itself",
    )


def check_device(device: torch.device, capture: Capture) -> None:
    """Raise ValueError if `capture` needs CUDA graphs and the device has none."""
    if capture is capture_cuda_graph and device.type != "cuda":
        raise ValueError(
            f"a step that is captured in a CUDA graph must compute on a GPU, got device {device}"
        )


def check_submodules(module: nn.Module, remedy: str) -> None:
    """Raise ValueError if a submodule was compiled to replay CUDA graphs.

    PyTorch's modes "max-autotune" and "reduce-overhead" replay graphs of their own, which cannot be
    captured.
    """
    for name, submodule in module.named_modules():
        # Module.compile keeps its function among them; get_compiler_config is PyTorch's own
        for value in vars(submodule).values():
            read_config = getattr(value, "get_compiler_config", None)
            compiler_config = read_config() if callable(read_config) else None
            if compiler_config and compiler_config.get("triton.cudagraphs"):
                raise ValueError(
                    "a step that is captured in a CUDA graph must not replay CUDA graphs of "
                    f"torch.compile, got {name or type(submodule).__name__} compiled with mode "
                    '"max-autotune" or "reduce-overhead": compile it with '
                    f'"max-autotune-no-cudagraphs", or {remedy}'
                )


def indices_on_device(module: nn.Module, device: torch.device) -> list[tuple[Slot, Tensor]]:
    """Return the host indices of an Anemoi module and its children, as slots with device copies.

    They are integer tensors that are neither parameters nor buffers, and lists of integers in a
    dictionary of indices.
    """

    def is_index(name: str, value: Any) -> bool:
        if isinstance(value, list):
            return "indices" in name and bool(value) and all(type(index) is int for index in value)
        is_host_tensor = isinstance(value, Tensor) and value.device.type == "cpu" != device.type
        is_index = is_host_tensor and value.dtype in (torch.int32, torch.int64) and value.dim() > 0
        return is_index and name not in ("_buffers", "_parameters")

    indices = values_of(module, is_index)
    return [
        (slot_at(module, path), torch.as_tensor(index, device=device))
        for path, index in indices.items()
    ]
