"""Compilation of a model's layers by torch.compile: the only place of this room that asks for it."""

from torch import nn

from anemoi_gt.nn import GraphTransformerBaseBlock

# Messages leave as soon as their rows are there, and are waited for where they are read: behind all that does not need them.
HIDE_MESSAGES = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}


def compile_blocks(model: nn.Module) -> None:
    """Compile every graph-transformer block of a model, in place: at its first call, and again where sizes or types change.

    Blocks are compiled one by one and not as a whole: those of a kind share what was compiled, so a deep model compiles as fast as a
    shallow one. Weights and their names stay as they are, and a copy of the model is not compiled.

    Parameters
    ----------
    model : nn.Module

    Raises
    ------
    ValueError
        When the model has no such block.
    """
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    if not blocks:
        raise ValueError(
            f"training.compile must be false for a model without graph-transformer blocks, got true and {type(model).__name__}"
        )
    for block in blocks:
        # The decoder's sizes are not those of the encoder, but stay as well; and PyTorch 2.13 fails on counts of rows that a rank
        # sends while it computes, where it takes them for numbers that change.
        block.compile(dynamic=False, options=HIDE_MESSAGES)
