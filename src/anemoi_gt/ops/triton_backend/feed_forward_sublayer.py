"""The feed-forward sub-layer of a block as one operator: norm, network, residual connection.

    m = norm(x)                                  see `anemoi_gt.ops.sublayer_tensors`
    h = W_in m + b_in                                                       [N, K_h]
    h = [W_gate; W_in] m + [b_gate; b_in]               gated               [N, 2 K_h]
    a = act(h), gated act(h_gate) h_value        [N, K_h]
    y = x + W_out a + b_out

Kept for the backward pass: x, and in one block h and the cast weights. The backward pass makes m
and a again, in the passes that read x and h. Rows are taken in chunks: what is as wide as the
hidden layer exists for a chunk alone, except h. With the option `keep_hidden` False h is not kept
either: the backward pass computes it again from x, by the launches and products of the forward
pass over the same chunks, hence bit by bit.
"""

from functools import lru_cache
from typing import Generic, NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import (
    define_operator,
    flat_arguments,
    is_plain,
    needs_gradient,
    on_device,
    refuse_forward_mode,
    refuse_second_derivative,
)
from anemoi_gt.ops.operands import Held, Operand, OperandT
from anemoi_gt.ops.sublayer_tensors import FeedForwardOptions, FeedForwardTensors
from anemoi_gt.ops.triton_backend import row_launches, sublayer_steps
from anemoi_gt.ops.triton_backend.plan import BlockLayout, Buffer, Plan, PlanBuilder
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    GradientPiece,
    Norm,
    NormParameters,
    PackedWeights,
    ParameterPieces,
    Piece,
    Shaped,
    SublayerPlans,
)
from anemoi_gt.torch_compat import is_batched

KEPT = 128  # plans of both passes that are kept
NUM_TENSORS = len(FeedForwardTensors._fields)
NUM_OPTIONS = len(FeedForwardOptions._fields)


def feed_forward_sublayer(
    tensors: FeedForwardTensors[Tensor], options: FeedForwardOptions
) -> Tensor:
    """Return y [N, F] = x + network(norm(x)), in the promoted dtype of x and the products."""
    refuse_forward_mode(*tensors)
    save = needs_gradient(*tensors)
    if not is_plain(*tensors):
        return feed_forward_triton(*tensors, *options, save)[0]
    if save:
        return FeedForward.apply(*tensors, options)
    _, (y,) = _run_forward(tensors, options, save=False)
    return y


class FeedForwardNeeds(NamedTuple):
    """Gradients that need separate launches and are computed only if needed."""

    condition: bool
    weights: bool  # of some linear map; False in a frozen block

    @classmethod
    def of(cls, needs: FeedForwardTensors[bool]) -> "FeedForwardNeeds":
        """Read them from the needs of all tensors."""
        weights = bool(needs.weight_gate or needs.weight_in or needs.weight_out)
        return cls(bool(needs.condition), weights)


class FeedForwardGradients(NamedTuple, Generic[Held]):
    """Results of the backward plan; None for what is absent or not needed."""

    x: Held
    condition: Held | None
    parameters: Held  # a block, see `parameter_pieces`


def _weight_groups(t: FeedForwardTensors[OperandT]) -> dict[str, list[Piece[OperandT]]]:
    """Return the packed parameters by the group that stacks them."""
    groups = {
        "in": _stacked(t.weight_gate, t.weight_in),
        "out": [Piece.of(t.weight_out)],
    }
    if t.bias_in is not None:
        groups["bias_in"] = _stacked(t.bias_gate, t.bias_in)
    if t.bias_out is not None:
        groups["bias_out"] = [Piece.of(t.bias_out)]
    return groups | _norm_parameters(t).groups("norm")


def _stacked(*parameters: OperandT | None) -> list[Piece[OperandT]]:
    """Return the pieces of parameters of which some may be absent."""
    return [Piece.of(parameter) for parameter in parameters if parameter is not None]


def _norm_parameters(t: FeedForwardTensors[OperandT]) -> NormParameters[OperandT]:
    return NormParameters(
        t.norm_scale, t.norm_shift, t.norm_scale_bias, t.norm_shift_bias, t.condition
    )


