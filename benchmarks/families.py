"""Training steps of Anemoi's model families, untouched and under `install`: time and memory.

    python benchmarks/families.py --list
    python benchmarks/families.py benchmark ensemble diffusion --output outputs/families.json
    python benchmarks/families.py ensemble --members 4 --variants "untouched*" "install*captured"
    python benchmarks/families.py benchmark --compile-mode max-autotune --variants "*whole*"
    python benchmarks/families.py O96 --configs FOLDER --channels 32 --layers 2 --device cpu

Models are built from Anemoi's own YAML: `config/model` of the installed anemoi-training, or
FOLDER/model. A case is a family with sizes; options override the sizes of all cases. A step
consists of forward and backward under autocast, GradScaler, and AdamW, which is fused on a GPU.

All variants of a case share one model and one process. In each round, all variants take turns, and
every second round is in reverse order. Before a variant is timed for the first time, its loss and
gradients are compared with the untouched model; a variant that differs is reported and not timed.
A variant that runs out of memory is reported as well, and the others continue.

    ms          median time of a whole step, including synchronisation
    host ms     median time until the call of a step returns
    kernels     ms of GPU kernels per step, by group; on a CPU, ms of operators
    GB          peak memory; for a captured step, peak during capture (a replay allocates nothing)
    loss, gradients   relative difference from the untouched model
"""

import fnmatch
import gc
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from kernel_families import GROUPS, profile_of
from suite import command_line
from suite.anemoi_training import (
    CASES,
    PACKAGES,
    PRECISIONS,
    VARIANTS,
    Case,
    Training,
    find_configs,
)
from suite.environment import describe
from suite.results import Results
from suite.timing import CLOCKS

REFERENCES = ("untouched", "untouched, blocks compiled", "untouched, compiled whole")
DEFAULT_VARIANTS = [name for name in VARIANTS if "attention alone" not in name]
FEWEST, MOST = 3, 50  # measured steps of a variant in a round
OUT_OF_MEMORY = "out of memory"


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, is an out-of-memory error."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or OUT_OF_MEMORY in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def unless_out_of_memory(call):
    """Call a function; return `OUT_OF_MEMORY` if it runs out of memory."""
    try:
        return call()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return OUT_OF_MEMORY


