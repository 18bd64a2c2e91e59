"""Accuracy of the attention against the float64 oracle, over the corpus of the tests, as a table.

    python benchmarks/accuracy.py --output benchmarks/results/accuracy_cpu.json
    on a GPU:        python benchmarks/accuracy.py --backend triton --output outputs/h200.json
    without a GPU:   TRITON_INTERPRET=1 python benchmarks/accuracy.py --backend triton --device cpu

For each result and dtype, the table has the RMS error relative to the RMS value, and relative to
the RMS error of plain PyTorch in the same dtype. Errors beyond the criterion of the tests raise an
error, and nothing is written.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from suite import environment
from suite.page_tables import ERRORS, errors
from support.accuracy import Corpus
from support.corpus import DTYPES, corpus
from support.run import attend


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--output", type=Path, help="JSON file for the errors")
    parser.add_argument("--commit", help="to record if git is not available")
    return parser.parse_args(arguments)


def measure(backend: str, device: str, commit: str | None) -> dict:
    """Measure the errors of a backend by dtype and result; return them with the environment.

    Raises
    ------
    AssertionError
        If a result does not meet the criterion.
    """
    by_dtype = {}
    for dtype in DTYPES:
        checked = Corpus()
        for problem, graph in corpus(dtype, device):
            checked.add(attend(problem, graph, backend), problem)
        checked.assert_accurate()
        errors_of_dtype = {}
        for name in ERRORS:
            errors_of_dtype[name] = {
                "relative": checked.relative_error(name),
                "over_plain": checked.over_plain(name),
            }
        by_dtype[str(dtype).removeprefix("torch.")] = errors_of_dtype
    packages = {"torch", "triton"} if backend == "triton" else {"torch"}
    facts = environment.describe(device, packages, commit)
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return {
        "environment": facts,
        "backend": backend,
        "interpreted": interpreted,
        "errors": by_dtype,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure the errors, write them, and print the table."""
    options = parse(arguments)
    measured = measure(options.backend, options.device, options.commit)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(measured, indent=1) + "\n")
    print(errors(measured))


if __name__ == "__main__":
    main()
