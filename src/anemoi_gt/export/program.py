"""Exported programs: torch.export of models and layers, decomposed into portable operators.

torch.export represents each operator of this library by one node, which only has the operator's
name. `export_program` decomposes it into PyTorch operators (backend `torch`) or kernel launches
(backend `triton`), so that the program loads without this library.
"""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from anemoi_gt.custom_ops import NAMESPACE
from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.checks import check_shape
from anemoi_gt.nn.static_graph import StaticStructure
from anemoi_gt.ops.triton_backend.device import interpreted
from anemoi_gt.option_checks import check_integer


class Autocast(nn.Module):
    """A model whose forward pass always runs under autocast to bfloat16 or float16.

    `device_type` is, for example, "cuda".
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.device_type = device_type
        self.dtype = dtype

    def forward(self, x: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Call the model."""
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(x)


class TensorGraphLayer(nn.Module):
    """A layer, block, processor or mapper that takes a graph as the tensors of its structure.

    Inputs of torch.export are tensors, not a GraphStructure. So one program supports graphs of any
    size. The layer is called as `layer(x, graph, edge_attr)`.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        structure: dict[str, Tensor],
        edge_attr: Tensor | None = None,
    ) -> Any:
        """Call the layer.

        Parameters
        ----------
        x : Tensor, or pair of Tensor
            Input of the layer.
        structure : dict of str to Tensor
            `GraphStructure.state_dict()` of a structure. Build it with `reverse=False`, because
            every tensor becomes an input: inference needs only `colptr`, `row` and `sources`, and
            `perm` if the edges are not sorted by destination.
        edge_attr : Tensor [E, D] or [B, E, D], optional
            In the caller's edge order.
        """
        return self.layer(x, GraphStructure.from_state(structure), edge_attr)


def export_model(
    model: nn.Module, x: Tensor | dict[str, Tensor] | tuple[Tensor, ...], max_batch: int
) -> ExportedProgram:
    """Export a model on its own graph for inference, with a dynamic batch size.

    Raises ValueError if `max_batch` is not a positive integer, or `x` is not a valid example.

    Parameters
    ----------
    model : EncoderProcessorDecoder, or a module with the same arguments
        Left unchanged. A model compiled by `torch.compile` is exported uncompiled.
    x : Tensor [B, N, in_channels], or dict of data set to Tensor, or tuple of Tensor [B, ...]
        An example on the device of the model; its values do not matter. A tuple holds several
        arguments.
    max_batch : int
        Maximum batch size; 1 fixes the batch size. With the backend `triton`, kernels use 32-bit
        offsets if they suffice for this size.
    """
    check_integer("max_batch", max_batch)
    arguments = x if isinstance(x, tuple) else (x,)
    if not isinstance(x, tuple):
        tree_map(_check_example, x)
    batch = Dim("batch", min=1, max=max_batch) if max_batch > 1 else None
    size = 1 if batch is None else 2  # torch.export specialises on a size of 1

    def with_batch_size(field: Tensor) -> Tensor:
        return field.narrow(0, 0, 1).repeat(size, *[1] * (field.dim() - 1))

    def shape_of(_: Tensor) -> dict[int, Dim] | None:
        return None if batch is None else {0: batch}

    example = tree_map(with_batch_size, arguments)
    shapes = tree_map(shape_of, arguments)
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        shapes = (shapes,)  # torch.export treats *args as one argument
    return export_program(model, example, shapes)


def _check_example(field: Tensor) -> None:
    """Raise ValueError unless `field` is a tensor [B, N, channels] with B > 0."""
    expected = "[B, N, channels] with B at least 1"
    check_shape("x", field, expected, lambda x: x.dim() == 3 and x.shape[0] > 0)


def export_program(module: nn.Module, inputs: tuple, dynamic_shapes: Any = None) -> ExportedProgram:
    """Export a module for inference, with PyTorch operators and kernel launches only.

    The result is an input of `write_package`. Raises ValueError if an operator cannot be exported:
    sorting of edges, in a module that takes an edge_index, or kernels under Triton's interpreter.

    Parameters
    ----------
    module : nn.Module
        Any module; left unchanged, and exported in evaluation mode. Attention uses the backend
        that its config selects for the devices and dtypes of `inputs`.
    inputs : tuple
        Example arguments, in which dynamic sizes must not be 0 or 1. With the backend `triton`, the
        in-degrees of the example determine the tiles, which affect speed, not results.
    dynamic_shapes : optional
        As in `torch.export.export`; None fixes all sizes.

    Examples
    --------
    >>> from torch.export import Dim
    >>> from anemoi_gt.export import TensorGraphLayer
    >>> from anemoi_gt.nn import GraphTransformerConv
    >>> edges = torch.tensor([[0, 1, 1], [0, 0, 1]])
    >>> graph = GraphStructure.from_edge_index(edges, (2, 2), reverse=False)
    >>> layer = TensorGraphLayer(GraphTransformerConv(4, 8, heads=2, edge_dim=3))
    >>> inputs = torch.randn(5, 2, 4), graph.state_dict(), torch.randn(3, 3)
    >>> sizes = {0: Dim("batch", max=64)}, dict.fromkeys(graph.state_dict()), None
    >>> program = export_program(layer, inputs, sizes)
    >>> program.module()(torch.randn(7, 2, 4), graph.state_dict(), torch.randn(3, 3)).shape
    torch.Size([7, 2, 16])
    """
    with torch.no_grad():
        program = torch.export.export(
            _for_inference(module, {}), inputs, dynamic_shapes=dynamic_shapes, strict=False
        )
        decompositions = {operator: decomposition_of(operator) for operator in _custom_ops(program)}
        return program.run_decompositions(decompositions)


def check_kernels() -> None:
    """Raise ValueError if kernels of the backend `triton` run in Triton's interpreter."""
    if interpreted():
        raise ValueError(
            "kernels cannot be exported under Triton's interpreter: unset TRITON_INTERPRET, or use "
            "backend torch"
        )


def _for_inference(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return a copy in evaluation mode that shares all tensors with `module`, for inference only.

    The copy has no reverse structures of static graphs, which are as large as the graphs. Compiled
    modules are unwrapped. A module with several names is copied once, to `copies`.
    """
    # torch.compile's wrapper sets its attributes on the module inside
    module = getattr(module, "_orig_mod", module)
    if module in copies:
        return copies[module]
    copied = copies[module] = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        setattr(copied, kind, dict(getattr(copied, kind)))
    if isinstance(copied, StaticStructure):
        copied.keep_for_inference()
    copied._modules = dict(copied._modules)
    for name, child in copied._modules.items():
        if child is not None:
            copied._modules[name] = _for_inference(child, copies)
    copied.training = False
    return copied


def _custom_ops(program: ExportedProgram) -> set[torch._ops.OpOverload]:
    """Return this library's operators in a program, including its submodules."""
    operators = set()
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if getattr(node.target, "namespace", None) == NAMESPACE:
                    operators.add(node.target)
    return operators


def decomposition_of(operator: torch._ops.OpOverload) -> Callable:
    """Return the decomposition of one of this library's operators.

    Raise ValueError if it has none.
    """
    if operator._opname == "edge_attention_torch":
        from anemoi_gt.ops.torch_backend.aten_decomposition import decompose
    elif operator._opname == "edge_attention_triton":
        check_kernels()
        from anemoi_gt.ops.triton_backend.launch_decomposition import decompose
    else:
        raise ValueError(
            f"a program must not sort edges, but the module calls {operator}: build a "
            "GraphStructure once and pass its tensors, see anemoi_gt.export.TensorGraphLayer"
        )
    return decompose
