"""What one rank holds of a model, as values: cut from the whole in one process, without communication, and fit to travel.

    rows of nodes     positions and trained features of own nodes
    rows of edges     given and trained attributes of the edges into them, and where these edges run
    the rest          a model without rows, the same for all ranks: `strip_sharded_rows`

With strategy "heads" a rank attends on the whole graph, so there the structure of the whole is a part of each part.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.distributed.graph_shard import STRATEGIES
from anemoi_gt.distributed.heads import head_ranges
from anemoi_gt.distributed.partition import Partition, destination_cost
from anemoi_gt.graph import GraphStructure
from anemoi_gt.graph.ordering import morton_order
from anemoi_gt.nn import EncoderProcessorDecoder, GraphTransformerBaseBlock
from anemoi_gt.ops.backends import check_counts_heads, choose_backend

HIDDEN = "hidden"
NODE_ROWS, EDGE_ROWS = ("sin_cos_lat_lon", "trainable"), ("edge_attr", "trainable")


class NodePart(NamedTuple):
    """A rank's nodes of one set."""

    rows: dict[str, Tensor | None]  # [n_own, F], by the names of `NODE_ROWS`
    size: int  # nodes of the whole set


class EdgePart(NamedTuple):
    """A rank's edges of one graph."""

    numbers: Tensor  # [E_own] int64, rising, in the whole graph
    rows: dict[str, Tensor | None]  # [E_own, D], by the names of `EDGE_ROWS`
    size: int  # edges of the whole graph
    edge_index: Tensor | None  # [2, E_own] int64, in the numbering of the whole graph; None with strategy "heads"
    graph: GraphStructure | None  # the whole, with strategy "heads"


@dataclass(frozen=True)
class ModelPart:
    """What a rank holds of a model beside what all hold.

    Attributes
    ----------
    partitions : dict of str to Partition
        Who owns which nodes, by the name of their set.
    nodes : dict of str to NodePart
        By the name of the set.
    edges : dict of str to EdgePart
        By the path of their module, as `edges_of_model` names it.
    """

    partitions: dict[str, Partition]
    nodes: dict[str, NodePart]
    edges: dict[str, EdgePart]

    def to(self, device: torch.device) -> "ModelPart":
        """Return this part with all rows and structures on `device`; partitions stay on the CPU."""
        return ModelPart(self.partitions, _moved(self.nodes, device), _moved(self.edges, device))


class ShardPlan:
    """A whole model, ready to be cut: who owns which nodes, and which edges end in them.

    Parameters
    ----------
    model : EncoderProcessorDecoder
        Whole; stays as it is.
    parts : int
        Ranks that are to share it.
    strategy : {"edges", "heads"}
        As for `shard_graph`.
    device_type : str
        Where the ranks will compute.

    Raises
    ------
    ValueError
        For another strategy, when the mappers of the model work in pieces, or with strategy "heads" when a layer cannot be divided by
        heads, which the first step would find.
    """

    def __init__(self, model: EncoderProcessorDecoder, parts: int, strategy: str, device_type: str):
        if strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
        self.model, self.strategy, self.edges = model, strategy, edges_of_model(model)
        pieces = max((len(getattr(module, "chunks", ())) for module, _, _ in self.edges.values()), default=1)
        if pieces > 1:
            raise ValueError(
                f"mapper_chunks must be 1 where ranks share a model, got {pieces}: a rank's part is a piece already"
            )
        if strategy == "heads" and parts > 1:
            _check_heads(model, parts, device_type)
        self.partitions = _partitions(model, parts)
        self._runs = {path: self._by_owner(module, dst) for path, (module, _, dst) in self.edges.items()}

    def part(self, rank: int) -> ModelPart:
        """Return what `rank` holds."""
        nodes = {name: self._nodes(name, rank) for name in self.model.nodes}
        return ModelPart(self.partitions, nodes, {path: self._edges(path, rank) for path in self.edges})

    def _by_owner(self, module: nn.Module, destination: str) -> tuple[Tensor, ...]:
        """The numbers of the edges of each rank, rising."""
        owners, graph = self.partitions[destination], module.structure()
        owner = owners.ranges.owner(owners.places(graph.dst))
        numbers = graph.global_edge_ids()[torch.argsort(owner, stable=True)]
        return numbers.split(torch.bincount(owner, minlength=owners.ranges.parts).tolist())

    def _nodes(self, name: str, rank: int) -> NodePart:
        module = self.model.nodes[name]
        return NodePart(
            _rows(module, NODE_ROWS, self.partitions[name].nodes(rank, module.sin_cos_lat_lon.device)), len(module)
        )

    def _edges(self, path: str, rank: int) -> EdgePart:
        module, numbers = self.edges[path][0], self._runs[path][rank].clone()  # a view travels with all that it is of
        graph, rows = module.structure(), _rows(module, EDGE_ROWS, numbers)
        if self.strategy == "heads":
            return EdgePart(numbers, rows, graph.num_edges, None, graph)
        dst = torch.searchsorted(graph.colptr, numbers.to(graph.colptr.dtype), right=True) - 1
        return EdgePart(numbers, rows, graph.num_edges, torch.stack([graph.row[numbers].long(), dst]), None)


