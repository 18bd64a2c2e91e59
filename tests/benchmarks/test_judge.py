"""A peer that is wrong in one respect must not be timed."""

from dataclasses import replace

import pytest
import torch
from suite import judge
from suite.peers import eager
from suite.problems import GRADIENTS


def judge_tampered(problem, operands, tamper):
    """Judge plain PyTorch on operands through which `tamper` passes gradients and values."""

    def attention(o):
        honest = eager.attention(tamper(o))
        return lambda: honest().view(o.grad_out.shape)

    judge.judge_attention(problem, operands, attention)


def with_gradient(name, change):
    """A tampering: the gradient of an operand goes through `change`."""

    def tamper(o):
        through = getattr(o, name) * 1
        through.register_hook(change)
        return replace(o, **{name: through})

    return tamper


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_plain_pytorch_is_right(tiny, drawn, tmp_path, dtype, batch):
    problem = tiny(dtype=dtype, batch=batch)
    judge_tampered(problem, drawn(problem, tmp_path), lambda o: o)


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_wrong_gradient_is_found(tiny, drawn, tmp_path, name):
    with pytest.raises(AssertionError, match=f"^d{name}: RMS error"):
        judge_tampered(tiny(), drawn(tiny(), tmp_path), with_gradient(name, lambda gradient: 1.01 * gradient))


def test_a_wrong_output_is_found(tiny, drawn, tmp_path):
    with pytest.raises(AssertionError, match="^out: RMS error"):
        judge_tampered(tiny(), drawn(tiny(), tmp_path), lambda o: replace(o, value=o.value * 1.001))


def test_an_output_that_is_wrong_without_gradients_is_found(tiny, drawn, tmp_path):
    def attention(o):
        honest = eager.attention(o)
        return lambda: honest() * (1.0 if torch.is_grad_enabled() else 1.001)

    with pytest.raises(AssertionError, match="^out: RMS error"):
        judge.judge_attention(tiny(), drawn(tiny(), tmp_path), attention)


def test_only_what_is_asked_for_is_judged(tiny, drawn, tmp_path):
    problem = tiny(gradients=("query", "key"))
    judge_tampered(problem, drawn(problem, tmp_path), with_gradient("query", lambda gradient: gradient))


@pytest.mark.parametrize("sample", (0, 1))
def test_a_gradient_where_none_arrives_is_found(tiny, drawn, tmp_path, monkeypatch, sample):
    """Rows outside the part, and other samples than the last."""
    monkeypatch.setattr(judge, "DESTINATIONS", 0)
    monkeypatch.setattr(judge, "SOURCES", 0)
    problem = tiny(batch=2)
    operands = drawn(problem, tmp_path)
    outside = next(i for i in range(operands.coo.sizes[1]) if i not in judge.Part.of(operands.coo).dst)

    def leak(gradient):
        gradient = gradient.clone()
        gradient[sample, outside] += 1e-3
        return gradient

    with pytest.raises(AssertionError, match="dquery: not zero"):
        judge_tampered(problem, operands, with_gradient("query", leak))


def test_a_part_holds_all_edges_of_the_sources_it_draws(tiny, drawn, tmp_path):
    coo = drawn(tiny(), tmp_path).coo
    part = judge.Part.of(coo)
    kept = torch.isin(coo.edge_index[1], part.dst)
    assert torch.equal(kept.nonzero().flatten(), part.edges)
    assert torch.equal(part.src[part.edge_index[0]], coo.edge_index[0, part.edges])
    assert torch.equal(part.dst[part.edge_index[1]], coo.edge_index[1, part.edges])


@pytest.fixture
def sides(tiny, drawn, tmp_path):
    """A graph, and both of its sides as they should be."""
    from suite.peers import ours

    coo = drawn(tiny(), tmp_path).coo
    return coo, ours.structure(coo, "structure")()


def test_right_sides_pass(sides):
    judge.judge_structure(*sides)


@pytest.mark.parametrize("name", ("colptr", "row", "rowptr", "csr_to_csc"))
def test_a_wrong_side_is_found(sides, name):
    coo, right = sides
    tensor = getattr(right, name).clone()
    middle = len(tensor) // 2
    tensor[middle] = tensor[middle] + (1 if tensor[middle] < tensor.max() else -1)
    with pytest.raises((AssertionError, RuntimeError)):
        judge.judge_structure(coo, right._replace(**{name: tensor}))
