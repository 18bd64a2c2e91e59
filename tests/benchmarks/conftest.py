"""The benchmark suite is no part of the package: it is imported from the checkout. And what its tests share."""

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))


@pytest.fixture
def tiny():
    """A function that makes problems which every peer does in no time."""
    from suite.problems import Problem, Random

    def make(name="tiny", **changes):
        sizes = {"heads": 2, "channels": 8, "edge_dim": 3, "dtype": "float32"}
        return Problem(name, "tiny", Random(9, 7, 30), **(sizes | changes))

    return make


@pytest.fixture
def drawn():
    """A function that returns the operands of a problem on the CPU."""
    from suite import graphs, operands

    def make(problem, tmp_path):
        graphs.build([problem.graph], tmp_path)
        return operands.draw(problem, graphs.load(problem.graph, tmp_path))

    return make


@pytest.fixture
def results():
    """A results file of two peers on two problems, with round numbers."""
    problems, lines, passes = {}, [], ["forward", "forward_backward"]
    for name, scale in (("encoder-x-c64", 1), ("processor-x-c64", 2)):
        flops, nbytes = (dict.fromkeys(passes, count) for count in (4 * 10**9 * scale, 2 * 10**9))
        facts = {"name": name, "group": "x", "channels": 64, "passes": passes, "flops": flops, "bytes": nbytes}
        problems[name] = facts | {"graph": name, "sizes": [1, 1, 1]}
        line = {"problem": name, "pass": "forward", "calls": 10, "peak_bytes": None, "bytes_per_second": 1.0}
        lines.append(line | {"peer": "ours", "median_ms": 4.0, "quartiles_ms": [3.9, 4.1]})
    lines.append(lines[0] | {"peer": "pyg", "median_ms": 12.0})
    lines.append({"problem": "processor-x-c64", "pass": "forward", "peer": "pyg", "reason": "out of memory"})
    where = {"device": "Abacus", "versions": {"torch": "2"}, "commit": "abc", "date": "today"}
    return {
        "environment": where | {"copy_bytes_per_second": [0.9e12, 1e12]},
        "peers": {"ours": "anemoi_gt", "pyg": "PyG"},
        "problems": problems,
        "results": lines,
    }
