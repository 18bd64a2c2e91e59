"""`shard_model`: cuts an EncoderProcessorDecoder to the rows of one rank, from outside. The only place of this room that knows a model.

    nodes       positions and trained features of this rank's nodes
    edges       given and trained attributes of this rank's edges; in place of the structure, a `ShardedGraph`
    the rest    as it was, the same on all ranks

Every set of nodes is laid on a Morton curve through its positions, and cut by what its nodes cost in all graphs that end in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.agreement import check_same, fingerprint
from anemoi_gt.distributed.attention import attend_after_exchange, attend_by_heads, attend_overlapped
from anemoi_gt.distributed.checkpoint import RowTable
from anemoi_gt.distributed.partition import Partition, destination_cost
from anemoi_gt.distributed.shard import GraphShard, HeadShard, shard_graph
from anemoi_gt.graph.order import morton_order
from anemoi_gt.nn import EncoderProcessorDecoder
from anemoi_gt.ops import edge_attention

HIDDEN = "hidden"


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """What a block gets in place of a GraphStructure: it hands over what it would compute attention from.

    Parameters
    ----------
    shard : GraphShard
        This rank's part.
    overlap : bool
        With strategy "edges", attend to interior edges while the halo travels.
    """

    shard: GraphShard
    overlap: bool = True

    def attend(
        self,
        query: Tensor,
        x_src: Tensor,
        key_value: Callable[[Tensor], tuple[Tensor, Tensor]],
        edge_attr: Tensor | None,
        edge_weight: Tensor | None,
        edge_bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Attend on all ranks, as `attend_overlapped` is called; with dropout after the exchange, whatever `overlap` says."""
        edges = edge_attr, edge_weight, edge_bias
        if self.shard.sources.ranges.parts == 1:
            return edge_attention(query, *key_value(x_src), self.shard.graph, *edges, **options)[0]
        if isinstance(self.shard, HeadShard):
            attend = attend_by_heads
        else:
            attend = attend_overlapped if self.overlap and not options.get("dropout_p") else attend_after_exchange
        return attend(self.shard, query, x_src, key_value, *edges, **options)

    def __deepcopy__(self, memo: dict) -> "ShardedGraph":
        return self  # nothing in it changes, and copies of a model may share it


@dataclass(frozen=True)
class ModelShard:
    """How a model is divided.

    Attributes
    ----------
    partitions : dict of str to Partition
        Who owns which nodes, by the name of their set.
    rank : int
        This rank among those that share the model: it reads rows `partitions[name].nodes(rank)` of a sample.
    tables : dict of str to RowTable
        By the name of a parameter: which rows of the whole one this rank trains. All other parameters are shared.
    """

    partitions: dict[str, Partition]
    rank: int
    tables: dict[str, RowTable]

    def parameters(self, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that the ranks of a model share, and those whose rows are this rank's own."""
        named = list(model.named_parameters())
        own = [parameter for name, parameter in named if name in self.tables]
        return [parameter for name, parameter in named if name not in self.tables], own


def shard_model(
    model: EncoderProcessorDecoder, mesh: DeviceMesh, strategy: str = "edges", *, overlap: bool = True
) -> ModelShard:
    """Cut a model to this rank's rows, in place. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder
        Whole, with the same weights on all ranks, on the device where it is trained.
    mesh : DeviceMesh
        With axes (data, model).
    strategy : {"edges", "heads"}
        As for `shard_graph`.
    overlap : bool
        As for `ShardedGraph`.

    Returns
    -------
    ModelShard
        What of a sample the model takes now, and which parameters are this rank's own.

    Raises
    ------
    ValueError
        On all ranks, when the weights or graphs are not the same on all of them, or the mappers work in pieces.
    """
    group, rank = mesh.get_group("model"), mesh.get_local_rank("model")
    check_same({"weights": fingerprint(*model.state_dict().values())}, group)
    edges = _edges(model)
    if any(len(getattr(part, "pieces", ())) > 1 for part, _, _ in edges.values()):
        raise ValueError("mapper_chunks must be 1 in a model that is sharded: a rank's part is a piece already")
    partitions = _partitions(model, mesh["model"].size())
    tables = {}
    for name, nodes in model.nodes.items():
        own = partitions[name].nodes(rank, nodes.waves.device)
        if nodes.trainable is not None:
            tables[f"nodes.{name}.trainable"] = RowTable(own, len(nodes), mesh)
        _keep_rows(nodes, ("waves", "trainable"), own)
    for path, (part, source, destination) in edges.items():
        sides = {"sources": partitions[source], "destinations": partitions[destination]}
        shard = shard_graph(part.structure(), group, strategy, **sides)
        if part.trainable is not None:
            tables[f"{path}.trainable"] = RowTable(shard.edges, part.edge_attr.shape[0], mesh)
        _keep_rows(part, ("edge_attr", "trainable"), shard.edges)
        _replace_structure(part, ShardedGraph(shard, overlap))
    return ModelShard(partitions, rank, tables)


def _edges(model: EncoderProcessorDecoder) -> dict[str, tuple[nn.Module, str, str]]:
    """The edges of a model by the path of their module: module, set of sources, set of destinations."""
    found = {f"encoder_edges.{name}": (part, name, HIDDEN) for name, part in model.encoder_edges.items()}
    found["processor_edges"] = (model.processor_edges, HIDDEN, HIDDEN)
    return found | {f"decoder_edges.{name}": (part, HIDDEN, name) for name, part in model.decoder_edges.items()}


def _partitions(model: EncoderProcessorDecoder, parts: int) -> dict[str, Partition]:
    """Cut every set of nodes by what its nodes cost; the processor's graph counts once for each layer."""
    costs = {name: torch.ones(len(nodes), dtype=torch.int64, device="cpu") for name, nodes in model.nodes.items()}
    for path, (part, _, destination) in _edges(model).items():
        times = len(model.processor.proc) if path == "processor_edges" else 1
        costs[destination] = costs[destination] + times * destination_cost(part.structure().colptr.diff().cpu())
    return {
        name: Partition.balanced(costs[name], parts, morton_order(_unit_vectors(nodes.waves.cpu())))
        for name, nodes in model.nodes.items()
    }


def _unit_vectors(waves: Tensor) -> Tensor:
    """Points [N, 3] on the unit sphere from sines and cosines of latitude and longitude."""
    sin_lat, sin_lon, cos_lat, cos_lon = waves.unbind(1)
    return torch.stack([cos_lat * cos_lon, cos_lat * sin_lon, sin_lat], dim=1)


def _keep_rows(module: nn.Module, names: tuple[str, ...], rows: Tensor) -> None:
    """Keep these rows of a module's buffers and parameters."""
    for name in names:
        whole = getattr(module, name)
        if isinstance(whole, nn.Parameter):
            setattr(module, name, nn.Parameter(whole.detach()[rows].clone()))
        elif whole is not None:
            setattr(module, name, whole[rows])


def _replace_structure(part: nn.Module, graph: ShardedGraph) -> None:
    """Make a module of edges return `graph`."""
    part.structure = _Constant(graph)
    for piece in getattr(part, "pieces", ()):
        piece.structure = part.structure


class _Constant(nn.Module):
    """Returns one thing, which needs no moving."""

    def __init__(self, value: Any):
        super().__init__()
        self.value = value

    def forward(self) -> Any:
        """Return it."""
        return self.value
