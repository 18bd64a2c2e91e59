"""Programs of PyTorch's own operators: a module after torch.export, with nothing in it that needs our Python code.

torch.export leaves each of our operators as one node that knows only the operator's name. Here each is replaced by the same
work in terms that every process has: operators of PyTorch on the backend `torch`, the kernels themselves on `triton`.
"""

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.export import ExportedProgram

from anemoi_gt.custom_ops import NAMESPACE
from anemoi_gt.nn.static_graph import StaticStructure
from anemoi_gt.ops.triton_backend.device import interpreted


def export_program(module: nn.Module, inputs: tuple, dynamic_shapes=None) -> ExportedProgram:
    """Export a module for inference, with none of our operators in it.

    Parameters
    ----------
    module : nn.Module
        Any module whose layers attend; it is left as it is, and exported as after `eval()`. Attention runs on the backend
        that its config chooses for tensors of `inputs`.
    inputs : tuple
        An example of its arguments. Sizes that are to change must not be 0 or 1 in it. On the backend `triton`, the numbers
        of edges a node in the example choose the tiles, which change speed, not results.
    dynamic_shapes : optional
        Which sizes may change, as `torch.export.export` takes it; None fixes all.

    Returns
    -------
    torch.export.ExportedProgram
        Without gradients. `write_package` takes it.

    Raises
    ------
    ValueError
        When an operator of ours has no other form: one that sorts edges, in a module that is handed an edge_index; or
        kernels under Triton's interpreter.

    Examples
    --------
    >>> from torch.export import Dim
    >>> from anemoi_gt.export import LayerOnTensors
    >>> from anemoi_gt.nn import GraphTransformerConv
    >>> graph = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
    >>> layer = LayerOnTensors(GraphTransformerConv(4, 8, heads=2, edge_dim=3))
    >>> program = export_program(layer, (torch.randn(5, 2, 4), graph.state_dict(), torch.randn(3, 3)),
    ...                          ({0: Dim("samples", max=64)}, dict.fromkeys(graph.state_dict()), None))
    >>> program.module()(torch.randn(7, 2, 4), graph.state_dict(), torch.randn(3, 3)).shape
    torch.Size([7, 2, 16])
    """
    with torch.no_grad():
        program = torch.export.export(for_inference(module), inputs, dynamic_shapes=dynamic_shapes, strict=False)
        table = {operator: _replacement(operator) for operator in _ours(program)}
        return program.run_decompositions(table)


def for_inference(module: nn.Module) -> nn.Module:
    """Return a module that shares all tensors with `module` and computes the same in `eval()`, without what gradients need.

    Source sides of static graphs are left out: they are as large as the graphs. Of what `torch.compile` returned it is the
    module inside.
    """
    return _twin(module, {})


def check_kernels() -> None:
    """Raise ValueError where kernels of the backend `triton` cannot be put into a program."""
    if interpreted():
        raise ValueError(
            "kernels of Triton's interpreter cannot be exported; unset TRITON_INTERPRET, or use the attention backend torch"
        )


def _twin(module: nn.Module, made: dict[nn.Module, nn.Module]) -> nn.Module:
    """One for a module, be it met under several names."""
    module = getattr(module, "_orig_mod", module)  # what is set on the shell of torch.compile lands on the one inside
    if module in made:
        return made[module]
    twin = made[module] = copy.copy(module)
    for kind in ("_parameters", "_buffers"):
        setattr(twin, kind, dict(getattr(twin, kind)))
    if isinstance(module, StaticStructure):
        twin.keep_for_inference()
    parts = twin._modules.items()
    twin._modules = {name: None if part is None else _twin(part, made) for name, part in parts}
    twin.training = False
    return twin


def _ours(program: ExportedProgram) -> set[torch._ops.OpOverload]:
    """Our operators in a program."""
    targets = (node.target for part in program.graph_module.modules() for node in _nodes(part))
    return {target for target in targets if getattr(target, "namespace", None) == NAMESPACE}


def _nodes(part: nn.Module):
    return part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ()


def _replacement(operator: torch._ops.OpOverload) -> Callable:
    """What stands for an operator of ours in a program."""
    if operator._opname == "edge_attention_torch":
        from anemoi_gt.ops.torch_backend.export_decomposition import decompose
    elif operator._opname == "edge_attention_triton":
        check_kernels()
        from anemoi_gt.ops.triton_backend.export_decomposition import decompose
    else:
        raise ValueError(
            f"a program must not sort edges, the module calls {operator}; build a GraphStructure once and hand over its "
            "tensors, see anemoi_gt.export.LayerOnTensors"
        )
    return decompose
