"""Private names of PyTorch that the library uses, each with a fallback, and helpers for tracing.

Private names of Triton are in `anemoi_gt.kernels.launch`, next to the launches that they speed up.
Names of PyTorch that start with an underscore but are documented, such as `torch.utils._pytree`,
are imported where they are used.
"""

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, overrides
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

# The fallbacks are conservative: correct for every call, at more host time. They assume that
# transforms, a dispatch mode and a profiler are active, that no gradient is batched, and that no
# backward pass has a number.
transforms_are_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
num_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
_function_modes = getattr(overrides, "_get_current_function_mode_stack", lambda: ["unknown"])
num_function_modes = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
profiler_is_enabled = getattr(torch.autograd, "_profiler_enabled", lambda: True)
_functorch = getattr(torch._C, "_functorch", None)
_is_legacy_batched = getattr(_functorch, "is_legacy_batchedtensor", lambda _: False)
_graph_task = getattr(torch._C, "_current_graph_task_id", lambda: -1)
_innermost_transform = getattr(_functorch, "peek_interpreter_stack", lambda: None)
_gradient_transform = getattr(getattr(_functorch, "TransformType", None), "Grad", None)
_float32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
# What products by cuBLAS depend on besides their operands; new releases add settings of such names.
# `allow_tf32` is left out: it raises where both ways to set it were used. `_float32_precision` is
# its successor.
_PREFIXES_OF_SETTINGS = (
    "_get_cublas",
    "_get_blas_preferred",
    "_get_sm_carveout",
    "_get_deterministic_algorithms",
)
_PRODUCT_SETTINGS = [
    getattr(torch._C, name)
    for name in dir(torch._C)
    if name.startswith(_PREFIXES_OF_SETTINGS) and name != "_get_cublas_allow_tf32"
]
_tunes_products = getattr(torch._C, "_cuda_tunableop_is_enabled", lambda: False)
_below_autograd = getattr(torch._C, "_AutoDispatchBelowAutograd", nullcontext)
_assert_async = getattr(torch, "_assert_async", None)
_flash_attention: Any = getattr(torch.ops.aten, "_flash_attention_forward", None)


def constant_when_traced(function: Callable) -> Callable:
    """Mark a function whose result torch.compile computes once, at trace time.

    torch.compiler.assume_constant_result sets the same mark but imports the compiler, which doubles
    the import time.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def without_autograd() -> AbstractContextManager:
    """Return a context for operators whose results have no gradient, in eager code.

    Collectives otherwise spend half of their host time in a Python function of their own that looks
    for one (torch 2.13).
    """
    return nullcontext() if torch.compiler.is_compiling() else _below_autograd()


def direct_apply(function: type[torch.autograd.Function]) -> Callable:
    """Return `apply` of an autograd function for calls outside of torch.func.

    `apply` of the class first looks at each argument for tensors that torch.func has left, a tenth
    of the host time of an operator with twenty arguments (torch 2.13).
    """
    return getattr(super(torch.autograd.Function, function), "apply", function.apply)


def constants(*numbers: int) -> tuple[int, ...]:
    """Return integers, as constants in traced code.

    torch.compile takes a number as dynamic once it has changed, as with a second batch size. Names
    of attributes and functions that run at trace time need constants.
    """
    return tuple(operator.index(number) for number in numbers)


@constant_when_traced
def is_exporting() -> bool:
    """Return whether a program is being exported.

    Before PyTorch 2.13, torch.compile traces PyTorch's own function as True.
    """
    return torch.compiler.is_exporting()


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor has no data (FakeTensorMode)."""
    return isinstance(tensor, FakeTensor)


def is_transformed() -> bool:
    """Return whether a torch.func transform (grad, vmap, ...) is active; False in traced code."""
    return not torch.compiler.is_compiling() and transforms_are_active()


def is_gradient_transform() -> bool:
    """Return whether the innermost torch.func transform differentiates (grad, vjp, jacrev)."""
    if not is_transformed():
        return False
    transform = _innermost_transform()
    return transform is not None and transform.key() == _gradient_transform


@constant_when_traced
def function_modes() -> str:
    """Return the classes of active modes of `__torch_function__`, "" if there are none.

    Those of PyTorch do not count: the default device, which is for functions that make tensors, and
    those that trace.
    """
    kinds = [type(mode) for mode in _function_modes()]
    foreign = [kind for kind in kinds if kind.__module__.partition(".")[0] != "torch"]
    return ", ".join([kind.__qualname__ for kind in foreign])


def product_settings() -> tuple | None:
    """Return the settings that, with the operands, decide what a matrix product on a GPU launches.

    None if they cannot be read, and while TunableOp is enabled, which may choose by timings.
    """
    if _float32_precision is None or _tunes_products():
        return None
    return (_float32_precision("cuda", "matmul"), *[setting() for setting in _PRODUCT_SETTINGS])


def is_batched(*gradients: Tensor | None) -> bool:
    """Return whether gradients have a hidden batch dimension (`is_grads_batched=True`).

    Operators that take and return plain tensors are then called once per entry, by PyTorch's own
    fallback.
    """
    return any(gradient is not None and _is_legacy_batched(gradient) for gradient in gradients)


def backward_pass() -> int | None:
    """Return the number of the backward pass that runs in this thread, which no other has.

    None outside of one, or where it is unknown.
    """
    number = _graph_task()
    return None if number < 0 else number


def forward_mode_is_active() -> bool:
    """Return whether tangents may exist: inside `forward_ad.dual_level` or `torch.func.jvp`."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def assert_async(holds: Tensor, claim: str) -> None:
    """Raise RuntimeError with `claim` unless `holds` [] is True, without synchronising.

    On a GPU, the device raises it later. In compiled and captured code, the assertion is part of
    the graph. The fallback synchronises.
    """
    if _assert_async is not None:
        _assert_async(holds, claim)
    elif not bool(holds):
        raise RuntimeError(claim)


@constant_when_traced
def takes_window_in_flash_attention() -> bool:
    """Return whether PyTorch's FlashAttention operator has the window that its kernel takes.

    The public `torch.nn.attention.varlen.varlen_attn` has one since PyTorch 2.11, but no dropout.
    """
    if _flash_attention is None:
        return False
    names = {argument.name for argument in _flash_attention.default._schema.arguments}
    return {"window_size_left", "window_size_right"} <= names


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    left: int,
    right: int,
    dropout_p: float,
    scale: float | None,
) -> Tensor:
    """Return the attention [B, H, N, C] within a window, by PyTorch's FlashAttention kernel.

    `scaled_dot_product_attention` calls the same operator without a window. Queries are
    [B, H, N, C] and keys [B, H, M, C], in 16 bits.
    """
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    out, *_ = _flash_attention(
        query,
        key,
        value,
        None,  # one length for all members of the batch
        None,
        query.shape[1],
        key.shape[1],
        dropout_p,
        False,  # noqa: FBT003  not causal: the window says it
        False,  # noqa: FBT003  no debug mask
        scale=scale,
        window_size_left=left,
        window_size_right=right,
    )
    return out.transpose(1, 2)
