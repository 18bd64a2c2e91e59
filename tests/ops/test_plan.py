"""Plans: memory that steps share, views of it, results of a run, and graphs with nothing to launch."""

import random
from types import SimpleNamespace

import pytest
import torch

from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from anemoi_gt.kernels.launch import Launch
from anemoi_gt.ops.triton_backend.plan import SCRATCH_ALIGNMENT, PlanBuilder

# numpy's, of the interpreter
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
SIZE = 1024  # bytes of a buffer, a multiple of the alignment
DTYPES = (torch.int64, torch.int32, torch.int16)


def copy(source, target):
    target.copy_(source)


def write_sum(number):
    """Return a step that fills its last tensor with `number` more than the sum of all others' elements."""

    def step(*tensors):
        *sources, target = tensors
        total = sum(int(source.sum()) for source in sources)
        target.fill_((total + number) % 1009)

    return step


def random_plan(seed):
    """Return a plan whose steps read what earlier ones wrote, its input, and the number that fills each result."""
    draw = random.Random(seed)
    x = torch.ones(draw.randint(0, 9), dtype=torch.int64)
    builder = PlanBuilder([(x.shape, x.dtype)])
    written = {builder.inputs[0]: 1}
    for number in range(draw.randint(1, 30)):
        sources = draw.sample(list(written), draw.randint(0, min(4, len(written))))
        total = sum(written[source] * source.shape[0] for source in sources)
        target = builder.empty((draw.choice((0, 1, 7, 64, 300)),), draw.choice(DTYPES))
        builder.compute(write_sum(number), *sources, target)
        written[target] = (total + number) % 1009
    del written[builder.inputs[0]]
    results = draw.sample(list(written), draw.randint(0, len(written)))
    return builder.finish(results), x, [written[result] for result in results]


@pytest.mark.parametrize("seed", range(60))
def test_steps_read_what_earlier_steps_wrote_for_them(seed):
    plan, x, expected = random_plan(seed)
    for result, number in zip(plan.run([x]), expected, strict=True):
        assert torch.equal(result, torch.full_like(result, number))


@pytest.mark.parametrize("seed", range(60))
def test_scratch_of_a_common_step_never_overlaps(seed):
    plan, _, _ = random_plan(seed)
    spans = {}
    lifetimes = {}
    for number, step in enumerate(plan.steps):
        for index in step.views:
            view = plan.viewed[index]
            buffer = view.buffer
            if view.base > len(plan.results):  # neither the input nor a result
                end = view.first_byte + buffer.shape[0] * buffer.dtype.itemsize
                spans[buffer.storage] = (view.first_byte, end)
                lifetimes.setdefault(buffer.storage, []).append(number)
    assert all(end <= plan.scratch_bytes for _, end in spans.values())
    for block, (begin, end) in spans.items():
        for other, (other_begin, other_end) in spans.items():
            is_earlier = max(lifetimes[block]) < min(lifetimes[other])
            is_later = max(lifetimes[other]) < min(lifetimes[block])
            if block == other or is_earlier or is_later:
                continue
            assert end <= other_begin or other_end <= begin


def test_scratch_of_steps_that_do_not_overlap_shares_bytes():
    builder = PlanBuilder([((SIZE,), torch.uint8)])
    buffer = builder.inputs[0]
    for _ in range(10):
        following = builder.empty_like(buffer)
        builder.compute(copy, buffer, following)
        buffer = following
    out = builder.empty_like(buffer)
    builder.compute(copy, buffer, out)
    plan = builder.finish([out])
    assert plan.scratch_bytes == 2 * SIZE
    x = torch.randint(256, (SIZE,), dtype=torch.uint8)
    assert torch.equal(plan.run([x])[0], x)


def test_scratch_buffers_of_one_step_are_adjacent_at_aligned_offsets():
    builder = PlanBuilder([((3,), torch.float32)])
    buffers = [builder.empty((3,), torch.float32) for _ in range(4)]
    builder.compute(lambda *tensors: None, *buffers)
    plan = builder.finish([])
    offsets = sorted(view.first_byte for view in plan.viewed)
    assert offsets == [n * SCRATCH_ALIGNMENT for n in range(4)]


