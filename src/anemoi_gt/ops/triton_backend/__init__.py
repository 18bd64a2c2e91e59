"""The `triton` backend: fused GPU kernels without any edges x heads x channels tensor."""

from anemoi_gt.ops.backend import Backend
from anemoi_gt.ops.triton_backend.device import is_faster_fused, why_not
from anemoi_gt.ops.triton_backend.edge_attention_triton import attend
from anemoi_gt.ops.triton_backend.edge_sums import sum_edges
from anemoi_gt.ops.triton_backend.formulas import (
    attention_sublayer,
    interaction_sublayer,
    network_sublayer,
)
from anemoi_gt.ops.triton_backend.tiles import MAX_ATTRIBUTES, MAX_FUSED_FEATURES

BACKEND = Backend(
    "triton",
    why_not,
    attention=attend,
    attention_sublayer=attention_sublayer,
    network=network_sublayer,
    edge_update=interaction_sublayer,
    edge_sums=sum_edges,
    is_faster_fused=is_faster_fused,
    max_features=MAX_FUSED_FEATURES,
    max_attributes=MAX_ATTRIBUTES - 1,
)

__all__ = ["BACKEND"]
