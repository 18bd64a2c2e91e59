"""Both sub-layers of a block over a corpus of norms, conditions, activations, batches and halos."""

from functools import partial

import torch
from support import sublayers
from support.accuracy import Corpus

from anemoi_gt.ops.sublayer_tensors import (
    AttentionTensors,
    FeedForwardOptions,
    FeedForwardTensors,
)
from anemoi_gt.ops.triton_backend.attention_sublayer import attention_sublayer
from anemoi_gt.ops.triton_backend.feed_forward_sublayer import feed_forward_sublayer
from gpu_checks import DEVICE

ODD = sublayers.Sizes(
    features=200,
    hidden=333,
    rows=1001,
    width=180,
    heads=6,
    edge_dim=11,
    edges=3001,
    num_src=301,
    num_dst=257,
)
WIDE = sublayers.Sizes(
    features=512,
    hidden=2048,
    rows=4100,
    width=512,
    heads=16,
    edge_dim=11,
    edges=2900,
    num_src=300,
    num_dst=333,
)
WIDEST = WIDE._replace(features=1024, hidden=4096, width=1024, edge_dim=23)
REPEATS = 3


def check() -> str:
    """Judge the corpora by what plain PyTorch loses; repeated runs give equal bits."""
    sizes = (sublayers.SMALL, ODD, WIDE, WIDEST)
    verdicts = []
    for dtype in sublayers.DTYPES:
        for name, corpus_of in (("attention", attention), ("feed-forward", feed_forward)):
            corpus = Corpus()
            for size in sizes:
                corpus_of(corpus, size, dtype)
            corpus.assert_accurate()
            worst = max(corpus.ours, key=corpus.over_plain)
            verdicts.append(f"{name} {dtype} {corpus.over_plain(worst):.2f} ({worst})")
    count = len(sizes) * (len(sublayers.ATTENTION_CASES) + len(sublayers.FEED_FORWARD_CASES))
    worsts = ", ".join(verdicts)
    return f"{count} problems in each dtype, {REPEATS} runs of equal bits; worst errors: {worsts}"


def attention(corpus: Corpus, sizes: sublayers.Sizes, dtype: torch.dtype) -> None:
    """Add the errors of attention sub-layers of some sizes."""
    for number, case in enumerate(sublayers.ATTENTION_CASES):
        ours, plain, named, grad = _attention(number, case, sizes, dtype)
        _add_errors(corpus, ours, plain, named, grad, dtype, str(case))


def feed_forward(corpus: Corpus, sizes: sublayers.Sizes, dtype: torch.dtype) -> None:
    """Add the errors of feed-forward sub-layers of some sizes."""
    for number, case in enumerate(sublayers.FEED_FORWARD_CASES):
        ours, plain, named, grad = _feed_forward(number, case, sizes, dtype)
        _add_errors(corpus, ours, plain, named, grad, dtype, str(case))


def run_each_case() -> None:
    """Run both passes of each case once on sizes that fill no tile, for compute-sanitizer."""
    cases = [(_attention, case) for case in sublayers.ATTENTION_CASES]
    cases += [(_feed_forward, case) for case in sublayers.FEED_FORWARD_CASES]
    for number, (make, case) in enumerate(cases):
        dtype = sublayers.DTYPES[number % len(sublayers.DTYPES)]
        ours, _, named, grad = make(number, case, sublayers.SMALL, dtype)
        sublayers.results_of(ours, named, grad, torch.float32)


def _attention(number: int, case: dict, sizes: sublayers.Sizes, dtype: torch.dtype):
    """Return our function, plain PyTorch's, tensors and a gradient of an attention sub-layer."""
    named, grad, graph, edge_index, options = sublayers.draw_attention(
        DEVICE, seed=number, dtype=dtype, sizes=sizes, **case
    )

    def ours(named):
        return attention_sublayer(sublayers.fill(AttentionTensors, named), graph, options)

    plain = partial(sublayers.attention, edge_index=edge_index, options=options)
    return ours, plain, named, grad


def _feed_forward(number: int, case: dict, sizes: sublayers.Sizes, dtype: torch.dtype):
    """Return our function, plain PyTorch's, tensors and a gradient of a feed-forward sub-layer."""
    named, grad = sublayers.draw_feed_forward(DEVICE, seed=number, sizes=sizes, scaled=True, **case)
    options = FeedForwardOptions(sublayers.EPS, case["activation"], dtype)

    def ours(named):
        return feed_forward_sublayer(sublayers.fill(FeedForwardTensors, named), options)

    activation = case["activation"]
    plain = partial(sublayers.feed_forward, eps=sublayers.EPS, activation=activation)
    return ours, plain, named, grad


def _add_errors(corpus, ours, plain, named, grad, dtype, case: str) -> None:
    """Add the errors of a case, after repeated runs gave equal bits."""
    result = sublayers.results_of(ours, named, grad, torch.float32)
    for _ in range(REPEATS - 1):
        again = sublayers.results_of(ours, named, grad, torch.float32)
        different = [name for name in result if not torch.equal(result[name], again[name])]
        if different:
            raise AssertionError(f"another run gave other bits of {different}: {case}")
    exact = sublayers.results_of(plain, named, grad, torch.float64)
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        baseline = sublayers.results_of(plain, named, grad, torch.float32)
    corpus.add_errors(result, exact, baseline)
