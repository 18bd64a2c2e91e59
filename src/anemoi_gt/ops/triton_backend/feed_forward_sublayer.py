"""The feed-forward sub-layer of a block as one operator: norm, network, residual connection.

    m = norm(x)                                  see `anemoi_gt.ops.sublayer_tensors`
    h = W_in m + b_in                                                       [N, K_h]
    h = [W_gate; W_in] m + [b_gate; b_in]               gated               [N, 2 K_h]
    a = act(h), gated act(h_gate) h_value        [N, K_h]
    y = x + W_out a + b_out

Kept for the backward pass: x, h and the cast weights. The backward pass makes m and a again, in the
passes that read x and h. Rows are taken in chunks: what is as wide as the hidden layer exists for a
chunk alone, except h.
"""

from functools import lru_cache

import torch
from torch import Tensor

from anemoi_gt.custom_ops import (
    define_operator,
    flat_arguments,
    is_batched,
    is_plain,
    needs_gradient,
    on_device,
    refuse_forward_mode,
    refuse_second_derivative,
)
from anemoi_gt.ops.dtypes import without_autocast
from anemoi_gt.ops.sublayer_tensors import FeedForwardOptions, FeedForwardTensors
from anemoi_gt.ops.triton_backend import row_launches, sublayer_steps
from anemoi_gt.ops.triton_backend.plan import Buffer, Plan, PlanBuilder
from anemoi_gt.ops.triton_backend.sublayer_steps import (
    Norm,
    NormParameters,
    PackedWeights,
    sum_columns,
)

KEPT = 128  # plans of each pass that are kept
NUM_TENSORS = len(FeedForwardTensors._fields)
NUM_OPTIONS = len(FeedForwardOptions._fields)


def feed_forward_sublayer(tensors: FeedForwardTensors, options: FeedForwardOptions) -> Tensor:
    """Return y [N, F] = x + network(norm(x)), in the promoted dtype of x and the products."""
    refuse_forward_mode(*tensors)
    save = needs_gradient(*tensors)
    if not is_plain(*tensors):
        return feed_forward_triton(*tensors, *options, save)[0]
    if save:
        return FeedForward.apply(*tensors, options)
    return _run_forward(tensors, options, save=False)[0]


def _weight_groups(t: FeedForwardTensors) -> dict[str, list[Buffer]]:
    """Return the parameters that are cast, by the group that stacks them."""
    is_gated = t.weight_gate is not None
    groups = {
        "in": [t.weight_gate, t.weight_in] if is_gated else [t.weight_in],
        "out": [t.weight_out],
    }
    if t.bias_in is not None:
        groups["bias_in"] = [t.bias_gate, t.bias_in] if is_gated else [t.bias_in]
    if t.bias_out is not None:
        groups["bias_out"] = [t.bias_out]
    return groups | _norm_parameters(t).groups("norm")


def _norm_parameters(t: FeedForwardTensors) -> NormParameters:
    return NormParameters(
        t.norm_scale, t.norm_shift, t.norm_scale_bias, t.norm_shift_bias, t.condition
    )


