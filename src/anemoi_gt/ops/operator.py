"""Operators on trees of tensors: registration with PyTorch, autograd, eager calls and refusals.

An operator costs 0.15 to 0.7 ms of host time per call (torch 2.11). So eager calls that are
`is_plain` use an autograd function instead, which runs the same two passes; the registered operator
and its backward are for traced code, dispatch modes and tensor subclasses.

    __call__ --- plain ------> Function.apply --> Passes.forward      ... Passes.backward
             \\-- otherwise --> torch.ops.anemoi_gt.NAME_BACKEND --> Passes.forward
                               (fake: forward_specs, gradient_layout)  ... NAME_BACKEND_backward
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anemoi_gt.custom_ops import is_plain, register
from anemoi_gt.ops.tensors import CallSizes
from anemoi_gt.ops.tree import form_of, getter_of, leaf_types, leaves, tree_of
from anemoi_gt.torch_compat import (
    direct_apply,
    forward_mode_is_active,
    is_batched,
    is_gradient_transform,
)

Spec = tuple[tuple[int, ...], torch.dtype]  # shape and dtype of a tensor


class GradientLeaf(NamedTuple):
    """Location of the gradient of a tensor: a result of the backward pass, or a piece of one."""

    result: int
    piece: int | None  # None: the whole result
    shape: tuple[int, ...]
    dtype: torch.dtype  # of the tensor; the result may have another


class GradientLayout(NamedTuple):
    """Results of a backward pass, and the location of each gradient in them.

    Results of an operator must not alias, and each costs host time, so the gradients of
    parameters may be pieces of one result. Sizes may be symbolic.
    """

    results: tuple[Spec | None, ...]  # None for one that is not computed
    sizes: tuple[tuple[int, ...] | None, ...]  # elements of the pieces of each result; None: whole
    leaves: tuple[GradientLeaf | None, ...]  # of each tensor, None without a gradient

    @classmethod
    def separate(cls, flat: Sequence, needs: Sequence[bool]) -> "GradientLayout":
        """Return a layout with one result for each tensor that needs a gradient, like it."""
        results: list[Spec | None] = []
        gradient_leaves: list[GradientLeaf | None] = []
        for number, (tensor, need) in enumerate(zip(flat, needs, strict=True)):
            if need and tensor is not None:
                results.append((tensor.shape, tensor.dtype))
                leaf = GradientLeaf(number, None, tensor.shape, tensor.dtype)
                gradient_leaves.append(leaf)
            else:
                results.append(None)
                gradient_leaves.append(None)
        return cls(tuple(results), (None,) * len(results), tuple(gradient_leaves))

    def gradients(self, results: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients in `results`, in the order, shapes and dtypes of the tensors.

        Tensors that share a piece get the same gradient: autograd copies it for one of them.
        """
        pieces: list[Any] = []  # of each result: itself, or a tuple of tensors
        for result, sizes in zip(results, self.sizes, strict=True):
            # not `split`, which is a Python function of PyTorch
            pieces.append(result if sizes is None else result.split_with_sizes(sizes))  # type: ignore[union-attr]
        gradients: list[Tensor | None] = []
        for leaf in self.leaves:
            if leaf is None:
                gradients.append(None)
                continue
            gradient = pieces[leaf.result]
            if leaf.piece is not None:
                gradient = gradient[leaf.piece]
            if gradient.dim() != len(leaf.shape):
                gradient = gradient.view(leaf.shape)
            if gradient.dtype != leaf.dtype:
                gradient = gradient.to(leaf.dtype)
            gradients.append(gradient)
        return gradients


class Passes(Protocol):
    """Both passes of an operator over tensors of some shapes and dtypes, with some options.

    `inputs` are the leaves of tensors and constants.
    """

    def forward(self, inputs: Sequence[Tensor | None], *, save: bool) -> list[Tensor]:
        """Return the outputs; with `save`, also the tensor saved for the backward pass."""

    def backward(
        self,
        inputs: Sequence[Tensor | None],
        kept: Tensor,
        grads: Sequence[Tensor | None],
        needs: tuple[bool, ...],
    ) -> tuple[Sequence[Tensor | None], GradientLayout]:
        """Return results with the gradients that are needed, and where they are."""


