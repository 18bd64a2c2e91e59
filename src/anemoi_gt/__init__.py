"""Graph-transformer layers for weather models, compatible with Anemoi and PyTorch Geometric."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers do not run `__getattr__`
    from anemoi_gt.attention_config import AttentionConfig as AttentionConfig
    from anemoi_gt.explanation import explain as explain
    from anemoi_gt.explanation import explain_attention as explain_attention
    from anemoi_gt.graph import GraphStructure as GraphStructure
    from anemoi_gt.integrations.anemoi import install as install
    from anemoi_gt.integrations.anemoi import installed as installed
    from anemoi_gt.integrations.anemoi import uninstall as uninstall
    from anemoi_gt.integrations.swap import swap_layers as swap_layers
    from anemoi_gt.kernel_config import KernelConfig as KernelConfig
    from anemoi_gt.nn import EncoderProcessorDecoder as EncoderProcessorDecoder
    from anemoi_gt.nn import GraphTransformerConv as GraphTransformerConv
    from anemoi_gt.nn import GraphTransformerMapperBlock as GraphTransformerMapperBlock
    from anemoi_gt.nn import GraphTransformerProcessorBlock as GraphTransformerProcessorBlock
    from anemoi_gt.nn import InteractionBlock as InteractionBlock
    from anemoi_gt.nn import InteractionConv as InteractionConv
    from anemoi_gt.ops.attention import edge_attention as edge_attention
    from anemoi_gt.ops.attention_weights import attention_weights as attention_weights
    from anemoi_gt.ops.merge import merge as merge
    from anemoi_gt.tested_versions import UntestedVersionsWarning as UntestedVersionsWarning

_DEFINED_IN = {
    "EncoderProcessorDecoder": "nn",
    "GraphStructure": "graph",
    "GraphTransformerConv": "nn",
    "GraphTransformerMapperBlock": "nn",
    "GraphTransformerProcessorBlock": "nn",
    "InteractionBlock": "nn",
    "InteractionConv": "nn",
    "KernelConfig": "kernel_config",
    "UntestedVersionsWarning": "tested_versions",
    "__version__": "version",
    "attention_weights": "ops",
    "edge_attention": "ops",
    "explain": "explanation",
    "explain_attention": "explanation",
    "install": "integrations.anemoi",
    "installed": "integrations.anemoi",
    "merge": "ops",
    "swap_layers": "integrations.swap",
    "uninstall": "integrations.anemoi",
}
__all__ = list(_DEFINED_IN)
_DEFINED_IN["AttentionConfig"] = "attention_config"  # the name of KernelConfig before 0.5.0


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: the command line's help then needs no PyTorch."""
    if name not in _DEFINED_IN:
        raise AttributeError(f"module 'anemoi_gt' has no attribute {name!r}")
    value = getattr(import_module(f"anemoi_gt.{_DEFINED_IN[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
