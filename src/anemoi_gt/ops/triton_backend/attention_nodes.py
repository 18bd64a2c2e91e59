"""Nodes of formulas with edge attention: norms of heads, and the attention itself.

Query, y, key and value of nodes are columns of wider values, which one product makes; the attention
is added to the column y. Gradients lie as they do.
"""

import torch
from torch import Tensor

from anemoi_gt.ops.tensors import (
    AttentionOperands,
    AttentionOptions,
    AttentionTensors,
    CallSizes,
    IndexTensors,
    NormOptions,
    Operand,
)
from anemoi_gt.ops.triton_backend import attention_steps, row_launches
from anemoi_gt.ops.triton_backend.attention_steps import AttentionCall
from anemoi_gt.ops.triton_backend.derived_passes import Pass, Run
from anemoi_gt.ops.triton_backend.formula import Key, Node, Value, WeightGradients, key_of, present
from anemoi_gt.ops.triton_backend.packing import Piece, stacked, zero
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.planned_operator import Shaped
from anemoi_gt.ops.triton_backend.sizes import Kept, Sizes, sizes_of
from anemoi_gt.ops.triton_backend.tiles import TUNING, Tuning


class HeadNormNode(Node):
    """Columns of rows [N, H * C], normalised over the C channels of each head.

    They are columns of `beside`, which lies as the value that has the rows: the attention reads
    queries, keys and values with one stride. The gradient is differentiated in place.
    """

    is_cheap = True

    def __init__(
        self, x: Value, scale: Value | None, options: NormOptions, heads: int, beside: Value
    ):
        out = Value(x.shape, x.dtype, base=beside, first=x.first, in_place_of=x)
        super().__init__([x], out)
        self.scale, self.options, self.heads = scale, options, heads
        self.channels = x.shape[1] // heads
        self.stride = beside.shape[1]
        self.reads = [x]
        self.parameters = present(scale)
        if scale is not None:
            self.sums[key_of(scale, "")] = self.channels

    def forward(self, run: Run, out: Buffer) -> None:
        """Normalise rows."""
        x = run.value(self.inputs[0])
        launch = row_launches.head_norm_forward(
            x.shape[0], self.heads, self.channels, self.options, stride=self.stride
        )
        run.builder.launch(launch, x=x, scale=run.call.leaf(self.scale), out=out)

    def backward(self, run: Run, grad: Buffer) -> None:
        """Differentiate in place."""
        x = run.value(self.inputs[0])
        width, first_sum, partial = 0, 0, None
        programs = self.programs(run.builder)
        if self.scale is not None:
            sums, first_sum = run.call.sums[self]
            width, partial = sums.width, sums.partial
        launch = row_launches.head_norm_backward(
            x.shape[0],
            self.heads,
            self.channels,
            self.options,
            stride=self.stride,
            programs=programs,
            sums=width,
            first_sum=first_sum,
        )
        scale = run.call.leaf(self.scale)
        run.builder.launch(launch, x=x, grad_normed=grad, scale=scale, dx=grad, partial=partial)


