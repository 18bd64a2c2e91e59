"""Both sub-layers of a block, and the linear layer, over a corpus of norms, sizes and options."""

import multiprocessing
from itertools import product
from typing import NamedTuple

import torch
from support import networks, sublayers
from support.accuracy import Corpus
from support.formulas import CASES, DRAW, Problem, results_of

from gpu_checks import DEVICE

NAMES = ("attention", "feed-forward", "linear")


class Size(NamedTuple):
    """Sizes of all problems."""

    attention: sublayers.Sizes
    rows: int  # of the others
    hidden: int  # of a feed-forward sub-layer

    @property
    def features(self) -> int:
        """Of all of them."""
        return self.attention.features


# The reference materialises several tensors of batch x destinations x edges x width elements.
ODD = sublayers.Sizes(
    features=200, width=180, heads=6, edge_dim=11, edges=701, num_src=91, num_dst=77
)
WIDE = ODD._replace(features=512, width=512, heads=16)
WIDEST = WIDE._replace(features=1024, width=1024, edge_dim=23)
# more features than are fused by default
BEYOND = WIDEST._replace(features=2048, width=1536)
SMALL = Size(sublayers.SMALL, rows=13, hidden=40)
ALL_SIZES = (
    SMALL,
    Size(ODD, rows=1001, hidden=333),
    Size(WIDE, rows=4100, hidden=2048),
    Size(WIDEST, rows=4100, hidden=4096),
    Size(BEYOND, rows=1100, hidden=2048),
)
REPEATS = 3


class Task(NamedTuple):
    """All cases of a sub-layer in some sizes and a dtype."""

    sublayer: str  # one of NAMES
    size: Size
    dtype: torch.dtype


def check(processes: int = 12) -> str:
    """Compare the errors of the corpora with plain PyTorch; check that runs are bitwise equal.

    Tasks run in several processes, because compilation dominates.
    """
    tasks = [
        Task(name, size, dtype) for name, size, dtype in product(NAMES, ALL_SIZES, sublayers.DTYPES)
    ]
    with multiprocessing.get_context("spawn").Pool(
        processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        corpora = pool.map(errors_of, tasks, chunksize=1)
    verdicts = []
    for name, dtype in product(NAMES, sublayers.DTYPES):
        total = Corpus()
        for task, corpus in zip(tasks, corpora, strict=True):
            if (task.sublayer, task.dtype) == (name, dtype):
                total.add_corpus(corpus)
        total.assert_accurate()
        worst = max(total.ours, key=total.over_plain)
        verdicts.append(f"{name} {dtype} {total.over_plain(worst):.2f} ({worst})")
    num_cases = sum(len(CASES[name]) for name in NAMES)
    worsts = ", ".join(verdicts)
    return (
        f"{len(ALL_SIZES) * num_cases} problems in each dtype, {REPEATS} runs of equal bits; worst "
        f"errors over plain PyTorch's: {worsts}"
    )


def errors_of(task: Task) -> Corpus:
    """Return the errors of a task."""
    corpus = Corpus()
    for number, case in enumerate(CASES[task.sublayer]):
        problem = _draw(task.sublayer, number, case, task.size, task.dtype)
        _add_errors(corpus, problem, task.dtype, str(case))
    return corpus


def run_some() -> None:
    """Run both passes of every third case on sizes that fill no tile, for compute-sanitizer."""
    for name in NAMES:
        for number in range(0, len(CASES[name]), 3):
            dtype = sublayers.DTYPES[number // 3 % len(sublayers.DTYPES)]
            results_of(_draw(name, number, CASES[name][number], SMALL, dtype))


def _draw(name: str, number: int, case: dict, size: Size, dtype: torch.dtype) -> Problem:
    """Return a problem of a size; its dtype takes the place of the case's."""
    case = {option: value for option, value in case.items() if option != "dtype"}
    if name == "attention":
        case = case | {"sizes": size.attention}
    else:
        case = case | {"sizes": networks.SIZES._replace(rows=size.rows, features=size.features)}
    if name == "feed-forward":
        case["hidden"] = size.hidden
    if name == "linear":  # the widths of the case, of which some are odd, scaled
        scale = size.features // networks.SIZES.features
        for width in ("columns", "out_columns"):
            case[width] = case[width] * scale + case[width] % 2
    return DRAW[name](DEVICE, dtype, seed=number, **case)


def _add_errors(corpus: Corpus, problem: Problem, dtype: torch.dtype, case: str) -> None:
    """Check that repeated runs give equal bits, then add the errors of a case."""
    result = results_of(problem)
    for _ in range(REPEATS - 1):
        again = results_of(problem)
        different = [name for name in result if not torch.equal(result[name], again[name])]
        if different:
            raise AssertionError(f"another run gave different bits in {different}: {case}")
    exact = results_of(problem, torch.float64, problem.plainly)
    with torch.autocast(DEVICE.type, dtype, enabled=dtype != torch.float32):
        baseline = results_of(problem, None, problem.plainly)
    corpus.add_errors(result, exact, baseline)
