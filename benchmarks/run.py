r"""Edge attention of anemoi_gt and baselines: one process each, one measurement at a time.

    python benchmarks/run.py                                          default problems and baselines
    python benchmarks/run.py --problems n320 host --baselines anemoi_gt anemoi --output \
        benchmarks/results/h200.json
    python benchmarks/run.py --list                                   problems and baselines

Times are medians of whole calls. benchmarks/report.py makes tables and plots of the results file.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from suite import baselines, environment, lower_bound, problems, results, schedule


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--problems", nargs="+", help="names or groups; by default, all that the device supports"
    )
    parser.add_argument(
        "--baselines",
        nargs="+",
        choices=baselines.NAMES,
        help="by default, all that run on the device",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--commit", help="to record if git is not available")
    parser.add_argument("--list", action="store_true", help="list problems by group, and baselines")
    options = parser.parse_args(arguments)
    options.problems = options.problems or problems.DEFAULT[options.device]
    options.baselines = options.baselines or baselines.DEFAULT[options.device]
    return options


def report(chosen: list[problems.Problem], done: schedule.Run, options: argparse.Namespace) -> dict:
    """Return a run as a report."""
    names = options.baselines
    packages = {package for name in names for package in baselines.load(name).PACKAGES}
    described = {}
    for problem in chosen:
        counts = done.sizes[str(problem.graph)]
        facts = asdict(problem) | {"graph": str(problem.graph), "sizes": counts}
        facts["bytes"] = {
            kind: lower_bound.compulsory_bytes(problem, counts, kind) for kind in problem.passes
        }
        described[problem.name] = facts
    run_environment = environment.describe(options.device, packages, options.commit)
    return {
        "environment": run_environment | {"copy_bytes_per_second": done.copy_speeds},
        "baselines": {name: baselines.load(name).TITLE for name in names},
        "problems": described,
        "results": done.results,
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the problems and baselines that the command line selects."""
    options = parse(arguments)
    if options.list:
        for problem in problems.PROBLEMS.values():
            print(f"{problem.group:16} {problem.name}")
        print("baselines", *baselines.NAMES)
        return
    chosen = problems.select(options.problems)
    with tempfile.TemporaryDirectory() as folder:

        def save(done: schedule.Run) -> None:
            if options.output:
                results.write(report(chosen, done, options), options.output)

        schedule.run(chosen, tuple(options.baselines), options.device, Path(folder), save)


if __name__ == "__main__":
    main()
