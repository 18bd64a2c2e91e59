"""Estimate of the memory of a training step, and advice for a GPU that is too small.

    state          20 bytes per parameter: weight, gradient, two moments of AdamW, average; divided
                   among ranks, and of two layers, weights and gradients while they are gathered
    graph          buffers of the model; for a sharded model, also this rank's structures
    fields         input and target in float32; output, error and gradient of the loss
    kept           inputs of checkpointed groups of processor layers, or all saved activations
    working set    activations of the largest mapper chunk or group of layers, and their gradients

A fused sub-layer says what it keeps besides its input. Modules save for a destination the inputs
and outputs of two norms, the query, the result of the attention, the input of its projection, and
input and output of the activation in the feed-forward network; for a source, its input, normalised
features, key and value. Norms save float32. Edges of modules, and rows that other ranks read, add
little. Compiled blocks need less.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.step import autocast
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import EncoderProcessorDecoder, GraphTransformerBackwardMapper, StaticEdges
from anemoi_gt.nn.fused_block import FusedParts
from anemoi_gt.refusal import Refusal

STATE = 20
GATHERED = 16  # per parameter: the weights of two layers, gradients, and a copy to be sent
FLOAT32 = 4


class MemoryEstimate(NamedTuple):
    """Bytes of a training step by purpose; `print` shows GB, MB or kB."""

    state: int
    graph: int
    fields: int
    kept: int
    working_set: int

    @property
    def total(self) -> int:
        """Sum of all parts, an upper bound because they peak at different times."""
        return sum(self)

    def __str__(self) -> str:
        parts = []
        for name, size in self._asdict().items():
            parts.append(f"{name.replace('_', ' ')} {format_bytes(size)}")
        return f"about {format_bytes(self.total)}: {', '.join(parts)}"


def format_bytes(size: int) -> str:
    """Return a number of bytes with three digits.

    Examples
    --------
    >>> [format_bytes(size) for size in (0, 1234, 999_600, 12_345_678, 73_500_000_000)]
    ['0 kB', '1.23 kB', '1 MB', '12.3 MB', '73.5 GB']
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * scale:  # rounds to 1
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def estimate_memory(
    model: nn.Module, config: TrainingConfig, ranks: int = 1
) -> MemoryEstimate | None:
    """Estimate the memory of a training step with eager blocks on this rank.

    `config.batch_size` is the batch size of one model, whose parameters are to be divided among
    `ranks` (`shard_parameters`). Return None unless the model is an `EncoderProcessorDecoder`.
    """
    if not isinstance(model, EncoderProcessorDecoder):
        return None
    element_size = FLOAT32 if config.precision == "32-true" else 2
    with autocast(config.precision, next(model.parameters()).device):
        return _estimate(model, config.batch_size, element_size, ranks)


