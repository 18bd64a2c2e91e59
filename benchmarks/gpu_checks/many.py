"""Many small problems, over processes because compilation dominates: random graphs, test matrix."""

import multiprocessing
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from support.accuracy import Corpus, assert_within
from support.batch import run_batch, share
from support.cases import full_cases, judge, pairwise_cases, run
from support.oracle import make_problem
from support.poison import poisoned_memory
from support.run import structure, with_hubs

from gpu_checks import DEVICE

FORMS = ("raw", "raw", "raw_without_bias", "embedded", "none")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, EDGE_DIMS = (1, 2, 3, 4, 6, 8, 16, 20), (1, 2, 3, 5, 8, 11, 17, 33)
CHANNELS = (1, 2, 3, 8, 10, 16, 24, 32, 40, 64, 65, 130)
CASES_PER_TASK = 8  # consecutive cases of the matrix, which share kernels
SHOWN = 5  # failures that are shown in full


@dataclass
class Outcome:
    """Results of some problems."""

    count: int = 0
    failures: list[str] = field(default_factory=list)
    corpora: dict[str, Corpus] = field(default_factory=dict)  # by dtype

    def add(self, other: "Outcome") -> None:
        """Add the results of other problems."""
        self.count += other.count
        self.failures += other.failures
        for dtype, corpus in other.corpora.items():
            self.corpora.setdefault(dtype, Corpus()).add_corpus(corpus)

    def verdict(self) -> str:
        """Raise if anything failed or nothing was checked, else return a summary."""
        if self.failures:
            shown = "; ".join(self.failures[:SHOWN])
            raise AssertionError(f"{len(self.failures)} of {self.count} failed: {shown}")
        worst = []
        for dtype, corpus in sorted(self.corpora.items()):
            corpus.assert_accurate()
            ratios = {name: corpus.over_plain(name) for name in corpus.ours}
            name = max(ratios, key=ratios.get)
            worst.append(f"{dtype} {ratios[name]:.2f} ({name})")
        summary = ", ".join(worst) or "per case"
        return f"{self.count} as accurate as plain PyTorch; worst RMS error over its: {summary}"


@dataclass(frozen=True)
class Configuration:
    """Seed of a shape, form and dtype, and the number of random graphs that share them."""

    seed: int
    graphs: int


def random_graphs(count: int, configurations: int, processes: int, seed: int) -> str:
    """Check `count` random graphs over sizes, forms, dtypes, batches and dropout."""
    configurations = min(configurations, count)
    tasks = []
    for i in range(configurations):
        graphs = count // configurations
        if i < count % configurations:
            graphs += 1
        tasks.append(Configuration(seed * 1_000_003 + i, graphs))
    return f"seed {seed}: {_over_processes(_random_configuration, tasks, processes).verdict()}"


def matrix(processes: int) -> str:
    """Check the full products of the test matrix; the pairwise table if kernels are interpreted."""
    cases = full_cases() if DEVICE.type == "cuda" else pairwise_cases()
    tasks = [cases[i : i + CASES_PER_TASK] for i in range(0, len(cases), CASES_PER_TASK)]
    return _over_processes(_matrix_cases, tasks, processes).verdict()


def _over_processes(work: Callable, tasks: Sequence, processes: int) -> Outcome:
    """Return the sum of the outcomes of `work` over all tasks."""
    total = Outcome()
    if processes == 1:
        for task in tasks:
            total.add(work(task))
        return total
    with multiprocessing.get_context("spawn").Pool(
        processes, initializer=torch.set_num_threads, initargs=(1,)
    ) as pool:
        for outcome in pool.imap_unordered(work, tasks):
            total.add(outcome)
    return total


def _matrix_cases(cases: list) -> Outcome:
    outcome = Outcome()
    for case in cases:
        outcome.count += 1
        corpus = outcome.corpora.setdefault(str(case.dtype).removeprefix("torch."), Corpus())
        try:
            with poisoned_memory():
                results = run(case, "triton", DEVICE)
            judge(case, results)
            corpus.add_errors(*results[:3])
        except Exception as error:
            outcome.failures.append(f"{case}: {error}")
    return outcome


def _random_configuration(configuration: Configuration) -> Outcome:
    rng, outcome = random.Random(configuration.seed), Outcome()
    shape = rng.choice(HEADS), rng.choice(CHANNELS), rng.choice(EDGE_DIMS)
    form, dtype, dropout_p = rng.choice(FORMS), rng.choice(DTYPES), rng.choice((0.0, 0.0, 0.4))
    # the latter two: nodes with more than 8 or 16 edges are hubs
    segment = rng.choice((None, None, 4, 8))
    corpus = outcome.corpora.setdefault(str(dtype).removeprefix("torch."), Corpus())
    for number in range(configuration.graphs):
        outcome.count += 1
        try:
            with poisoned_memory():
                results = _random_graph(rng, shape, form, dtype, dropout_p, segment)
            assert_within(*results, dtype)
            corpus.add_errors(*results[:3])
        except Exception as error:
            facts = f"seed {configuration.seed} graph {number} {shape} {form} {dtype} "
            facts += f"{dropout_p=} {segment=}"
            outcome.failures.append(f"{facts}: {error}")
    return outcome


def _random_graph(
    rng: random.Random,
    shape: tuple,
    form: str,
    dtype: torch.dtype,
    dropout_p: float,
    segment: int | None,
) -> tuple:
    edges = _random_edges(rng)
    samples = [
        make_problem(edges, *shape, form, dtype, rng.getrandbits(40))
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    samples = share(samples, "edge_weight", "edge_bias", *rng.choice(([], ["edge_attr"])))
    graph = with_hubs(structure(edges, DEVICE), segment)
    return run_batch(samples, graph, "triton", dropout_p=dropout_p, seed=rng.getrandbits(40))


def _random_edges(rng: random.Random) -> tuple:
    """Draw up to 24 nodes and 120 edges: spread, hubs, few, fixed in-degree; sorted or not."""
    num_src, num_dst = rng.randint(1, 24), rng.randint(1, 24)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    degree = rng.choice((0, 0, 0, 0, 1, 3))  # 0: of any degree
    num_edges = degree * num_dst or rng.choice((0, 1, rng.randint(2, 16), rng.randint(17, 120)))
    # the fourth power crowds into hubs
    places = torch.rand(2, num_edges, generator=generator) ** rng.choice((1, 1, 4))
    edge_index = (places * torch.tensor([[num_src], [num_dst]])).long()
    if degree:
        edge_index[1] = torch.arange(num_edges) % num_dst
    if rng.random() < 0.5:
        edge_index = edge_index[:, edge_index[1].argsort(stable=True)]
    return edge_index, (num_src, num_dst)
