"""Plan steps of both sub-layers of a block: packed weights, linear maps, norms, node sums.

Parameters are cast to the GEMM dtype once per forward pass, into one packed tensor that
the backward pass reads too. They are not remembered from step to step: version counters do not
tell, since `AdamW(fused=True).step()` and `.data.copy_` leave them as they were (torch 2.13).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.operands import Held, Operand, OperandT
from anemoi_gt.ops.operator import GradientLayout, GradientLeaf, Spec
from anemoi_gt.ops.sublayer_tensors import Linear, Norm, NormOptions
from anemoi_gt.ops.triton_backend import row_launches, tiles
from anemoi_gt.ops.triton_backend.plan import Buffer, PlanBuilder, contiguous_stride
from anemoi_gt.ops.triton_backend.tiles import next_power_of_two

PACKED_ALIGNMENT = 8  # elements: 16 bytes of 16-bit elements, which kernels and cuBLAS load at once
GRADIENT_ALIGNMENT = 32  # elements: 128 bytes of float32


def aligned_columns(columns: int, gemm_dtype: torch.dtype) -> int:
    """Return the columns of padded rows: 16-bit elements fill multiples of 16 bytes.

    cuBLAS multiplies other rows several times slower. 1,084,160 x 213 by 213 x 1024 in float16
    takes 6.3 ms on an H100, of which memory accounts for 0.9.
    """
    if gemm_dtype == torch.float32:
        return columns
    return -(-columns // PACKED_ALIGNMENT) * PACKED_ALIGNMENT


# ---------------------------------------------------------------------------- packed weights


class Piece(NamedTuple, Generic[Held]):
    """A parameter to pack: optionally plus `addend` or 1, then cast."""

    shape: tuple[int, ...]
    source: Held | None  # None: zeros
    addend: Held | None = None
    has_one: bool = False

    @classmethod
    def of(cls, parameter: OperandT) -> "Piece[OperandT]":
        """Return a parameter as it is."""
        return Piece(parameter.shape, parameter)


def stacked(*parameters: OperandT | None) -> list[Piece[OperandT]]:
    """Return the pieces of parameters; None is left out."""
    return [Piece.of(parameter) for parameter in parameters if parameter is not None]


def packed_norm(norm: Norm[OperandT], name: str) -> dict[str, list[Piece[OperandT]]]:
    """Return the packed parameters of a norm with a condition: W [2 F, K] and b [2 F]."""
    if norm.condition is None:
        return {}
    scale, shift = norm.scale_map, norm.shift_map
    assert scale.bias is not None
    scale_bias = Piece(scale.bias.shape, scale.bias, has_one=True)
    return {
        f"{name}_weight": stacked(scale.weight, shift.weight),
        f"{name}_bias": [scale_bias, *stacked(shift.bias)],
    }


def _stacked_shape(pieces: Sequence) -> tuple[int, ...]:
    """Return the shape of pieces stacked along their first dimension."""
    return (sum(piece.shape[0] for piece in pieces), *pieces[0].shape[1:])


class PackedWeights(NamedTuple):
    """Layout of parameters in one tensor; parameters of a group are stacked along dim 0."""

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Piece[Operand]]]) -> "PackedWeights":
        """Lay out groups of pieces, which differ only in their first dimension."""
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


# ---------------------------------------------------------------------------- gradients


@dataclass(frozen=True, eq=False)
class Part:
    """A gradient among packed gradients; parts are told apart by identity."""

    shape: tuple[int, ...]


class PackedGradients(NamedTuple):
    """Layout of the float32 tensor that holds the gradients of parameters.

    Parts of a group are stacked along their first dimension, as `PackedWeights` stacks parameters.
    Sizes may be symbolic.
    """

    num_elements: int
    groups: dict[str, tuple[int, tuple[int, ...]]]  # first element and shape of each group
    parts: tuple[Part, ...]  # one after another, with padding between groups
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, groups: Mapping[str, Sequence[Part]]) -> "PackedGradients":
        """Lay out groups of parts."""
        layout = {}
        parts: list[Part] = []
        first = 0
        for name, group in groups.items():
            shape = _stacked_shape(group)
            padding = -prod(shape) % GRADIENT_ALIGNMENT
            layout[name] = (first, shape)
            parts += group
            parts.append(Part((padding,)))
            first += prod(shape) + padding
        sizes = tuple(prod(part.shape) for part in parts)
        return cls(first, layout, tuple(parts), sizes)

    def allocate(self, builder: PlanBuilder) -> tuple[Buffer, dict[str, Buffer]]:
        """Return a tensor [num_elements] and each group in it."""
        packed = builder.empty((self.num_elements,), torch.float32)
        buffers = {}
        for name, (first, shape) in self.groups.items():
            buffers[name] = replace(
                packed, shape=shape, stride=contiguous_stride(shape), offset=first
            )
            end = first + prod(shape)
            padding = -end % GRADIENT_ALIGNMENT
            if padding:  # an operator returns the same bits each time
                builder.compute(zero, packed.slice(0, end, end + padding))
        return packed, buffers

    def layout(
        self, whole: Sequence[Spec | None], gradients: Sequence, tensors: Sequence, needs: Sequence
    ) -> GradientLayout:
        """Return the layout of a backward pass with the results `whole`, then this tensor.

        Each of `gradients` is a part, the number of a whole result, or None; `tensors` and `needs`
        are in the same order.
        """
        numbers = {part: number for number, part in enumerate(self.parts)}
        found: list[GradientLeaf | None] = []
        for gradient, tensor, need in zip(gradients, tensors, needs, strict=True):
            if not need or tensor is None or gradient is None:
                found.append(None)
            elif isinstance(gradient, Part):
                piece = numbers[gradient]
                found.append(GradientLeaf(len(whole), piece, tensor.shape, tensor.dtype))
            else:
                found.append(GradientLeaf(gradient, None, tensor.shape, tensor.dtype))
        results = (*whole, ((self.num_elements,), torch.float32))
        return GradientLayout(results, (*(None for _ in whole), self.sizes), tuple(found))


class NormGradients(NamedTuple):
    """The gradients of a norm among those of parameters."""

    sums: tuple[Part, Part]  # sums over nodes: of scale and shift, or of the biases of their maps
    maps: tuple[Part, ...]  # weights of the maps of a condition to scale and shift
    tree: Norm  # of these parts; the number of a result for the condition

    @classmethod
    def of(cls, norm: Norm[Operand], features: int, condition_result: int) -> "NormGradients":
        """Return the gradients of a norm of `features`."""
        sums = (Part((features,)), Part((features,)))
        if norm.condition is None:
            return cls(sums, (), Norm(*sums))
        shape = (features, norm.condition.shape[1])
        maps = (Part(shape), Part(shape))
        scale, shift = Linear(maps[0], sums[0]), Linear(maps[1], sums[1])
        tree = Norm(condition=condition_result, scale_map=scale, shift_map=shift)
        return cls(sums, maps, tree)


# ---------------------------------------------------------------------------- steps


def zero(out: Tensor) -> None:
    """Write zeros."""
    out.zero_()


def as_row(vector: Buffer) -> Buffer:
    """Return a vector [N] as [1, N]."""
    return vector.unflatten(0, (1, vector.shape[0]))


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


def _add_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    out.addmm_(x, y)


# PyTorch 2.13 has products of another dtype, float32, on GPUs only.


def wide_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    if x.is_cuda and out.dtype == torch.float32:
        torch.mm(x, y, out_dtype=torch.float32, out=out)
    else:
        out.copy_(x @ y)


def add_wide_mm(x: Tensor, y: Tensor, out: Tensor) -> None:
    if x.is_cuda and out.dtype == torch.float32:
        torch.addmm(out, x, y, out_dtype=torch.float32, out=out)
    else:
        out.add_(x @ y)


class SublayerBuilder(PlanBuilder):
    """Builder of a plan with steps of sub-layers: GEMMs, casts, residuals and norms."""

    def chunks(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of chunks of nearly equal sizes, at most `tuning.chunk` rows each."""
        number = max(1, -(-num_rows // self.tuning.chunk))
        for part in range(number):
            yield part * num_rows // number, (part + 1) * num_rows // number

    def pack(
        self, groups: Mapping[str, Sequence[Piece[Buffer]]], packed: Buffer
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
        num_tiles = sum(-(-size // tiles.PACK_ELEMENTS) for size in sizes)
        absent = elementwise.PACKED - len(sources)
        constants = {
            "SIZES": (*sizes, *(absent * (0,))),
            "FIRSTS": (*firsts, *(absent * (0,))),
            "ONES": (*ones, *(absent * (False,))),
            "WITH_ADDEND": with_addend,
            "ELEMENTS": tiles.PACK_ELEMENTS,
            "num_warps": 4,
        }
        sources += absent * [None]
        buffers = {f"source{number}": source for number, source in enumerate(sources)}
        launch = Launch(elementwise.pack, (num_tiles,), {}, constants)
        self.launch(launch, **buffers, addend=addend, packed=packed)
        return layout.views(packed)

    def linear(
        self, x: Buffer, weight: Buffer, bias: Buffer | None, out: Buffer | None = None
    ) -> Buffer:
        """Return x W^T + b [N, features] of x [N, F] and W [features, F]."""
        if out is None:
            out = self.empty((x.shape[0], weight.shape[0]), x.dtype)
        if bias is None:
            self.compute_into(out, torch.mm, x, weight.transposed())
        else:
            self.compute_into(out, torch.addmm, bias, x, weight.transposed())
        return out

    def product(self, x: Buffer, y: Buffer, out: Buffer | None = None) -> Buffer:
        """Return x y by one GEMM, for x [N, K] and y [K, M]."""
        if out is None:
            out = self.empty((x.shape[0], y.shape[1]), x.dtype)
        self.compute_into(out, torch.mm, x, y)
        return out

    def add_product(self, x: Buffer, y: Buffer, out: Buffer) -> None:
        """Add x y to `out` [N, M] by one GEMM, for x [N, K] and y [K, M]."""
        self.compute(_add_mm, x, y, out)

    def accumulate(self, x: Buffer, y: Buffer, out: Buffer) -> None:
        """Add the matrix product of x [N, K] and y [K, M] to `out`, in float32 if that is."""
        self.compute(_add_mm if out.dtype == x.dtype else add_wide_mm, x, y, out)

    def outer_product(self, dy: Buffer, x: Buffer, total: Buffer, *, is_first: bool) -> None:
        """Write dy^T x, the gradient of a weight, into float32 `total`; add unless `is_first`."""
        num_rows = dy.shape[0]
        if dy.dtype == torch.float32:
            if is_first:
                self.compute_into(total, torch.mm, dy.transposed(), x)
            else:
                self.compute(_add_mm, dy.transposed(), x, total)
            return
        # rows beyond a multiple of OUTER_ROWS are added by a kernel
        aligned = num_rows // tiles.OUTER_ROWS * tiles.OUTER_ROWS
        if aligned or is_first:
            dy_rows = dy.slice(0, 0, aligned).transposed()
            function = wide_mm if is_first else add_wide_mm
            self.compute(function, dy_rows, x.slice(0, 0, aligned), total)
        if aligned < num_rows:
            self._add_outer(dy.slice(0, aligned, num_rows), x.slice(0, aligned, num_rows), total)

    def _add_outer(self, dy: Buffer, x: Buffer, total: Buffer) -> None:
        from anemoi_gt.kernels import elementwise

        m, k = total.shape
        tile_m, tile_k = tiles.outer_tile(m, k)
        constants = {
            "M": m,
            "K": k,
            "DY_STRIDE": dy.stride[0],
            "X_STRIDE": x.stride[0],
            "TOTAL_STRIDE": total.stride[0],
            "ROWS": tiles.OUTER_ROWS,
            "TILE_M": tile_m,
            "TILE_K": tile_k,
            "num_warps": 4,
        }
        grid = (-(-m // tile_m), -(-k // tile_k))
        launch = Launch(elementwise.add_outer, grid, {"num_rows": dy.shape[0]}, constants)
        self.launch(launch, dy=dy, x=x, total=total)

    def cast(self, x: Buffer, dtype: torch.dtype) -> Buffer:
        """Return contiguous x in another dtype, x itself where it has that dtype."""
        if x.dtype == dtype:
            return x
        out = self.empty_like(x, dtype)
        self.add(x, None, out)
        return out

    def add(self, x: Buffer, y: Buffer | None, out: Buffer) -> None:
        """Write x + y, or x, into `out` in its dtype; all are contiguous."""
        from anemoi_gt.kernels import elementwise

        numel = prod(x.shape)
        unit = 16 if numel % 16 == 0 else 1
        constants = {
            "UNIT": unit,
            "ELEMENTS": tiles.ADD_ELEMENTS,
            "INT64": numel + tiles.ADD_ELEMENTS >= 2**31,
            "num_warps": 4,
        }
        scalars = {"num_units": numel // unit}
        launch = Launch(elementwise.add, (-(-numel // tiles.ADD_ELEMENTS),), scalars, constants)
        self.launch(launch, x=x, y=y, out=out)

    def copy(self, source: Buffer, target: Buffer) -> None:
        """Copy elements, cast to the dtype of `target`, of any strides."""
        if source.is_contiguous and target.is_contiguous:
            # PyTorch copies by cudaMemcpyAsync: a halo of 1.5 MB took 6.7 us on an H100, for 2.5
            self.add(source, None, target)
        else:
            self.compute(_copy, source, target)

    def resize(self, x: Buffer, out: Buffer) -> None:
        """Copy x [N, W] into `out` [N_out, W_out] in its dtype; zeros where x has no element."""
        from anemoi_gt.kernels import elementwise

        if x.shape == out.shape:
            self.add(x, None, out)
            return
        num_rows, width = x.shape
        out_rows, out_width = out.shape
        columns = min(tiles.RESIZE_COLUMNS, next_power_of_two(out_width))
        rows = tiles.RESIZE_ELEMENTS // columns
        constants = {
            "W": width,
            "W_OUT": out_width,
            "ROWS": rows,
            "COLUMNS": columns,
            "INT64": (out_rows + rows) * max(width, out_width) + columns >= 2**31,
            "num_warps": 4,
        }
        scalars = {"num_rows": num_rows, "out_rows": out_rows}
        grid = (-(-out_rows // rows), -(-out_width // columns))
        launch = Launch(elementwise.resize, grid, scalars, constants)
        self.launch(launch, x=x, out=out)

    def map_total(self, weight: Buffer, total: Buffer, out: Buffer) -> None:
        """Write W^T total [W] into `out`, of W [F, W] and total [F]."""
        from anemoi_gt.kernels import elementwise

        features, width = weight.shape
        constants = {
            "F": features,
            "W": width,
            "ROWS": tiles.TOTAL_ROWS,
            "COLUMNS": tiles.TOTAL_COLUMNS,
            "num_warps": tiles.TOTAL_WARPS,
        }
        launch = Launch(elementwise.map_total, (-(-width // tiles.TOTAL_COLUMNS),), {}, constants)
        self.launch(launch, weight=weight, total=total, out=out)


class NodeSums:
    """Partial sums over nodes, a row for each program, with named columns, written by launches.

    Launches have `programs` programs; by default the tuning chooses the number.
    """

    def __init__(
        self, builder: SublayerBuilder, parts: Mapping[str, Part], programs: int | None = None
    ):
        self.builder = builder
        self.programs = builder.tuning.programs if programs is None else programs
        self.columns: dict[str, slice] = {}
        self.width = 0
        for name, part in parts.items():
            self.columns[name] = slice(self.width, self.width + part.shape[0])
            self.width += part.shape[0]
        self.partial = builder.empty((self.programs, self.width), torch.float32)

    def sum_rows(self, name: str, rows: Buffer) -> None:
        """Write the sums of rows [N, W] into the columns called `name`."""
        from anemoi_gt.kernels import elementwise

        num_rows, width = rows.shape
        columns = min(tiles.SUM_COLUMNS, next_power_of_two(width))
        constants = {
            "W": width,
            "STRIDE": rows.stride[0],
            "ROWS": tiles.SUM_ELEMENTS // columns,
            "COLUMNS": columns,
            "SUMS": self.width,
            "INT64": (num_rows + self.programs * tiles.SUM_ELEMENTS) * rows.stride[0] >= 2**31,
            "num_warps": 4,
        }
        scalars = {"num_rows": num_rows, "first_sum": self.columns[name].start}
        grid = (self.programs, -(-width // columns))
        launch = Launch(elementwise.sum_columns, grid, scalars, constants)
        self.builder.launch(launch, rows=rows, partial=self.partial)

    def reduce_into(self, total: Buffer) -> None:
        """Write the sums of all columns into `total` [width]."""
        from anemoi_gt.kernels import elementwise

        constants = {
            "P": self.programs,
            "SUMS": self.width,
            "ROWS": tiles.TOTAL_ROWS,
            "COLUMNS": tiles.TOTAL_COLUMNS,
            "num_warps": tiles.TOTAL_WARPS,
        }
        grid = (-(-self.width // tiles.TOTAL_COLUMNS),)
        launch = Launch(elementwise.sum_partial, grid, {}, constants)
        self.builder.launch(launch, partial=self.partial, total=total)


class Rows(NamedTuple):
    """The normalised rows of batch entries in a buffer, which may have halo rows after each."""

    batch: int = 1
    entry_rows: int | None = None  # rows of each entry in the buffer; None: no others


ALL_ROWS = Rows()


class NormSteps:
    """The steps of one norm in a plan: it normalises rows x [N, F], and differentiates that.

    Parameters
    ----------
    builder : SublayerBuilder
    name : str
        In the packed weights, and of the columns of node sums.
    norm : Norm
    weights : dict
        The packed weights.
    options : NormOptions
    """

    def __init__(
        self,
        builder: SublayerBuilder,
        name: str,
        norm: Norm[Buffer],
        weights: dict[str, Buffer],
        options: NormOptions,
    ):
        self.builder = builder
        self.name = name
        self.norm = norm
        self.options = options
        self.condition: Buffer | None = None  # in the dtype of the weight
        self.grad_condition: Buffer | None = None  # [N, K], if needed
        if norm.condition is not None:
            self.weight, self.bias = weights[f"{name}_weight"], weights[f"{name}_bias"]
            self.condition = builder.cast(norm.condition, self.weight.dtype)

    def forward(self, x: Buffer, out: Buffer, first: int = 0, rows: Rows = ALL_ROWS) -> None:
        """Write the normalised x [N, F] into `out`, whose condition begins at row `first`.

        Scale and shift of every row, where a condition makes them, exist for a chunk at a time.
        """
        num_rows, features = x.shape
        parts = [(0, num_rows)]
        if self.condition is not None and rows.batch == 1:
            parts = list(self.builder.chunks(num_rows))
        for begin, end in parts:
            launch = row_launches.norm_forward(
                end - begin,
                features,
                self.options,
                batch=rows.batch,
                out_entry_rows=rows.entry_rows,
            )
            out_rows = out if rows.batch > 1 else out.slice(0, begin, end)
            self.builder.launch(
                launch,
                x=x.slice(0, begin, end),
                scale=self.norm.scale,
                shift=self.norm.shift,
                modulation=self._modulation(first + begin, first + end),
                out=out_rows,
            )

    def _modulation(self, begin: int, end: int) -> Buffer | None:
        """Return scale and shift of rows [N, 2 F]; None without a condition."""
        if self.condition is None:
            return None
        return self.builder.linear(self.condition.slice(0, begin, end), self.weight, self.bias)

    def allocate_gradients(
        self, sums: NodeSums, grad_map: Buffer | None, *, needs_condition: bool
    ) -> None:
        """Set the memory of gradients besides dx: node sums, and with a condition [2 F, K]."""
        self.sums, self.grad_map = sums, grad_map
        if self.condition is not None and needs_condition:
            self.grad_condition = self.builder.empty_like(self.condition)

    def backward(
        self,
        x: Buffer,
        grad_normed: Buffer,
        grad_total: Buffer | None,
        dx: Buffer,
        normed: Buffer,
        first: int = 0,
        rows: Rows = ALL_ROWS,
    ) -> None:
        """Fill dx, and `normed` with the output, recomputed, of rows that begin at `first`.

        x and dx have these rows only, `grad_normed` and `normed` the rows of `rows`. dx includes
        `grad_total`, the gradient of the residual connection. The gradients of scale and shift, or
        of their maps, are added to those of earlier rows unless these are the first.
        """
        builder = self.builder
        sums = self.sums
        num_rows, features = x.shape
        launch = row_launches.norm_backward(
            num_rows,
            features,
            self.options,
            programs=sums.programs,
            sums=sums.width,
            first_sum=sums.columns[f"{self.name}_scale"].start,
            is_first=first == 0,
            total=grad_total is not None,
            batch=rows.batch,
            normed_entry_rows=rows.entry_rows,
        )
        grad_scale = None
        if self.condition is not None:
            grad_scale = builder.empty((num_rows, features), grad_normed.dtype)
        builder.launch(
            launch,
            x=x,
            grad_normed=grad_normed,
            grad_total=grad_total,
            scale=self.norm.scale,
            shift=self.norm.shift,
            modulation=self._modulation(first, first + num_rows),
            dx=dx,
            normed=normed,
            grad_scale=grad_scale,
            partial=sums.partial,
        )
        if self.condition is None:
            return
        assert grad_scale is not None
        assert self.grad_map is not None
        if rows.batch > 1 and rows.entry_rows:  # without the halo's rows, which have no condition
            entries = (rows.batch, num_rows // rows.batch)
            all_rows = grad_normed.unflatten(0, (rows.batch, rows.entry_rows))
            grad_normed = builder.empty((num_rows, features), grad_normed.dtype)
            builder.copy(all_rows.slice(1, 0, entries[1]), grad_normed.unflatten(0, entries))
        condition = self.condition.slice(0, first, first + num_rows)
        of_scale, of_shift = slice(0, features), slice(features, 2 * features)
        builder.outer_product(
            grad_scale, condition, self.grad_map.rows(of_scale), is_first=first == 0
        )
        builder.outer_product(
            grad_normed, condition, self.grad_map.rows(of_shift), is_first=first == 0
        )
        if self.grad_condition is not None:
            grad_condition = self.grad_condition.slice(0, first, first + num_rows)
            builder.product(grad_scale, self.weight.rows(of_scale), grad_condition)
            builder.add_product(grad_normed, self.weight.rows(of_shift), grad_condition)
