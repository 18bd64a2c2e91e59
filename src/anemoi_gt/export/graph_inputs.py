"""Modules that take their graph as tensor arguments, so one program supports graphs of any size.

Inputs of torch.export are tensors, not a GraphStructure, and only sizes of inputs can be dynamic.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from anemoi_gt.export.program import for_inference
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import EncoderProcessorDecoder, StaticEdges


class TensorGraphLayer(nn.Module):
    """A layer, block, processor or mapper that takes a graph as the tensors of its structure.

    The layer is called as `layer(x, graph, edge_attr)`.
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


class GraphInputModel(nn.Module):
    """An `EncoderProcessorDecoder` with nodes, edges and attributes as arguments of each call.

    Raises ValueError for any other model, and unless `mapper_chunks=1`, because the bounds of
    chunks would be constants of the exported program.
    """

    def __init__(self, model: EncoderProcessorDecoder):
        super().__init__()
        model = _check_model(for_inference(model))
        num_chunks = 0
        for edges in (*model.encoder_edges.values(), *model.decoder_edges.values()):
            num_chunks = max(num_chunks, len(edges.chunks))
        if num_chunks > 0:
            raise ValueError(
                f"a model with its graph as input must have mapper_chunks=1, got {num_chunks}"
            )
        self.model = model
        tensors = graph_tensors(model)
        self._names = frozenset(tensors)
        _replace_by_empty(model, tensors)

    def forward(
        self, x: Tensor | dict[str, Tensor], graph: dict[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Run the model on a graph.

        Raises ValueError if a tensor is missing or unexpected, or the model rejects its input.

        Parameters
        ----------
        x : Tensor [B, N, in_channels], or dict of data set to Tensor
            Input of the model.
        graph : dict of str to Tensor
            `graph_tensors` of the model, or of a model with the same layers on another graph.
        """
        if graph.keys() != self._names:
            missing = sorted(self._names - graph.keys())
            unexpected = sorted(graph.keys() - self._names)
            raise ValueError(
                f"graph must have the keys of graph_tensors(model), missing {missing}, got "
                f"{unexpected}"
            )
        return functional_call(self.model, graph, (x,))

    def dynamic_shapes(self, batch: Dim | None = None) -> tuple:
        """Return `dynamic_shapes` for `torch.export.export` with dynamic batch, nodes and edges.

        If `batch` is None, any batch size is allowed. The program needs at least two nodes in each
        node set and two edges between connected sets.
        """
        if batch is None:
            batch = Dim("batch")
        graph_shapes = {name: {0: Dim.DYNAMIC} for name in self._names}
        field_shapes = {name: {0: batch, 1: Dim.DYNAMIC} for name in self.model.in_channels}
        if self.model.has_one_data_set:
            (field_shape,) = field_shapes.values()
            return field_shape, graph_shapes
        return field_shapes, graph_shapes


def graph_tensors(model: EncoderProcessorDecoder) -> dict[str, Tensor]:
    """Return the tensors of a model that depend on its graph, by name, including trainable ones.

    Raises ValueError unless the model is an `EncoderProcessorDecoder`.

    Examples
    --------
    >>> from anemoi_gt.data import graphs, grids
    >>> graph = graphs.icosphere_graph(grids.octahedral(4), refinement=1)
    >>> model = EncoderProcessorDecoder(graph, in_channels=4, out_channels=1, channels=16, heads=2)
    >>> tensors = graph_tensors(model).items()
    >>> {name: tuple(tensor.shape) for name, tensor in tensors if name.startswith("processor")}
    {'processor_edges.edge_attr': (240, 3), 'processor_edges.trainable': (240, 8), \
'processor_edges.structure.colptr': (43,), 'processor_edges.structure.row': (240,), \
'processor_edges.structure.sources': (42, 0)}
    """
    model = _check_model(for_inference(model))
    tensors = {}
    for name, nodes in model.nodes.items():
        for field, tensor in _direct_tensors(nodes):
            tensors[f"nodes.{name}.{field}"] = tensor
    for path, edges in model.named_modules():
        if isinstance(edges, StaticEdges):
            for field, tensor in _direct_tensors(edges):
                tensors[f"{path}.{field}"] = tensor
            for field, tensor in edges.structure.named_buffers():
                tensors[f"{path}.structure.{field}"] = tensor
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _replace_by_empty(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace these tensors of a model by empty ones, which do not constrain dynamic sizes."""
    replacements = {}  # one per tensor, so that `functional_call` recognises tied tensors
    for path in tensors:
        owner, _, field = path.rpartition(".")
        tensor = getattr(model.get_submodule(owner), field)
        empty = torch.empty_like(tensor[:0], requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, requires_grad=False)
        replacements[tensor] = empty
    for module in model.modules():
        fields: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for by_name in fields:
            for name, tensor in by_name.items():
                if tensor is not None and tensor in replacements:
                    by_name[name] = replacements[tensor]


def _check_model(model: nn.Module) -> EncoderProcessorDecoder:
    """Return the model; raise ValueError unless it is an `EncoderProcessorDecoder`."""
    if not isinstance(model, EncoderProcessorDecoder):
        raise ValueError(
            f"model must be an EncoderProcessorDecoder, got {type(model).__name__}; for layers use "
            "TensorGraphLayer"
        )
    return model


def _direct_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers and parameters of a module, without its submodules."""
    return [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]
