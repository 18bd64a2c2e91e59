"""Modules whose graph comes with the call as plain tensors: a program of them serves graphs of any size.

torch.export takes tensors, not a GraphStructure, and sizes can change where they are sizes of inputs.
"""

import re

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call

from anemoi_gt.export.program import for_inference
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import EncoderProcessorDecoder, StaticEdges
from anemoi_gt.nn.static_graph import HIDDEN


class LayerOnTensors(nn.Module):
    """A layer, block, processor or mapper that takes a graph as the tensors of its structure.

    Parameters
    ----------
    layer : nn.Module
        Called as `layer(x, graph, edge_attr)`.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x, structure: dict[str, Tensor], edge_attr: Tensor | None = None):
        """Call the layer.

        Parameters
        ----------
        x : Tensor, or pair of Tensor
            As the layer takes it.
        structure : dict of str to Tensor
            `GraphStructure.state_dict()`. For inference `colptr`, `row` and `sources` are enough, and `perm` where the
            edges do not come by destination.
        edge_attr : Tensor [E, D] or [B, E, D], optional
            In the caller's edge order.
        """
        return self.layer(x, GraphStructure.from_state(structure), edge_attr)


class GraphAsInput(nn.Module):
    """A model whose nodes, edges and attributes come with the call, those that are trained among them.

    Parameters
    ----------
    model : EncoderProcessorDecoder
        With mappers in one piece.

    Raises
    ------
    ValueError
        For another model, and when mappers take pieces: their bounds are numbers, which an export burns in.
    """

    def __init__(self, model: EncoderProcessorDecoder):
        super().__init__()
        model = _checked(for_inference(model))
        mappers = [*model.encoder_edges.values(), *model.decoder_edges.values()]
        if any(len(edges.chunks) > 1 for edges in mappers):
            pieces = max(len(edges.chunks) for edges in mappers)
            raise ValueError(f"a model whose graph comes with the call must have mapper_chunks=1, got {pieces}")
        self.model = model
        tensors = graph_tensors(model)
        self._names = frozenset(tensors)
        _forget(model, tensors)

    def forward(self, x: Tensor | dict[str, Tensor], graph: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Map fields to fields on a graph.

        Parameters
        ----------
        x : Tensor [B, N, in_channels], or dict of data set to that
            As the model takes it.
        graph : dict of str to Tensor
            `graph_tensors` of the model, or of one with the same layers on another graph.

        Raises
        ------
        ValueError
            When a tensor is missing or is of no place in the model, or for what the model refuses.
        """
        if graph.keys() != self._names:
            missing, others = sorted(self._names - graph.keys()), sorted(graph.keys() - self._names)
            raise ValueError(f"graph must be the graph_tensors of a model, got none of {missing}, and {others} beside")
        return functional_call(self.model, graph, (x,))

    def dynamic_shapes(self, samples: Dim | None = None) -> tuple:
        """Return what `torch.export.export` needs to leave all sizes open: samples, nodes of each set, edges of each kind.

        Parameters
        ----------
        samples : torch.export.Dim, optional
            None is any number.
        """
        nodes = {name: Dim(f"nodes_{number}_{_word(name)}") for number, name in enumerate(self.model.nodes)}
        shapes = {}
        for name in self.model.nodes:
            shapes |= _each(self.model, f"nodes.{name}", nodes[name])
        for number, (place, src, dst) in enumerate(
            self._kinds_of_edges()
        ):  # numbers, for names may read alike as words
            edges = Dim(f"edges_{number}_{_word(src)}_to_{_word(dst)}")
            shapes |= _each(self.model, place, edges)
            sizes = {"colptr": nodes[dst] + 1, "sources": nodes[src], "dst_schedule": nodes[dst]}
            for field in dict(self.model.get_submodule(f"{place}.structure").named_buffers()):
                shapes[f"{place}.structure.{field}"] = {0: sizes.get(field, edges)}
        samples = samples or Dim("samples")
        fields = {name: {0: samples, 1: nodes[name]} for name in self.model.in_channels}
        x = next(iter(fields.values())) if self.model.has_one_data_set else fields
        return x, shapes

    def _kinds_of_edges(self) -> list[tuple[str, str, str]]:
        """Place in the model, source, destination."""
        kinds = [(f"encoder_edges.{name}", name, HIDDEN) for name in self.model.encoder_edges]
        kinds += [(f"decoder_edges.{name}", HIDDEN, name) for name in self.model.decoder_edges]
        return [*kinds, ("processor_edges", HIDDEN, HIDDEN)]


def graph_tensors(model: EncoderProcessorDecoder) -> dict[str, Tensor]:
    """Return the tensors of a model that follow from its graph, trained ones among them, by their place in the model.

    Raises
    ------
    ValueError
        For another model.

    Examples
    --------
    >>> from torch_geometric.data import HeteroData
    >>> graph = HeteroData()
    >>> graph["data"].x, graph["hidden"].x = torch.zeros(6, 2), torch.zeros(2, 2)
    >>> for source, destination in (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data")):
    ...     edges = graph[source, "to", destination]
    ...     edges.edge_index = torch.zeros(2, 1, dtype=torch.int64)
    ...     edges.edge_length, edges.edge_dirs = torch.ones(1, 1), torch.ones(1, 2)
    >>> model = EncoderProcessorDecoder(graph, in_channels=4, out_channels=1, channels=16, heads=2)
    >>> {name: tuple(tensor.shape) for name, tensor in graph_tensors(model).items() if name.startswith("processor")}
    {'processor_edges.edge_attr': (1, 3), 'processor_edges.trainable': (1, 8), 'processor_edges.structure.colptr': (3,), \
'processor_edges.structure.row': (1,), 'processor_edges.structure.sources': (2, 0)}
    """
    model = _checked(for_inference(model))
    tensors = {f"nodes.{name}.{field}": tensor for name, nodes in model.nodes.items() for field, tensor in _own(nodes)}
    for place, edges in model.named_modules():
        if isinstance(edges, StaticEdges):
            tensors |= {f"{place}.{field}": tensor for field, tensor in _own(edges)}
            tensors |= {f"{place}.structure.{field}": tensor for field, tensor in edges.structure.named_buffers()}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _forget(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Leave empty tensors where a model holds these: an example in the model's own memory would bound the sizes by its own."""
    empty = {}  # one for all places of a tensor, by which `functional_call` knows that they are one
    for path in tensors:
        place, _, field = path.rpartition(".")
        tensor = getattr(model.get_submodule(place), field)
        nothing = torch.empty_like(tensor[:0], requires_grad=False)
        empty[tensor] = nn.Parameter(nothing, requires_grad=False) if isinstance(tensor, nn.Parameter) else nothing
    for part in model.modules():
        for kind in (part._parameters, part._buffers):
            kind |= {name: empty[tensor] for name, tensor in kind.items() if tensor is not None and tensor in empty}


def _checked(model: nn.Module) -> EncoderProcessorDecoder:
    if not isinstance(model, EncoderProcessorDecoder):
        raise ValueError(
            f"model must be an EncoderProcessorDecoder, whose graph is known by name, got {type(model).__name__}; "
            "LayerOnTensors takes other layers"
        )
    return model


def _own(part: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers of a module itself."""
    return [*part.named_buffers(recurse=False), *part.named_parameters(recurse=False)]


def _each(model: nn.Module, place: str, size: Dim) -> dict[str, dict[int, Dim]]:
    return {f"{place}.{field}": {0: size} for field, _ in _own(model.get_submodule(place))}


def _word(name: str) -> str:
    return re.sub(r"\W", "_", name)
