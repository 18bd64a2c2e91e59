"""Layers as modules: convolutions, blocks, mappers, processor and the whole model."""

from anemoi_gt.graph import ShardedGraph
from anemoi_gt.nn.block import (
    GraphTransformerBaseBlock,
    GraphTransformerMapperBlock,
    GraphTransformerProcessorBlock,
)
from anemoi_gt.nn.chunking import Chunk, split_destinations
from anemoi_gt.nn.conv import GraphTransformerConv
from anemoi_gt.nn.interaction_network import InteractionBlock, InteractionConv
from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.mapper import (
    BaseMapper,
    GNNMapper,
    GraphTransformerBackwardMapper,
    GraphTransformerBaseMapper,
    GraphTransformerForwardMapper,
)
from anemoi_gt.nn.model import EncoderProcessorDecoder
from anemoi_gt.nn.norm import AutocastLayerNorm, ConditionalLayerNorm
from anemoi_gt.nn.processor import GNNProcessor, GraphTransformerProcessor
from anemoi_gt.nn.static_graph import StaticEdges, StaticNodes

__all__ = [
    "AutocastLayerNorm",
    "BaseMapper",
    "Chunk",
    "ConditionalLayerNorm",
    "EncoderProcessorDecoder",
    "GNNMapper",
    "GNNProcessor",
    "GraphTransformerBackwardMapper",
    "GraphTransformerBaseBlock",
    "GraphTransformerBaseMapper",
    "GraphTransformerConv",
    "GraphTransformerForwardMapper",
    "GraphTransformerMapperBlock",
    "GraphTransformerProcessor",
    "GraphTransformerProcessorBlock",
    "InteractionBlock",
    "InteractionConv",
    "LayerKernels",
    "ShardedGraph",
    "StaticEdges",
    "StaticNodes",
    "split_destinations",
]