VIEWS = {
    "slice": (lambda x: x.slice(1, 1, 3), lambda x: x[:, 1:3]),
    "slice of a slice": (lambda x: x.slice(0, 2, 6).slice(0, 1, 3), lambda x: x[3:5]),
    "last columns": (lambda x: x.slice(-1, 4, 6), lambda x: x[:, 4:]),
    "unflattened": (lambda x: x.unflatten(1, (2, 3)), lambda x: x.unflatten(1, (2, 3))),
    "rows of entries": (
        lambda x: x.unflatten(0, (2, 4)).slice(1, 1, 3),
        lambda x: x.unflatten(0, (2, 4))[:, 1:3],
    ),
    "transposed": (lambda x: x.slice(0, 1, 4).transposed(), lambda x: x[1:4].T),
    "nothing": (lambda x: x.slice(0, 8, 8), lambda x: x[8:]),
}


@pytest.mark.parametrize("where", ["input", "input with an offset", "scratch", "result"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_of_a_buffer_matches_a_view_of_a_tensor(name, where):
    of_buffer, of_tensor = VIEWS[name]
    x = torch.arange(48.0).view(8, 6)
    if where == "input with an offset":
        x = torch.arange(55.0)[7:].view(8, 6)
    builder = PlanBuilder([(x.shape, x.dtype)])
    base = builder.inputs[0]
    if where in ("scratch", "result"):
        # so that the scratch block does not begin the allocation
        before = builder.empty((5,), torch.int64)
        base = builder.empty(x.shape, x.dtype)
        builder.compute(
            lambda _, source, target: target.copy_(source), before, builder.inputs[0], base
        )
    view = of_buffer(base)
    expected = of_tensor(x)
    out = builder.empty(view.shape, x.dtype)
    builder.compute(copy, view, out)
    results = [out, base] if where == "result" else [out]
    actual = builder.finish(results).run([x])[0]
    assert torch.equal(actual, expected)
    assert view.is_contiguous == expected.is_contiguous() or 0 in view.shape


def test_writing_to_a_view_leaves_the_rest_of_its_buffer():
    builder = PlanBuilder([((4, 2), torch.float32)])
    out = builder.empty((4, 6), torch.float32)
    builder.compute(lambda tensor: tensor.zero_(), out)
    builder.compute(copy, builder.inputs[0], out.slice(1, 2, 4))
    x = torch.randn(4, 2)
    (actual,) = builder.finish([out]).run([x])
    assert torch.equal(actual, torch.nn.functional.pad(x, (2, 2)))


def test_each_run_has_results_of_its_own():
    builder = PlanBuilder([((4,), torch.float32)])
    out = builder.empty((4,), torch.float32)
    builder.compute(copy, builder.inputs[0], out)
    plan = builder.finish([out, None])
    first, absent = plan.run([torch.ones(4)])
    second, _ = plan.run([torch.zeros(4)])
    assert absent is None
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4


def test_launches_of_no_program_are_left_out():
    kernel = SimpleNamespace(arg_names=["x", "number"])  # which cannot be launched
    builder = PlanBuilder([((0,), torch.float32)])
    builder.launch(Launch(kernel, (4, 0), {"number": 1}, {}), x=builder.inputs[0])
    plan = builder.finish([])
    assert plan.steps == ()
    assert plan.run([torch.empty(0)]) == []


@pytest.mark.parametrize(
    ("edges", "num_src", "num_dst"),
    [(0, 5, 0), (0, 5, 4), (0, 0, 3), (0, 0, 0)],
    ids=["no destinations", "no edges", "no sources", "no nodes"],
)
@pytest.mark.parametrize("form", ["raw", "embedded", "none"])
def test_an_empty_graph_runs_repeatedly(edges, num_src, num_dst, form, kernel_device):
    graph = GraphStructure.from_edge_index(
        torch.zeros(2, edges, dtype=torch.int64), (num_src, num_dst)
    )
    graph = graph.to(kernel_device)
    query = torch.randn(num_dst, 2, 4, device=kernel_device, requires_grad=True)
    key = torch.randn(num_src, 2, 4, device=kernel_device, requires_grad=True)
    operands = [query, key]
    features = {}
    if form == "raw":
        features["edge_attr"] = torch.randn(edges, 3, device=kernel_device, requires_grad=True)
        features["edge_weight"] = torch.randn(8, 3, device=kernel_device, requires_grad=True)
    elif form == "embedded":
        features["edge_attr"] = torch.randn(edges, 2, 4, device=kernel_device, requires_grad=True)
    operands += features.values()
    for _ in range(4):
        out, lse = edge_attention(query, key, key, graph, **features, config=KernelConfig("triton"))
        assert torch.equal(out, torch.zeros_like(query))
        assert bool(lse.isneginf().all())
        for gradient, operand in zip(
            torch.autograd.grad(out.sum(), operands), operands, strict=True
        ):
            assert torch.equal(gradient, torch.zeros_like(operand))
