"""Checks of the Triton kernels that take a real GPU, run by `benchmarks/check_gpu.py`.

Importing this package makes the package under test and the tests' oracle importable from the
checkout, and lets Triton interpret where there is no GPU, so that every check that can be is tried
there in small.
"""

import os
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is imported

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
