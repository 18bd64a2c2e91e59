"""Graph-transformer layers for weather models, compatible with Anemoi and PyTorch Geometric."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops import attention_weights, edge_attention, merge
from anemoi_gt.tested_versions import UntestedVersionsWarning
from anemoi_gt.version import __version__

if TYPE_CHECKING:  # type checkers do not run `__getattr__`
    from anemoi_gt.explanation import explain, explain_attention
    from anemoi_gt.nn import (
        EncoderProcessorDecoder,
        GraphTransformerConv,
        GraphTransformerMapperBlock,
        GraphTransformerProcessorBlock,
    )

__all__ = [
    "AttentionConfig",
    "EncoderProcessorDecoder",
    "GraphStructure",
    "GraphTransformerConv",
    "GraphTransformerMapperBlock",
    "GraphTransformerProcessorBlock",
    "UntestedVersionsWarning",
    "__version__",
    "attention_weights",
    "edge_attention",
    "explain",
    "explain_attention",
    "merge",
]


def __getattr__(name: str) -> Any:
    """Import modules on first use, so that the structure and the operation need only torch."""
    if name not in __all__:
        raise AttributeError(f"module 'anemoi_gt' has no attribute {name!r}")
    package = "anemoi_gt.explanation" if name.startswith("explain") else "anemoi_gt.nn"
    return getattr(import_module(package), name)