class AttendNode(Node):
    """y_i += sum_e p_e (v_j + x_e), in place, with x_e = W_edge a_e + b_edge + b_value.

    Adding one vector to all keys shifts all scores of a destination alike and changes no weight. So
    without a norm of keys their bias has no effect, and gradient 0, and b_value is added to key and
    value by the bias of the edges, whose gradient it shares: the sum of dy_i over destinations that
    have in-edges. The gradient of b_self follows from the sum of the block's dz that a norm makes:
    sum_i dy_i = W_projection^T sum_i dz_i.

    Parameters
    ----------
    t : AttentionTensors
    o : AttentionOptions
    index : IndexTensors
    q, y, k, v : Value
        Columns of wider values.
    total : Key
        Of the sum of dz.
    """

    def __init__(
        self,
        t: AttentionTensors[Value],
        o: AttentionOptions,
        index: IndexTensors[Operand],
        q: Value,
        y: Value,
        k: Value,
        v: Value,
        total: Key,
    ):
        out = Value(y.shape, y.dtype, base=y.base, first=y.first)
        super().__init__([q, y, k, v, t.edge_attr], out)
        self.t, self.options, self.total = t, o, total
        self.num_edges = index.row.shape[0]
        self.reads = [q, k, v]
        self.parameters = [t.edge.weight]
        self.parameters += present(t.edge.bias, t.value.bias, t.self_term.bias, t.key.bias)
        has_bias = t.edge.bias is not None or t.value.bias is not None
        attr_shape = tuple(t.edge_attr.shape)
        if o.batch > 1 and len(attr_shape) == 2:
            attr_shape = (1, *attr_shape)  # shared by the batch
        t.edge_attr.gradient = (attr_shape, q.dtype)
        self.operands: AttentionOperands[Operand] = AttentionOperands(
            Shaped(self._heads_of(q.shape), q.dtype),
            Shaped(self._heads_of(k.shape), q.dtype),
            Shaped(self._heads_of(k.shape), q.dtype),
            Shaped(attr_shape, q.dtype),
            t.edge.weight,
            Shaped((q.shape[1],), q.dtype) if has_bias else None,
        )
        assert q.base is not None
        self.row_stride = q.base.shape[1]
        kept = self.sizes(index).kept((q.shape[0], o.heads))
        self.kept = [Value(*spec, self) for spec in kept if spec is not None]
        self.extras = list(self.kept)
        self.cast_attr: Value | None = None
        if t.edge_attr.dtype != q.dtype:
            self.cast_attr = Value(tuple(t.edge_attr.shape), q.dtype, self)
            self.extras.append(self.cast_attr)

    def sizes(self, index: IndexTensors[Operand], tuning: Tuning = TUNING) -> Sizes:
        """Return the sizes of the call of edge attention."""
        return sizes_of(
            self.operands,
            index,
            self.operands.query.shape[-1] ** -0.5,
            row_stride=self.row_stride,
            int32_limit=tuning.int32_limit,
        )

    def call_sizes(self) -> CallSizes:
        """Return the sizes of the attention, for people."""
        return CallSizes.of_attention(self.operands, self.num_edges)

    def packed(self) -> dict[str, list[Piece[Value]]]:
        """Return weight and bias of the edges."""
        edge, value = self.t.edge, self.t.value
        groups = {"edge": stacked(edge.weight)}
        if edge.bias is not None and value.bias is not None:
            groups["edge_bias"] = [Piece(edge.bias.shape, edge.bias, addend=value.bias)]
        elif edge.bias is not None or value.bias is not None:
            groups["edge_bias"] = stacked(edge.bias, value.bias)
        return groups

    def weights(self) -> dict[str, WeightGradients]:
        """Return the gradients of the edges' weight, and of all biases that reach them."""
        t, shape = self.t, (self.out.shape[1],)
        groups: dict[str, WeightGradients] = {
            "edge": [((key_of(t.edge.weight, ""),), t.edge.weight.shape)]
        }
        of_edges = present(t.edge.bias, t.value.bias)  # which share their gradient
        of_self = present(t.self_term.bias)
        of_key = [] if self.options.key_norm.eps else present(t.key.bias)
        biases = {"edge_bias": of_edges, "self_bias": of_self, "key_bias": of_key}
        for name, leaves in biases.items():
            if leaves:
                groups[name] = [(tuple(key_of(leaf, "") for leaf in leaves), shape)]
        return groups

    def forward(self, run: Run, out: Buffer) -> None:
        """Add the attention to y."""
        builder = run.builder
        if self.cast_attr is not None:
            cast_attr = run.call.whole(self.cast_attr)
            assert cast_attr is not None
            builder.copy(run.value(self.t.edge_attr), cast_attr)
        attended = builder.empty(out.shape, out.dtype)
        split = self._split_heads
        attention_steps.attend_and_add(
            self._attention(run), self._kept(run), split(attended), split(out)
        )

    def backward(self, run: Run, grad: Buffer) -> None:
        """Write dq, dk and dv beside dy, and the gradients of the edges."""
        builder, parameters, split = run.builder, run.call.parameters, self._split_heads
        if "key_bias" in parameters:
            builder.compute(zero, parameters["key_bias"])
        edge_bias = parameters.get("edge_bias")
        if edge_bias is not None and grad.dtype == torch.float32:
            # The kernels' sum has terms of the keys, which cancel but for rounding. That is below
            # the rounding of 16-bit operands, but several times the error of a float32 sum.
            builder.compute(_sum_of_attending_rows, grad, run.call.index.colptr, edge_bias)
            edge_bias = None
        query, _, key, value, edge_attr = self.inputs
        found = attention_steps.gradients(
            self._attention(run),
            self._kept(run),
            split(grad),
            None,
            AttentionOperands(
                query=True,
                key=True,
                value=True,
                edge_attr=run.needs(edge_attr),
                edge_weight="edge" in parameters,
                edge_bias=edge_bias is not None,
            ),
            into=AttentionOperands(
                query=split(run.write(query)),
                key=split(run.write(key)),
                value=split(run.write(value)),
                edge_weight=parameters.get("edge"),
                edge_bias=edge_bias,
            ),
        )
        if found.edge_attr is not None:
            run.call.gradients[edge_attr] = found.edge_attr

    def after_sums(self, call: Pass) -> None:
        """Write the gradient of the self term's bias."""
        gradient = call.parameters.get("self_bias")
        weight = call.leaf(self.t.projection.weight)
        if gradient is not None and weight is not None:
            call.builder.map_total(weight, call.totals[self.total], gradient)

    def _attention(self, run: Run) -> AttentionCall:
        """Return the call of edge attention."""
        query, _, key, value, _ = self.inputs
        attr = run.call.whole(self.cast_attr or self.t.edge_attr)
        assert attr is not None
        if len(self.operands.edge_attr.shape) > len(attr.shape):  # type: ignore[union-attr]
            attr = attr.unflatten(0, (1, attr.shape[0]))
        operands = AttentionOperands(
            query=self._split_heads(run.value(query)),
            key=self._split_heads(run.value(key)),
            value=self._split_heads(run.value(value)),
            edge_attr=attr,
            edge_weight=run.call.weights["edge"],
            edge_bias=run.call.weights.get("edge_bias"),
        )
        index = run.call.index
        sizes = self.sizes(index, run.builder.tuning)
        return AttentionCall(run.builder, sizes, operands, index)

    def _kept(self, run: Run) -> Kept:
        return Kept._make(run.call.whole(value) for value in self.kept)

    def _heads_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of rows [B * N, H * C] as [N, H, C], or [B, N, H, C] of a batch."""
        rows, width = shape
        heads = (self.options.heads, width // self.options.heads)
        if self.options.batch == 1:
            return (rows, *heads)
        return (self.options.batch, rows // self.options.batch, *heads)

    def _split_heads(self, rows: Buffer) -> Buffer:
        shape = self._heads_of(rows.shape)
        heads = rows.unflatten(1, shape[-2:])
        return heads if len(shape) == 3 else heads.unflatten(0, shape[:2])


def _sum_of_attending_rows(rows: Tensor, colptr: Tensor, total: Tensor) -> None:
    """Sum rows [B * N, width] over destinations with in-edges, whose weights sum to 1."""
    attends = (colptr.diff() > 0).to(rows.dtype)
    num_entries = rows.shape[0] // max(1, attends.shape[0])
    torch.sum(rows * attends.repeat(num_entries).unsqueeze(1), 0, out=total)
