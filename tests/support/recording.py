"""A recorder for any device: it computes a pass each time, but reads and writes where a CUDA graph would."""

import math


def record_in_place(function):
    """As `record_cuda_graph`: a warm-up, a capture that computes nothing, and a replay into the memory of the capture."""
    function()
    outputs = function()
    kept = written(outputs)
    for tensor in kept:
        tensor.fill_(math.nan)

    def replay():
        for tensor, new in zip(kept, written(function()), strict=True):
            tensor.copy_(new)

    return outputs, replay


def written(outputs):
    """The tensors among the outputs of a pass."""
    return [tensor for tensor in (outputs.loss, *outputs.gradients) if tensor is not None]
