"""Checks of index tensors: metadata always, values on request.

While torch.compile or torch.export traces, sizes may be symbolic and values are unknown. Then sizes
are compared, and values asserted, in the compiled program, which raises RuntimeError.
"""

from collections.abc import Callable
from numbers import Integral

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_true

from anemoi_gt.torch_compat import assert_async

INDEX_DTYPES = (torch.int32, torch.int64)
HOW_TO_CHECK = "build it with validate=True, outside compiled code"
HUB_DEGREE = 256  # a node with more edges is a hub, which GPU kernels divide among programs


def check_shape(
    name: str, value: object, expected: str, is_valid: Callable[[Tensor], bool]
) -> None:
    """Raise ValueError unless `value` is a tensor for which `is_valid` returns True.

    `expected` describes the shape, such as "[N, 2], one per node".
    """
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor {expected}, got {type(value).__name__}")
    if not is_valid(value):
        raise ValueError(f"{name} must have shape {expected}, got {tuple(value.shape)}")


def check_index(
    name: str, index: Tensor, like: Tensor, dtypes: tuple[torch.dtype, ...] | None = None
) -> None:
    """Raise ValueError unless `index` is 1-D, has one of `dtypes` and is on the device of `like`.

    By default, the dtype must be the dtype of `like`.
    """
    if not isinstance(index, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(index).__name__}")
    if index.dim() != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(index.shape)}")
    if dtypes is None:
        dtypes = (like.dtype,) if like.dtype in INDEX_DTYPES else INDEX_DTYPES
    if index.dtype not in dtypes:
        expected = " or ".join(map(str, dtypes))
        raise ValueError(f"{name} must have dtype {expected}, got {index.dtype}")
    if index.device != like.device:
        raise ValueError(
            f"all tensors must be on one device, got {name} on {index.device} and others on "
            f"{like.device}"
        )


def check_edge_index(edge_index: Tensor) -> None:
    """Raise ValueError unless `edge_index` is an int32 or int64 tensor [2, E]."""
    check_shape(
        "edge_index",
        edge_index,
        "[2, E] (sources, destinations)",
        lambda e: e.dim() == 2 and e.shape[0] == 2,
    )
    if edge_index.dtype not in INDEX_DTYPES:
        raise ValueError(f"edge_index must have dtype int32 or int64, got {edge_index.dtype}")


def check_edge_ids(global_edge_id: Tensor, edge_index: Tensor) -> None:
    """Raise ValueError unless `global_edge_id` is int64 [E], one id per edge of `edge_index`."""
    check_index("global_edge_id", global_edge_id, like=edge_index, dtypes=(torch.int64,))
    num_ids = global_edge_id.shape[0]
    num_edges = edge_index.shape[1]
    if not have_size(num_ids, num_edges):
        raise ValueError(
            f"global_edge_id must have {num_edges} entries, one per edge, got {num_ids}"
        )


def as_size(name: str, size: int) -> int:
    """Return a number of nodes as int or SymInt; raise ValueError if it is not a valid size."""
    if isinstance(size, bool) or not isinstance(size, (Integral, torch.SymInt)) or size < 0:
        raise ValueError(f"{name} must be a number of nodes >= 0, got {size!r}")
    return size if isinstance(size, (int, torch.SymInt)) else int(size)


def have_size(size: int, expected: int) -> bool:
    """Return whether `size == expected`; if unknown while tracing, assert it at run time."""
    if not torch.compiler.is_compiling():
        return size == expected
    if not guard_or_true(size == expected):
        return False
    torch._check(size == expected)
    return True


def check_range(name: str, index: Tensor, size: int) -> None:
    """Raise ValueError unless every value is in 0 .. size - 1; synchronises with the device."""
    if index.numel() == 0:
        return
    low, high = torch.stack(torch.aminmax(index)).tolist()  # one transfer
    if low >= 0 and high < size:
        return
    raise ValueError(
        f"{name} must hold values in 0 .. {size - 1}, one for each of {size} nodes, got values "
        f"from {low} to {high}; check the order (sources, destinations) of the indices and of the "
        "sizes"
    )


def assert_range(name: str, index: Tensor, size: int, of: str = "nodes") -> None:
    """Assert on the device, without synchronising, that every value is in 0 .. size - 1.

    `of` says what `size` counts.

    The assertion precedes kernels that use the values as addresses. A failure raises RuntimeError.
    """
    in_range = ((index >= 0) & (index < size)).all()
    message = f"{name} must hold values from 0 to below the number of {of}; {HOW_TO_CHECK}"
    assert_async(in_range, message)


def assert_pointers(name: str, pointers: Tensor, num_edges: int) -> None:
    """Assert on the device, without synchronising, that `pointers` increase from 0 to `num_edges`.

    A failure raises RuntimeError.
    """
    is_valid = (pointers[0] == 0) & (pointers[-1] == num_edges) & ~(pointers.diff() < 0).any()
    message = f"{name} must increase from 0 to the number of edges; {HOW_TO_CHECK}"
    assert_async(is_valid, message)


def check_pointers(name: str, pointers: Tensor, num_edges: int) -> None:
    """Raise ValueError unless `pointers` increase from 0 to `num_edges`; synchronises."""
    first, last = int(pointers[0]), int(pointers[-1])
    if first != 0 or last != num_edges:
        raise ValueError(
            f"{name} must start at 0 and end at the number of edges {num_edges}, got {first} and "
            f"{last}"
        )
    decreases = (pointers.diff() < 0).nonzero()
    if len(decreases) > 0:
        position = int(decreases[0])
        value, next_value = pointers[position : position + 2].tolist()
        raise ValueError(
            f"{name} must not decrease, got {value}, {next_value} at position {position}"
        )


def is_size(tensor: Tensor) -> bool:
    """Return whether a tensor has shape [size, 0], a size that torch.compile can trace."""
    return tensor.dim() == 2 and tensor.shape[1] == 0


def max_degree(pointers: Tensor) -> int:
    """Return the largest degree of any node; synchronises with the device."""
    return int(pointers.diff().amax()) if pointers.shape[0] > 1 else 0


def check_permutation(name: str, index: Tensor, size: int) -> None:
    """Raise ValueError unless `index` holds each of 0 .. size - 1 once; synchronises."""
    check_range(name, index, size)
    seen = torch.zeros(size, dtype=torch.bool, device=index.device).index_fill_(
        0, index.long(), value=True
    )
    num_missing = size - int(seen.sum())
    if num_missing > 0:
        raise ValueError(
            f"{name} must be a permutation of 0 .. {size - 1}, got {num_missing} values missing"
        )
