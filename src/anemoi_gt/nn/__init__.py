"""Layers and models as modules: channels and heads, parameters and norms. The only room that makes query, key and value."""

from anemoi_gt.nn.block import GraphTransformerBaseBlock, GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from anemoi_gt.nn.chunks import Chunk, split_destinations
from anemoi_gt.nn.conv import GraphTransformerConv
from anemoi_gt.nn.edges import ChunkedEdges, StaticEdges
from anemoi_gt.nn.inference import ChunkedInference
from anemoi_gt.nn.layer_kernels import LayerKernels
from anemoi_gt.nn.mapper import (
    GraphTransformerBackwardMapper,
    GraphTransformerBaseMapper,
    GraphTransformerForwardMapper,
)
from anemoi_gt.nn.model import EncoderProcessorDecoder
from anemoi_gt.nn.nodes import StaticNodes
from anemoi_gt.nn.norm import AutocastLayerNorm, ConditionalLayerNorm
from anemoi_gt.nn.processor import GraphTransformerProcessor

__all__ = [
    "AutocastLayerNorm",
    "Chunk",
    "ChunkedEdges",
    "ChunkedInference",
    "ConditionalLayerNorm",
    "EncoderProcessorDecoder",
    "GraphTransformerBackwardMapper",
    "GraphTransformerBaseBlock",
    "GraphTransformerBaseMapper",
    "GraphTransformerConv",
    "GraphTransformerForwardMapper",
    "GraphTransformerMapperBlock",
    "GraphTransformerProcessor",
    "GraphTransformerProcessorBlock",
    "LayerKernels",
    "StaticEdges",
    "StaticNodes",
    "split_destinations",
]
