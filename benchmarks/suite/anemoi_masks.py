"""Masks of Anemoi's transformers: [N, N] for each layer, 26 GB for the 16 layers of AIFS."""

from torch import nn


def drop_masks(model: nn.Module) -> None:
    """Free the masks that an untouched model has kept; it makes them again."""
    for module in model.modules():
        if hasattr(module, "attn_mask"):  # since anemoi-models 0.13
            module.attn_mask = None
