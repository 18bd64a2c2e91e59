"""Model sharding: `shard_model` if all ranks hold the whole model, `scatter_model` if rank 0 does.

As in `module_shard`; the tables of a model are coordinates and trainable features of its nodes,
fixed and trainable attributes of its edges. Every set of nodes is ordered by a Morton curve through
its coordinates.
"""

import copy
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.distributed.consensus import consensus
from anemoi_gt.distributed.graph_shard import in_edges, shard_edges
from anemoi_gt.distributed.module_shard import Kind, ModuleShard, ShardPlan
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
        Rows of a sample that the model reads now, and the parameters that are this rank's own.

    Raises
    ------
    ValueError
        On all ranks, when weights, graphs or options are not the same on all of them, or the model
        cannot be sharded.
    """
    check_mesh(mesh)
    if not isinstance(model, EncoderProcessorDecoder):
        raise ValueError(f"model must be an EncoderProcessorDecoder, got {type(model).__name__}")
    with consensus(mesh.get_group("model")):
        plan = plan_of(model, mesh["model"].size())
    return plan.apply(mesh)


def scatter_model(
    model: EncoderProcessorDecoder | None, mesh: DeviceMesh, group: dist.ProcessGroup
) -> tuple[EncoderProcessorDecoder, ModuleShard]:
    """Send every rank its shard of a model that only rank 0 of the mesh holds. Collective.

    Parameters
    ----------
    model : EncoderProcessorDecoder or None
        On the first rank the whole model, on the CPU, which is left unchanged; None on the others.
    mesh : DeviceMesh
        With axes (data, model).
    group : ProcessGroup
        The ranks of the mesh, communicating from the CPU (gloo), with a timeout longer than
        building the model takes.

    Returns
    -------
    model : EncoderProcessorDecoder
        With this rank's rows, on the device of the mesh.
    shard : ModuleShard
        As `shard_model` returns it.

    Raises
    ------
    ValueError
        On all ranks, when the model cannot be sharded, or is not on the first rank only.
    """
    check_mesh(mesh)
    ranks = mesh.mesh.tolist()
    data, column = mesh.get_local_rank("data"), mesh.get_local_rank("model")
    is_first = (data, column) == (0, 0)
    plan = None
    with consensus(group):
        if (model is not None) != is_first:
            raise ValueError("model must be on the first rank of the mesh, and None on the others")
        if model is not None:
            plan = plan_of(model, mesh["model"].size())
    received: list[Any] = [None]
    if model is not None and plan is not None:
        bare = strip_sharded_rows(model)
        # rank 0 holds one shard in addition to the whole
        for other, rank in reversed([*enumerate(ranks[0])]):
            nodes = {name: partition.nodes(other) for name, partition in plan.partitions.items()}
            edges = {
                kind: in_edges(structure, nodes[kind[1]])
                for kind, structure in plan.structures.items()
            }
            rows = plan.rows(other, {kind: ids for kind, (_, ids) in edges.items()})
            rows.cut(model, bare)
            received = [(bare, rows, edges)]  # one object: what they share is sent once
            if other:
                dist.send_object_list(received, dst=rank, group=group)
    else:
        dist.recv_object_list(received, src=ranks[0][column] if data else ranks[0][0], group=group)
    if data == 0:
        for row in ranks[1:]:
            dist.send_object_list(received, dst=row[column], group=group)
    shard, rows, edges = received[0]
    shard, shards = shard.to(mesh.device_type), {}
    for (src, dst), parts in edges.items():
        edge_index, ids = (part.to(mesh.device_type) for part in parts)
        owners = {"sources": rows.partitions[src], "destinations": rows.partitions[dst]}
        graph = shard_edges(edge_index, mesh.get_group("model"), **owners, global_edge_id=ids)
        shards[src, dst] = replace(graph, edges=ids)
    return shard, rows.attach(shard, edges_of_model(shard), shards, mesh)


def plan_of(model: EncoderProcessorDecoder, num_ranks: int) -> ShardPlan:
    """Return the shard plan of a whole model."""
    rows = (*model.nodes.named_buffers(), *model.nodes.named_parameters())
    # names of sets have no dot
    tables = {f"nodes.{path}": path.partition(".")[0] for path, _ in rows}
    positions = {
        name: _unit_vectors(nodes.sin_cos_lat_lon.cpu()) for name, nodes in model.nodes.items()
    }
    num_layers = {(HIDDEN, HIDDEN): len(model.processor.proc)}
    return ShardPlan(model, edges_of_model(model), num_ranks, tables, positions, num_layers)


def edges_of_model(model: EncoderProcessorDecoder) -> dict[Kind, StaticEdges]:
    """Return the edges of a model by the names of the sets of sources and destinations."""
    encoders = {(name, HIDDEN): edges for name, edges in model.encoder_edges.items()}
    decoders = {(HIDDEN, name): edges for name, edges in model.decoder_edges.items()}
    return encoders | {(HIDDEN, HIDDEN): model.processor_edges} | decoders


def strip_sharded_rows(model: EncoderProcessorDecoder) -> EncoderProcessorDecoder:
    """Return a copy of a model without the rows of its nodes and edges."""
    copies = {}
    for module in (*model.nodes.values(), *edges_of_model(model).values()):
        for tensor in (*module.parameters(), *module.buffers()):
            empty = tensor.detach().new_empty(0, *tensor.shape[1:])
            is_trained = isinstance(tensor, nn.Parameter)
            copies[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_trained else empty
    return copy.deepcopy(model, copies)


def _unit_vectors(sin_cos_lat_lon: Tensor) -> Tensor:
    """Return points [N, 3] on the unit sphere from sines and cosines of latitude and longitude."""
    sin_lat, sin_lon, cos_lat, cos_lon = sin_cos_lat_lon.unbind(1)
    return torch.stack([cos_lat * cos_lon, cos_lat * sin_lon, sin_lat], dim=1)
