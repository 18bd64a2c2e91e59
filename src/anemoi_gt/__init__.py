"""Graph-transformer layers for weather models, compatible with Anemoi and PyTorch Geometric."""

from importlib import import_module

from anemoi_gt.config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops import attention_weights, edge_attention, merge
from anemoi_gt.version import __version__

_FROM_NN = (
    "EncoderProcessorDecoder",
    "GraphTransformerConv",
    "GraphTransformerMapperBlock",
    "GraphTransformerProcessorBlock",
)

__all__ = [
    "AttentionConfig",
    "GraphStructure",
    "__version__",
    "attention_weights",
    "edge_attention",
    "merge",
    *_FROM_NN,
]


def __getattr__(name: str):
    """Import the modules on first use, so that the structure and the operation need torch alone."""
    if name in _FROM_NN:
        return getattr(import_module("anemoi_gt.nn"), name)
    raise AttributeError(f"module 'anemoi_gt' has no attribute {name!r}")
