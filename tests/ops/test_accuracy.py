"""Every graph, form, shape and dtype against the float64 oracle."""

import pytest
import torch
from support.accuracy import Corpus, assert_accurate
from support.corpus import DTYPES, FORMS, SHAPES, corpus
from support.graphs import GRAPHS
from support.oracle import make_problem
from support.run import attend, structure


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float64), ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_outputs_and_gradients_are_as_accurate_as_plain_pytorch(name, form, dtype):
    for shape in SHAPES:
        problem = make_problem(GRAPHS[name], *shape, form, dtype)
        assert_accurate(attend(problem, structure(GRAPHS[name]), "torch"), problem, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_over_the_corpus_the_error_is_at_most_twice_that_of_plain_pytorch(dtype):
    judged = Corpus()
    for problem, graph in corpus(dtype):
        judged.add(attend(problem, graph, "torch"), problem)
    assert set(judged.ours) >= {"out", "lse", "dquery", "dkey", "dvalue", "dedge_attr", "dedge_weight", "dedge_bias"}
    judged.assert_accurate()
