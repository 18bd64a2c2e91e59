"""Errors of anemoi_gt in the transformer blocks of an anemoi-models before 0.15.

Newer versions pass shards differently; tests/integrations/anemoi/test_transformers.py tests them.
"""

from inspect import signature

import torch
from anemoi.models.layers import block as blocks
from anemoi.models.layers.utils import load_layer_kernels

from anemoi_gt.integrations import anemoi as integration


def build(kind):
    """Return a block with 2 heads of 8 channels, with the options that this version has."""
    torch.manual_seed(0)
    options = {
        "num_channels": 16,
        "hidden_dim": 32,
        "num_heads": 2,
        "window_size": None,
        "activation": "GELU",
        "layer_kernels": load_layer_kernels(),
        "attention_implementation": "scaled_dot_product_attention",
    }
    known = signature(kind).parameters
    return kind(**{name: value for name, value in options.items() if name in known})


def rows_after(kind, block):
    """Return the rows that a block returns, and whether it returns a tensor instead of a tuple."""
    shards = [[12, 16]]
    rows = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    result = None
    if kind is blocks.TransformerProcessorBlock:
        result = block(rows, shards, 1)
    else:
        result = block((rows, rows + 1), (shards, shards), 1)[0][1]
    if isinstance(result, torch.Tensor):
        return result, True
    return result[0], False


def compare():
    """Return a report per block class, by its name; Triton must interpret kernels."""
    report = {}
    for kind in (blocks.TransformerProcessorBlock, blocks.TransformerMapperBlock):
        block = build(kind)
        expected, expected_tensor = rows_after(kind, block)
        with integration.install(backend="triton", fusion="sublayers"):
            actual, returns_tensor = rows_after(kind, block)
            (computed,) = integration.installed().computed
        report[kind.__name__] = {
            "error": (actual - expected).abs().max().item(),
            "same_form": returns_tensor == expected_tensor,
            "outcome": computed.outcome,
        }
    return report
