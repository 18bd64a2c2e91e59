"""The corpus of the accuracy criterion: every graph, form of edge features and shape, in one dtype."""

import torch

from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import structure

FORMS = ("raw", "raw_without_bias", "embedded", "none")
SHAPES = ((1, 1, 1), (4, 16, 3), (6, 10, 11), (3, 40, 17))  # heads, channels, edge_dim
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def corpus(dtype, device="cpu"):
    """Yield every problem of the corpus with its structure on `device`."""
    for graph in GRAPHS.values():
        for form in FORMS:
            for seed, shape in enumerate(SHAPES):
                yield make_problem(graph, *shape, form, dtype, seed), structure(graph, device)
