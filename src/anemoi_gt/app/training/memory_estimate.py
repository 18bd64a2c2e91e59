"""Estimate of the memory of a training step, and advice for a GPU that is too small.

    state          20 bytes a parameter: weight, gradient, two moments of AdamW, average
    graph          buffers of the model; of a sharded model, this rank's structures too
    fields         input and target, float32, and output, error and gradient at the loss
    kept           inputs of checkpointed groups of processor layers, or all saved activations
    working set    saved by the largest mapper chunk or group of layers, and its largest gradients

A destination keeps two inputs of norms, two normed copies, query, result of the attention and input
of its projection, and both sides of the activation in the feed-forward network. A source keeps its
input, a normed copy, key and value. Norms keep float32. A fused attention sub-layer keeps its
inputs, query, key, value and the result of the attention, a fused feed-forward sub-layer its input
and the activation's input; both keep their weights in the dtype of products. Edges, and rows that
other ranks read, keep little more. Compiled blocks need less.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.step import autocast
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import EncoderProcessorDecoder, GraphTransformerBackwardMapper, StaticEdges

STATE = 20
FLOAT32 = 4


class MemoryEstimate(NamedTuple):
    """Bytes of a training step by purpose; printed, in GB."""

    state: int
    graph: int
    fields: int
    kept: int
    working_set: int

    @property
    def total(self) -> int:
        """All of them: purposes that peak at different times are not many bytes apart."""
        return sum(self)

    def __str__(self) -> str:
        parts = (
            f"{name.replace('_', ' ')} {size / 1e9:.2f}" for name, size in self._asdict().items()
        )
        return f"about {self.total / 1e9:.2f} GB: {', '.join(parts)}"


def estimate_memory(model: nn.Module, config: TrainingConfig) -> MemoryEstimate | None:
    """Estimate the memory of a training step with eager blocks on this rank; None for other models.

    `config.batch_size` is the batch size of one model.
    """
    if not isinstance(model, EncoderProcessorDecoder):
        return None
    batch, size = config.batch_size, FLOAT32 if config.precision == "32-true" else 2
    with autocast(config.precision, next(model.parameters()).device):
        return _estimate(model, batch, size)


def _estimate(model: EncoderProcessorDecoder, batch: int, size: int) -> MemoryEstimate:
    layers, hidden, groups = (
        model.processor.proc,
        model.nodes["hidden"].num_nodes,
        model.processor.checkpoint_groups,
    )
    layer, layers_in_group = BlockSizes.of(layers[0]), -(-len(layers) // (groups or 1))
    group = hidden * (layers_in_group * _destination(layer, size) + _gradients(layer, size))
    group += _structures(model.processor_edges)[0].num_src * layers_in_group * _source(layer, size)
    group += layers_in_group * size * layer.cast_weights
    mappers = [
        *_mappers(model.encoder, model.encoder_edges, size),
        *_mappers(model.decoder, model.decoder_edges, size),
    ]
    if groups is None:
        kept, working = group + sum(everything for everything, _ in mappers), 0
    else:
        kept, working = (
            groups * hidden * layer.channels * size,
            max(group, *(chunk for _, chunk in mappers)),
        )
    at_loss = 0
    for name, nodes in model.nodes.items():
        inputs, outputs = model.in_channels.get(name, 0), model.out_channels.get(name, 0)
        at_loss += nodes.num_nodes * (FLOAT32 * inputs + (3 * FLOAT32 + 2) * outputs)
    return MemoryEstimate(
        state=STATE * sum(parameter.numel() for parameter in model.parameters()),
        graph=sum(buffer.nbytes for buffer in model.buffers()) + _shard_bytes(model),
        fields=batch * at_loss,
        kept=batch * kept,
        working_set=batch * working,
    )


def advice(model: Mapping, training: Mapping) -> str:
    """Suggest changes to the configs `model` and `training` for a run that ran out of memory."""
    layers, chunks = model.get("num_layers"), model.get("mapper_chunks", 1)
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
    """Return the structures of the chunks of edges, or the one of all; of a shard, this rank's."""
    graph = edges.structure()
    if isinstance(graph, GraphStructure):
        return [chunk.structure() for chunk in edges.chunks] or [graph]
    return [chunk.graph for chunk in graph.chunks] or [graph.structure]