def forward_plan(specs: tuple, options: FeedForwardOptions, *, save: bool) -> Plan:
    """Return the plan of a forward pass: y, and with `save` the kept block."""
    builder = PlanBuilder(specs)
    t: FeedForwardTensors[Buffer] = FeedForwardTensors._make(builder.inputs)
    kept = builder.empty_parts(kept_layout(t, options), together=save)
    weights = sublayer_steps.pack_weights(builder, _weight_groups(t), kept["packed"])
    norm = Norm.of(builder, _norm_parameters(t), options.eps, weights, "norm")

    num_rows = t.x.shape[0]
    num_hidden = t.weight_in.shape[0]
    y = builder.empty(t.x.shape, _out_dtype(t, options))
    for begin, end in sublayer_steps.chunks(num_rows):
        rows = end - begin
        x = t.x.slice(0, begin, end)
        hidden = None  # scratch of this chunk
        if save and options.keep_hidden:
            hidden = kept["hidden"].slice(0, begin, end)
        hidden = hidden_layer(builder, x, norm.rows(begin, end), weights, options, hidden)
        activated = builder.empty((rows, num_hidden), options.dtype)
        is_gated = t.weight_gate is not None
        launch = row_launches.activation_forward(
            rows, num_hidden, options.activation, gated=is_gated
        )
        builder.launch(launch, hidden=hidden, out=activated)
        delta = sublayer_steps.linear(builder, activated, weights["out"], weights.get("bias_out"))
        sublayer_steps.add(builder, x, delta, y.slice(0, begin, end))
    if not save:
        return builder.finish([y])
    return builder.finish([y, builder.whole(kept["packed"])])


def hidden_layer(
    builder: PlanBuilder,
    x: Buffer,
    norm: Norm,
    weights: dict[str, Buffer],
    options: FeedForwardOptions,
    out: Buffer | None,
) -> Buffer:
    """Write h of some rows, into `out` or else into scratch, and return it."""
    m = builder.empty(x.shape, options.dtype)
    sublayer_steps.norm_forward(builder, x, norm, m)
    return sublayer_steps.linear(builder, m, weights["in"], weights.get("bias_in"), out)


def backward_plan(
    specs: tuple, options: FeedForwardOptions, needs: FeedForwardNeeds
) -> tuple[Plan, ParameterPieces]:
    """Return the plan of a backward pass over the tensors, the kept block and the gradient of y.

    Its results are `FeedForwardGradients`; the pieces are of their block of parameters.
    """
    shapes_of_tensors: FeedForwardTensors[Shaped] = FeedForwardTensors._make(Shaped.all_of(specs))
    kept_parts = kept_layout(shapes_of_tensors, options)
    grad_spec = (shapes_of_tensors.x.shape, _out_dtype(shapes_of_tensors, options))
    builder = PlanBuilder([*specs, ((kept_parts.num_bytes,), torch.uint8), grad_spec])
    t: FeedForwardTensors[Buffer] = FeedForwardTensors._make(builder.inputs[:NUM_TENSORS])
    kept_block, grad = builder.inputs[NUM_TENSORS:]
    assert kept_block is not None
    assert grad is not None
    kept = kept_parts.buffers(kept_block)
    weights = PackedWeights.of(_weight_groups(t)).views(kept["packed"])
    norm = Norm.of(builder, _norm_parameters(t), options.eps, weights, "norm")
    pieces = parameter_pieces(t, weights=needs.weights)
    parameter_block, parameters = pieces.allocate(builder)
    num_rows = t.x.shape[0]
    num_hidden = t.weight_in.shape[0]
    is_gated = t.weight_gate is not None

    sums = sublayer_steps.NodeSums(builder, _sum_pieces(t))
    modulation = sublayer_steps.modulation_gradients(
        builder, norm, parameters.get("norm_map"), need_condition=needs.condition
    )
    dx = builder.empty_like(t.x)
    for begin, end in sublayer_steps.chunks(num_rows):
        rows = end - begin
        x = t.x.slice(0, begin, end)
        if options.keep_hidden:
            hidden = kept["hidden"].slice(0, begin, end)
        else:
            hidden = hidden_layer(builder, x, norm.rows(begin, end), weights, options, None)
        grad_rows = grad.slice(0, begin, end)
        narrow = sublayer_steps.cast(builder, grad_rows, options.dtype)
        grad_activated = sublayer_steps.product(builder, narrow, weights["out"])
        activated = builder.empty((rows, num_hidden), options.dtype)
        grad_hidden = builder.empty_like(hidden)
        launch = row_launches.activation_backward(
            rows,
            num_hidden,
            options.activation,
            gated=is_gated,
            programs=sublayer_steps.PROGRAMS,
            sums=sums.width,
            first_sum=sums.columns["bias_gate" if is_gated else "bias_in"].start,
            is_first=begin == 0,
        )
        builder.launch(
            launch,
            hidden=hidden,
            grad_activated=grad_activated,
            activated=activated,
            grad_hidden=grad_hidden,
            partial=sums.partial,
        )
        is_first = begin == 0
        if needs.weights:
            sublayer_steps.outer_product(
                builder, narrow, activated, parameters["out"], is_first=is_first
            )
        grad_normed = sublayer_steps.product(builder, grad_hidden, weights["in"])
        normed = builder.empty_like(grad_normed)
        sublayer_steps.norm_backward(
            sums,
            "norm",
            norm,
            (begin, end),
            x=x,
            grad_normed=grad_normed,
            grad_total=grad_rows,
            dx=dx.slice(0, begin, end),
            normed=normed,
            modulation=modulation,
            is_first=is_first,
        )
        if needs.weights:
            sublayer_steps.outer_product(
                builder, grad_hidden, normed, parameters["in"], is_first=is_first
            )
    sums.total_into(parameters["sums"])
    grad_condition = None if modulation is None else modulation.condition
    plan = builder.finish(FeedForwardGradients(dx, grad_condition, parameter_block))
    return plan, pieces


