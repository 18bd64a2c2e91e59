"""Attention within a window of any anemoi-models: by its own mask, and under `install` without flash-attn."""

import copy
import io

import torch
from anemoi.models.layers.attention import MultiHeadSelfAttention
from anemoi.models.layers.utils import load_layer_kernels

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import window_attention

NODES, CHANNELS, BATCH = 40, 16, 2


def build(implementation, **options):
    """Return an attention with 2 heads of 8 channels, in float64."""
    torch.manual_seed(0)
    attention = MultiHeadSelfAttention(
        2,
        CHANNELS,
        layer_kernels=load_layer_kernels(),
        attention_implementation=implementation,
        **{"window_size": 5, "qk_norm": True, **options},
    )
    return attention.double()


def shards():
    """Return what this version takes for nodes that are not sharded."""
    try:
        from anemoi.models.distributed.shapes import GraphShardInfo
    except ImportError:  # before 0.15
        return [[BATCH * NODES, CHANNELS]]
    return GraphShardInfo()


def differentiate(attention):
    """Return the output, and the gradients of the input and of all parameters."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * NODES, CHANNELS, generator=generator, dtype=torch.float64)
    leaves = (x.requires_grad_(), *attention.parameters())
    out = attention(x, shards(), BATCH)
    return out.detach(), *torch.autograd.grad(out.sin().sum(), leaves)


def compare():
    """Return errors relative to the mask of this version, and whether flash-attn is named in a pickle."""
    window_attention.BLOCK = 8
    attention = build("scaled_dot_product_attention")
    expected = differentiate(copy.deepcopy(attention))

    def error(results):
        return max(
            (actual - exact).abs().max().item()
            for actual, exact in zip(results, expected, strict=True)
        )

    report = {}
    with integration.install(backend="torch"):
        report["mask"] = error(differentiate(attention))
        kept = (getattr(attention.attention, name, None) for name in ("mask", "attn_mask"))
        report["keeps a mask"] = any(mask is not None for mask in kept)
        report["after a pass"] = error(differentiate(with_mask_of(attention)))
        flash = build("flash_attention", softcap=0.0)
        report["flash"] = error(differentiate(flash))
    file = io.BytesIO()
    torch.save(flash, file)
    file.seek(0)
    with integration.flash_attn_stand_in():
        report["read"] = error(differentiate(torch.load(file, weights_only=False)))
    return report


def with_mask_of(attention):
    """Return an attention with the mask that a pass without `install` leaves."""
    attention = copy.deepcopy(attention)
    upstream = type(attention.attention).forward.replaces
    rows = torch.randn(1, 2, NODES, 8, dtype=torch.float64)
    upstream(attention.attention, rows, rows, rows, 1, window_size=5)
    return attention
