"""Operators whose passes are plans: of the `triton` backend."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anemoi_gt.ops.operator import GradientLayout, Operator, Spec
from anemoi_gt.ops.tree import tree_of
from anemoi_gt.ops.triton_backend.plan import Buffer, Plan
from anemoi_gt.ops.triton_backend.sublayer_builder import SublayerBuilder
from anemoi_gt.ops.triton_backend.tiles import TUNING, Tuning
from anemoi_gt.tested_versions import warn_if_untested

# specs and options whose plans are cached: graphs times layers of different sizes in use at a time
PLAN_CACHE_SIZE = 128


@dataclass(frozen=True)
class Shaped:
    """Shape and dtype of a tensor, a leaf of a tree."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class PlannedOperator(Operator):
    """An operator whose passes are plans, which are made from shapes, dtypes and options only."""

    def __init__(self, name: str, **trees: Any):
        super().__init__(name, "triton", **trees)
        self.plans_of = self.new_cache()

    def new_cache(self, tuning: Tuning = TUNING) -> Callable[[tuple, Any], "Plans"]:
        """Return a function that makes and caches the plans for specs and options."""

        def plans_of(specs: tuple, options: Any) -> "Plans":
            return Plans(self, specs, options, tuning)

        return lru_cache(PLAN_CACHE_SIZE)(plans_of)

    def passes(self, inputs: Sequence[Tensor | None], options: Any) -> "Plans":
        """Return the plans for these inputs."""
        warn_if_untested(self.backend)
        # from a list: a generator is entered once for each input
        specs = tuple([None if x is None else (x.shape, x.dtype) for x in inputs])
        return self.plans_of(specs, options)

    def kernels(self, arguments: Sequence, needs: Sequence[bool]) -> tuple[list[str], list[str]]:
        """Return the kernels of a forward pass, and of a backward pass if a tensor needs one.

        Assumes that only the first output has an incoming gradient.
        """
        _, _, options = self.split(arguments)
        plans = self.passes(arguments[: self.num_inputs], options)
        forward = plans.forward_plan(save=any(needs)).kernels()
        if not any(needs):
            return forward, []
        has_grads = (True, *(False for _ in self.outputs[1:]))
        plan, _ = plans.backward_plan(tuple(needs), has_grads)
        return forward, plan.kernels()

    @abstractmethod
    def add_forward(
        self, builder: SublayerBuilder, tensors: Any, constants: Any, options: Any, *, save: bool
    ) -> list[Buffer]:
        """Add the steps of the forward pass; return outputs, and what is kept with `save`."""

    @abstractmethod
    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: Any,
        constants: Any,
        options: Any,
        kept: Buffer,
        grads: Any,
        needs: Any,
    ) -> Sequence[Buffer | None]:
        """Add the steps of the backward pass; return the results of `gradient_layout`.

        `needs` is the tree of tensors with a bool for each.
        """


class Plans:
    """The plans of an operator for some shapes, dtypes and options, each made when first run.

    Parameters
    ----------
    operator : PlannedOperator
    specs : tuple
        Shape and dtype of each input; None where there is none.
    options : NamedTuple
    tuning : Tuning
    """

    def __init__(self, operator: PlannedOperator, specs: tuple, options: Any, tuning: Tuning):
        self.operator = operator
        self.specs = specs
        self.options = options
        self.tuning = tuning
        shapes = [None if spec is None else Shaped(*spec) for spec in specs]
        self.tensors, self.constants = self._trees(shapes)
        self.output_specs = operator.forward_specs(self.tensors, self.constants, options)
        self._forward: dict[bool, Plan] = {}
        self._backward: dict[tuple, tuple[Plan, GradientLayout]] = {}

    def _trees(self, leaves: Sequence) -> tuple[Any, Any]:
        """Return tensors and constants of one leaf for each input."""
        operator = self.operator
        num_tensors = self.operator.num_tensors
        tensors = tree_of(operator.tensors_form, leaves[:num_tensors])
        return tensors, tree_of(operator.constants_form, leaves[num_tensors:])

    def forward_plan(self, *, save: bool) -> Plan:
        """Return the plan of the forward pass: outputs, and what is kept with `save`."""
        if save not in self._forward:
            builder = SublayerBuilder(self.specs, self.tuning)
            trees = self._trees(builder.inputs)
            results = self.operator.add_forward(builder, *trees, self.options, save=save)
            self._forward[save] = builder.finish(results, replay=self.options.replay)
        return self._forward[save]

    def backward_plan(
        self, needs: tuple[bool, ...], has_grads: tuple[bool, ...]
    ) -> tuple[Plan, GradientLayout]:
        """Return the plan over inputs, what is kept and the incoming gradients that exist."""
        key = (needs, has_grads)
        if key not in self._backward:
            operator = self.operator
            *outputs, kept = self.output_specs
            grads: list[Spec | None] = []
            for spec, has_grad in zip(outputs, has_grads, strict=True):
                grads.append(spec if has_grad else None)
            builder = SublayerBuilder([*self.specs, kept, *grads], self.tuning)
            kept_buffer, *grad_buffers = builder.inputs[operator.num_inputs :]
            assert kept_buffer is not None
            trees = self._trees(builder.inputs[: operator.num_inputs])
            needed = tree_of(operator.tensors_form, needs)
            arguments = (*trees, self.options, kept_buffer, grad_buffers, needed)
            results = operator.add_backward(builder, *arguments)
            layout = operator.gradient_layout(self.tensors, self.constants, self.options, needed)
            plan = builder.finish(results, replay=self.options.replay)
            self._backward[key] = (plan, layout)
        return self._backward[key]

    def forward(self, inputs: Sequence[Tensor | None], *, save: bool) -> list[Tensor]:
        """Run the forward pass."""
        plan = self._forward.get(save) or self.forward_plan(save=save)
        return plan.run(inputs)  # type: ignore[return-value]  # no result of this pass is None

    def backward(
        self,
        inputs: Sequence[Tensor | None],
        kept: Tensor,
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> tuple[list[Tensor | None], GradientLayout]:
        """Run the backward pass."""
        cast_grads = []
        for grad, (_, dtype) in zip(grads, self.output_specs, strict=False):
            cast_grads.append(grad if grad is None or grad.dtype == dtype else grad.to(dtype))
        plan, layout = self.backward_plan(needs, tuple([grad is not None for grad in cast_grads]))
        return plan.run((*inputs, kept, *cast_grads)), layout
