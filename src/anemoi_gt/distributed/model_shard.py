"""A model on several ranks: `shard_model` where all ranks hold it whole, `scatter_model` where one does. The only place of this room
that changes a model.

    nodes       positions and trained features of this rank's nodes
    edges       given and trained attributes of this rank's edges; in place of the structure, a `ShardedGraph`
    the rest    as it was, the same on all ranks

Every set of nodes is laid on a Morton curve through its positions, and cut by what its nodes cost in all graphs that end in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.consensus import agreed, check_same, fingerprint
from anemoi_gt.distributed.grad_sync import AXES, check_mesh
from anemoi_gt.distributed.graph_shard import GraphShard, HeadShard, shard_edges, shard_graph
from anemoi_gt.distributed.halo import PendingExchange
from anemoi_gt.distributed.halo_attention import (
    attend_after_exchange,
    attend_by_heads,
    attend_overlapped,
    start_exchange,
)
from anemoi_gt.distributed.partition import Partition
from anemoi_gt.distributed.shard_plan import (
    EdgePart,
    ModelPart,
    ShardPlan,
    edges_of_model,
    options_of,
    strip_sharded_rows,
)
from anemoi_gt.distributed.sharded_checkpoint import ShardedTable
from anemoi_gt.nn import EncoderProcessorDecoder
from anemoi_gt.ops import edge_attention


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """What a block gets in place of a GraphStructure: it hands over what it would compute attention from.

    Parameters
    ----------
    shard : GraphShard
        This rank's part.
    overlap : bool
        With strategy "edges", attend to interior edges while the halo travels; else once it is there.
    """

    shard: GraphShard
    overlap: bool = False

    def start(self, x_src: Tensor) -> Tensor | PendingExchange:
        """With strategy "edges", send rows of this rank's sources and go on; else return them. `attend` takes what comes back."""
        if self.shard.sources.ranges.parts == 1 or isinstance(self.shard, HeadShard):
            return x_src
        return start_exchange(self.shard, x_src)

    def attend(
        self,
        query: Tensor,
        x_src: Tensor | PendingExchange,
        key_value: Callable[[Tensor], tuple[Tensor, Tensor]],
        edge_attr: Tensor | None,
        edge_weight: Tensor | None,
        edge_bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Attend on all ranks, as `attend_overlapped` is called."""
        edges = edge_attr, edge_weight, edge_bias
        if self.shard.sources.ranges.parts == 1:
            return edge_attention(query, *key_value(x_src), self.shard.graph, *edges, **options)[0]
        if isinstance(self.shard, HeadShard):
            attend = attend_by_heads
        else:
            attend = attend_overlapped if self.overlap else attend_after_exchange
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
    tables : dict of str to ShardedTable
        By the name of a parameter: which rows of the whole one this rank trains. All other parameters are shared.
    """

    partitions: dict[str, Partition]
    rank: int
    tables: dict[str, ShardedTable]

    def parameters(self, model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters that the ranks of a model share, and those whose rows are this rank's own."""
        named = list(model.named_parameters())
        own = [parameter for name, parameter in named if name in self.tables]
        return [parameter for name, parameter in named if name not in self.tables], own


def shard_model(model: EncoderProcessorDecoder, mesh: DeviceMesh) -> ModelShard:
    """Cut a model that every rank holds to this rank's rows, in place. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder
        Whole, with the same weights and graphs on all ranks, on the device where it is trained.
    mesh : DeviceMesh
        With axes (data, model).

    Returns
    -------
    ModelShard
        What of a sample the model takes now, and which parameters are this rank's own.

    Raises
    ------
    ValueError
        On all ranks, when weights, graphs or options are not the same on all of them, or the model cannot be divided so.
    """
    strategy, overlap = "edges", False
    check_mesh(mesh)
    if not isinstance(model, EncoderProcessorDecoder):
        raise ValueError(f"model must be an EncoderProcessorDecoder, got {type(model).__name__}")
    same = {"weights": fingerprint(*model.state_dict().values()), "graphs": fingerprint(*model.buffers())}
    same |= {"strategy": strategy, "overlap": overlap, "heads, dropout and config of the layers": options_of(model)}
    for axis in AXES:
        check_same(same, mesh.get_group(axis))
    cut = ShardPlan(model, mesh["model"].size(), strategy, mesh.device_type)
    return _hold(model, cut.part(mesh.get_local_rank("model")), mesh, overlap)


def scatter_model(
    model: EncoderProcessorDecoder | None, mesh: DeviceMesh, group: dist.ProcessGroup
) -> tuple[EncoderProcessorDecoder, ModelShard]:
    """Give every rank its part of a model that the first rank of the mesh holds; no other ever holds all edges. Collective.

    With strategy "heads", which attends on the whole graph, every rank gets its structure; attributes are divided all the same.

    Parameters
    ----------
    model : EncoderProcessorDecoder or None
        On the first rank the whole model, on the CPU, which stays as it is; None on the others.
    mesh : DeviceMesh
        With axes (data, model).
    group : ProcessGroup
        The ranks of the mesh, communicating from the CPU (gloo), with a timeout beyond what it takes to make the model.

    Returns
    -------
    model : EncoderProcessorDecoder
        With this rank's rows, on the device of the mesh.
    cut : ModelShard
        As `shard_model` returns it.

    Raises
    ------
    ValueError
        On all ranks, when the model cannot be divided, or is not on the first rank alone.
    """
    strategy, overlap = "edges", False
    check_mesh(mesh)
    ranks, (data, place) = mesh.mesh.tolist(), mesh.get_coordinate()
    cut = _cut_together(model, (data, place) == (0, 0), mesh, strategy, group)
    if cut is not None:
        bare = strip_sharded_rows(model)
        for other, rank in enumerate(ranks[0][1:], 1):  # one at a time: the first rank holds one part beside the whole
            dist.send_object_list([bare, cut.part(other)], dst=rank, group=group)
        received = [bare, cut.part(0)]
    else:
        received = [None, None]
        dist.recv_object_list(received, src=ranks[0][place] if data else ranks[0][0], group=group)
    if data == 0:
        for row in ranks[1:]:
            dist.send_object_list(received, dst=row[place], group=group)
    own, part = received
    own = own.to(mesh.device_type)
    return own, _hold(own, part.to(torch.device(mesh.device_type)), mesh, overlap)


def _cut_together(
    model: EncoderProcessorDecoder | None, is_first: bool, mesh: DeviceMesh, strategy: str, group: dist.ProcessGroup
) -> ShardPlan | None:
    """Return the cut model on the first rank, None on the others; or raise on all."""
    with agreed(group):
        if (model is not None) != is_first:
            raise ValueError("model must be given on the first rank of the mesh, and be None on the others")
        return ShardPlan(model, mesh["model"].size(), strategy, mesh.device_type) if is_first else None


def _hold(model: EncoderProcessorDecoder, part: ModelPart, mesh: DeviceMesh, overlap: bool) -> ModelShard:
    """Give a model the rows of a part, and its graphs to `ShardedGraph`s. Collective."""
    group, rank = mesh.get_group("model"), mesh.get_local_rank("model")
    tables = {}
    for name, module in model.nodes.items():
        nodes = part.nodes[name]
        if module.trainable is not None:
            own = part.partitions[name].nodes(rank, module.sin_cos_lat_lon.device)
            tables[f"nodes.{name}.trainable"] = ShardedTable(own, nodes.size, mesh)
        _set_rows(module, nodes.rows)
    for path, (module, source, destination) in edges_of_model(model).items():
        edges = part.edges[path]
        sides = {"sources": part.partitions[source], "destinations": part.partitions[destination]}
        shard, order = _divide(edges, group, sides)
        if module.trainable is not None:
            tables[f"{path}.trainable"] = ShardedTable(edges.numbers[order], edges.size, mesh)
        _set_rows(module, {name: None if rows is None else rows[order] for name, rows in edges.rows.items()})
        _replace_structure(module, ShardedGraph(shard, overlap))
    return ModelShard(part.partitions, rank, tables)


def _divide(edges: EdgePart, group: dist.ProcessGroup, sides: dict[str, Partition]) -> tuple[GraphShard, Tensor]:
    """Return the shard of this rank, and its own edges in the order in which the shard reads their attributes."""
    if edges.graph is not None:
        shard = shard_graph(edges.graph, group, "heads", **sides)
        return shard, torch.searchsorted(edges.numbers, shard.edges)
    shard = shard_edges(edges.edge_index, group, numbers=edges.numbers, **sides)
    return shard, shard.edges


def _set_rows(module: nn.Module, rows: dict[str, Tensor | None]) -> None:
    """Give a module other rows in its buffers and parameters."""
    for name, tensor in rows.items():
        former = getattr(module, name)
        is_trained = isinstance(former, nn.Parameter)
        setattr(module, name, nn.Parameter(tensor, former.requires_grad) if is_trained else tensor)


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