def kept_layout(t: FeedForwardTensors[Operand], options: FeedForwardOptions) -> BlockLayout:
    """Return the layout of what the forward pass keeps: the packed weights, and h if wanted."""
    packed = PackedWeights.of(_weight_groups(t))
    specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "packed": ((packed.num_elements,), options.dtype)
    }
    if options.keep_hidden:
        specs["hidden"] = ((t.x.shape[0], packed.groups["in"][1][0]), options.dtype)
    return BlockLayout.of(specs)


def parameter_pieces(t: FeedForwardTensors[Operand], *, weights: bool) -> ParameterPieces:
    """Return where the gradients of parameters lie in their block.

    With `weights`, it includes the gradients of the linear maps.
    """
    groups = {}
    if weights:
        weight_in = [GradientPiece(("weight_in",), t.weight_in.shape)]
        if t.weight_gate is not None:
            weight_in.insert(0, GradientPiece(("weight_gate",), t.weight_gate.shape))
        groups["in"] = weight_in
        groups["out"] = [GradientPiece(("weight_out",), t.weight_out.shape)]
    if t.condition is not None:
        groups["norm_map"] = sublayer_steps.norm_map_pieces(
            "norm", t.x.shape[1], t.condition.shape[1]
        )
    groups["sums"] = list(_sum_pieces(t).values())
    return ParameterPieces.of(groups)


def _sum_pieces(t: FeedForwardTensors[Operand]) -> dict[str, GradientPiece]:
    """Return the gradients that are sums over nodes, by the names of their columns."""
    features = t.x.shape[1]
    pieces = sublayer_steps.norm_sum_pieces("norm", features, has_condition=t.condition is not None)
    pieces["norm_total"] = GradientPiece(("bias_out",), (features,))
    num_hidden = t.weight_in.shape[0]
    if t.weight_gate is not None:
        pieces["bias_gate"] = GradientPiece(("bias_gate",), (num_hidden,))
    pieces["bias_in"] = GradientPiece(("bias_in",), (num_hidden,))
    return pieces


def _named_gradients(
    t: FeedForwardTensors[Tensor],
    results: FeedForwardGradients[Tensor],
    pieces: ParameterPieces,
    needs: FeedForwardTensors[bool],
) -> list[Tensor | None]:
    """Return the gradients that are needed, in the order and the dtypes of `t`."""
    gradients = pieces.gradients(results.parameters)
    gradients["x"] = results.x
    gradients["condition"] = results.condition
    return sublayer_steps.ordered_gradients(t, gradients, needs)


def _out_dtype(t: FeedForwardTensors[Operand], options: FeedForwardOptions) -> torch.dtype:
    """Return the dtype of y, and of its gradient."""
    return torch.promote_types(t.x.dtype, options.dtype)


@lru_cache(KEPT)
def plans_of(specs: tuple, options: FeedForwardOptions) -> SublayerPlans:
    """Return the plans of both passes over tensors of these shapes and dtypes."""
    return SublayerPlans(forward_plan, backward_plan, specs, options)


def _run_forward(
    tensors: FeedForwardTensors[Tensor], options: FeedForwardOptions, *, save: bool
) -> tuple[SublayerPlans, list[Tensor]]:
    """Return the plans of these tensors, and the results of the forward pass."""
    inputs = sublayer_steps.contiguous(tensors)
    with on_device(tensors.x):
        plans = plans_of(sublayer_steps.specs_of(inputs), options)
        results = plans.forward(save=save).run(inputs)
        return plans, results  # type: ignore[return-value]  # no result of this pass is None


def _run_backward(
    plans: SublayerPlans,
    tensors: FeedForwardTensors[Tensor],
    kept: Tensor,
    grad: Tensor,
    needs: FeedForwardNeeds,
) -> tuple[FeedForwardGradients[Tensor], ParameterPieces]:
    inputs = sublayer_steps.contiguous((*tensors, kept, grad))
    with on_device(tensors.x):
        plan, pieces = plans.backward(needs)
        return FeedForwardGradients._make(plan.run(inputs)), pieces