def _estimate(model: EncoderProcessorDecoder, batch: int, size: int, ranks: int) -> MemoryEstimate:
    """Estimate the memory for `size` bytes per element of an activation."""
    layers = model.processor.proc
    num_hidden = model.nodes["hidden"].num_nodes
    num_groups = model.processor.checkpoint_groups
    layer = BlockSizes.of(layers[0])
    layers_in_group = -(-len(layers) // (num_groups or 1))
    graph = _structures(model.processor_edges)[0]
    group = layers_in_group * layer.kept(graph, size) + num_hidden * layer.gradients(size)
    mappers = [
        *_mappers(model.encoder, model.encoder_edges, size),
        *_mappers(model.decoder, model.decoder_edges, size),
    ]
    if num_groups is None:
        kept = group + sum(all_chunks for all_chunks, _ in mappers)
        working_set = 0
    else:
        kept = num_groups * num_hidden * layer.channels * size
        working_set = max(group, *(largest_chunk for _, largest_chunk in mappers))
    fields = 0
    for name, nodes in model.nodes.items():
        inputs = model.in_channels.get(name, 0)
        outputs = model.out_channels.get(name, 0)
        fields += nodes.num_nodes * (FLOAT32 * inputs + (3 * FLOAT32 + 2) * outputs)
    rows = sum(_num_parameters(part) for part in (model.nodes, *_all_edges(model)))
    state = STATE * (rows + (_num_parameters(model) - rows) // ranks)
    if ranks > 1:
        state += GATHERED * _num_parameters(layers[0])
    return MemoryEstimate(
        state=state,
        graph=sum(buffer.nbytes for buffer in model.buffers()) + _shard_bytes(model),
        fields=batch * fields,
        kept=batch * kept,
        working_set=batch * working_set,
    )


def _all_edges(model: EncoderProcessorDecoder) -> tuple[StaticEdges, ...]:
    return (
        *model.encoder_edges.values(),
        model.processor_edges,
        *model.decoder_edges.values(),
    )


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def advice(model: Mapping, training: Mapping) -> str:
    """Suggest changes to the configs `model` and `training` for a run that ran out of memory."""
    layers = model.get("num_layers")
    chunks = model.get("mapper_chunks", 1)
    if layers is not None and model.get("checkpoint_groups") is None:
        return f"set model.checkpoint_groups={layers} and model.mapper_chunks={2 * chunks}"
    if layers is not None and model["checkpoint_groups"] < layers:
        return f"set model.checkpoint_groups={layers}"
    if training.get("precision") == "32-true":
        return "set training.precision=bf16-mixed"
    if chunks < 64:
        return f"set model.mapper_chunks={4 * chunks}"
    return "lower training.batch_size or model.channels, or share the model among GPUs by torchrun"


def _structures(edges: StaticEdges) -> list[GraphStructure]:
    """Return the structures of the chunks of edges, or the whole structure without chunks.

    For a graph shard, they are the structures of this rank.
    """
    graph = edges.structure()
    if isinstance(graph, GraphStructure):
        return [chunk.structure() for chunk in edges.chunks] or [graph]
    return [chunk.graph for chunk in graph.chunks] or [graph.structure]


def _shard_bytes(model: EncoderProcessorDecoder) -> int:
    """Return the bytes of graph shards and their chunks, which are not buffers of the model."""
    total = 0
    for edges in _all_edges(model):
        shard = edges.structure()
        if isinstance(shard, GraphStructure):  # not sharded: in the buffers
            continue
        for graph in (shard.structure, *(chunk.graph for chunk in shard.chunks)):
            total += sum(tensor.nbytes for tensor in graph.state_dict().values())
    return total


def _mappers(mappers: Any, edges: Any, size: int) -> list[tuple[int, int]]:
    """Return the saved bytes of each mapper, and the bytes of its largest chunk with gradients.

    `mappers` and `edges` are ModuleDicts by data set, as in a model.
    """
    sizes = []
    for name, mapper in mappers.items():
        block = BlockSizes.of(mapper.proc)
        # rows of fields in float32, and cast for the embedding
        source = (FLOAT32 + size) * mapper.in_channels_src
        destination = (FLOAT32 + size) * mapper.in_channels_dst
        if isinstance(mapper, GraphTransformerBackwardMapper):  # the norm at its end
            destination += (size + FLOAT32) * block.channels
        source_gradient = 3 * size * block.channels
        total = largest = 0
        for graph in _structures(edges[name]):
            chunk = graph.num_src * source + graph.num_dst * destination + block.kept(graph, size)
            gradients = max(graph.num_dst * block.gradients(size), graph.num_src * source_gradient)
            total += chunk
            largest = max(largest, chunk + gradients)
        sizes.append((total, largest))
    return sizes


class BlockSizes(NamedTuple):
    """The sizes and options of a block that determine how much memory it saves."""

    channels: int  # features of a node
    width: int  # features of query, key or value, over all heads
    hidden: int  # features of the hidden layer, including both gate and value of a gated network
    edge_dim: int
    is_one_set: bool  # sources are the destinations, with one norm
    fused: FusedParts

    @classmethod
    def of(cls, block: Any) -> "BlockSizes":
        """Read the sizes of a `GraphTransformerBaseBlock`."""
        return cls(
            channels=block.channels,
            width=block.lin_query.out_features,
            hidden=block.hidden_dim * (1 if block.mlp_implementation == "mlp" else 2),
            edge_dim=block.lin_edge.in_features,
            is_one_set=block.source_norm is block.layer_norm_attention,
            # without rows: the choice depends on modules, dtype and autocast
            fused=block.fused_parts(block.lin_query.weight.new_empty(0, block.channels), None),
        )

    def kept(self, graph: GraphStructure, size: int) -> int:
        """Return the bytes that both sub-layers keep on a graph, inputs included."""
        return self._kept_by_attention(graph, size) + self._kept_by_feed_forward(graph, size)

    def _kept_by_attention(self, graph: GraphStructure, size: int) -> int:
        parts = self.fused.attention
        if isinstance(parts, Refusal):
            destination = FLOAT32 * self.channels + size * (self.channels + 3 * self.width)
            source = (FLOAT32 + size) * self.channels + size * 2 * self.width
            return graph.num_dst * destination + graph.num_src * source
        num_sources = graph.num_src
        if self.is_one_set:
            num_sources -= graph.num_dst  # the halo of a shard
        x_src = torch.empty(num_sources, self.channels, device="meta")
        x_dst = torch.empty(graph.num_dst, self.channels, device="meta")
        edge_attr = torch.empty(graph.num_edges, self.edge_dim, device="meta")
        if self.is_one_set:
            tensors = parts.tensors((None, x_dst), edge_attr, (None, None), halo=x_src)
        else:
            tensors = parts.tensors((x_src, x_dst), edge_attr, (None, None), halo=None)
        kept = parts.sublayer.kept_bytes(tensors, graph, parts.options(batch=1))
        return kept + size * self.channels * (num_sources + graph.num_dst)

    def _kept_by_feed_forward(self, graph: GraphStructure, size: int) -> int:
        parts = self.fused.feed_forward
        if isinstance(parts, Refusal):
            destination = FLOAT32 * self.channels + size * (self.channels + 2 * self.hidden)
            return graph.num_dst * destination
        z = torch.empty(graph.num_dst, self.channels, device="meta")
        kept_bytes = parts.sublayer.kept_bytes
        kept = kept_bytes(parts.tensors(z), parts.options(residual=True))
        return kept + size * self.channels * graph.num_dst

    def gradients(self, size: int) -> int:
        """Return the peak gradient bytes of a destination, at the activation or the projections."""
        if isinstance(self.fused.feed_forward, Refusal):
            return size * (2 * self.hidden + self.channels)
        return size * (3 * self.width + 2 * self.channels)
