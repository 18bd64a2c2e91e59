"""Graph-transformer layers for weather models, compatible with Anemoi and PyTorch Geometric."""

from importlib import import_module
from typing import TYPE_CHECKING

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.compatibility import UntestedVersionsWarning
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops import attention_weights, edge_attention, merge
from anemoi_gt.version import __version__

if TYPE_CHECKING:  # type checkers do not run `__getattr__`
    from anemoi_gt.kernel_report import explain, explain_attention
    from anemoi_gt.nn import (
        EncoderProcessorDecoder,
        GraphTransformerConv,
        GraphTransformerMapperBlock,
        GraphTransformerProcessorBlock,
    )

_FROM_KERNEL_REPORT = ("explain", "explain_attention")
_FROM_NN = (
    "EncoderProcessorDecoder",
    "GraphTransformerConv",
    "GraphTransformerMapperBlock",
    "GraphTransformerProcessorBlock",
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


def __getattr__(name: str):
    """Import modules on first use, so that the structure and the operation need only torch."""
    for package, names in (("nn", _FROM_NN), ("kernel_report", _FROM_KERNEL_REPORT)):
        if name in names:
            return getattr(import_module(f"anemoi_gt.{package}"), name)
    raise AttributeError(f"module 'anemoi_gt' has no attribute {name!r}")
