"""Random graphs, dtypes, forms and options, drawn by hypothesis; `benchmarks/check_gpu.py --random` does many more."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.accuracy import assert_within
from support.batch import run_batch, share
from support.oracle import make_problem
from support.poison import poisoned_memory
from support.run import structure, with_hubs

# heads, channels, edge_dim; few, for each is compiled on a GPU
SHAPES = (
    (1, 1, 1),
    (2, 3, 4),
    (3, 8, 2),
    (5, 2, 16),
)
# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@st.composite
def graphs(draw):
    """Up to 5 nodes a side with 24 edges in any order, or as many at every destination, for which there are kernels."""
    num_src, num_dst = draw(st.integers(0, 5)), draw(st.integers(0, 5))
    source, destination = (st.integers(0, max(nodes - 1, 0)) for nodes in (num_src, num_dst))
    degree = draw(st.sampled_from([None, None, 1, 2, 3]))
    if degree is None or num_src == 0 or degree * num_dst > 10:
        most = draw(st.sampled_from([10, 24])) if num_src and num_dst else 0
        pairs = draw(
            st.lists(
                st.tuples(source, destination), min_size=most * 9 // 10 * (most > 10), max_size=most
            )
        )
    else:
        pairs = [
            (draw(source), i) for i in draw(st.permutations(sorted([*range(num_dst)] * degree)))
        ]
    return torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous(), (num_src, num_dst)


@pytest.mark.interpreted
@given(
    edges=graphs(),
    shape=st.sampled_from(SHAPES),
    form=st.sampled_from(["raw", "raw_without_bias", "embedded", "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    count=st.integers(1, 2),
    dropout_p=st.sampled_from([0.0, 0.0, 0.5]),
    segment=st.sampled_from([None, 4]),  # nodes with more than 8 edges are hubs
    seed=st.integers(0, 2**32),
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_random_graphs_are_as_accurate_as_plain_torch(
    kernel_device, edges, shape, form, dtype, count, dropout_p, segment, seed
):
    samples = [make_problem(edges, *shape, form, dtype, seed + number) for number in range(count)]
    samples = share(samples, "edge_weight", "edge_bias")
    graph = with_hubs(structure(edges, kernel_device), segment)
    with poisoned_memory():
        judged = run_batch(samples, graph, "triton", dropout_p=dropout_p, seed=seed)
    assert_within(*judged, dtype)
