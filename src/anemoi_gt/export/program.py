"""Exported programs: torch.export of models and layers, decomposed into portable operators.

torch.export keeps each operator of this library as one node that only has the operator's name.
`export_program` decomposes it to operators of PyTorch (backend `torch`) or to the kernels
themselves (backend `triton`), so that the program loads without this library.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_map

from anemoi_gt.custom_ops import NAMESPACE
from anemoi_gt.nn.static_graph import StaticStructure
from anemoi_gt.ops.triton_backend.device import interpreted
from anemoi_gt.option_checks import check_integer


class Autocast(nn.Module):
    """A model whose forward pass always runs under autocast to bfloat16 or float16.

    `device_type` is such as "cuda".
    """

    def __init__(self, model: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__()
        self.model, self.device_type, self.dtype = model, device_type, dtype

    def forward(self, x: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Call the model."""
        with torch.autocast(self.device_type, dtype=self.dtype):
            return self.model(x)


def export_model(
    model: nn.Module, x: Tensor | dict[str, Tensor] | tuple[Tensor, ...], max_batch: int
) -> ExportedProgram:
    """Export a model on its own graph for inference, with a dynamic batch size.

    Raises ValueError if max_batch is not a positive integer, or x is not an example.

    Parameters
    ----------
    model : EncoderProcessorDecoder, or a module with the same arguments
        Left unchanged. A model compiled by `torch.compile` is exported uncompiled.
    x : Tensor [B, N, in_channels], or dict of data set to that, or tuple of Tensor [B, ...]
        An example on the device of the model; its values do not matter. A tuple holds several
        arguments.
    max_batch : int
        Maximum batch size; 1 fixes it. On the backend `triton`, kernels use 32-bit offsets if that
        suffices for this size.
    """
    check_integer("max_batch", max_batch)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    arguments = x if isinstance(x, tuple) else (x,)
    if not isinstance(x, tuple):
        tree_map(_check_example, x)
    batch = Dim("batch", min=1, max=max_batch) if max_batch > 1 else None
    size = 1 if batch is None else 2  # a dynamic size of 1 would specialise
    example = tree_map(
        lambda field: field.narrow(0, 0, 1).repeat(size, *[1] * (field.dim() - 1)), arguments
    )
    # A module with *args takes its arguments under one name.
    shapes = tree_map(lambda _: None if batch is None else {0: batch}, arguments)
    return export_program(model, example, (shapes,) if isinstance(x, tuple) else shapes)


def _check_example(field: Tensor) -> None:
    if not isinstance(field, Tensor) or field.dim() != 3 or field.shape[0] < 1:
        got = tuple(field.shape) if isinstance(field, Tensor) else type(field).__name__
        raise ValueError(f"x must be an example [B, N, channels] with B at least 1, got {got}")


def export_program(module: nn.Module, inputs: tuple, dynamic_shapes=None) -> ExportedProgram:
    """Return an inference program of a module for `write_package`, with portable operators.

    Raises ValueError if an operator has no portable form: one that sorts edges, in a module that
    takes an edge_index; or kernels under Triton's interpreter.

    Parameters
    ----------
    module : nn.Module
        Any module; left unchanged, and exported in evaluation mode. Attention runs on the backend
        that its config selects for the devices and dtypes of `inputs`.
    inputs : tuple
        Example arguments. Dynamic sizes must not be 0 or 1 in it. On the backend `triton`, the
        in-degrees of the example determine the tiles, which change speed, not results.
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
            for_inference(module), inputs, dynamic_shapes=dynamic_shapes, strict=False
        )
        return program.run_decompositions(
            {operator: decomposition_of(operator) for operator in _custom_ops(program)}
        )


def for_inference(module: nn.Module) -> nn.Module:
    """Return an eval-mode copy that shares all tensors with `module`, for inference only.

    Reverse structures of static graphs, which are as large as the graphs, are dropped. Compiled
    modules are unwrapped.
    """
    return _shallow_copy(module, {})


def check_kernels() -> None:
    """Raise ValueError if kernels of the backend `triton` cannot be exported."""
    if interpreted():
        raise ValueError(
            "kernels cannot be exported under Triton's interpreter: unset TRITON_INTERPRET, or "
            "use backend torch"
        )


def _shallow_copy(module: nn.Module, copies: dict[nn.Module, nn.Module]) -> nn.Module:
    """Return one copy of each module, even if it has several names."""
    # attributes set on torch.compile's wrapper land on the module inside
    module = getattr(module, "_orig_mod", module)
    if module in copies:
        return copies[module]
    copied = copies[module] = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        setattr(copied, kind, dict(getattr(copied, kind)))
    if isinstance(copied, StaticStructure):
        copied.keep_for_inference()
    children = copied._modules.items()
    copied._modules = {
        name: None if child is None else _shallow_copy(child, copies) for name, child in children
    }
    copied.training = False
    return copied


def _custom_ops(program: ExportedProgram) -> set[torch._ops.OpOverload]:
    """Return this library's operators in a program."""
    graphs = (
        part for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)
    )
    targets = (node.target for part in graphs for node in part.graph.nodes)
    return {target for target in targets if getattr(target, "namespace", None) == NAMESPACE}


def decomposition_of(operator: torch._ops.OpOverload) -> Callable:
    """Return the decomposition of one of this library's operators; ValueError if it has none."""
    if operator._opname == "edge_attention_torch":
        from anemoi_gt.ops.torch_backend.aten_decomposition import decompose
    elif operator._opname == "edge_attention_triton":
        check_kernels()
        from anemoi_gt.ops.triton_backend.launch_decomposition import decompose
    else:
        raise ValueError(
            f"a program must not sort edges, but the module calls {operator}: build a "
            "GraphStructure once and pass its "
            "tensors, see anemoi_gt.export.TensorGraphLayer"
        )
    return decompose