def edges_of_model(model: EncoderProcessorDecoder) -> dict[str, tuple[nn.Module, str, str]]:
    """Return the edges of a model by the path of their module: module, set of sources, set of destinations."""
    found = {f"encoder_edges.{name}": (part, name, HIDDEN) for name, part in model.encoder_edges.items()}
    found["processor_edges"] = (model.processor_edges, HIDDEN, HIDDEN)
    return found | {f"decoder_edges.{name}": (part, HIDDEN, name) for name, part in model.decoder_edges.items()}


def options_of(model: EncoderProcessorDecoder) -> list[tuple]:
    """Return what ranks must share of the layers of a model beside their weights: heads, dropout, config."""
    return [(block.num_heads, block.dropout, block.config) for block in _blocks(model)]


def strip_sharded_rows(model: EncoderProcessorDecoder) -> EncoderProcessorDecoder:
    """Return a copy of a model in which no node and no edge has a row; whatever else it has is copied."""
    places = [*model.nodes.values(), *(module for module, _, _ in edges_of_model(model).values())]
    tensors = (tensor for place in places for tensor in (*place.parameters(), *place.buffers()))
    return copy.deepcopy(model, {id(tensor): _emptied(tensor) for tensor in tensors})


def _blocks(model: EncoderProcessorDecoder) -> Iterator[GraphTransformerBaseBlock]:
    return (module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock))


def _check_heads(model: EncoderProcessorDecoder, parts: int, device_type: str) -> None:
    """Raise what `attend_by_heads` would raise on so many ranks."""
    for block in _blocks(model):
        head_ranges(block.num_heads, parts)
        if block.dropout > 0:
            query = torch.empty(0, block.num_heads, 1, dtype=block.lin_query.weight.dtype, device=device_type)
            check_counts_heads(choose_backend(block.config.backend, query), block.dropout)


def _emptied(tensor: Tensor) -> Tensor:
    empty = tensor.detach().new_empty(0, *tensor.shape[1:])
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _rows(module: nn.Module, names: tuple[str, ...], rows: Tensor) -> dict[str, Tensor | None]:
    whole = {name: getattr(module, name) for name in names}
    return {name: None if tensor is None else tensor.detach()[rows] for name, tensor in whole.items()}


def _partitions(model: EncoderProcessorDecoder, parts: int) -> dict[str, Partition]:
    """Cut every set of nodes by what its nodes cost; the processor's graph counts once for each layer."""
    costs = {name: torch.ones(len(nodes), dtype=torch.int64, device="cpu") for name, nodes in model.nodes.items()}
    for path, (part, _, destination) in edges_of_model(model).items():
        times = len(model.processor.proc) if path == "processor_edges" else 1
        costs[destination] = costs[destination] + times * destination_cost(part.structure().colptr.diff().cpu())
    return {
        name: Partition.balanced(costs[name], parts, morton_order(_unit_vectors(nodes.sin_cos_lat_lon.cpu())))
        for name, nodes in model.nodes.items()
    }


def _unit_vectors(sin_cos_lat_lon: Tensor) -> Tensor:
    """Points [N, 3] on the unit sphere from sines and cosines of latitude and longitude."""
    sin_lat, sin_lon, cos_lat, cos_lon = sin_cos_lat_lon.unbind(1)
    return torch.stack([cos_lat * cos_lon, cos_lat * sin_lon, sin_lat], dim=1)


def _moved(value: Any, device: torch.device) -> Any:
    """The same with all tensors and structures on a device."""
    if isinstance(value, Tensor | GraphStructure):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(part, device) for name, part in value.items()}
    if isinstance(value, tuple):
        return type(value)(*(_moved(part, device) for part in value))
    return value
