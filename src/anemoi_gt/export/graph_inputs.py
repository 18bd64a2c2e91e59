"""Modules that take their graph as tensor arguments, so one program runs graphs of any size.

torch.export takes tensors, not a GraphStructure, and only the sizes of inputs can be dynamic.
"""

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

    def forward(self, x, structure: dict[str, Tensor], edge_attr: Tensor | None = None):
        """Call the layer.

        Parameters
        ----------
        x : Tensor, or pair of Tensor
            Input of the layer.
        structure : dict of str to Tensor
            `GraphStructure.state_dict()` of a structure built with `reverse=False`: every tensor
            becomes an input. Inference needs only `colptr`, `row` and `sources`, and `perm` if the
            edges are not sorted by destination.
        edge_attr : Tensor [E, D] or [B, E, D], optional
            In the caller's edge order.
        """
        return self.layer(x, GraphStructure.from_state(structure), edge_attr)


class GraphInputModel(nn.Module):
    """An `EncoderProcessorDecoder` with nodes, edges and attributes as arguments of each call.

    Raises ValueError for another model, or unless `mapper_chunks=1`: chunk bounds are constants in
    an exported program.
    """

    def __init__(self, model: EncoderProcessorDecoder):
        super().__init__()
        model = _checked(for_inference(model))
        chunks = 0
        for edges in (*model.encoder_edges.values(), *model.decoder_edges.values()):
            chunks = max(chunks, len(edges.chunks))
        if chunks > 0:
            raise ValueError(
                f"a model with its graph as input must have mapper_chunks=1, got {chunks}"
            )
        self.model = model
        tensors = graph_tensors(model)
        self._names = frozenset(tensors)
        _replace_by_empty(model, tensors)

    def forward(
        self, x: Tensor | dict[str, Tensor], graph: dict[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Map fields to fields on a graph.

        Raises ValueError if a tensor is missing or unexpected, or the model rejects its input.

        Parameters
        ----------
        x : Tensor [B, N, in_channels], or dict of data set to that
            Input of the model.
        graph : dict of str to Tensor
            `graph_tensors` of the model, or of one with the same layers on another graph.
        """
        if graph.keys() != self._names:
            missing, unexpected = (
                sorted(self._names - graph.keys()),
                sorted(graph.keys() - self._names),
            )
            raise ValueError(
                f"graph must have the keys of graph_tensors(model), missing {missing}, got "
                f"{unexpected}"
            )
        return functional_call(self.model, graph, (x,))

    def dynamic_shapes(self, batch: Dim | None = None) -> tuple:
        """Return `dynamic_shapes` for `torch.export.export` with dynamic batch, nodes and edges.

        A `batch` of None allows any size. A program takes at least two nodes of each kind and two
        edges between them.
        """
        shapes = {name: {0: Dim.DYNAMIC} for name in self._names}
        fields = {
            name: {0: batch or Dim("batch"), 1: Dim.DYNAMIC} for name in self.model.in_channels
        }
        return next(iter(fields.values())) if self.model.has_one_data_set else fields, shapes


def graph_tensors(model: EncoderProcessorDecoder) -> dict[str, Tensor]:
    """Return the tensors of a model that depend on its graph, trainable ones included, by name.

    Raises ValueError for another model.

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
    model = _checked(for_inference(model))
    tensors = {
        f"nodes.{name}.{field}": tensor
        for name, nodes in model.nodes.items()
        for field, tensor in _own(nodes)
    }
    for path, edges in model.named_modules():
        if isinstance(edges, StaticEdges):
            tensors |= {f"{path}.{field}": tensor for field, tensor in _own(edges)}
            tensors |= {
                f"{path}.structure.{field}": tensor
                for field, tensor in edges.structure.named_buffers()
            }
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _replace_by_empty(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Replace these tensors of a model by empty ones, which do not constrain dynamic sizes."""
    empty = {}  # one per tensor, so that `functional_call` recognises tied tensors
    for path in tensors:
        owner, _, field = path.rpartition(".")
        tensor = getattr(model.get_submodule(owner), field)
        nothing = torch.empty_like(tensor[:0], requires_grad=False)
        empty[tensor] = (
            nn.Parameter(nothing, requires_grad=False)
            if isinstance(tensor, nn.Parameter)
            else nothing
        )
    for module in model.modules():
        for kind in (module._parameters, module._buffers):
            kind |= {
                name: empty[tensor]
                for name, tensor in kind.items()
                if tensor is not None and tensor in empty
            }


def _checked(model: nn.Module) -> EncoderProcessorDecoder:
    if not isinstance(model, EncoderProcessorDecoder):
        raise ValueError(
            f"model must be an EncoderProcessorDecoder, got {type(model).__name__}; for layers "
            "use TensorGraphLayer"
        )
    return model


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers and parameters of a module, without submodules."""
    return [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]
