"""Cases of the accuracy matrix: graph, shape, dtype, form and option, run and checked.

On a CPU, where the interpreter is slow, the matrix is a pairwise table; on a GPU it is the full
product.
"""

from dataclasses import dataclass
from itertools import cycle, product

import torch

from support.accuracy import assert_within
from support.batch import run_batch, share
from support.graphs import GRAPHS, HUBS
from support.oracle import make_problem
from support.pairwise import pairwise
from support.run import structure, with_hubs

BATCHES = ("batch_shares_attributes", "batch_of_attributes")
# options with only one incoming gradient
GRADIENTS = {
    "only_out_has_a_gradient": ["grad_out"],
    "only_lse_has_a_gradient": ["grad_lse"],
}
COLUMNS = {
    "shape": ((1, 1), (4, 16), (6, 10), (16, 64), (3, 40)),  # heads, channels
    "edge_dim": (1, 3, 11, 17),
    "dtype": (torch.float32, torch.bfloat16, torch.float16),
    "form": ("raw", "raw_without_bias", "embedded", "none"),
    "option": ("plain", "dropout", *BATCHES, *GRADIENTS),
}
LOSS_SCALE = 256.0  # for float16, as in training
DROPOUT = 0.3
SEED = 5


@dataclass(frozen=True)
class Case:
    """A row of the matrix."""

    shape: tuple[int, int]
    edge_dim: int
    dtype: torch.dtype
    form: str
    option: str
    graph: str
    segment: int | None = None  # edges of a segment of hubs

    def __str__(self):
        heads, channels = self.shape
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.graph}-{heads}x{channels}-{self.edge_dim}-{self.form}-{dtype}-{self.option}"


def pairwise_cases():
    """Return cases with every pair of values of two columns, and every graph at least twice."""
    names = cycle(GRAPHS)
    return [Case(**row, graph=next(names)) for row in pairwise(**COLUMNS)]


def full_cases():
    """Return every combination of options with graphs in turn, and every graph in every form and dtype."""
    names = cycle(GRAPHS)
    cases = []
    for values in product(*COLUMNS.values()):
        row = dict(zip(COLUMNS, values, strict=True))
        # other forms have no attributes
        if row["form"].startswith("raw") or row["edge_dim"] == COLUMNS["edge_dim"][0]:
            cases.append(Case(**row, graph=next(names)))
    for graph, form, dtype in product(GRAPHS, COLUMNS["form"], COLUMNS["dtype"]):
        cases.append(Case((6, 10), 11, dtype, form, "plain", graph))
    return cases


def run(case, backend, device):
    """Run a case and compute its references."""
    graph = with_hubs(structure((GRAPHS | HUBS)[case.graph], device), case.segment)
    arriving = GRADIENTS.get(case.option, ["grad_out", "grad_lse"])
    dropout_p = DROPOUT if case.option == "dropout" else 0.0
    return run_batch(
        problems(case), graph, backend, seed=SEED, dropout_p=dropout_p, arriving=arriving
    )


def judge(case, judged):
    """Assert that a case meets the accuracy criterion."""
    __tracebackhide__ = True
    try:
        assert_within(*judged, case.dtype)
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def problems(case):
    """Return the problems of a case, one per element of its batch."""
    scale = LOSS_SCALE if case.dtype == torch.float16 else 1.0
    edges = (GRAPHS | HUBS)[case.graph]
    samples = []
    for seed in range(2 if case.option.startswith("batch") else 1):
        sample = make_problem(edges, *case.shape, case.edge_dim, case.form, case.dtype, seed)
        sample.grad_out *= 0.0 if case.option == "only_lse_has_a_gradient" else scale
        sample.grad_lse *= 0.0 if case.option == "only_out_has_a_gradient" else scale
        samples.append(sample)
    shared = ["edge_weight", "edge_bias"]
    if case.option == "batch_shares_attributes":
        shared.append("edge_attr")
    return share(samples, *shared)
