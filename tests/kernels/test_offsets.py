"""When 64-bit offsets are chosen: as soon as an offset can pass 2^31, and not before. Sizes only; nothing is allocated."""

import pytest
import torch

from anemoi_gt.ops.operands import AttentionOperands
from anemoi_gt.ops.triton_backend.problem import IndexTensors, Options, Problem


def is_wide(samples, num_src, num_dst, num_edges, heads, channels, form="none", edge_dim=1):
    def empty(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    attr = weight = None
    if form == "embedded":
        attr = empty(1, num_edges, heads, channels)
    elif form == "raw":
        attr, weight = empty(1, num_edges, edge_dim), empty(heads * channels, edge_dim)
    query, key = empty(samples, num_dst, heads, channels), empty(samples, num_src, heads, channels)
    colptr, row = (torch.empty(n, dtype=torch.int32, device="meta") for n in (num_dst + 1, num_edges))
    operands = AttentionOperands(query, key, key, attr, weight)
    return Problem(operands, IndexTensors(colptr, row), Options()).needs_int64()


@pytest.mark.parametrize(
    ("largest_narrow", "change"),
    [
        ({"num_dst": 2**21 - 1, "num_src": 1, "num_edges": 1, "heads": 16, "channels": 64}, {"num_dst": 2**21}),
        ({"num_dst": 1, "num_src": 2**21 - 1, "num_edges": 1, "heads": 16, "channels": 64}, {"num_src": 2**21}),
        ({"num_dst": 1, "num_src": 1, "num_edges": 2**26 - 1, "heads": 16, "channels": 1}, {"num_edges": 2**26}),
        ({"num_dst": 1, "num_src": 1, "num_edges": 2**21 - 1, "heads": 16, "channels": 64, "form": "embedded"}, {"num_edges": 2**21}),
        ({"num_dst": 1, "num_src": 1, "num_edges": 2**21 - 1, "heads": 1, "channels": 1, "form": "raw", "edge_dim": 1024}, {"num_edges": 2**21}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("samples", [1, 2])
def test_offsets_become_wide_when_one_can_pass_2_to_31(largest_narrow, change, samples):
    name, size = next(iter(change.items()))
    if samples > 1:  # the same number of rows or edges, shared out among samples
        largest_narrow, size = largest_narrow | {name: largest_narrow[name] // samples}, size // samples
    assert not is_wide(samples, **largest_narrow)
    assert is_wide(samples, **largest_narrow | {name: size})