class FeedForward(torch.autograd.Function):
    """The sub-layer of eager calls: apply(*tensors, options) returns y."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, options = arguments
        plans, (y, kept) = _run_forward(FeedForwardTensors(*tensors), options, save=True)
        ctx.plans = plans
        ctx.save_for_backward(*tensors, kept)
        return y

    @staticmethod
    def backward(ctx, grad):
        *tensors, kept = ctx.saved_tensors  # read once: checkpointing unpacks at each access
        t = FeedForwardTensors(*tensors)
        needs = FeedForwardTensors(*ctx.needs_input_grad[:NUM_TENSORS])
        wanted = FeedForwardNeeds.of(needs)
        is_eager = is_plain(*tensors, kept, grad) and not is_batched(grad)
        if torch.is_grad_enabled() or not is_eager:
            results, pieces = _call_backward(t, ctx.plans.options, kept, grad, wanted)
        else:
            results, pieces = _run_backward(ctx.plans, t, kept, grad, wanted)
        return *_named_gradients(t, results, pieces, needs), None


@define_operator
def feed_forward_triton(
    tensors: FeedForwardTensors[Tensor],
    options: FeedForwardOptions,
    save: bool,  # noqa: FBT001  operators take positions
) -> tuple[Tensor, Tensor]:
    """Return y, and the block that `kept_layout` describes, empty unless `save`."""
    _, (y, *kept) = _run_forward(tensors, options, save=save)
    return y, kept[0] if save else y.new_empty(0, dtype=torch.uint8)


@torch.library.register_fake("anemoi_gt::feed_forward_triton")
@flat_arguments
def _(
    tensors: FeedForwardTensors[Tensor],
    options: FeedForwardOptions,
    save: bool,  # noqa: FBT001  operators take positions
):
    x = tensors.x
    y = x.new_empty(x.shape, dtype=_out_dtype(tensors, options))
    num_bytes = kept_layout(tensors, options).num_bytes if save else 0
    return y, y.new_empty((num_bytes,), dtype=torch.uint8)


def _setup_context(ctx, inputs, output):
    *tensors_and_options, _ = inputs
    ctx.options = FeedForwardOptions(*tensors_and_options[NUM_TENSORS:])
    _, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors_and_options[:NUM_TENSORS], kept)


@define_operator
def feed_forward_triton_backward(
    tensors: FeedForwardTensors[Tensor],
    options: FeedForwardOptions,
    kept: Tensor,
    grad: Tensor,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `FeedForwardGradients`, empty for those that are None."""
    plans = plans_of(sublayer_steps.specs_of(tensors), options)
    grad = grad.to(_out_dtype(tensors, options))
    results, _ = _run_backward(plans, tensors, kept, grad, FeedForwardNeeds(*needs))
    dx, dcondition, parameters = (
        grad.new_empty(0) if result is None else result for result in results
    )
    return dx, dcondition, parameters


@torch.library.register_fake("anemoi_gt::feed_forward_triton_backward")
@flat_arguments
def _(
    tensors: FeedForwardTensors[Tensor],
    options: FeedForwardOptions,
    kept: Tensor,
    grad: Tensor,
    needs: list[bool],
):
    condition = grad.new_empty(0)
    wanted = FeedForwardNeeds(*needs)
    if tensors.condition is not None and wanted.condition:
        condition = grad.new_empty(tensors.condition.shape, dtype=options.dtype)
    num_elements = parameter_pieces(tensors, weights=wanted.weights).num_elements
    parameters = grad.new_empty((num_elements,), dtype=torch.float32)
    return tensors.x.new_empty(tensors.x.shape), condition, parameters


def _backward(ctx, grad, *_):
    num_arguments = NUM_TENSORS + NUM_OPTIONS + 1
    if grad is None:
        return (None,) * num_arguments
    *tensors, kept = ctx.saved_tensors
    t = FeedForwardTensors(*tensors)
    needs = FeedForwardTensors(*ctx.needs_input_grad[:NUM_TENSORS])
    results, pieces = _call_backward(t, ctx.options, kept, grad, FeedForwardNeeds.of(needs))
    gradients = _named_gradients(t, results, pieces, needs)
    return *gradients, *((None,) * (NUM_OPTIONS + 1))


def _call_backward(
    t: FeedForwardTensors[Tensor],
    options: FeedForwardOptions,
    kept: Tensor,
    grad: Tensor,
    needs: FeedForwardNeeds,
) -> tuple[FeedForwardGradients[Tensor], ParameterPieces]:
    """Call the backward operator; return what `_run_backward` does."""
    results = feed_forward_triton_backward(*t, *options, kept, grad, list(needs))
    return FeedForwardGradients(*results), parameter_pieces(t, weights=needs.weights)


torch.library.register_autograd(feed_forward_triton, _backward, setup_context=_setup_context)
refuse_second_derivative(feed_forward_triton_backward)
