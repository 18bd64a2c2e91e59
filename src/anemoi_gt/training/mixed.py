"""Mixed precision: the weights of a model's layers cast all at once. The only place that hands a model other weights than its own.

Autocast casts each weight where it is read, and each gradient back, in a kernel of its own: 400 of the 2,400 that a pass of sixteen layers
launches, however small a part of the graph a rank has. Together they take some twenty. Numbers are the same, bit by bit.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from anemoi_gt.nn import GraphTransformerBaseBlock, GraphTransformerBaseMapper
from anemoi_gt.ops.dtypes import autocast_is_active

READ = "lin_edge"  # not called: attention reads its weight, in a precision that its config may choose


class CastTogether:
    """Calls a model with weights that autocast would cast one by one cast together; outside autocast, or without gradients, as it is.

    Parameters
    ----------
    model : nn.Module
        Weights of the linear maps that our blocks and mappers call are cast, those that get gradients; others are left to autocast.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        self.weights = _called_weights(model)

    def __call__(self, x: Tensor) -> Tensor:
        """Return model(x)."""
        if not (torch.is_grad_enabled() and autocast_is_active(x.device.type)):
            return self.model(x)
        weights = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        if not weights:
            return self.model(x)
        cast = _Cast.apply(torch.get_autocast_dtype(x.device.type), *weights.values())
        return functional_call(self.model, dict(zip(weights, cast, strict=True)), (x,))


class _Cast(torch.autograd.Function):
    """Tensors in another dtype, and their gradients in their own."""

    @staticmethod
    def forward(ctx, dtype, *tensors):
        ctx.set_materialize_grads(False)  # a weight that nothing reads gets no gradient
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return _cast(tensors, [dtype] * len(tensors))

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        given = [i for i, gradient in enumerate(gradients) if gradient is not None]
        cast = iter(_cast([gradients[i] for i in given], [ctx.dtypes[i] for i in given]))
        return None, *(None if gradient is None else next(cast) for gradient in gradients)


def _cast(tensors, dtypes) -> tuple[Tensor, ...]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if cast:
        torch._foreach_copy_(cast, list(tensors))
    return tuple(cast)


def _called_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Float32 weights and biases of the linear maps that blocks and mappers of a model call, by name."""
    called, read = set(), set()
    for layer in model.modules():
        if isinstance(layer, GraphTransformerBaseBlock | GraphTransformerBaseMapper):
            for path, part in layer.named_modules():
                if type(part) is nn.Linear:
                    ids = read if path.rpartition(".")[2] == READ else called
                    ids.update(map(id, part.parameters(recurse=False)))
    return {
        name: weight
        for name, weight in model.named_parameters()
        if id(weight) in called - read and weight.dtype == torch.float32
    }