@lru_cache(KEPT)
def forward_plan(specs: tuple, options: FeedForwardOptions, save: bool) -> Plan:
    """Return the plan of a forward pass: y, and with `save` h and the packed weights."""
    builder = PlanBuilder(specs)
    t = FeedForwardTensors(*builder.inputs)
    packed, weights = sublayer_steps.cast_weights(builder, _weight_groups(t), options.dtype)
    if t.condition is not None:
        sublayer_steps.add_one_to_scale(builder, weights["norm_bias"])
    norm = Norm.of(builder, _norm_parameters(t), options.eps, weights, "norm")

    num_rows, features = t.x.shape
    width = weights["in"].shape[0]
    num_hidden = t.weight_in.shape[0]
    y = builder.empty(t.x.shape, torch.promote_types(t.x.dtype, options.dtype))
    kept_hidden = builder.empty((num_rows, width), options.dtype) if save else None
    for begin, end in sublayer_steps.chunks(num_rows):
        rows = end - begin
        x = t.x.slice(0, begin, end)
        m = builder.empty((rows, features), options.dtype)
        builder.launch(
            row_launches.norm_forward(rows, features, norm.eps),
            x=x,
            scale=norm.scale,
            shift=norm.shift,
            modulation=norm.modulation(builder, begin, end),
            out=m,
        )
        hidden = None if kept_hidden is None else kept_hidden.slice(0, begin, end)
        hidden = sublayer_steps.linear(builder, m, weights["in"], weights.get("bias_in"), hidden)
        activated = builder.empty((rows, num_hidden), options.dtype)
        is_gated = t.weight_gate is not None
        launch = row_launches.activation_forward(
            rows, num_hidden, options.activation, gated=is_gated
        )
        builder.launch(launch, hidden=hidden, out=activated)
        delta = sublayer_steps.linear(builder, activated, weights["out"], weights.get("bias_out"))
        sublayer_steps.add(builder, x, delta, y.slice(0, begin, end))
    return builder.finish([y, kept_hidden, packed] if save else [y])


@lru_cache(KEPT)
def backward_plan(specs: tuple, options: FeedForwardOptions, need_condition: bool) -> Plan:
    """Return the plan of a backward pass over tensors, h, packed weights and the gradient of y.

    Results: gradients of x, of the condition (or None), of the packed "in" and "out" weights, of
    the map of the condition (or None), and the sums over nodes, whose columns are `_sum_widths`.
    """
    builder = PlanBuilder(specs)
    t = FeedForwardTensors(*builder.inputs[:NUM_TENSORS])
    hidden, packed, grad = builder.inputs[NUM_TENSORS:]
    groups = _weight_groups(t)
    weights = PackedWeights.of(groups).views(packed)
    norm = Norm.of(builder, _norm_parameters(t), options.eps, weights, "norm")
    num_rows, features = t.x.shape
    num_hidden = t.weight_in.shape[0]
    is_gated = t.weight_gate is not None

    sums = sublayer_steps.NodeSums(builder, _sum_widths(features, weights["in"].shape[0]))
    modulation = sublayer_steps.modulation_gradients(builder, norm, need_condition)
    dx = builder.empty_like(t.x)
    grad_in = builder.empty_like(weights["in"], torch.float32)
    grad_out = builder.empty_like(weights["out"], torch.float32)
    for begin, end in sublayer_steps.chunks(num_rows):
        rows = end - begin
        grad_rows = grad.slice(0, begin, end)
        narrow = sublayer_steps.cast(builder, grad_rows, options.dtype)
        grad_activated = sublayer_steps.product(builder, narrow, weights["out"])
        hidden_rows = hidden.slice(0, begin, end)
        activated = builder.empty((rows, num_hidden), options.dtype)
        grad_hidden = builder.empty(hidden_rows.shape, options.dtype)
        launch = row_launches.activation_backward(
            rows,
            num_hidden,
            options.activation,
            gated=is_gated,
            programs=sublayer_steps.PROGRAMS,
            sums=sums.width,
            first_sum=sums.columns["bias_in"].start,
        )
        builder.launch(
            launch,
            hidden=hidden_rows,
            grad_activated=grad_activated,
            activated=activated,
            grad_hidden=grad_hidden,
            partial=sums.partial,
        )
        is_first = begin == 0
        sublayer_steps.outer_product(builder, narrow, activated, grad_out, is_first)
        grad_normed = sublayer_steps.product(builder, grad_hidden, weights["in"])
        normed = builder.empty_like(grad_normed)
        sublayer_steps.norm_backward(
            sums,
            "norm",
            norm,
            (begin, end),
            x=t.x.slice(0, begin, end),
            grad_normed=grad_normed,
            grad_total=grad_rows,
            dx=dx.slice(0, begin, end),
            normed=normed,
            modulation=modulation,
            is_first=is_first,
        )
        sublayer_steps.outer_product(builder, grad_hidden, normed, grad_in, is_first)
    grad_condition = None if modulation is None else modulation.condition
    grad_map = None if modulation is None else modulation.weight
    return builder.finish([dx, grad_condition, grad_in, grad_out, grad_map, sums.total()])