def _shard_bytes(model: EncoderProcessorDecoder) -> int:
    """Return the bytes of the structures of graph shards and their chunks, which are no buffers."""
    edges = (*model.encoder_edges.values(), model.processor_edges, *model.decoder_edges.values())
    shards = [
        static_edges.structure()
        for static_edges in edges
        if not isinstance(static_edges.structure(), GraphStructure)
    ]
    graphs = [
        graph
        for shard in shards
        for graph in (shard.structure, *(chunk.graph for chunk in shard.chunks))
    ]
    return sum(tensor.nbytes for graph in graphs for tensor in graph.state_dict().values())


def _mappers(mappers: Any, edges: Any, size: int) -> list[tuple[int, int]]:
    """Return the bytes each mapper keeps in all, and of its largest chunk with gradients.

    `mappers` and `edges` are ModuleDicts by data set, as in a model.
    """
    sizes = []
    for name, mapper in mappers.items():
        graphs, block = _structures(edges[name]), BlockSizes.of(mapper.proc)
        end = (size + FLOAT32) * block.channels * isinstance(mapper, GraphTransformerBackwardMapper)
        source = _source(block, size) + (FLOAT32 + size) * mapper.in_channels_src
        destination = _destination(block, size) + (FLOAT32 + size) * mapper.in_channels_dst + end
        gradient = 3 * size * block.channels
        weights = size * block.cast_weights
        chunks = [
            graph.num_src * source + graph.num_dst * destination + weights for graph in graphs
        ]
        at_dst = _gradients(block, size)
        gradients = [max(graph.num_dst * at_dst, graph.num_src * gradient) for graph in graphs]
        sizes.append((sum(chunks), max(map(sum, zip(chunks, gradients, strict=True)))))
    return sizes


class BlockSizes(NamedTuple):
    """The sizes and options that determine the memory a block keeps."""

    channels: int  # features of a node
    width: int  # features of query, key or value, all heads together
    hidden: int  # features that the hidden layer computes, gate and value of a gated network
    fused_attention: bool
    fused_feed_forward: bool
    cast_weights: int  # parameters of the fused sub-layers, which keep them in 16 bits

    @classmethod
    def of(cls, block: Any) -> "BlockSizes":
        """Read the sizes of a `GraphTransformerBaseBlock`."""
        path = block.path(block.lin_query.weight.new_empty(0, block.channels), None)
        fused_attention = not isinstance(path.attention, str)
        fused_feed_forward = not isinstance(path.feed_forward, str)
        feed_forward = sum(parameter.numel() for parameter in block.node_dst_mlp.parameters())
        attention = sum(parameter.numel() for parameter in block.parameters()) - feed_forward
        return cls(
            channels=block.channels,
            width=block.lin_query.out_features,
            hidden=block.hidden_dim * (1 if block.mlp_implementation == "mlp" else 2),
            fused_attention=fused_attention,
            fused_feed_forward=fused_feed_forward,
            cast_weights=attention * fused_attention + feed_forward * fused_feed_forward,
        )


def _destination(block: BlockSizes, size: int) -> int:
    """Return the bytes that a destination keeps for the backward pass."""
    if block.fused_attention:
        attention = size * (block.channels + 2 * block.width)
    else:
        attention = FLOAT32 * block.channels + size * (block.channels + 3 * block.width)
    if block.fused_feed_forward:
        return attention + size * (block.channels + block.hidden)
    return attention + FLOAT32 * block.channels + size * (block.channels + 2 * block.hidden)


def _source(block: BlockSizes, size: int) -> int:
    """Return the bytes that a source keeps: in mappers it has its own norm."""
    norm = size if block.fused_attention else FLOAT32 + size
    return size * 2 * block.width + norm * block.channels


def _gradients(block: BlockSizes, size: int) -> int:
    """Return the gradient bytes of a destination at their largest: activation or projections."""
    if block.fused_feed_forward:
        return size * (3 * block.width + 2 * block.channels)
    return size * (2 * block.hidden + block.channels)
