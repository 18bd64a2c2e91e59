"""Mixed precision: the weights of a model's layers cast all at once. The only place that hands a model other weights than its own.

Autocast casts each weight where it is read, and each gradient back, in a kernel of its own: 520 in a pass of sixteen layers, however small a
part of the graph a rank has. Together they take 26. Numbers are the same, bit by bit.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call

from anemoi_gt.ops.dtypes import autocast_is_active

LAYERS = "anemoi_gt.nn."  # modules whose classes call their linear maps and read no weight of them, but one:
READ = "lin_edge"  # attention reads it, in a precision that its config may choose


class CastTogether:
    """Calls a model with weights that autocast would cast one by one cast together; outside autocast, or without gradients, as it is.

    Parameters
    ----------
    model : nn.Module
        Weights of the plain linear maps that layers of this library call are cast, those that get gradients. Others are left to
        autocast, and so are all of a model with parts that torch.compile compiles: it casts within kernels, and layers that are computed
        again would be compiled for other weights.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, x: Tensor) -> Tensor:
        """Return model(x)."""
        if not (torch.is_grad_enabled() and autocast_is_active(x.device.type)):
            return self.model(x)
        weights = {name: weight for name, weight in self.weights.items() if weight.requires_grad}
        if not weights:
            return self.model(x)
        cast = _Cast.apply(torch.get_autocast_dtype(x.device.type), *weights.values())
        return functional_call(self.model, dict(zip(weights, cast, strict=True)), (x,))

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """Those that are cast, by name, as the model is when they are first asked for."""
        if any(_is_compiled(part) for part in self.model.modules()):
            return {}
        maps = {id(weight) for part in _called_maps(self.model) for weight in part.parameters()}
        read = {id(weight) for path, weight in self.model.named_parameters() if READ in path.split(".")}
        return {
            path: weight
            for path, weight in self.model.named_parameters()
            if id(weight) in maps - read and weight.dtype == torch.float32
        }


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


def _called_maps(model: nn.Module) -> Iterator[nn.Linear]:
    """The linear maps that layers of this library call, without hooks and without another way to their weights."""
    for layer in model.modules():
        if type(layer).__module__.startswith(LAYERS):
            for part in layer.children():
                for inner in part.children() if type(part) is nn.Sequential else (part,):
                    if type(inner) is nn.Linear and _is_plain(inner):
                        yield inner


def _is_plain(part: nn.Linear) -> bool:
    return set(part._parameters) == {"weight", "bias"} and not (part._forward_pre_hooks or part._forward_hooks)


def _is_compiled(part: nn.Module) -> bool:
    return part._compiled_call_impl is not None or "_orig_mod" in part._modules
