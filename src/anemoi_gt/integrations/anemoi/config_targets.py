"""Anemoi's own processor and mappers, built and swapped in one call: targets for configs whose validation is off."""

from importlib import import_module

from torch import nn

from anemoi_gt.integrations.anemoi.patch import swap_layers


def graph_transformer_processor(
    *, backend: str = "auto", precision: str | None = None, fuse_edges: bool = True, **options
) -> nn.Module:
    """Build Anemoi's `GraphTransformerProcessor` with blocks that compute with us.

    Parameters
    ----------
    backend, precision, fuse_edges
        As for `install`.
    **options
        Of `anemoi.models.layers.processor.GraphTransformerProcessor`.
    """
    return _build("processor", "GraphTransformerProcessor", options, backend, precision, fuse_edges)


def graph_transformer_forward_mapper(
    *, backend: str = "auto", precision: str | None = None, fuse_edges: bool = True, **options
) -> nn.Module:
    """Build Anemoi's `GraphTransformerForwardMapper`, the encoder, with a block that computes with us.

    Parameters
    ----------
    backend, precision, fuse_edges
        As for `install`.
    **options
        Of `anemoi.models.layers.mapper.GraphTransformerForwardMapper`.
    """
    return _build("mapper", "GraphTransformerForwardMapper", options, backend, precision, fuse_edges)


def graph_transformer_backward_mapper(
    *, backend: str = "auto", precision: str | None = None, fuse_edges: bool = True, **options
) -> nn.Module:
    """Build Anemoi's `GraphTransformerBackwardMapper`, the decoder, with a block that computes with us.

    Parameters
    ----------
    backend, precision, fuse_edges
        As for `install`.
    **options
        Of `anemoi.models.layers.mapper.GraphTransformerBackwardMapper`.
    """
    return _build("mapper", "GraphTransformerBackwardMapper", options, backend, precision, fuse_edges)


def _build(module: str, name: str, options: dict, backend: str, precision: str | None, fuse_edges: bool) -> nn.Module:
    component = getattr(import_module(f"anemoi.models.layers.{module}"), name)
    return swap_layers(component(**options), backend, precision, fuse_edges)
