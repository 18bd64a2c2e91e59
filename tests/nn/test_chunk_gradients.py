"""Chunks that read rows of one tensor add their gradients to one tensor."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from anemoi_gt import torch_compat
from anemoi_gt.nn.chunking import rows_of, shared

NUM_ROWS = 12
CHUNKS = {
    "ranges": (slice(0, 4), slice(4, 4), slice(4, NUM_ROWS)),
    "indices": (torch.tensor([1, 9, 3]), torch.tensor([3, 0, 1, 11]), torch.tensor([3])),
}


def draw(shape=(NUM_ROWS, 3)):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, requires_grad=True)


def read(x, rows):
    """Rows as autograd knows them."""
    return x[..., rows, :] if isinstance(rows, slice) else x.index_select(-2, rows)


def loss_of(x, chunks, select, *, checkpointed=False):
    total = 0.0
    for number, rows in enumerate(chunks):

        def chunk(x, rows=rows):
            return (select(x, rows) ** 3).sin()

        out = checkpoint(chunk, x, use_reentrant=False) if checkpointed else chunk(x)
        total = total + (number + 1) * out.sum()
    return total


def gradient(make_loss, share, **options):
    leaf = draw()
    (found,) = torch.autograd.grad(make_loss(share(2 * leaf)), leaf, **options)
    return found


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.parametrize("shape", [(NUM_ROWS, 3), (2, NUM_ROWS, 3)], ids=["rows", "batch"])
def test_gradients_are_those_of_autograd_bit_for_bit(kind, checkpointed, shape):
    gradients = []
    for share, select in ((lambda x: x, read), (shared, rows_of)):
        leaf = draw(shape)
        loss = loss_of(share(2 * leaf), CHUNKS[kind], select, checkpointed=checkpointed)
        gradients += torch.autograd.grad(loss, leaf)
    assert torch.equal(*gradients)


def test_a_chunk_that_reads_all_rows_adds_its_gradient_too():
    expected = gradient(lambda x: loss_of(x, CHUNKS["ranges"], read) + x.sum(), lambda x: x)
    actual = gradient(lambda x: loss_of(x, CHUNKS["ranges"], rows_of) + x.sum(), shared)
    torch.testing.assert_close(actual, expected)


def test_a_retained_graph_gives_the_same_gradient_again():
    leaf = draw()
    loss = loss_of(shared(2 * leaf), CHUNKS["indices"], rows_of)
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second)


def stop(gradient):
    raise InterruptedError("in the backward pass")


def test_a_pass_that_raised_leaves_nothing_to_the_next():
    leaf = draw()
    x = shared(2 * leaf)
    *others, last = CHUNKS["indices"]
    rows = rows_of(x, others[0])
    loss = (rows**3).sum() + loss_of(x, (*others[1:], last), rows_of)
    interruption = rows.register_hook(stop)  # after the chunks that follow it
    with pytest.raises(InterruptedError):
        torch.autograd.grad(loss, leaf, retain_graph=True)
    interruption.remove()

    expected = (2 * leaf[others[0]]) ** 3
    expected = expected.sum() + loss_of(2 * leaf, (*others[1:], last), read)
    torch.testing.assert_close(
        torch.autograd.grad(loss, leaf), torch.autograd.grad(expected, leaf), rtol=0, atol=0
    )


def test_a_pass_that_runs_during_another_has_a_gradient_of_its_own():
    leaf = draw()
    x = shared(2 * leaf)
    first, *others = CHUNKS["indices"]
    rows = rows_of(x, first)
    loss = (rows**3).sum() + loss_of(x, others, rows_of)
    found = []

    def run_another(gradient):
        if not found:
            found.append(None)
            (found[0],) = torch.autograd.grad(loss, leaf, retain_graph=True)

    rows.register_hook(run_another)  # after the chunks that follow it
    found += torch.autograd.grad(loss, leaf, retain_graph=True)
    found += torch.autograd.grad(loss, leaf)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])


def test_without_numbers_of_passes_gradients_are_the_same(monkeypatch):
    expected = gradient(lambda x: loss_of(x, CHUNKS["indices"], read), lambda x: x)
    monkeypatch.setattr(torch_compat, "_graph_task", lambda: -1)
    actual = gradient(lambda x: loss_of(x, CHUNKS["indices"], rows_of), shared)
    assert torch.equal(actual, expected)


def test_second_derivatives_are_those_of_autograd():
    found = []
    for share, select in ((lambda x: x, read), (shared, rows_of)):
        leaf = draw()
        loss = loss_of(share(2 * leaf), CHUNKS["indices"], select)
        (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), leaf)
    torch.testing.assert_close(*found)


class Counting(TorchDispatchMode):
    """Count calls that return a tensor with all rows."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == (NUM_ROWS, 3):
            self.calls[function.overloadpacket.__name__] += 1
        return out


@pytest.mark.parametrize("kind", CHUNKS)
def test_one_tensor_with_all_rows_is_made_for_all_chunks(kind):
    leaf = draw()
    loss = loss_of(shared(2 * leaf), CHUNKS[kind], rows_of)
    with Counting() as counting:
        loss.backward()
    made = counting.calls["new_zeros"] + counting.calls["zeros"]
    assert made == 1
    assert counting.calls["add"] == 0


def test_compiled_code_holds_no_function_of_its_own():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    def step(leaf):
        return loss_of(shared(2 * leaf), CHUNKS["ranges"], rows_of)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    leaf = draw()
    (actual,) = torch.autograd.grad(compiled(leaf), leaf)
    (expected,) = torch.autograd.grad(loss_of(2 * leaf, CHUNKS["ranges"], read), leaf)
    torch.testing.assert_close(actual, expected)
    assert "autograd" not in graphs[0].code


def test_transforms_of_torch_func_see_plain_operations():
    leaf = draw().detach()
    expected = torch.func.grad(lambda x: loss_of(2 * x, CHUNKS["ranges"], read))(leaf)
    actual = torch.func.grad(lambda x: loss_of(shared(2 * x), CHUNKS["ranges"], rows_of))(leaf)
    assert torch.equal(actual, expected)
