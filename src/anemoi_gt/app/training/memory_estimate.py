"""Estimate of the memory of a training step, and advice for a GPU that is too small.

    state          20 bytes per parameter: weight, gradient, two moments of AdamW, average
    graph          buffers of the model; for a sharded model, also this rank's structures
    fields         input and target in float32; output, error and gradient of the loss
    kept           inputs of checkpointed groups of processor layers, or all saved activations
    working set    activations of the largest mapper chunk or group of layers, and their gradients

Saved for a destination are the inputs and outputs of two norms, the query, the result of the
attention, the input of its projection, and input and output of the activation in the feed-forward
network; for a source, its input, normalised features, key and value. Norms save float32. A fused
attention sub-layer saves its inputs, query, key, value and the result of the attention; a fused
feed-forward sub-layer saves its input and the input of the activation. Both also save their weights
in the dtype of the matrix products. Edges, and rows that other ranks read, add little. Compiled
blocks need less.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.step import autocast
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import EncoderProcessorDecoder, GraphTransformerBackwardMapper, StaticEdges
from anemoi_gt.refusal import Refusal

STATE = 20
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


def estimate_memory(model: nn.Module, config: TrainingConfig) -> MemoryEstimate | None:
    """Estimate the memory of a training step with eager blocks on this rank.

    `config.batch_size` is the batch size of one model. Return None unless the model is an
    `EncoderProcessorDecoder`.
    """
    if not isinstance(model, EncoderProcessorDecoder):
        return None
    element_size = FLOAT32 if config.precision == "32-true" else 2
    with autocast(config.precision, next(model.parameters()).device):
        return _estimate(model, config.batch_size, element_size)


def _estimate(model: EncoderProcessorDecoder, batch: int, size: int) -> MemoryEstimate:
    """Estimate the memory for `size` bytes per element of an activation."""
    layers = model.processor.proc
    num_hidden = model.nodes["hidden"].num_nodes
    num_groups = model.processor.checkpoint_groups
    layer = BlockSizes.of(layers[0])
    layers_in_group = -(-len(layers) // (num_groups or 1))
    num_src = _structures(model.processor_edges)[0].num_src
    group = num_hidden * (layers_in_group * _destination(layer, size) + _gradients(layer, size))
    group += num_src * layers_in_group * _source(layer, size)
    group += layers_in_group * size * layer.cast_weights
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
    return MemoryEstimate(
        state=STATE * sum(parameter.numel() for parameter in model.parameters()),
        graph=sum(buffer.nbytes for buffer in model.buffers()) + _shard_bytes(model),
        fields=batch * fields,
        kept=batch * kept,
        working_set=batch * working_set,
    )


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
    all_edges = (
        *model.encoder_edges.values(),
        model.processor_edges,
        *model.decoder_edges.values(),
    )
    total = 0
    for edges in all_edges:
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
        source = _source(block, size) + (FLOAT32 + size) * mapper.in_channels_src
        destination = _destination(block, size) + (FLOAT32 + size) * mapper.in_channels_dst
        if isinstance(mapper, GraphTransformerBackwardMapper):  # the norm at its end
            destination += (size + FLOAT32) * block.channels
        source_gradient = 3 * size * block.channels
        destination_gradient = _gradients(block, size)
        weights = size * block.cast_weights
        total = largest = 0
        for graph in _structures(edges[name]):
            chunk = graph.num_src * source + graph.num_dst * destination + weights
            gradients = max(graph.num_dst * destination_gradient, graph.num_src * source_gradient)
            total += chunk
            largest = max(largest, chunk + gradients)
        sizes.append((total, largest))
    return sizes


class BlockSizes(NamedTuple):
    """The sizes and options of a block that determine how much memory it saves."""

    channels: int  # features of a node
    width: int  # features of query, key or value, over all heads
    hidden: int  # features of the hidden layer, including both gate and value of a gated network
    fused_attention: bool
    fused_feed_forward: bool
    cast_weights: int  # parameters of the fused sub-layers, which are saved in 16 bits

    @classmethod
    def of(cls, block: Any) -> "BlockSizes":
        """Read the sizes of a `GraphTransformerBaseBlock`."""
        fused = block.fused_parts(block.lin_query.weight.new_empty(0, block.channels), None)
        fused_attention = not isinstance(fused.attention, Refusal)
        fused_feed_forward = not isinstance(fused.feed_forward, Refusal)
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
    """Return the bytes that are saved for a destination."""
    if block.fused_attention:
        attention = size * (block.channels + 2 * block.width)
    else:
        attention = FLOAT32 * block.channels + size * (block.channels + 3 * block.width)
    if block.fused_feed_forward:
        return attention + size * (block.channels + block.hidden)
    return attention + FLOAT32 * block.channels + size * (block.channels + 2 * block.hidden)


def _source(block: BlockSizes, size: int) -> int:
    """Return the bytes that are saved for a source, which in mappers has a norm of its own."""
    norm = size if block.fused_attention else FLOAT32 + size
    return size * 2 * block.width + norm * block.channels


def _gradients(block: BlockSizes, size: int) -> int:
    """Return the peak gradient bytes of a destination, at the activation or the projections."""
    if block.fused_feed_forward:
        return size * (3 * block.width + 2 * block.channels)
    return size * (2 * block.hidden + block.channels)
