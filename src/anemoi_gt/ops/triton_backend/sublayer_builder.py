"""Steps of sub-layers on a plan: GEMMs, casts, copies, packed parameters, and sums over rows."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from anemoi_gt import kernels
from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.triton_backend import tiles
from anemoi_gt.ops.triton_backend.packing import PackedWeights, Piece
from anemoi_gt.ops.triton_backend.plan import Buffer, PlanBuilder
from anemoi_gt.ops.triton_backend.tiles import next_power_of_two


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
        for i in range(number):
            yield i * num_rows // number, (i + 1) * num_rows // number

    def pack(
        self, groups: Mapping[str, Sequence[Piece[Buffer]]], packed: Buffer
    ) -> dict[str, Buffer]:
        """Cast groups of parameters into `packed`; return each group in it."""
        layout = PackedWeights.of(groups)
        entries: list[tuple[int, Piece[Buffer]]] = []  # first elements and pieces
        for name, pieces in groups.items():
            first = layout.groups[name][0]
            for piece in pieces:
                entries.append((first, piece))
                first += prod(piece.shape)
        most = kernels.elementwise.PACKED
        for begin in range(0, len(entries), most):
            self._pack(entries[begin : begin + most], packed)
        return layout.views(packed)

    def _pack(self, entries: list[tuple[int, Piece[Buffer]]], packed: Buffer) -> None:
        """Cast pieces by one launch, which takes one addend."""
        absent = kernels.elementwise.PACKED - len(entries)
        firsts = [first for first, _ in entries]
        pieces = [piece for _, piece in entries]
        sizes = [prod(piece.shape) for piece in pieces]
        addends = [piece.addend for piece in pieces]
        # more than one cannot be unpacked
        (with_addend,) = [n for n, addend in enumerate(addends) if addend is not None] or [-1]
        constants = {
            "SIZES": (*sizes, *(absent * (0,))),
            "FIRSTS": (*firsts, *(absent * (0,))),
            "ONES": (*[piece.has_one for piece in pieces], *(absent * (False,))),
            "WITH_ADDEND": with_addend,
            "ELEMENTS": tiles.PACK_ELEMENTS,
            "num_warps": 4,
        }
        sources = [*[piece.source for piece in pieces], *(absent * (None,))]
        buffers = {f"source{number}": source for number, source in enumerate(sources)}
        num_tiles = sum(-(-size // tiles.PACK_ELEMENTS) for size in sizes)
        launch = Launch(kernels.elementwise.pack, (num_tiles,), {}, constants)
        self.launch(launch, **buffers, addend=addends[with_addend], packed=packed)

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

    def multiply(self, x: Buffer, y: Buffer, out: Buffer, *, adds: bool = False) -> None:
        """Write the matrix product of x [N, K] and y [K, M] into `out`, or add it.

        Where `out` is float32, it gets the product in float32.
        """
        if adds:
            self.compute(_add_mm if out.dtype == x.dtype else add_wide_mm, x, y, out)
        elif out.dtype == x.dtype:
            self.compute_into(out, torch.mm, x, y)
        else:
            self.compute(wide_mm, x, y, out)

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
        launch = Launch(kernels.elementwise.add_outer, grid, {"num_rows": dy.shape[0]}, constants)
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
        numel = prod(x.shape)
        unit = 16 if numel % 16 == 0 else 1
        constants = {
            "UNIT": unit,
            "ELEMENTS": tiles.ADD_ELEMENTS,
            "INT64": numel + tiles.ADD_ELEMENTS >= 2**31,
            "num_warps": 4,
        }
        scalars = {"num_units": numel // unit}
        launch = Launch(
            kernels.elementwise.add, (-(-numel // tiles.ADD_ELEMENTS),), scalars, constants
        )
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
        launch = Launch(kernels.elementwise.resize, grid, scalars, constants)
        self.launch(launch, x=x, out=out)

    def map_total(self, weight: Buffer, total: Buffer, out: Buffer) -> None:
        """Write W^T total [W] into `out`, of W [F, W] and total [F]."""
        features, width = weight.shape
        constants = {
            "F": features,
            "W": width,
            "ROWS": tiles.TOTAL_ROWS,
            "COLUMNS": tiles.TOTAL_COLUMNS,
            "num_warps": tiles.TOTAL_WARPS,
        }
        launch = Launch(
            kernels.elementwise.map_total, (-(-width // tiles.TOTAL_COLUMNS),), {}, constants
        )
        self.launch(launch, weight=weight, total=total, out=out)


class NodeSums:
    """Partial sums over nodes, a row for each program, written by launches of `programs` programs.

    Their columns have names, `widths` in order.
    """

    def __init__(self, builder: SublayerBuilder, widths: Mapping[Hashable, int], programs: int):
        self.builder = builder
        self.programs = programs
        self.columns: dict[Hashable, slice] = {}
        self.width = 0
        for name, width in widths.items():
            self.columns[name] = slice(self.width, self.width + width)
            self.width += width
        self.partial = builder.empty((self.programs, self.width), torch.float32)

    def sum_rows(self, name: Hashable, rows: Buffer, *, is_first: bool) -> None:
        """Write the sums of rows [N, W] into the columns called `name`, or add them."""
        num_rows, width = rows.shape
        columns = min(tiles.SUM_COLUMNS, next_power_of_two(width))
        constants = {
            "W": width,
            "STRIDE": rows.stride[0],
            "ROWS": tiles.SUM_ELEMENTS // columns,
            "COLUMNS": columns,
            "SUMS": self.width,
            "IS_FIRST": is_first,
            "INT64": (num_rows + self.programs * tiles.SUM_ELEMENTS) * rows.stride[0] >= 2**31,
            "num_warps": 4,
        }
        scalars = {"num_rows": num_rows, "first_sum": self.columns[name].start}
        grid = (self.programs, -(-width // columns))
        launch = Launch(kernels.elementwise.sum_columns, grid, scalars, constants)
        self.builder.launch(launch, rows=rows, partial=self.partial)

    def reduce_into(self, total: Buffer) -> None:
        """Write the sums of all columns into `total` [width]."""
        constants = {
            "P": self.programs,
            "SUMS": self.width,
            "ROWS": tiles.TOTAL_ROWS,
            "COLUMNS": tiles.TOTAL_COLUMNS,
            "num_warps": tiles.TOTAL_WARPS,
        }
        grid = (-(-self.width // tiles.TOTAL_COLUMNS),)
        launch = Launch(kernels.elementwise.sum_partial, grid, {}, constants)
        self.builder.launch(launch, partial=self.partial, total=total)
