"""A stand-in for CUDA graphs on any device: it computes every pass, but in the memory that a CUDA graph would use."""

import math


def record_in_place(function):
    """Capture like `record_cuda_graph`: a warm-up, a capture without results, and a replay into its memory."""
    function()
    outputs = function()
    kept = written(outputs)
    for tensor in kept:
        if tensor is not None:
            tensor.fill_(math.nan)

    def replay():
        for tensor, new in zip(kept, written(function()), strict=True):
            if tensor is not None and new is not None:
                tensor.copy_(new)

    return outputs, replay


def written(outputs):
    """Return the outputs of a pass, None where a parameter has no gradient."""
    return [outputs.loss, *outputs.gradients]
