"""Checks of the Triton kernels that need a real GPU, run by `benchmarks/check_gpu.py`.

Importing this package puts the package under test and the tests' oracle on the path. Without a GPU
it also switches on Triton's interpreter, so that most checks run there on small problems.
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