def _sum_widths(features: int, hidden: int) -> dict[str, int]:
    """Return the columns of the sums over nodes: the total is the gradient of bias_out."""
    return {**sublayer_steps.norm_sums("norm", features), "bias_in": hidden}


def _named_gradients(t: FeedForwardTensors, results: list[Tensor | None]) -> FeedForwardTensors:
    """Return the gradients by name, from the results of `backward_plan`."""
    dx, condition, grad_in, grad_out, grad_map, total = results
    features = t.x.shape[1]
    columns = sum_columns(_sum_widths(features, grad_in.shape[0]))
    scale, shift = total[columns["norm_scale"]], total[columns["norm_shift"]]
    scale_bias = shift_bias = None
    if t.condition is not None:
        scale_bias, shift_bias = scale, shift
        scale, shift = grad_map[:features], grad_map[features:]
    bias_in = total[columns["bias_in"]]
    weight_gate = bias_gate = None
    if t.weight_gate is not None:
        width = t.weight_in.shape[0]
        weight_gate, bias_gate = grad_in[:width], bias_in[:width]
        grad_in, bias_in = grad_in[width:], bias_in[width:]
    gradients = FeedForwardTensors(
        x=dx,
        norm_scale=scale,
        norm_shift=shift,
        norm_scale_bias=scale_bias,
        norm_shift_bias=shift_bias,
        condition=condition,
        weight_gate=weight_gate,
        bias_gate=bias_gate,
        weight_in=grad_in,
        bias_in=bias_in,
        weight_out=grad_out,
        bias_out=total[columns["norm_total"]],
    )
    return FeedForwardTensors(*sublayer_steps.like_tensors(gradients, t))


def _run_forward(
    tensors: FeedForwardTensors, options: FeedForwardOptions, save: bool
) -> list[Tensor]:
    inputs = sublayer_steps.contiguous(tensors)
    with on_device(tensors.x), without_autocast(tensors.x.device.type):
        return forward_plan(sublayer_steps.specs_of(inputs), options, save).run(inputs)


def _run_backward(
    tensors: FeedForwardTensors,
    options: FeedForwardOptions,
    hidden: Tensor,
    packed: Tensor,
    grad: Tensor,
    need_condition: bool,
) -> list[Tensor | None]:
    inputs = sublayer_steps.contiguous((*tensors, hidden, packed, grad))
    with on_device(tensors.x), without_autocast(tensors.x.device.type):
        return backward_plan(sublayer_steps.specs_of(inputs), options, need_condition).run(inputs)


class FeedForward(torch.autograd.Function):
    """The sub-layer of eager calls: apply(*tensors, options) returns y."""

    @staticmethod
    def forward(ctx, *arguments):
        *tensors, options = arguments
        y, hidden, packed = _run_forward(FeedForwardTensors(*tensors), options, save=True)
        ctx.options = options
        ctx.save_for_backward(*tensors, hidden, packed)
        return y

    @staticmethod
    def backward(ctx, grad):
        *tensors, hidden, packed = ctx.saved_tensors
        t = FeedForwardTensors(*tensors)
        needs = FeedForwardTensors(*ctx.needs_input_grad[:NUM_TENSORS])
        is_eager = is_plain(*tensors, grad) and not is_batched(grad)
        if torch.is_grad_enabled() or not is_eager:
            gradients = _call_backward(t, ctx.options, hidden, packed, grad, needs)
        else:
            results = _run_backward(t, ctx.options, hidden, packed, grad, bool(needs.condition))
            gradients = _named_gradients(t, results)
        return *sublayer_steps.needed(gradients, needs), None