class ListedOperator(Protocol):
    """An operator as `explain` lists it.

    `arguments` are those that a dispatch mode sees, `needs` the tensors that need a gradient.
    """

    op: Any
    op_backward: Any
    backend: str
    num_tensors: int  # the first arguments, which are differentiated

    def sizes_of(self, arguments: Sequence) -> CallSizes:
        """Return the sizes of a call, for people."""

    def kernels(self, arguments: Sequence, needs: Sequence[bool]) -> tuple[list[str], list[str]]:
        """Return the kernels of a forward pass, and of a backward pass if a tensor needs one."""


OPERATORS: dict[Any, ListedOperator] = {}  # every operator, by what a dispatch mode sees


class Operator(ABC):
    """A differentiable operator: torch.ops.anemoi_gt.NAME_BACKEND, and ..._backward.

    Parameters
    ----------
    name, backend : str
        Error messages contain `name`.
    tensors : NamedTuple class
        Tree of the tensors that are differentiated.
    constants : NamedTuple class
        Tree of the tensors that are not, such as indices.
    options : NamedTuple class
        Tree of numbers, strings and dtypes.
    outputs : tuple of str
        Names of the outputs, which are all differentiable.
    num_results : int, optional
        Results of the backward pass; None: one for each tensor.
    """

    def __init__(
        self,
        name: str,
        backend: str,
        *,
        tensors: Any,
        constants: Any,
        options: Any,
        outputs: tuple[str, ...],
        num_results: int | None = None,
    ):
        self.name = name
        self.backend = backend
        self.outputs = outputs
        self.tensors_form = form_of(tensors)
        self.constants_form = form_of(constants)
        self.options_form = form_of(options)
        self.num_tensors = len(leaf_types(tensors))
        self.num_inputs = self.num_tensors + len(leaf_types(constants))
        # leaves of the options in each argument of the registered operator, which takes numbers of
        # a type in one list: PyTorch's limit is 64 arguments
        indices: dict[str, tuple[bool, list[int]]] = {}
        types: dict[str, Any] = {}
        for index, (option, type_) in enumerate(leaf_types(options).items()):
            is_number = type_ in (int, float, bool)
            argument = f"{type_.__name__}s" if is_number else option
            types[argument] = list[type_] if is_number else type_  # type: ignore[valid-type]
            indices.setdefault(argument, (is_number, []))[1].append(index)
        self.option_indices = list(indices.values())
        self.num_arguments = self.num_inputs + len(types)
        self.num_results = self.num_tensors if num_results is None else num_results
        self.get_leaves = getter_of(tensors)
        inputs = dict.fromkeys([*leaf_types(tensors), *leaf_types(constants)], Tensor | None)
        arguments = inputs | types
        self.op = register(
            f"{name}_{backend}",
            _with_signature(self._run_forward, arguments | {"save": bool}, len(outputs) + 1),
        )
        grads = dict.fromkeys([f"grad_{output}" for output in outputs], Tensor | None)
        more = {"kept": Tensor} | grads | {"needs": list[bool]}
        self.op_backward = register(
            f"{name}_{backend}_backward",
            _with_signature(self._run_backward, arguments | more, self.num_results),
        )
        torch.library.register_fake(self.op, self._fake_forward)
        torch.library.register_fake(self.op_backward, self._fake_backward)
        torch.library.register_autograd(self.op, self._backward, setup_context=self._setup_context)
        torch.library.register_autograd(self.op_backward, self._refuse_second_derivative)
        self.apply = direct_apply(_function_of(self))
        OPERATORS[self.op] = self

    @abstractmethod
    def passes(self, inputs: Sequence[Tensor | None], options: Any) -> Passes:
        """Return both passes over these inputs, which are `readable`."""

    @abstractmethod
    def forward_specs(self, tensors: Any, constants: Any, options: Any) -> list[Spec]:
        """Return shape and dtype of each output, then of the tensor saved for backward, if any."""

    def gradient_layout(
        self, tensors: Any, constants: Any, options: Any, needs: Any
    ) -> GradientLayout:
        """Return the layout of the results of the backward pass: here, one for each tensor.

        `needs` is a tree of bools.
        """
        return GradientLayout.separate(leaves(tensors), leaves(needs))

    @abstractmethod
    def call_sizes(self, tensors: Any, constants: Any, options: Any) -> CallSizes:
        """Return the sizes of a call, for people."""

    def sizes_of(self, arguments: Sequence) -> CallSizes:
        """Return the sizes of a call, for people."""
        return self.call_sizes(*self.split(arguments))

    def kernels(self, arguments: Sequence, needs: Sequence[bool]) -> tuple[list[str], list[str]]:
        """Return no kernels: those of PyTorch have no names that this library gives."""
        return [], []

    def readable(self, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return inputs as the passes read them: contiguous."""
        return [None if tensor is None else tensor.contiguous() for tensor in inputs]

    def __call__(
        self,
        flat: Sequence[Tensor | None],
        constants: Sequence[Tensor | None],
        options: Any,
        *,
        save: bool,
    ) -> Sequence[Tensor]:
        """Return the outputs.

        Parameters
        ----------
        flat, constants : sequence of Tensor or None
            The leaves of both trees.
        options : NamedTuple
        save : bool
            Whether a tensor `needs_gradient`.
        """
        if not torch.compiler.is_compiling() and forward_mode_is_active():
            self._refuse_tangents(flat)
        if not is_plain(*flat, *constants):
            self._refuse_transform(flat)
            outputs = self.op(*flat, *constants, *self.option_arguments(options), save)
        elif save:
            outputs = self.apply(*flat, constants, options)
        else:
            inputs = self.readable((*flat, *constants))
            outputs = self.passes(inputs, options).forward(inputs, save=False)
        return outputs[: len(self.outputs)]

    def flatten(self, tensors: Any) -> Sequence[Tensor | None]:
        """Return the leaves of a tree of tensors."""
        return leaves(tensors) if torch.compiler.is_compiling() else self.get_leaves(tensors)

    def split(self, arguments: Sequence) -> tuple[Any, Any, Any]:
        """Return tensors, constants and options of flat arguments."""
        tensors = tree_of(self.tensors_form, arguments[: self.num_tensors])
        constants = tree_of(self.constants_form, arguments[self.num_tensors : self.num_inputs])
        return tensors, constants, self._options_of(arguments)

    def option_arguments(self, options: Any) -> list:
        """Return options as arguments of the registered operator."""
        flat = leaves(options)
        return [
            [flat[index] for index in indices] if is_list else flat[indices[0]]
            for is_list, indices in self.option_indices
        ]

    def _options_of(self, arguments: Sequence) -> Any:
        packed = arguments[self.num_inputs : self.num_arguments]
        options: dict[int, Any] = {}  # by their index among the leaves
        for (is_list, indices), argument in zip(self.option_indices, packed, strict=True):
            values = argument if is_list else [argument]
            options |= dict(zip(indices, values, strict=True))
        return tree_of(self.options_form, [options[index] for index in range(len(options))])

    def _run_forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        inputs = self.readable(arguments[: self.num_inputs])
        options = self._options_of(arguments)
        save = arguments[-1]
        outputs = self.passes(inputs, options).forward(inputs, save=save)
        if not save:
            outputs = [*outputs, outputs[0].new_empty(0, dtype=torch.uint8)]
        return tuple(outputs)

    def _fake_forward(self, *arguments: Any) -> tuple[Tensor, ...]:
        specs = self.forward_specs(*self.split(arguments))
        if not arguments[-1]:
            specs[-1] = ((0,), torch.uint8)
        like = next(tensor for tensor in arguments if tensor is not None)
        return tuple(like.new_empty(shape, dtype=dtype) for shape, dtype in specs)

    def _setup_context(self, ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)
        *_, kept = output
        ctx.mark_non_differentiable(kept)
        ctx.options = inputs[self.num_inputs : -1]
        ctx.save_for_backward(*inputs[: self.num_inputs], kept)

    def _backward(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_others = self.num_arguments + 1 - self.num_tensors
        grads = grads[: len(self.outputs)]
        if all(grad is None for grad in grads):
            return (None,) * (self.num_arguments + 1)
        *inputs, kept = ctx.saved_tensors
        needs = ctx.needs_input_grad[: self.num_tensors]
        gradients = self._call_backward(inputs, ctx.options, kept, grads, needs)
        return *gradients, *((None,) * num_others)

    def _call_backward(
        self,
        inputs: Sequence[Tensor | None],
        options: Sequence,
        kept: Tensor,
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
    ) -> list[Tensor | None]:
        """Call the backward operator; return the gradient of each tensor, None if not needed."""
        results = self.op_backward(*inputs, *options, kept, *grads, list(needs))
        needed = tree_of(self.tensors_form, needs)
        layout = self.gradient_layout(*self.split((*inputs, *options)), needed)
        return layout.gradients(results)

    def _run_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        inputs = self.readable(arguments[: self.num_inputs])
        options = self._options_of(arguments)
        kept, *grads, needs = arguments[self.num_arguments :]
        grads = self.readable(grads)
        results, _ = self.passes(inputs, options).backward(inputs, kept, grads, tuple(needs))
        # a new empty tensor for each: results of an operator must not alias
        return tuple(kept.new_empty(0) if result is None else result for result in results)

    def _fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        kept, *_, needs = arguments[self.num_arguments :]
        needed = tree_of(self.tensors_form, needs)
        layout = self.gradient_layout(*self.split(arguments), needed)
        specs = [((0,), kept.dtype) if spec is None else spec for spec in layout.results]
        return tuple(kept.new_empty(shape, dtype=dtype) for shape, dtype in specs)

    def _refuse_second_derivative(self, ctx: Any, *_: Tensor | None) -> NoReturn:
        raise RuntimeError(
            f"double backward is not supported by {self.name}, got a backward through its backward "
            "(create_graph=True); use plain PyTorch operations where a second derivative is needed"
        )

    def _refuse_tangents(self, tensors: Sequence[Tensor | None]) -> None:
        """Raise RuntimeError if a tensor has a tangent, which would be dropped silently."""
        for tensor in tensors:
            if tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None:
                raise RuntimeError(
                    f"forward-mode derivatives are not supported by {self.name}, got an operand "
                    "with a tangent (torch.func.jvp, torch.autograd.forward_ad); use "
                    "torch.autograd.grad, or plain PyTorch operations where tangents are needed"
                )

    def _refuse_transform(self, tensors: Sequence[Tensor | None]) -> None:
        """Raise RuntimeError if torch.func differentiates a tensor, which is not supported."""
        if not is_gradient_transform():
            return
        if any(tensor is not None and tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"torch.func.grad, vjp and jacrev are not supported by {self.name}, got an operand "
                "that needs a gradient inside a transform; use torch.autograd.grad, with "
                "is_grads_batched=True for several incoming gradients"
            )


def _with_signature(run: Callable, parameters: dict[str, Any], num_results: int) -> Callable:
    """Return `run(*arguments)` with a signature that PyTorch can infer a schema from.

    Results are a tuple, not a list: PyTorch's fallback for vmap needs single tensors.
    """

    def function(*arguments: Any) -> tuple[Tensor, ...]:
        return run(*arguments)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    vars(function)["__signature__"] = inspect.Signature(
        [inspect.Parameter(name, kind, annotation=type_) for name, type_ in parameters.items()],
        return_annotation=tuple[(Tensor,) * num_results],  # type: ignore[misc]
    )
    return function


def _function_of(operator: Operator) -> type[torch.autograd.Function]:
    """Return the operator of eager calls: apply(*leaves, constants, options) returns outputs."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
            *flat, constants, options = arguments
            inputs = operator.readable((*flat, *constants))
            ctx.passes = operator.passes(inputs, options)
            ctx.options = options
            *outputs, kept = ctx.passes.forward(inputs, save=True)
            ctx.set_materialize_grads(False)
            # Not the readable copies: a second derivative of their originals must be refused.
            ctx.save_for_backward(*flat, *constants, kept)
            return tuple(outputs)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            if all(grad is None for grad in grads):
                return (None,) * (operator.num_tensors + 2)
            *inputs, kept = ctx.saved_tensors  # read once: checkpointing unpacks at each access
            needs = ctx.needs_input_grad[: operator.num_tensors]
            is_eager = is_plain(*inputs, kept, *grads) and not is_batched(*grads)
            if torch.is_grad_enabled() or not is_eager:
                options = operator.option_arguments(ctx.options)
                gradients = operator._call_backward(inputs, options, kept, grads, needs)
            else:
                inputs = operator.readable(inputs)
                grads_read = operator.readable(grads)
                results, layout = ctx.passes.backward(inputs, kept, grads_read, needs)
                gradients = layout.gradients(results)
            return *gradients, None, None

    Function.__name__ = Function.__qualname__ = operator.name.title().replace("_", "")
    return Function
