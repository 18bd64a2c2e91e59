"""LayerKernels: the classes that blocks are built from, replaced by one value."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from anemoi_gt.nn.norm import AutocastLayerNorm
from anemoi_gt.ops.dtypes import cast_for_autocast
from anemoi_gt.torch_compat import constant_when_traced

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)  # in torch.nn.modules.module
QKNorm = partial(AutocastLayerNorm, bias=False)


@dataclass(frozen=True)
class LayerKernels:
    """Constructors of the submodules of a block, by the names of Anemoi's configs.

    The result of Anemoi's `load_layer_kernels`, which has the same five attributes, works too.

    Parameters
    ----------
    Linear : callable
        Takes (in_features, out_features) and `bias=False` or not; has `weight` and `bias` of
        `torch.nn.Linear`.
    LayerNorm : callable
        Takes `normalized_shape`, the features of a node. With a condition the norm is called as
        norm(x, cond=...), as `ConditionalLayerNorm` is.
    Activation : callable
        Takes nothing; of feed-forward networks without a gate.
    QueryNorm, KeyNorm : callable
        Take the channels of a head; used with `qk_norm`.

    Examples
    --------
    >>> from anemoi_gt.nn import ConditionalLayerNorm
    >>> kernels = LayerKernels(LayerNorm=partial(ConditionalLayerNorm, condition_shape=4))
    >>> kernels.LayerNorm(normalized_shape=8).scale
    Linear(in_features=4, out_features=8, bias=True)
    """

    Linear: Callable[..., Any] = nn.Linear  # Any: a module with parameters of these names
    LayerNorm: Callable[..., nn.Module] = nn.LayerNorm
    Activation: Callable[[], nn.Module] = nn.GELU
    QueryNorm: Callable[[int], nn.Module] = QKNorm
    KeyNorm: Callable[[int], nn.Module] = QKNorm


def cast_for_projections(x: Tensor, *projections: nn.Module) -> Tensor:
    """Cast `x` to autocast's dtype if all projections are `nn.Linear`; others cast themselves."""
    if all(type(projection) is nn.Linear for projection in projections):
        return cast_for_autocast(x)
    return x


@constant_when_traced
def class_path(kind: type) -> str:
    """Return module and name of a class, for messages: other libraries have a `Linear` too.

    Constant while torch.compile traces, where the names of classes are not what they seem.
    """
    return f"{kind.__module__}.{kind.__qualname__}"


def hooks_of(module: nn.Module) -> list:
    """Return hooks and instance-level `forward` overrides of a module.

    PyTorch's spectral norm and pruning are such hooks, offloading and quantisation of other
    libraries such a `forward`.
    """
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return [*hooks, module.forward] if "forward" in module.__dict__ else hooks


def has_global_hooks() -> bool:
    """Return whether hooks of others are registered for all modules.

    `register_module_forward_hook` registers such a hook; ours only observe.
    """
    for name in GLOBAL_HOOKS:
        for hook in getattr(nn.modules.module, name, {}).values():
            if not getattr(hook, "__module__", "").startswith("anemoi_gt."):
                return True
    return False


def has_wrapped_weights(module: nn.Module) -> bool:
    """Return whether weight or bias is a tensor subclass with its own ops: DTensor, quantised."""
    return hasattr(module.weight, "__tensor_flatten__") or hasattr(
        module.bias, "__tensor_flatten__"
    )


def must_be_called(linear: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a linear layer is more than weight and bias: adapters, hooks. Warn if so.

    The attention reads the weight and bias of an edge embedding instead of calling it. `kind` is
    the class whose `forward` needs nothing else.
    """
    if (
        type(linear).forward is kind.forward
        and not is_parametrized(linear)  # its class inherits `forward`
        and not hooks_of(linear)
        and not has_wrapped_weights(linear)
    ):
        return False
    _warn_of_call(type(linear))
    return True


@constant_when_traced
def _warn_of_call(kind: type) -> None:
    warnings.warn(
        f"lin_edge, a {class_path(kind)}, has hooks, weights that are a tensor subclass, or a "
        "replaced class: falling back to materialised edge features [E, H, C]",
        stacklevel=3,
    )


def check_kernels(kernels: object) -> None:
    """Raise ValueError unless `kernels` has all constructors that blocks need."""
    names = [field.name for field in fields(LayerKernels)]
    missing = [name for name in names if not hasattr(kernels, name)]
    if missing:
        raise ValueError(
            f"layer_kernels must have the attributes {', '.join(names)}, as LayerKernels(...) "
            f"does, got {type(kernels).__name__} without {', '.join(missing)}"
        )
    for name in names:
        maker = getattr(kernels, name)
        if not callable(maker) or isinstance(maker, nn.Module):
            example = "Linear"
            if name == "Activation":
                example = "GELU"
            elif "Norm" in name:
                example = "LayerNorm"
            raise ValueError(
                f"layer_kernels.{name} must be a class, or a function that returns a module, such "
                f"as torch.nn.{example}, got {maker!r}"
            )
