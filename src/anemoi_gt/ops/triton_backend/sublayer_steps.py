"""Plan steps of norms in the attention sub-layer."""

from typing import NamedTuple

from anemoi_gt.ops.operands import Operand, OperandT
from anemoi_gt.ops.sublayer_tensors import Linear, Norm, NormOptions
from anemoi_gt.ops.triton_backend import row_launches
from anemoi_gt.ops.triton_backend.packing import Part, Piece, stacked
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.sublayer_builder import NodeSums, SublayerBuilder


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
