"""Model sharding: `shard_model` if all ranks hold the whole model, `scatter_model` if rank 0 does.

It works as in `module_shard`. The tables of a model are coordinates and trainable features of its
nodes, and fixed and trainable attributes of its edges. Nodes are ordered along a Morton curve.
"""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.consensus import consensus
from anemoi_gt.distributed.graph_shard import in_edges, shard_edges
from anemoi_gt.distributed.module_shard import Kind, ModulePartition, ModuleShard
from anemoi_gt.distributed.process_group import check_mesh
from anemoi_gt.nn import EncoderProcessorDecoder, StaticEdges
from anemoi_gt.nn.static_graph import HIDDEN


def shard_model(model: EncoderProcessorDecoder, mesh: DeviceMesh) -> ModuleShard:
    """Reduce a model that every rank holds to this rank's rows, in place. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder
        With the same weights and graphs on all ranks, on the device where it is trained.
    mesh : DeviceMesh
        With axes (data, model).

    Returns
    -------
    ModuleShard
        The rows of this rank and its shards of the graphs.

    Raises
    ------
    ValueError
        On all ranks, if weights, graphs or options differ between them, or the model cannot be
        sharded.
    """
    check_mesh(mesh)
    with consensus(mesh.get_group("model")):
        module_partition = partition_of(model, mesh["model"].size())
    return module_partition.apply(mesh)


def scatter_model(
    model: EncoderProcessorDecoder | None, mesh: DeviceMesh, group: dist.ProcessGroup
) -> tuple[EncoderProcessorDecoder, ModuleShard]:
    """Send every rank its shard of a model that only rank 0 of the mesh holds. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder or None
        On rank 0 the whole model, on the CPU, which is left unchanged; None on the other ranks.
    mesh : DeviceMesh
        With axes (data, model).
    group : ProcessGroup
        The ranks of the mesh, communicating from the CPU (gloo). Its timeout must be longer than
        the time to build the model.

    Returns
    -------
    model : EncoderProcessorDecoder
        The model with the rows of this rank, on the device of the mesh.
    shard : ModuleShard
        As `shard_model` returns it.

    Raises
    ------
    ValueError
        On all ranks, if the model cannot be sharded, or is not on rank 0 only.
    """
    check_mesh(mesh)
    ranks = mesh.mesh.tolist()
    data = mesh.get_local_rank("data")
    column = mesh.get_local_rank("model")
    is_first = data == 0 and column == 0
    module_partition = None
    with consensus(group):
        if (model is not None) != is_first:
            raise ValueError("model must be on the first rank of the mesh, and None on the others")
        if model is not None:
            module_partition = partition_of(model, mesh["model"].size())
    received: Any = None
    if model is not None and module_partition is not None:
        bare = strip_sharded_rows(model)
        # Rank 0 holds the rows of one rank at a time besides the whole model; its own come last.
        for other, rank in reversed([*enumerate(ranks[0])]):
            edges = {}
            for kind, structure in module_partition.structures.items():
                edges[kind] = in_edges(structure, module_partition.partitions[kind[1]].nodes(other))
            rows = module_partition.rows(other, {kind: ids for kind, (_, ids) in edges.items()})
            rows.cut(model, bare)
            received = bare, rows, edges
            if other > 0:
                _send(received, rank, group)
    else:
        sender = ranks[0][0] if data == 0 else ranks[0][column]
        received = _receive(sender, group)
    if data == 0:
        for row in ranks[1:]:  # to the ranks of the other replicas with the same rows
            _send(received, row[column], group)
    shard, rows, edges = received
    for parameter in shard.parameters():
        # copied: on the first rank, other parameters than rows are those of the whole model
        parameter.data = parameter.data.to(mesh.device_type, copy=True)
    shard = shard.to(mesh.device_type)
    graphs = {}
    for (src, dst), (edge_index, ids) in edges.items():
        ids = ids.to(mesh.device_type)
        graph = shard_edges(
            edge_index.to(mesh.device_type),
            mesh.get_group("model"),
            sources=rows.partitions[src],
            destinations=rows.partitions[dst],
            global_edge_id=ids,
        )
        graphs[src, dst] = replace(graph, edges=ids)
    return shard, rows.attach(shard, edges_of_model(shard), graphs, mesh)


def partition_of(model: EncoderProcessorDecoder, num_ranks: int) -> ModulePartition:
    """Return the partition of a whole model."""
    rows = (*model.nodes.named_buffers(), *model.nodes.named_parameters())
    # The name of a node set has no dot, so it ends at the first one.
    tables = {f"nodes.{path}": path.partition(".")[0] for path, _ in rows}
    positions = {
        name: _unit_vectors(nodes.sin_cos_lat_lon.cpu()) for name, nodes in model.nodes.items()
    }
    num_layers = {(HIDDEN, HIDDEN): model.num_layers}
    return ModulePartition(model, edges_of_model(model), num_ranks, tables, positions, num_layers)


def edges_of_model(model: EncoderProcessorDecoder) -> dict[Kind, StaticEdges]:
    """Return the edges of a model by the node sets of their sources and destinations."""
    encoders = {(name, HIDDEN): edges for name, edges in model.encoder_edges.items()}
    decoders = {(HIDDEN, name): edges for name, edges in model.decoder_edges.items()}
    return encoders | {(HIDDEN, HIDDEN): model.processor_edges} | decoders


def strip_sharded_rows(model: EncoderProcessorDecoder) -> EncoderProcessorDecoder:
    """Return a copy without rows of nodes and edges; other parameters share their memory."""
    copies: dict[int, Tensor] = {}
    for parameter in model.parameters():
        copies[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    for module in (*model.nodes.values(), *edges_of_model(model).values()):
        for tensor in (*module.parameters(), *module.buffers()):
            empty = tensor.detach().new_empty(0, *tensor.shape[1:])
            is_trained = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_trained else empty
    return copy.deepcopy(model, copies)  # as its memo: what is in it is taken in place of a copy


class _Pickler(pickle.Pickler):
    """A pickler that leaves out tensors, each of which has a number instead."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a tensor; parameters have one for their data."""
        if type(value) is not Tensor:
            return None
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)  # which also keeps its id
        return self._numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    """An unpickler of a `_Pickler` that takes tensors from a list."""

    def __init__(self, file: io.BytesIO, tensors: list[Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        """Return a tensor by its number."""
        return self._tensors[number]


def _send(value: Any, rank: int, group: dist.ProcessGroup) -> None:
    """Send an object to a rank; `send_object_list` would hold three copies of its tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    kinds = [(tensor.dtype, tensor.shape) for tensor in pickler.tensors]
    dist.send_object_list([file.getvalue(), kinds], dst=rank, group=group)
    for tensor in pickler.tensors:
        dist.send(tensor.contiguous(), rank, group)


def _receive(rank: int, group: dist.ProcessGroup) -> Any:
    """Return the object that a rank sends, with its tensors on the CPU."""
    received: list[Any] = [None, None]
    dist.recv_object_list(received, src=rank, group=group)
    content, kinds = received
    tensors = []
    for dtype, shape in kinds:
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        dist.recv(tensor, rank, group)
        tensors.append(tensor)
    return _Unpickler(io.BytesIO(content), tensors).load()


def _unit_vectors(sin_cos_lat_lon: Tensor) -> Tensor:
    """Return points [N, 3] on the unit sphere from sines and cosines of latitude and longitude."""
    sin_lat, sin_lon, cos_lat, cos_lon = sin_cos_lat_lon.unbind(1)
    return torch.stack([cos_lat * cos_lon, cos_lat * sin_lon, sin_lat], dim=1)
