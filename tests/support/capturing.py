"""Stand-ins for CUDA graphs on any device, whose replays use fixed memory, and compiled blocks without Inductor."""

import math
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

compile_module = nn.Module.compile


def capture_in_place(function):
    """Imitate `capture_cuda_graph`: warm up, capture without results, and replay into the memory of the capture."""
    function()
    outputs = function()
    static = written(outputs)
    for tensor in static[: len(static) - len(outputs.attributes)]:  # which may be inputs
        if tensor is not None:
            tensor.fill_(math.nan)

    def replay():
        for tensor, new in zip(static, written(function()), strict=True):
            if tensor is not None and new is not None:
                tensor.copy_(new)

    return outputs, replay


def written(outputs):
    """Return the outputs of a pass, None where a parameter has no gradient, or an attribute no tensor."""
    results = [leaf for leaf in tree_leaves(outputs.result) if isinstance(leaf, Tensor)]
    left = [value if isinstance(value, Tensor) else None for value in outputs.attributes.values()]
    return [*results, *outputs.gradients, *left]


@contextmanager
def without_inductor(backend="aot_eager"):
    """Let `nn.Module.compile` use another backend, without options: Inductor takes a minute."""

    def compile_without(module, *, options=None, **arguments):
        compile_module(module, backend=backend, **arguments)

    with patch.object(nn.Module, "compile", compile_without):
        yield