def free_memory() -> None:
    """Release the memory of earlier variants."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reference_of(training: Training, results: Results, record: dict):
    """Return loss and gradients of the first untouched variant that fits, or None."""
    for name in REFERENCES:

        def gradients(name=name):
            with training.computing(name):
                return training.gradients()

        reference = results.run(f"reference {name}", partial(unless_out_of_memory, gradients))
        free_memory()
        if reference is None:
            return None
        if reference != OUT_OF_MEMORY:
            record["reference"] = name
            return reference
    record["reference"] = f"none: every untouched form runs {OUT_OF_MEMORY}"
    print(record["reference"], flush=True)
    return None


def difference(training: Training, reference) -> dict[str, float]:
    """Return the relative differences between loss and gradients and a reference.

    Raises
    ------
    ValueError
        If they exceed the tolerance.
    """
    expected_loss, expected = reference
    loss, gradients = training.gradients()
    if gradients.keys() != expected.keys():
        missing = sorted(gradients.keys() ^ expected.keys())
        raise ValueError(f"the same parameters must get gradients, these do not: {missing}")
    squares, differences = 0.0, 0.0
    for name, gradient in expected.items():
        squares += gradient.square().sum().item()
        differences += (gradients[name] - gradient).square().sum().item()
    off = {
        "loss": abs(loss - expected_loss) / abs(expected_loss),
        "gradients": (differences / squares) ** 0.5,
    }
    limit = 1e-4 if training.dtype is None else 5e-2
    if not all(value < limit for value in off.values()):
        raise ValueError(f"nothing is timed that is not right; allowed {limit}, got {off}")
    return off


def time_steps(training: Training, warmup: int, seconds: float) -> dict:
    """Return step times and call times in ms, the peak memory in GB, and the final loss scale."""
    on_gpu = training.device.type == "cuda"
    wait = CLOCKS[training.device.type].synchronize
    for number in range(warmup):
        # A replay allocates nothing; the peak is reached during capture, at the first step.
        if on_gpu and number == (0 if training.captured else warmup - 1):
            torch.cuda.reset_peak_memory_stats()
        training.step()
    wait()
    steps, calls = [], []
    deadline = time.perf_counter() + seconds
    while len(steps) < FEWEST or (len(steps) < MOST and time.perf_counter() < deadline):
        begin = time.perf_counter()
        training.step()
        calls.append(1e3 * (time.perf_counter() - begin))
        wait()
        steps.append(1e3 * (time.perf_counter() - begin))
    peak_gb = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
    # A lower scale means that steps were skipped.
    scale = training.scaler.get_scale()
    return {"ms": steps, "host_ms": calls, "peak_gb": peak_gb, "scale": scale}


def measure(training: Training, name: str, options, reference, *, is_first: bool) -> dict:
    """Compare a variant with the reference, profile it and time it; later rounds only time it."""
    record = {}
    with training.computing(name):
        if is_first and reference is not None:
            record["difference"] = difference(training, reference)
        training.restart()
        record |= time_steps(training, options.warmup, options.variant_seconds)
        if is_first:
            kind = training.device.type
            steps = 3 if kind == "cuda" else 1
            record["profile"] = profile_of(training.step, steps, CLOCKS[kind].synchronize, kind)
    return record


def add_round(variants: dict, name: str, record: dict) -> None:
    """Add the results of a round to the results of a variant."""
    total = variants.setdefault(name, {"rounds": []})
    total["rounds"].append({key: record.pop(key) for key in ("ms", "host_ms", "peak_gb", "scale")})
    total |= record
    rounds = total["rounds"]
    total["median_ms"] = statistics.median([ms for one_round in rounds for ms in one_round["ms"]])
    total["host_ms"] = statistics.median(
        [ms for one_round in rounds for ms in one_round["host_ms"]]
    )
    total["peak_gb"] = None
    if rounds[0]["peak_gb"] is not None:
        total["peak_gb"] = max(one_round["peak_gb"] for one_round in rounds)


def make_training(case: Case, options, seed: int = 0) -> Training:
    """Build the model of a case with the options of the command line."""
    return Training(
        case,
        options.configs or find_configs(),
        device=options.device,
        precision=options.precision,
        variables=options.variables,
        mapper_chunks=options.mapper_chunks,
        seed=seed,
    )


def run_case(case: Case, options, results: Results, record: dict) -> None:
    """Measure all variants of a case."""
    training = make_training(case, options)
    record["sizes"] = training.sizes
    variants = record["variants"] = {}
    reference = reference_of(training, results, record)
    if reference is None and not record.get("reference"):
        return  # it failed, which is among the problems
    training.compile_mode = options.compile_mode
    left = list(options.variants)
    for number in range(options.rounds):
        for name in left if number % 2 == 0 else left[::-1]:
            call = partial(measure, training, name, options, reference, is_first=number == 0)
            measured = results.run(f"{record['name']}, {name}", partial(unless_out_of_memory, call))
            free_memory()
            if measured == OUT_OF_MEMORY:
                variants[name] = {"outcome": OUT_OF_MEMORY}
            elif measured is not None:
                add_round(variants, name, measured)
                print(row(name, variants[name]), flush=True)
        left = [name for name in left if "median_ms" in variants.get(name, {})]


HEADER = (
    f"| variant | ms | host ms | kernels | {' | '.join(GROUPS)} | GB | loss | gradients |\n"
    f"|---|{'---|' * (len(GROUPS) + 6)}"
)


def row(name: str, record: dict) -> str:
    """Return the table row of a variant."""
    if "outcome" in record:
        return f"| {name} | {record['outcome']} |{' |' * (len(GROUPS) + 5)}"
    profile = record["profile"]
    cells = [f"{record['median_ms']:.1f}", f"{record['host_ms']:.1f}", f"{profile['total_ms']:.1f}"]
    cells += [f"{ms:.1f}" for ms in profile["groups_ms"].values()]
    cells.append("" if record["peak_gb"] is None else f"{record['peak_gb']:.1f}")
    off = record.get("difference")
    cells += ["not compared"] * 2 if off is None else [f"{value:.1e}" for value in off.values()]
    return f"| {name} | {' | '.join(cells)} |"


def table(record: dict) -> str:
    """Return a case as a table."""
    lines = [f"\n{record['name']}: {record['case']}", HEADER]
    lines += [row(name, variant) for name, variant in record["variants"].items()]
    return "\n".join(lines)


def matching_variants(patterns: list[str]) -> list[str]:
    """Return the variants whose names match a pattern, in the original order.

    Raises
    ------
    ValueError
        If a pattern matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(VARIANTS, pattern):
            raise ValueError(f"variants must match names of {', '.join(VARIANTS)}, got {pattern!r}")
    matching = []
    for name in VARIANTS:
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns):
            matching.append(name)
    return matching


