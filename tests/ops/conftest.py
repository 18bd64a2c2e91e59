"""Problems of the oracle where kernels run."""

import pytest
import torch
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure


@pytest.fixture
def problem_and_graph(kernel_device):
    def make(name="isolated", form="raw", dtype=torch.float32, heads=3, channels=4, edge_dim=3):
        problem = make_problem(GRAPHS[name], heads, channels, edge_dim, form, dtype)
        return problem, structure(GRAPHS[name], kernel_device)

    return make


@pytest.fixture
def filled_padding():
    """Fill memory that nobody writes, such as padding between the parts of a block, alike each time."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)
