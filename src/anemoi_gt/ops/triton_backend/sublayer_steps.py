"""Plan steps of both sub-layers of a block: packed weights, linear maps, norms, node sums.

Parameters are cast to the dtype of the products once per forward pass, into one packed tensor that
the backward pass reads too. They are not remembered from step to step: version counters do not
tell, since `AdamW(fused=True).step()` and `.data.copy_` leave them as they were (torch 2.13).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.operands import Held, Operand, OperandT
from anemoi_gt.ops.triton_backend import row_launches
from anemoi_gt.ops.triton_backend.plan import Buffer, Plan, PlanBuilder, contiguous_stride
from anemoi_gt.ops.triton_backend.tiles import next_power_of_two

CHUNK = 131072  # rows whose hidden features and modulation exist at a time
# programs that share sums over nodes; fixed, so that the order of summation does not depend on the
# device
PROGRAMS = 528
PACKED_ALIGNMENT = 8  # elements: 16 bytes of 16-bit elements, which kernels and cuBLAS load at once
GRADIENT_ALIGNMENT = 32  # elements: 128 bytes of float32
PACK_BLOCK = 2048  # elements of a program of `pack`
ADD_BLOCK = 2048
SUM_ELEMENTS = 2048  # of a tile whose rows are summed
# 10,240 and 271,040 rows of 1024 columns take 17 and 193 us on an H100; with 128, 26 and 200
SUM_COLUMNS = 512
# 528 rows of 7168 partial sums take 13 us on an H100, a map of 1024 x 1024 takes 6; with 64 x 32
# and 4 warps, 22 and 13
TOTAL_ROWS = 256
TOTAL_COLUMNS = 16
TOTAL_WARPS = 8
OUTER_ROWS = 64  # a product over nodes in 16 bits is a multiple of it, and the rows beyond


def chunks(num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of chunks of nearly equal sizes, at most CHUNK rows each."""
    number = max(1, -(-num_rows // CHUNK))
    for part in range(number):
        yield part * num_rows // number, (part + 1) * num_rows // number


class Piece(NamedTuple, Generic[Held]):
    """A parameter as it is packed: cast, after `addend` or 1 has been added."""

    shape: tuple[int, ...]
    source: Held | None  # None: zeros
    addend: Held | None = None
    has_one: bool = False

    @classmethod
    def of(cls, parameter: OperandT) -> "Piece[OperandT]":
        """Return a parameter as it is."""
        return Piece(parameter.shape, parameter)


def _stacked_shape(pieces: Sequence) -> tuple[int, ...]:
    """Return the shape of pieces stacked along their first dimension."""
    return (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])


class PackedWeights(NamedTuple):
    """Layout of parameters in one tensor; parameters of a group are stacked along dim 0."""

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Piece[Operand]]]) -> "PackedWeights":
        """Lay out groups of pieces; the pieces of a group differ in their first dimension alone."""
        layout = {}
        num_elements = 0
        for name, pieces in groups.items():
            shape = _stacked_shape(pieces)
            layout[name] = (num_elements, shape)
            num_elements += -(-prod(shape) // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
        return cls(num_elements, layout)

    def views(self, packed: Buffer) -> dict[str, Buffer]:
        """Return each group in `packed` [num_elements]."""
        views = {}
        for name, (first, shape) in self.groups.items():
            stride = contiguous_stride(shape)
            views[name] = replace(packed, shape=shape, stride=stride, offset=packed.offset + first)
        return views


def pack_weights(
    builder: PlanBuilder, groups: Mapping[str, Sequence[Piece[Buffer]]], packed: Buffer
) -> dict[str, Buffer]:
    """Cast groups of parameters into `packed` by one launch; return each group in it."""
    from anemoi_gt.kernels import elementwise

    layout = PackedWeights.of(groups)
    sizes = []
    firsts = []
    ones = []
    sources: list[Buffer | None] = []
    addend = None
    with_addend = -1
    for name, pieces in groups.items():
        first = layout.groups[name][0]
        for piece in pieces:
            if piece.addend is not None:
                addend = piece.addend
                with_addend = len(sources)
            sizes.append(prod(piece.shape))
            firsts.append(first)
            ones.append(piece.has_one)
            sources.append(piece.source)
            first += prod(piece.shape)
    num_blocks = sum(-(-size // PACK_BLOCK) for size in sizes)
    absent = elementwise.PACKED - len(sources)
    constants = {
        "SIZES": (*sizes, *(absent * (0,))),
        "FIRSTS": (*firsts, *(absent * (0,))),
        "ONES": (*ones, *(absent * (False,))),
        "WITH_ADDEND": with_addend,
        "BLOCK": PACK_BLOCK,
        "num_warps": 4,
    }
    sources += absent * [None]
    buffers = {f"source{number}": source for number, source in enumerate(sources)}
    launch = Launch(elementwise.pack, (num_blocks,), {}, constants)
    builder.launch(launch, **buffers, addend=addend, packed=packed)
    return layout.views(packed)


class GradientPiece(NamedTuple):
    """One gradient in a block of gradients of parameters."""

    names: tuple[str, ...]  # of the parameters it belongs to; () if of none
    shape: tuple[int, ...]


class ParameterPieces(NamedTuple):
    """Layout of the float32 block that holds the gradients of parameters.

    Pieces of a group are stacked along their first dimension, as `PackedWeights` stacks parameters.
    Sizes may be symbolic.
    """

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group
    pieces: tuple[GradientPiece, ...]  # one after another, with padding between groups
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[GradientPiece]]) -> "ParameterPieces":
        """Lay out groups of pieces."""
        layout = {}
        pieces: list[GradientPiece] = []
        first = 0
        for name, group in groups.items():
            shape = _stacked_shape(group)
            padding = -prod(shape) % GRADIENT_ALIGNMENT
            layout[name] = (first, shape)
            pieces += group
            pieces.append(GradientPiece((), (padding,)))
            first += prod(shape) + padding
        sizes = tuple(prod(piece.shape) for piece in pieces)
        return cls(first, layout, tuple(pieces), sizes)

    def allocate(self, builder: PlanBuilder) -> tuple[Buffer, dict[str, Buffer]]:
        """Return a block [num_elements] and each group in it."""
        block = builder.empty((self.num_elements,), torch.float32)
        buffers = {}
        for name, (first, shape) in self.groups.items():
            buffers[name] = replace(
                block, shape=shape, stride=contiguous_stride(shape), offset=first
            )
            end = first + prod(shape)
            padding = -end % GRADIENT_ALIGNMENT
            if padding:  # an operator returns the same bits each time
                builder.compute(_zero, block.slice(0, end, end + padding))
        return block, buffers

    def gradients(self, block: Tensor) -> dict[str, Tensor | None]:
        """Return the gradients in a block [num_elements] by the names of their parameters.

        Parameters that share a gradient get the same tensor: autograd copies it for one of them.
        """
        gradients: dict[str, Tensor | None] = {}  # callers add those that may be absent
        for piece, part in zip(self.pieces, block.split(self.sizes), strict=True):
            if len(piece.shape) > 1:
                part = part.view(piece.shape)
            for name in piece.names:
                gradients[name] = part
        return gradients


def linear(
    builder: PlanBuilder, x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer | None = None
) -> Buffer:
    """Return x W^T + b [N, features] of x [N, F] and W [features, F]."""
    if out is None:
        out = builder.empty((x.shape[0], weight.shape[0]), x.dtype)
    if bias is None:
        builder.compute_into(out, torch.mm, x, weight.transposed())
    else:
        builder.compute_into(out, torch.addmm, bias, x, weight.transposed())
    return out


def product(builder: PlanBuilder, x: Buffer, y: Buffer, out: Buffer | None = None) -> Buffer:
    """Return the matrix product of x [N, K] and y [K, M]."""
    if out is None:
        out = builder.empty((x.shape[0], y.shape[1]), x.dtype)
    builder.compute_into(out, torch.mm, x, y)
    return out


def add_product(builder: PlanBuilder, x: Buffer, y: Buffer, out: Buffer) -> None:
    """Add the matrix product of x [N, K] and y [K, M] to `out` [N, M]."""
    builder.compute(_add_mm, x, y, out)


def outer_product(
    builder: PlanBuilder, dy: Buffer, x: Buffer, total: Buffer, *, is_first: bool
) -> None:
    """Write dy^T x, the gradient of a weight, into float32 `total`, or add it unless `is_first`."""
    num_rows = dy.shape[0]
    if dy.dtype == torch.float32:
        if is_first:
            builder.compute_into(total, torch.mm, dy.transposed(), x)
        else:
            builder.compute(_add_mm, dy.transposed(), x, total)
        return
    # Rows beyond a multiple of OUTER_ROWS are added by a kernel: cuBLAS may leave some of them out
    # (docs/upstream.md).
    aligned = num_rows // OUTER_ROWS * OUTER_ROWS
    if aligned or is_first:
        dy_rows = dy.slice(0, 0, aligned).transposed()
        function = _wide_mm if is_first else _add_wide_mm
        builder.compute(function, dy_rows, x.slice(0, 0, aligned), total)
    if aligned < num_rows:
        _add_outer(builder, dy.slice(0, aligned, num_rows), x.slice(0, aligned, num_rows), total)


def _add_outer(builder: PlanBuilder, dy: Buffer, x: Buffer, total: Buffer) -> None:
    from anemoi_gt.kernels import elementwise

    m, k = total.shape
    # a matrix instruction has at least 16 elements along each side
    tile_m = min(64, max(16, next_power_of_two(m)))
    tile_k = min(128, max(16, next_power_of_two(k)))
    constants = {
        "M": m,
        "K": k,
        "DY_STRIDE": dy.stride[0],
        "X_STRIDE": x.stride[0],
        "ROWS": OUTER_ROWS,
        "TILE_M": tile_m,
        "TILE_K": tile_k,
        "num_warps": 4,
    }
    grid = (-(-m // tile_m), -(-k // tile_k))
    launch = Launch(elementwise.add_outer, grid, {"num_rows": dy.shape[0]}, constants)
    builder.launch(launch, dy=dy, x=x, total=total)


def _add_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.addmm_(x, y)


def _wide_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    if x.is_cuda:
        torch.mm(x, y, out_dtype=torch.float32, out=out)
    else:  # PyTorch 2.13 has `out_dtype` on GPUs alone
        out.copy_(x @ y)


def _add_wide_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    if x.is_cuda:
        torch.addmm(out, x, y, out_dtype=torch.float32, out=out)
    else:
        out.add_(x @ y)


def cast(builder: PlanBuilder, x: Buffer, dtype: torch.dtype) -> Buffer:
    """Return contiguous x in another dtype, x itself where it has that dtype."""
    if x.dtype == dtype:
        return x
    out = builder.empty_like(x, dtype)
    add(builder, x, None, out)
    return out


def add(builder: PlanBuilder, x: Buffer, y: Buffer | None, out: Buffer) -> None:
    """Write x + y, or x, into `out` in its dtype; all are contiguous."""
    from anemoi_gt.kernels import elementwise

    numel = prod(x.shape)
    unit = 16 if numel % 16 == 0 else 1
    constants = {
        "UNIT": unit,
        "BLOCK": ADD_BLOCK,
        "INT64": numel + ADD_BLOCK >= 2**31,
        "num_warps": 4,
    }
    scalars = {"num_units": numel // unit}
    launch = Launch(elementwise.add, (-(-numel // ADD_BLOCK),), scalars, constants)
    builder.launch(launch, x=x, y=y, out=out)


def copy(builder: PlanBuilder, source: Buffer, target: Buffer) -> None:
    """Copy elements, cast to the dtype of `target`, of any strides."""
    if source.is_contiguous and target.is_contiguous:
        # PyTorch copies by cudaMemcpyAsync: 1.5 MB took 11 us on an H100, a kernel takes 3
        add(builder, source, None, target)
    else:
        builder.compute(_copy, source, target)


def _zero(out: Tensor) -> None:
    out.zero_()


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


class NormParameters(NamedTuple, Generic[Held]):
    """Parameters of a norm as `anemoi_gt.ops.sublayer_tensors` describes them."""

    scale: Held | None
    shift: Held | None
    scale_bias: Held | None
    shift_bias: Held | None
    condition: Held | None

    def groups(self: "NormParameters[OperandT]", name: str) -> dict[str, list[Piece[OperandT]]]:
        """Return the packed rows: with a condition W [2 F, K] and b [2 F], scale before shift."""
        if self.condition is None:
            return {}
        assert self.scale is not None
        assert self.shift is not None
        assert self.scale_bias is not None
        assert self.shift_bias is not None
        scale_bias = Piece(self.scale_bias.shape, self.scale_bias, has_one=True)
        return {
            f"{name}_weight": [Piece.of(self.scale), Piece.of(self.shift)],
            f"{name}_bias": [scale_bias, Piece.of(self.shift_bias)],
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
        parameters: NormParameters[Buffer],
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

    def rows(self, begin: int, end: int) -> "Norm":
        """Return the norm of rows `begin` to `end`."""
        if self.condition is None:
            return self
        return self._replace(condition=self.condition.slice(0, begin, end))

    def modulation(self, builder: PlanBuilder) -> Buffer | None:
        """Return scale and shift of all rows [N, 2 F]; None without a condition."""
        if self.condition is None:
            return None
        assert self.weight is not None
        return linear(builder, self.condition, self.weight, self.bias)


def norm_forward(
    builder: PlanBuilder, x: Buffer, norm: Norm, out: Buffer, batch: int = 1, entry_rows: int = 0
) -> None:
    """Write the normed rows of x [N, F] into `out`.

    With `entry_rows`, into the first rows of each batch entry of that number of rows. Where scale
    and shift of every row are made of a condition, rows are taken in chunks.
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
            modulation=norm.rows(begin, end).modulation(builder),
            out=rows,
        )


class NodeSums:
    """Partial sums over nodes, PROGRAMS rows with named columns, each written by a launch."""

    def __init__(self, builder: PlanBuilder, pieces: Mapping[str, GradientPiece]):
        self.builder = builder
        self.columns: dict[str, slice] = {}
        self.width = 0
        for name, piece in pieces.items():
            self.columns[name] = slice(self.width, self.width + piece.shape[0])
            self.width += piece.shape[0]
        self.partial = builder.empty((PROGRAMS, self.width), torch.float32)

    def sum_rows(self, name: str, rows: Buffer) -> None:
        """Write the sums of rows [N, W] into the columns called `name`."""
        from anemoi_gt.kernels import elementwise

        num_rows, width = rows.shape
        columns = min(SUM_COLUMNS, next_power_of_two(width))
        constants = {
            "W": width,
            "STRIDE": rows.stride[0],
            "ROWS": SUM_ELEMENTS // columns,
            "COLUMNS": columns,
            "SUMS": self.width,
            "INT64": (num_rows + PROGRAMS * SUM_ELEMENTS) * rows.stride[0] >= 2**31,
            "num_warps": 4,
        }
        scalars = {"num_rows": num_rows, "first_sum": self.columns[name].start}
        grid = (PROGRAMS, -(-width // columns))
        launch = Launch(elementwise.sum_columns, grid, scalars, constants)
        self.builder.launch(launch, rows=rows, partial=self.partial)

    def total_into(self, total: Buffer) -> None:
        """Write the sums of all columns into `total` [width]."""
        from anemoi_gt.kernels import elementwise

        constants = {
            "P": PROGRAMS,
            "SUMS": self.width,
            "ROWS": TOTAL_ROWS,
            "COLUMNS": TOTAL_COLUMNS,
            "num_warps": TOTAL_WARPS,
        }
        grid = (-(-self.width // TOTAL_COLUMNS),)
        launch = Launch(elementwise.sum_partial, grid, {}, constants)
        self.builder.launch(launch, partial=self.partial, total=total)


def map_total(builder: PlanBuilder, weight: Buffer, total: Buffer, out: Buffer) -> None:
    """Write W^T total [W] into `out`, of W [F, W] and total [F]."""
    from anemoi_gt.kernels import elementwise

    features, width = weight.shape
    constants = {
        "F": features,
        "W": width,
        "ROWS": TOTAL_ROWS,
        "COLUMNS": TOTAL_COLUMNS,
        "num_warps": TOTAL_WARPS,
    }
    launch = Launch(elementwise.map_total, (-(-width // TOTAL_COLUMNS),), {}, constants)
    builder.launch(launch, weight=weight, total=total, out=out)


def norm_sum_pieces(name: str, features: int, *, has_condition: bool) -> dict[str, GradientPiece]:
    """Return the sums that `norm_backward` makes: of scale and shift, or of their biases."""
    suffix = "_bias" if has_condition else ""
    pieces = {}
    for part in ("scale", "shift"):
        pieces[f"{name}_{part}"] = GradientPiece((f"{name}_{part}{suffix}",), (features,))
    return pieces


def norm_map_pieces(name: str, features: int, num_conditions: int) -> list[GradientPiece]:
    """Return the gradients of the map [2 F, K] of a condition to scale and shift."""
    shape = (features, num_conditions)
    return [GradientPiece((f"{name}_{part}",), shape) for part in ("scale", "shift")]


class ModulationGradients(NamedTuple):
    """Gradients of a condition and of the map that makes scale and shift of it."""

    weight: Buffer  # [2 F, K] float32
    condition: Buffer | None  # [N, K]


def modulation_gradients(
    builder: PlanBuilder, norm: Norm, weight: Buffer | None, *, need_condition: bool
) -> ModulationGradients | None:
    """Return memory for the gradients of a condition and its map; None without a condition."""
    if norm.condition is None:
        return None
    condition = None
    if need_condition:
        condition = builder.empty_like(norm.condition)
    assert weight is not None
    return ModulationGradients(weight, condition)


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
        is_first=is_first,
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
        modulation=norm.rows(begin, end).modulation(builder),
        dx=dx,
        normed=normed,
        grad_scale=grad_scale,
        partial=sums.partial,
    )
    if norm.condition is None:
        return
    assert grad_scale is not None
    assert modulation is not None
    assert norm.weight is not None
    condition = norm.condition.slice(0, begin, end)
    if batch > 1 and entry_rows:  # without the halo's rows, which have no condition
        entries = (batch, num_rows // batch)
        own_rows = grad_normed.unflatten(0, (batch, entry_rows)).slice(1, 0, entries[1])
        grad_normed = builder.empty((num_rows, features), grad_normed.dtype)
        copy(builder, own_rows, grad_normed.unflatten(0, entries))
    scale_weight = modulation.weight.slice(0, 0, features)
    shift_weight = modulation.weight.slice(0, features, 2 * features)
    outer_product(builder, grad_scale, condition, scale_weight, is_first=is_first)
    outer_product(builder, grad_normed, condition, shift_weight, is_first=is_first)
    if modulation.condition is not None:
        grad_condition = modulation.condition.slice(0, begin, end)
        product(builder, grad_scale, norm.weight.slice(0, 0, features), grad_condition)
        add_product(
            builder, grad_normed, norm.weight.slice(0, features, 2 * features), grad_condition
        )


class SublayerPlans:
    """The plans of a sub-layer for some shapes and dtypes, each made when first run.

    Parameters
    ----------
    make_forward, make_backward : callable
        Of (specs, options, save) and of (specs, options, needs).
    specs : tuple
        Shape and dtype of each tensor, None for an absent one.
    options : NamedTuple
    """

    def __init__(self, make_forward: Callable, make_backward: Callable, specs: tuple, options):
        self.make_forward, self.make_backward = make_forward, make_backward
        self.specs, self.options = specs, options
        self._forward: dict[bool, Plan] = {}
        self._backward: dict[object, tuple[Plan, ParameterPieces]] = {}

    def forward(self, *, save: bool) -> Plan:
        """Return the plan of the forward pass."""
        if save not in self._forward:
            self._forward[save] = self.make_forward(self.specs, self.options, save=save)
        return self._forward[save]

    def backward(self, needs) -> tuple[Plan, ParameterPieces]:
        """Return the plan of the backward pass, and the layout of its block of parameters."""
        if needs not in self._backward:
            self._backward[needs] = self.make_backward(self.specs, self.options, needs)
        return self._backward[needs]


class Shaped(NamedTuple):
    """Stands for a tensor where its shape and dtype are all that is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def all_of(cls, specs: tuple) -> list["Shaped | None"]:
        """Return one for each spec."""
        return [None if spec is None else cls(*spec) for spec in specs]


def contiguous(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the same elements, contiguous."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def specs_of(tensors: Sequence[Tensor | None]) -> tuple:
    """Return the key of a plan for contiguous tensors: shapes and dtypes."""
    return tuple(None if tensor is None else (tensor.shape, tensor.dtype) for tensor in tensors)


def ordered_gradients(
    tensors: NamedTuple, gradients: Mapping[str, Tensor | None], needs: NamedTuple
) -> list[Tensor | None]:
    """Return the needed gradients in the order and dtypes of `tensors`, None for others."""
    ordered: list[Tensor | None] = []
    for name, tensor, need in zip(tensors._fields, tensors, needs, strict=True):
        gradient = gradients.get(name) if need else None
        if gradient is not None and gradient.dtype != tensor.dtype:
            gradient = gradient.to(tensor.dtype)
        ordered.append(gradient)
    return ordered
