"""Command line of the benchmarks that write their results with `suite.results`."""

import argparse
from pathlib import Path

import torch


def make_parser(
    description: str, *, seconds: float, **defaults: int | float | str
) -> argparse.ArgumentParser:
    """Return a parser of device, time limit, commit, results file and typed options."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="after which nothing more is begun"
    )
    parser.add_argument("--commit", help="to record if git is not available")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    return parser