@define_operator
def feed_forward_triton(
    tensors: FeedForwardTensors, options: FeedForwardOptions, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, h and the packed weights, the latter two empty unless `save`."""
    y, *saved = _run_forward(tensors, options, save)
    hidden, packed = saved or (y.new_empty(0), y.new_empty(0))
    return y, hidden, packed


@torch.library.register_fake("anemoi_gt::feed_forward_triton")
@flat_arguments
def _(tensors: FeedForwardTensors, options: FeedForwardOptions, save: bool):
    x = tensors.x
    y = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, options.dtype))
    if not save:
        return y, y.new_empty(0), y.new_empty(0)
    layout = PackedWeights.of(_weight_groups(tensors))
    width = layout.groups["in"][1][0]
    hidden = x.new_empty((x.shape[0], width), dtype=options.dtype)
    return y, hidden, x.new_empty((layout.num_elements,), dtype=options.dtype)


def _setup_context(ctx, inputs, output):
    *tensors_and_options, _ = inputs
    ctx.options = FeedForwardOptions(*tensors_and_options[NUM_TENSORS:])
    _, hidden, packed = output
    ctx.mark_non_differentiable(hidden, packed)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors_and_options[:NUM_TENSORS], hidden, packed)


@define_operator
def feed_forward_triton_backward(
    tensors: FeedForwardTensors,
    options: FeedForwardOptions,
    hidden: Tensor,
    packed: Tensor,
    grad: Tensor,
    need_condition: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the results of `backward_plan`, empty for those that are None."""
    results = _run_backward(tensors, options, hidden, packed, grad, need_condition)
    return tuple(grad.new_empty(0) if result is None else result for result in results)


@torch.library.register_fake("anemoi_gt::feed_forward_triton_backward")
@flat_arguments
def _(
    tensors: FeedForwardTensors, options: FeedForwardOptions, hidden, packed, grad, need_condition
):
    t = tensors
    features = t.x.shape[1]
    layout = PackedWeights.of(_weight_groups(t))
    widths = _sum_widths(features, layout.groups["in"][1][0])
    condition, grad_map = (
        grad.new_empty(0),
        grad.new_empty(0),
    )  # results are no aliases of each other
    if t.condition is not None:
        grad_map = grad.new_empty(layout.groups["norm_weight"][1], dtype=torch.float32)
        if need_condition:
            condition = grad.new_empty(t.condition.shape, dtype=options.dtype)
    return (
        t.x.new_empty(t.x.shape),
        condition,
        grad.new_empty(layout.groups["in"][1], dtype=torch.float32),
        grad.new_empty(layout.groups["out"][1], dtype=torch.float32),
        grad_map,
        grad.new_empty((sum(widths.values()),), dtype=torch.float32),
    )


def _backward(ctx, grad, *_):
    num_arguments = NUM_TENSORS + NUM_OPTIONS + 1
    if grad is None:
        return (None,) * num_arguments
    *tensors, hidden, packed = ctx.saved_tensors
    needs = FeedForwardTensors(*ctx.needs_input_grad[:NUM_TENSORS])
    gradients = _call_backward(
        FeedForwardTensors(*tensors), ctx.options, hidden, packed, grad, needs
    )
    return *sublayer_steps.needed(gradients, needs), *((None,) * (NUM_OPTIONS + 1))


def _call_backward(
    t: FeedForwardTensors, options, hidden, packed, grad, needs
) -> FeedForwardTensors:
    """Call the backward operator; return the gradients by name."""
    results = feed_forward_triton_backward(
        *t, *options, hidden, packed, grad, bool(needs.condition)
    )
    return _named_gradients(t, results)


torch.library.register_autograd(feed_forward_triton, _backward, setup_context=_setup_context)
refuse_second_derivative(feed_forward_triton_backward)
