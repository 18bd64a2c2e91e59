"""Checks of the Triton kernels on a real GPU: print PASS or FAIL for each, and write a log.

    python benchmarks/check_gpu.py --all --grids O32:3 O320:6 --log benchmarks/results/check_gpu.log
    python benchmarks/check_gpu.py --random 10000 --processes 14
    python benchmarks/check_gpu.py --repeat --stream --sync

Without a GPU, some checks run on small problems in Triton's interpreter, to test the checks
themselves.
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from gpu_checks import (
    DEVICE,
    application,
    execution,
    large,
    many,
    model,
    names,
    package,
    replays,
    sanitize,
    sublayers,
)
from gpu_checks.report import Report

NEED_GPU = {
    "stream",
    "sync",
    "replays",
    "inference",
    "training",
    "waiting",
    "compiled",
    "names",
    "package",
    "application",
    "sanitize",
    "sublayers",
}
SIMPLE = {
    "repeat": (execution.repeat, "runs give the same bits 100 times"),
    "stream": (execution.stream, "a second stream"),
    "sync": (execution.no_synchronisation, "no host synchronisation"),
    "replays": (replays.check, "plans that replay themselves, whatever happens beside them"),
    "inference": (
        model.forward_in_graph,
        "a captured forward pass of a model replayed on new fields",
    ),
    "training": (model.step_in_graph, "a captured training step of a model replayed on new fields"),
    "waiting": (model.step_never_waits, "no host synchronisation in the training step of a model"),
    "compiled": (model.compiled, "a model under torch.compile, modes default and reduce-overhead"),
    "names": (
        names.kernel_names,
        "kernels of a profile, eager and compiled, are those that explain names",
    ),
    "package": (
        package.models_and_layers,
        "packages of models and layers in processes without this library",
    ),
    "application": (
        application.exported_and_loaded,
        "anemoi-gt export, and the loaders of the example",
    ),
    "big": (large.beyond_32_bits, "offsets beyond 2^31; takes about 80 GB"),
    "norms": (
        large.norm_beyond_32_bits,
        "norms of features beyond 2^32 elements; takes about 30 GB",
    ),
    "sanitize": (sanitize.check, "compute-sanitizer memcheck and racecheck"),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="every check but --random and --grids, which need a number",
    )
    for name, (_, summary) in SIMPLE.items():
        parser.add_argument(f"--{name}", action="store_true", help=summary)
    parser.add_argument(
        "--matrix",
        action="store_true",
        help="the full products of the test matrix against the oracle",
    )
    parser.add_argument(
        "--sublayers",
        action="store_true",
        help="both sub-layers of a block over a corpus, against float64, and runs of equal bits",
    )
    parser.add_argument(
        "--random", type=int, default=0, metavar="N", help="N random graphs against the oracle"
    )
    parser.add_argument(
        "--configurations",
        type=int,
        default=280,
        help="of --random: shapes, forms, dtypes to compile",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --random")
    parser.add_argument(
        "--grids", nargs="*", default=[], metavar="GRID:REFINEMENT", help='weather graphs, "O32:3"'
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(12, os.cpu_count() or 1),
        help="of --random, --matrix and --sublayers",
    )
    parser.add_argument("--log", type=Path, help="file for the lines that are printed")
    parser.add_argument("--commit", help="to log if git is not available")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the selected checks; return 1 if any failed."""
    options = parse(arguments)
    report = Report(options.log, options.commit)
    checks = {}
    for name, (check, _) in SIMPLE.items():
        if options.all or getattr(options, name):
            checks[name] = check
    if options.grids:
        checks["grids"] = partial(large.weather_graphs, options.grids)
    if options.all or options.sublayers:
        checks["sublayers"] = partial(sublayers.check, options.processes)
    if options.all or options.matrix:
        checks["matrix"] = partial(many.matrix, options.processes)
    if options.random:
        sizes = options.random, options.configurations, options.processes, options.seed
        checks["random"] = partial(many.random_graphs, *sizes)
    if "sanitize" in checks:  # last, since it then reuses kernels that others compiled
        checks["sanitize"] = checks.pop("sanitize")
    for name, check in checks.items():
        if name in NEED_GPU and DEVICE.type != "cuda":
            report.line(f"---- {name}: needs a GPU")
        else:
            report.run(name, check)
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
