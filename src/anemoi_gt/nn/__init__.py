"""Layers and models as modules: channels and heads, parameters and norms. The only room that makes query, key and value."""

from anemoi_gt.nn.block import GraphTransformerBlock
from anemoi_gt.nn.conv import GraphTransformerConv
from anemoi_gt.nn.edges import StaticEdges
from anemoi_gt.nn.model import EncoderProcessorDecoder
from anemoi_gt.nn.nodes import StaticNodes

__all__ = [
    "EncoderProcessorDecoder",
    "GraphTransformerBlock",
    "GraphTransformerConv",
    "StaticEdges",
    "StaticNodes",
]
