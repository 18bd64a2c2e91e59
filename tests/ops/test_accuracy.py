"""Every graph, form, shape and dtype against the float64 oracle."""

import pytest
import torch
from support.accuracy import Corpus, assert_accurate
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, structure

FORMS = ("raw", "raw_without_bias", "embedded", "none")
SHAPES = ((1, 1, 1), (4, 16, 3), (6, 10, 11), (3, 40, 17))  # heads, channels, edge_dim
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_and_gradients_are_as_accurate_as_plain_pytorch(name, form, dtype):
    for shape in SHAPES:
        problem = make_problem(GRAPHS[name], *shape, form, dtype)
        assert_accurate(attend(problem, structure(GRAPHS[name]), "torch"), problem, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_over_the_corpus_the_error_is_at_most_twice_that_of_plain_pytorch(dtype):
    corpus = Corpus()
    for graph in GRAPHS.values():
        for form in FORMS:
            for seed, shape in enumerate(SHAPES):
                problem = make_problem(graph, *shape, form, dtype, seed)
                corpus.add(attend(problem, structure(graph), "torch"), problem)
    assert set(corpus.ours) >= {"out", "lse", "dquery", "dkey", "dvalue", "dedge_attr", "dedge_weight", "dedge_bias"}
    corpus.assert_accurate()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_float64_equals_the_oracle(name, form):
    problem = make_problem(GRAPHS[name], 3, 5, 4, form, torch.float64)
    assert_accurate(attend(problem, structure(GRAPHS[name]), "torch"), problem, torch.float64)
