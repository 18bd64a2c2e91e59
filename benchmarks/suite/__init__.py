"""The benchmark suite: named problems, baselines, correctness checks and measurements.

Run by `benchmarks/run.py`, drawn by `benchmarks/report.py`. Importing this package makes the
package under test and the tests' oracle importable from the checkout.

Letters: N = nodes, E = edges, H = heads, C = channels per head, D = edge attributes, B = samples of
a batch.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
