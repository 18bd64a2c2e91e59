"""Compilation of a model's graph-transformer blocks by torch.compile, and what a CUDA graph can capture."""

import torch
from torch import nn

from anemoi_gt.nn import GraphTransformerBackwardMapper, GraphTransformerBaseBlock, GraphTransformerMapperBlock

REMEDY = "set training.cuda_graph=false"

# Inductor sends messages as early as possible and waits for them as late as possible.
OVERLAP_MESSAGES = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}


def compile_blocks(model: nn.Module) -> None:
    """Compile each graph-transformer block of a model, in place, at its first call and again for other sizes or dtypes.

    Blocks are compiled one by one: those of a kind share the compiled code, so a deep model compiles as fast as a
    shallow one, and chunks of a mapper share it too. The norm and linear map at the end of a decoder are compiled with
    its block. Weights and their names do not change, and a copy of the model is not compiled. Raises ValueError when
    the model has no such block.
    """
    if not (blocks := [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]):
        name = type(model).__name__
        raise ValueError(
            f"training.compile must be false for a model without graph-transformer blocks, got true and {name}"
        )
    has_chunks = any(len(getattr(module, "chunks", ())) > 1 for module in model.modules())
    ends = [part.node_data_extractor for part in model.modules() if isinstance(part, GraphTransformerBackwardMapper)]
    for part in (*blocks, *ends):
        # Other sizes are static: with dynamic ones PyTorch 2.13 fails on the row counts of all-to-all messages.
        is_chunked = has_chunks and (part in ends or isinstance(part, GraphTransformerMapperBlock))
        part.compile(dynamic=is_chunked, options=OVERLAP_MESSAGES)


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
    """Return True if a module, a processor or a mapper, recomputes layers with dropout in backward."""
    recomputes = getattr(part, "checkpoint_groups", None) is not None or getattr(part, "gradient_checkpointing", False)
    blocks = (block for block in part.modules() if isinstance(block, GraphTransformerBaseBlock))
    return recomputes and any(block.dropout > 0 for block in blocks)
