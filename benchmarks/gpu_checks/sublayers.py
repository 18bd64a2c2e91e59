"""Both sub-layers of a block, and the linear layer, over a corpus of norms, sizes and options."""

import multiprocessing
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from support import sublayers
from support.accuracy import Corpus

from anemoi_gt.ops.sublayer_tensors import (
    AttentionTensors,
    FeedForwardOptions,
    FeedForwardTensors,
    NormLinearOptions,
    NormLinearTensors,
    NormOptions,
)
from anemoi_gt.ops.triton_backend.attention_sublayer import attention_sublayer
from anemoi_gt.ops.triton_backend.feed_forward_sublayer import feed_forward_sublayer
from anemoi_gt.ops.triton_backend.norm_linear import norm_linear
from gpu_checks import DEVICE

# The reference materialises several tensors of batch x destinations x edges x width elements.
ODD = sublayers.Sizes(
    features=200,
    hidden=333,
    rows=1001,
    width=180,
    heads=6,
    edge_dim=11,
    edges=701,
    num_src=91,
    num_dst=77,
)
WIDE = ODD._replace(features=512, hidden=2048, rows=4100, width=512, heads=16)
WIDEST = WIDE._replace(features=1024, hidden=4096, width=1024, edge_dim=23)
# more features than are fused by default
BEYOND = WIDEST._replace(features=2048, hidden=2048, width=1536, rows=1100)
ALL_SIZES = (sublayers.SMALL, ODD, WIDE, WIDEST, BEYOND)
REPEATS = 3


class Task(NamedTuple):
    """All cases of a sub-layer in some sizes and a dtype."""

    sublayer: str  # a name in MAKERS
    sizes: sublayers.Sizes
    dtype: torch.dtype


def check(processes: int = 12) -> str:
    """Compare the errors of the corpora with plain PyTorch; check that runs are bitwise equal.

    Tasks run in several processes, because compilation dominates.
    """
    tasks = [
        Task(name, sizes, dtype)
        for name, sizes, dtype in product(MAKERS, ALL_SIZES, sublayers.DTYPES)
    ]
    with multiprocessing.get_context("spawn").Pool(
        processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        corpora = pool.map(errors_of, tasks, chunksize=1)
    verdicts = []
    for name, dtype in product(MAKERS, sublayers.DTYPES):
        total = Corpus()
        for task, corpus in zip(tasks, corpora, strict=True):
            if (task.sublayer, task.dtype) == (name, dtype):
                total.add_corpus(corpus)
        total.assert_accurate()
        worst = max(total.ours, key=total.over_plain)
        verdicts.append(f"{name} {dtype} {total.over_plain(worst):.2f} ({worst})")
    num_cases = sum(len(cases) for _, cases in MAKERS.values())
    worsts = ", ".join(verdicts)
    return (
        f"{len(ALL_SIZES) * num_cases} problems in each dtype, {REPEATS} runs of equal bits; worst "
        f"errors over plain PyTorch's: {worsts}"
    )


def errors_of(task: Task) -> Corpus:
    """Return the errors of a task."""
    corpus = Corpus()
    make, cases = MAKERS[task.sublayer]
    for number, case in enumerate(cases):
        ours, plain, named, grad = make(number, case, task.sizes, task.dtype)
        _add_errors(corpus, ours, plain, named, grad, task.dtype, str(case))
    return corpus


def run_some() -> None:
    """Run both passes of every third case on sizes that fill no tile, for compute-sanitizer."""
    for make, cases in MAKERS.values():
        for number in range(0, len(cases), 3):
            dtype = sublayers.DTYPES[number // 3 % len(sublayers.DTYPES)]
            ours, _, named, grad = make(number, cases[number], sublayers.SMALL, dtype)
            sublayers.results_of(ours, named, grad, torch.float32)


def _attention(number: int, case: dict, sizes: sublayers.Sizes, dtype: torch.dtype):
    """Return both implementations of an attention sub-layer, its tensors and a gradient."""
    named, grad, graph, edge_index, options = sublayers.draw_attention(
        DEVICE, seed=number, dtype=dtype, sizes=sizes, **case
    )

    def ours(named):
        return attention_sublayer(sublayers.fill(AttentionTensors, named), graph, options)

    plain = partial(sublayers.attention, edge_index=edge_index, options=options)
    return ours, plain, named, grad


def _feed_forward(number: int, case: dict, sizes: sublayers.Sizes, dtype: torch.dtype):
    """Return both implementations of a feed-forward sub-layer, its tensors and a gradient."""
    named, grad = sublayers.draw_feed_forward(DEVICE, seed=number, sizes=sizes, scaled=True, **case)
    keep_hidden = number % 2 == 0  # every second problem recomputes its hidden layer
    norm = NormOptions(sublayers.EPS, case["centred"])
    options = FeedForwardOptions(norm, case["activation"], dtype, keep_hidden)

    def ours(named):
        return feed_forward_sublayer(sublayers.fill(FeedForwardTensors, named), options)

    activation = case["activation"]
    plain = partial(sublayers.feed_forward, norm=norm, activation=activation)
    return ours, plain, named, grad


def _norm_linear(number: int, case: dict, sizes: sublayers.Sizes, dtype: torch.dtype):
    """Return both implementations of a linear layer, its tensors and a gradient."""
    # the widths of the case, of which some are odd, scaled
    scale = sizes.features // sublayers.SMALL.features
    widths = {name: case[name] * scale + case[name] % 2 for name in ("columns", "out_columns")}
    named, grad = sublayers.draw_norm_linear(DEVICE, seed=number, rows=sizes.rows, **case | widths)
    norm = NormOptions() if case["norm"] is None else NormOptions(sublayers.EPS, case["centred"])
    options = NormLinearOptions(norm, dtype)

    def ours(named):
        return norm_linear(sublayers.fill(NormLinearTensors, named), options)

    return ours, partial(sublayers.norm_linear, norm=norm), named, grad


def _add_errors(corpus, ours, plain, named, grad, dtype, case: str) -> None:
    """Check that repeated runs give equal bits, then add the errors of a case."""
    result = sublayers.results_of(ours, named, grad, torch.float32)
    for _ in range(REPEATS - 1):
        again = sublayers.results_of(ours, named, grad, torch.float32)
        different = [name for name in result if not torch.equal(result[name], again[name])]
        if different:
            raise AssertionError(f"another run gave different bits in {different}: {case}")
    exact = sublayers.results_of(plain, named, grad, torch.float64)
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        baseline = sublayers.results_of(plain, named, grad, torch.float32)
    corpus.add_errors(result, exact, baseline)


MAKERS = {
    "attention": (_attention, sublayers.ATTENTION_CASES),
    "feed-forward": (_feed_forward, sublayers.FEED_FORWARD_CASES),
    "linear": (_norm_linear, sublayers.NORM_LINEAR_CASES),
}
