"""Checks that a training step can be captured in a CUDA graph (`anemoi_gt.cuda_graph`)."""

import torch
from torch import nn

from anemoi_gt.nn import GraphTransformerBaseBlock, GraphTransformerBaseMapper, GraphTransformerProcessor

REMEDY = "set training.cuda_graph=false"


def check_capturable(model: nn.Module, device: torch.device) -> None:
    """Raise a ValueError unless a step of a model can be captured in a CUDA graph.

    It cannot on a device without CUDA graphs, nor with activation checkpointing of layers with dropout, for which
    PyTorch would read the state of the generator during capture, and refuses.
    """
    check_device_has_cuda_graphs(device)
    checkpointed = [name or type(part).__name__ for name, part in model.named_modules() if _checkpoints_dropout(part)]
    if checkpointed:
        raise ValueError(
            "training.cuda_graph must be false with activation checkpointing of layers with dropout, got true and "
            f"{', '.join(checkpointed)}: set model.checkpoint_groups=null or model.dropout=0"
        )


def check_device_has_cuda_graphs(device: torch.device) -> None:
    """Raise a ValueError unless a device has CUDA graphs."""
    if device.type != "cuda":
        raise ValueError(f"training.cuda_graph must be false on device {device}, got true: set training.device=cuda")


def _checkpoints_dropout(part: nn.Module) -> bool:
    """Return True if a module recomputes layers with dropout in backward."""
    checkpoints = (isinstance(part, GraphTransformerProcessor) and part.checkpoint_groups is not None) or (
        isinstance(part, GraphTransformerBaseMapper) and part.gradient_checkpointing
    )
    blocks = (block for block in part.modules() if isinstance(block, GraphTransformerBaseBlock))
    return checkpoints and any(block.dropout > 0 for block in blocks)
