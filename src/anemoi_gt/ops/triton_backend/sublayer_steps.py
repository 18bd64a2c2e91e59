"""Plan steps of both sub-layers of a block: packed weights, linear maps, norms, node sums.

Parameters are cast to the dtype of the products once per forward pass, into one packed tensor that
the backward pass reads too. They are not remembered from step to step: version counters do not
tell, since `AdamW(fused=True).step()` and `.data.copy_` leave them as they were (torch 2.13).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.ops.triton_backend import row_launches
from anemoi_gt.ops.triton_backend.plan import Buffer, PlanBuilder, contiguous_stride

CHUNK = 131072  # rows whose hidden features and modulation exist at a time
# that share sums over nodes; fixed, so that the order of summation does not depend on the device
PROGRAMS = 528
PACKED_ALIGNMENT = 8  # elements: 16 bytes of 16-bit elements, which kernels and cuBLAS load at once


def chunks(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of chunks of nearly equal sizes, at most CHUNK rows each."""
    number = max(1, -(-num_rows // CHUNK))
    for part in range(number):
        yield part * num_rows // number, (part + 1) * num_rows // number


class PackedWeights(NamedTuple):
    """Layout of parameters in one tensor; parameters of a group are stacked along dim 0."""

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Buffer]]) -> "PackedWeights":
        """Lay out groups of parameters, which differ only in their first dimension."""
        places = {}
        num_elements = 0
        for name, parameters in groups.items():
            rows = sum(parameter.shape[0] for parameter in parameters)
            shape = (rows, *parameters[0].shape[1:])
            places[name] = (num_elements, shape)
            num_elements += -(-prod(shape) // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
        return cls(num_elements, places)

    def views(self, packed: Buffer) -> dict[str, Buffer]:
        """Return each group in `packed` [num_elements]."""
        views = {}
        for name, (first, shape) in self.groups.items():
            views[name] = replace(
                packed, shape=shape, stride=contiguous_stride(shape), offset=first
            )
        return views


def cast_weights(
    builder: PlanBuilder, groups: Mapping[str, Sequence[Buffer]], dtype: torch.dtype
) -> tuple[Buffer, dict[str, Buffer]]:
    """Cast groups of parameters by one call; return the packed tensor and its groups."""
    layout = PackedWeights.of(groups)
    packed = builder.empty((layout.num_elements,), dtype)
    views = layout.views(packed)
    targets = []
    parameters = []
    for name, group in groups.items():
        first = 0
        for parameter in group:
            targets.append(views[name].slice(0, first, first + parameter.shape[0]))
            parameters.append(parameter)
            first += parameter.shape[0]
    if parameters:
        builder.compute(_copy_all, *targets, *parameters)
    return packed, views


def _copy_all(*tensors: Tensor) -> None:
    number = len(tensors) // 2
    torch._foreach_copy_(list(tensors[:number]), list(tensors[number:]))


def linear(
    builder: PlanBuilder, x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer | None = None
) -> Buffer:
    """Return x W^T + b [N, features] of x [N, F] and W [features, F]."""
    if out is None:
        out = builder.empty((x.shape[0], weight.shape[0]), x.dtype)
    if bias is None:
        builder.compute(_mm, x, weight.transposed(), out)
    else:
        builder.compute(_addmm, bias, x, weight.transposed(), out)
    return out


def product(builder: PlanBuilder, x: Buffer, y: Buffer, out: Buffer | None = None) -> Buffer:
    """Return the matrix product of x [N, K] and y [K, M]."""
    if out is None:
        out = builder.empty((x.shape[0], y.shape[1]), x.dtype)
    builder.compute(_mm, x, y, out)
    return out


def add_product(builder: PlanBuilder, x: Buffer, y: Buffer, out: Buffer) -> None:
    """Add the matrix product of x [N, K] and y [K, M] to `out` [N, M]."""
    builder.compute(_add_mm, x, y, out)


def outer_product(
    builder: PlanBuilder, dy: Buffer, x: Buffer, total: Buffer, is_first: bool
) -> None:
    """Write dy^T x, a weight gradient, into `total` in float32; add it unless `is_first`."""
    builder.compute(partial(_outer_product, is_first=is_first), dy, x, total)


def _mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.mm(x, y, out=out)


def _addmm(bias: Tensor, x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.addmm(bias, x, y, out=out)


def _add_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.addmm_(x, y)


def _outer_product(dy: Tensor, x: Tensor, total: Tensor, is_first: bool) -> None:
    if not dy.is_cuda or dy.dtype == torch.float32:
        gradient = dy.t() @ x
        if is_first:
            total.copy_(gradient)
        else:
            total.add_(gradient)
        return
    # Rows beyond a multiple of 64 have a separate product: cuBLAS may leave some of them out
    # (docs/upstream.md).
    aligned = dy.shape[0] // 64 * 64
    if is_first:
        torch.mm(dy[:aligned].t(), x[:aligned], out_dtype=torch.float32, out=total)
    else:
        torch.addmm(total, dy[:aligned].t(), x[:aligned], out_dtype=torch.float32, out=total)
    if aligned < dy.shape[0]:
        torch.addmm(total, dy[aligned:].t(), x[aligned:], out_dtype=torch.float32, out=total)


def cast(builder: PlanBuilder, x: Buffer, dtype: torch.dtype) -> Buffer:
    """Return x in another dtype, x itself where it has that dtype."""
    if x.dtype == dtype:
        return x
    out = builder.empty_like(x, dtype)
    builder.compute(_copy, x, out)
    return out


def copy(builder: PlanBuilder, source: Buffer, target: Buffer) -> None:
    """Copy elements, cast to the dtype of `target`."""
    builder.compute(_copy, source, target)


def add(builder: PlanBuilder, x: Buffer, y: Buffer, out: Buffer) -> None:
    """Write x + y into `out`, in its dtype."""
    builder.compute(_add, x, y, out)


def zero(builder: PlanBuilder, out: Buffer) -> None:
    """Fill `out` with zeros."""
    builder.compute(_zero, out)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _add(x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.add(x, y, out=out)


def _zero(out: Tensor) -> None:
    out.zero_()


class NormParameters(NamedTuple):
    """Parameters of a norm as `anemoi_gt.ops.sublayer_tensors` describes them."""

    scale: Buffer | None
    shift: Buffer | None
    scale_bias: Buffer | None
    shift_bias: Buffer | None
    condition: Buffer | None

    def groups(self, name: str) -> dict[str, list[Buffer]]:
        """Return the parameters to cast: for a condition W [2 F, K] and b [2 F], scale first."""
        if self.condition is None:
            return {}
        return {
            f"{name}_weight": [self.scale, self.shift],
            f"{name}_bias": [self.scale_bias, self.shift_bias],
        }


class Norm(NamedTuple):
    """A norm as the kernels read it: scale and shift [F], or a map of the condition to both."""

    eps: float
    scale: Buffer | None = None
    shift: Buffer | None = None
    condition: Buffer | None = None  # [N, K] in the dtype of products
    weight: Buffer | None = None  # [2 F, K]
    bias: Buffer | None = None  # [2 F], 1 added to the half of the scale

    @classmethod
    def of(
        cls,
        builder: PlanBuilder,
        parameters: NormParameters,
        eps: float,
        weights: dict[str, Buffer],
        name: str,
    ) -> "Norm":
        """Return the norm called `name` in the cast weights."""
        if parameters.condition is None:
            return cls(eps, parameters.scale, parameters.shift)
        weight = weights[f"{name}_weight"]
        condition = cast(builder, parameters.condition, weight.dtype)
        return cls(eps, condition=condition, weight=weight, bias=weights[f"{name}_bias"])

    def modulation(self, builder: PlanBuilder, begin: int, end: int) -> Buffer | None:
        """Return scale and shift of rows `begin` to `end` [rows, 2 F]; None without a condition."""
        if self.condition is None:
            return None
        return linear(builder, self.condition.slice(0, begin, end), self.weight, self.bias)


def add_one_to_scale(builder: PlanBuilder, bias: Buffer) -> None:
    """Add 1 to the half of the scale of a cast bias [2 F]."""
    builder.compute(_add_one, bias.slice(0, 0, bias.shape[0] // 2))


def _add_one(scale_bias: Tensor) -> None:
    scale_bias.add_(1.0)


def norm_forward(
    builder: PlanBuilder, x: Buffer, norm: Norm, out: Buffer, batch: int = 1, entry_rows: int = 0
) -> None:
    """Write the normed rows of x [N, F] into `out`.

    With `entry_rows`, into the first rows of each batch entry of that number of rows.

    Where scale and shift of every row are made of a condition, rows are taken in chunks.
    """
    num_rows, features = x.shape
    parts = [(0, num_rows)]
    if norm.condition is not None and batch == 1:
        parts = list(chunks(num_rows))
    for begin, end in parts:
        launch = row_launches.norm_forward(
            end - begin, features, norm.eps, batch=batch, out_entry_rows=entry_rows or None
        )
        rows = out if batch > 1 else out.slice(0, begin, end)
        builder.launch(
            launch,
            x=x.slice(0, begin, end),
            scale=norm.scale,
            shift=norm.shift,
            modulation=norm.modulation(builder, begin, end),
            out=rows,
        )


class NodeSums:
    """Sums over nodes: PROGRAMS rows of partial sums, columns by name."""

    def __init__(self, builder: PlanBuilder, widths: Mapping[str, int]):
        self.builder = builder
        self.columns: dict[str, slice] = sum_columns(widths)
        self.width = max(1, sum(widths.values()))
        self.partial = builder.empty((PROGRAMS, self.width), torch.float32)
        zero(builder, self.partial)

    def total(self) -> Buffer:
        """Return the sums [width]."""
        total = self.builder.empty((self.width,), torch.float32)
        self.builder.compute(_sum_rows, self.partial, total)
        return total


def sum_columns(widths: Mapping[str, int]) -> dict[str, slice]:
    """Return the columns of the sums by name."""
    columns = {}
    first = 0
    for name, width in widths.items():
        columns[name] = slice(first, first + width)
        first += width
    return columns


def _sum_rows(partial: Tensor, total: Tensor) -> None:
    torch.sum(partial, 0, out=total)


def norm_sums(name: str, features: int) -> dict[str, int]:
    """Return the widths of `norm_backward`'s sums: scale, shift and residual gradient."""
    return {f"{name}_scale": features, f"{name}_shift": features, f"{name}_total": features}


class ModulationGradients(NamedTuple):
    """Gradients of a condition and of the map that makes scale and shift of it."""

    weight: Buffer  # [2 F, K] float32
    condition: Buffer | None  # [N, K]


def modulation_gradients(
    builder: PlanBuilder, norm: Norm, need_condition: bool
) -> ModulationGradients | None:
    """Return memory for the gradients of a condition; None without one."""
    if norm.condition is None:
        return None
    condition = None
    if need_condition:
        condition = builder.empty_like(norm.condition)
    return ModulationGradients(builder.empty_like(norm.weight, torch.float32), condition)


def norm_backward(
    sums: NodeSums,
    name: str,
    norm: Norm,
    rows: tuple[int, int],
    *,
    x: Buffer,
    grad_normed: Buffer,
    grad_total: Buffer | None,
    dx: Buffer,
    normed: Buffer,
    modulation: ModulationGradients | None,
    is_first: bool,
    batch: int = 1,
    entry_rows: int = 0,
) -> None:
    """Differentiate a norm over condition rows `rows` (begin, end): fill dx and `normed`.

    `normed` is the output, recomputed.

    Tensors hold these rows alone, `grad_normed` and `normed` [rows, F], or [B * entry_rows, F]. The
    gradients of scale and shift are added to the sums, or with a condition to `modulation`.
    """
    builder = sums.builder
    begin, end = rows
    num_rows, features = x.shape
    launch = row_launches.norm_backward(
        num_rows,
        features,
        norm.eps,
        programs=PROGRAMS,
        sums=sums.width,
        first_sum=sums.columns[f"{name}_scale"].start,
        total=grad_total is not None,
        batch=batch,
        normed_entry_rows=entry_rows or None,
    )
    grad_scale = None
    if norm.condition is not None:
        grad_scale = builder.empty((num_rows, features), grad_normed.dtype)
    builder.launch(
        launch,
        x=x,
        grad_normed=grad_normed,
        grad_total=grad_total,
        scale=norm.scale,
        shift=norm.shift,
        modulation=norm.modulation(builder, begin, end),
        dx=dx,
        normed=normed,
        grad_scale=grad_scale,
        partial=sums.partial,
    )
    if norm.condition is None:
        return
    condition = norm.condition.slice(0, begin, end)
    if batch > 1 and entry_rows:  # without the halo's rows, which have no condition
        entries = (batch, num_rows // batch)
        own_rows = grad_normed.unflatten(0, (batch, entry_rows)).slice(1, 0, entries[1])
        grad_normed = builder.empty((num_rows, features), grad_normed.dtype)
        copy(builder, own_rows, grad_normed.unflatten(0, entries))
    outer_product(builder, grad_scale, condition, modulation.weight.slice(0, 0, features), is_first)
    outer_product(
        builder,
        grad_normed,
        condition,
        modulation.weight.slice(0, features, 2 * features),
        is_first,
    )
    if modulation.condition is not None:
        grad_condition = modulation.condition.slice(0, begin, end)
        product(builder, grad_scale, norm.weight.slice(0, 0, features), grad_condition)
        add_product(
            builder, grad_normed, norm.weight.slice(0, features, 2 * features), grad_condition
        )


def contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the same elements, contiguous."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def specs_of(tensors: Sequence[Tensor | None]) -> tuple:
    """Return the key of a plan for contiguous tensors: shapes and dtypes."""
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)


def like_tensors(
    gradients: Sequence[Tensor | None], tensors: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return gradients in the dtypes of their tensors, None where there is no tensor."""
    cast_gradients = []
    for gradient, tensor in zip(gradients, tensors, strict=True):
        is_absent = gradient is None or tensor is None
        cast_gradients.append(None if is_absent else gradient.to(tensor.dtype))
    return cast_gradients


def needed(gradients: Sequence[Tensor | None], needs: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that are needed, None for others."""
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=True)]
