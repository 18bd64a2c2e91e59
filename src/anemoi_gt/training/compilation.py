"""Compilation of a model's graph-transformer blocks by torch.compile."""

from torch import nn

from anemoi_gt.nn import GraphTransformerBackwardMapper, GraphTransformerBaseBlock, GraphTransformerMapperBlock

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
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    if not blocks:
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
