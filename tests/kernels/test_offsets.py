"""When 64-bit offsets are chosen: as soon as an offset can pass 2^31, not before. Sizes only; nothing is allocated."""

import pytest
import torch

from anemoi_gt.ops.tensors import AttentionOperands, IndexTensors
from anemoi_gt.ops.triton_backend.sizes import sizes_of


def is_wide(samples, num_src, num_dst, num_edges, heads, channels, form="none", edge_dim=1):
    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    attr = weight = None
    if form == "embedded":
        attr = empty(1, num_edges, heads, channels)
    elif form == "raw":
        attr, weight = empty(1, num_edges, edge_dim), empty(heads * channels, edge_dim)
    query, key = empty(samples, num_dst, heads, channels), empty(samples, num_src, heads, channels)
    colptr, row = (
        torch.empty(n, dtype=torch.int32, device="meta") for n in (num_dst + 1, num_edges)
    )
    operands = AttentionOperands(query, key, key, attr, weight)
    return sizes_of(operands, IndexTensors(colptr, row)).needs_int64


SIZES = {"num_dst": 1, "num_src": 1, "num_edges": 1, "heads": 16, "channels": 64}


@pytest.mark.parametrize(
    ("name", "size", "options"),
    [
        ("num_dst", 2**21, {}),
        ("num_src", 2**21, {}),
        ("num_edges", 2**26, {"channels": 1}),
        ("num_edges", 2**21, {"form": "embedded"}),
        ("num_edges", 2**21, {"heads": 1, "channels": 1, "form": "raw", "edge_dim": 1024}),
    ],
)
@pytest.mark.parametrize("samples", [1, 2])
def test_offsets_become_wide_when_one_can_pass_2_to_31(name, size, options, samples):
    options = SIZES | options  # the same number of rows or edges, shared out among samples
    assert not is_wide(samples, **options | {name: (size - 1) // samples})
    assert is_wide(samples, **options | {name: size // samples})