def add_model_options(parser) -> None:
    """Add the options that select models: cases, and overrides of their sizes."""
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    add_size_options(parser)


def add_size_options(parser) -> None:
    """Add the folder of Anemoi's YAML, and overrides of the sizes of a case."""
    parser.add_argument(
        "--configs", type=Path, help="folder that holds model/, the YAML of Anemoi's models"
    )
    for name, kind in Case.__annotations__.items():
        is_text = name in ("family", "grid", "area_grid", "hidden")
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=str if is_text else int,
            help=f"of all cases ({kind})",
        )


def check_cases(parser, options) -> None:
    """Exit with a message if a case is unknown."""
    unknown = set(options.cases) - CASES.keys()
    if unknown:
        parser.error(f"a CASE must be one of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")


def case_of(case: Case, options) -> Case:
    """Return a case with the sizes from the command line."""
    values = {field: getattr(options, field) for field in Case._fields}
    changes = {field: value for field, value in values.items() if value is not None}
    return case._replace(**changes)


def start_report(options) -> dict:
    """Return a report with the environment and the options."""
    facts = describe(options.device, PACKAGES, options.commit)
    return {"environment": facts, "options": vars(options) | {"output": None}}


def make_parser():
    """Return the parser of the command line."""
    parser = command_line.make_parser(__doc__, seconds=540, variables=100, rounds=2, warmup=4)
    add_model_options(parser)
    parser.add_argument("--list", action="store_true", help="print cases and variants")
    parser.add_argument("--mapper-chunks", type=int, help="default: as in the YAML")
    parser.add_argument("--precision", choices=PRECISIONS, default="16-mixed")
    parser.add_argument(
        "--variants", nargs="+", metavar="PATTERN", default=DEFAULT_VARIANTS, help="see --list"
    )
    parser.add_argument(
        "--variant-seconds", type=float, default=3.0, help="of measured steps in a round"
    )
    parser.add_argument(
        "--compile-mode",
        help="of torch.compile, such as max-autotune; to capture, max-autotune-no-cudagraphs",
    )
    return parser


def main(arguments=None) -> dict | None:
    """Measure the cases, print their tables, and write and return the report."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(f"{name}: {case}" for name, case in CASES.items()))
        print("\n".join(VARIANTS))
        return None
    check_cases(parser, options)
    options.variants = matching_variants(options.variants)
    results = Results(start_report(options) | {"cases": []}, options.output, options.seconds)
    for name in options.cases or ["benchmark"]:
        case = case_of(CASES[name], options)
        record = {"name": name, "case": case._asdict()}
        results.report["cases"].append(record)
        print(f"\n{name}: {case}\n{HEADER}", flush=True)
        results.run(name, partial(run_case, case, options, results, record))
        free_memory()
        if "variants" in record:
            print(table(record), flush=True)
    return results.end()


if __name__ == "__main__":
    main()
