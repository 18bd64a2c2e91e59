"""Steps and forecasts that depend on the host: calls launched and replayed, in fresh processes.

    python benchmarks/host_bound.py O96 gnn --processes 5 --output outputs/host_bound.json
    python benchmarks/host_bound.py benchmark --processes 1

On a small grid the GPU waits for Python, whose speed differs between machines and between processes
of one machine. So each process measures all variants of a model of `families.py` by turns, and the
table has the median of the processes and their range, in ms:

    step        forward, backward and AdamW, without recomputation
    one thread  the same, with backward on the calling thread, as `InstallCallback` makes it
    forecast    forward without gradients
    random      a step beside allocations of random sizes, so that few addresses recur

`gnn` is measured on O96 too. Losses are compared with the untouched model's first.
"""

import json
import statistics
import subprocess
import sys

import torch
from families import add_model_options, case_of, make_training, start_report
from suite.anemoi_training import CASES, PRECISIONS
from suite.command_line import make_parser
from suite.results import Results
from suite.table import EMPTY, markdown
from suite.timing import seconds_of

UNTOUCHED = "untouched, no recomputation"
LAUNCHED, REPLAYED = "install, no recomputation, launched", "install, no recomputation"
VARIANTS = (UNTOUCHED, LAUNCHED, REPLAYED, REPLAYED + ", captured")
TASKS = ("step", "one thread", "forecast", "random")
OF_UNTOUCHED = TASKS[:2]
TOLERANCE = 5e-2


def measure(case, options) -> dict[str, dict[str, float]]:
    """Return the median ms of each task by variant, in this process."""
    training = make_training(case, options)
    generator = torch.Generator().manual_seed(0)
    held = []

    def forecast():
        with torch.no_grad():
            training.loss(training.batch)

    def random():
        sizes = torch.randint(2**8, 2**24, (6,), generator=generator).tolist()
        held.extend(torch.empty(size, device=options.device) for size in sizes)
        del held[:-9]
        training.step()

    def times_of(call) -> list[float]:
        for _ in range(options.warmup):
            call()
        return [1e3 * time for time in seconds_of(call, options.repeats, options.device)]

    def on_one_thread():
        with torch.autograd.set_multithreading_enabled(mode=False):
            training.step()

    calls = {
        "step": training.step,
        "one thread": on_one_thread,
        "forecast": forecast,
        "random": random,
    }
    times: dict[str, dict[str, list]] = {name: {task: [] for task in TASKS} for name in VARIANTS}
    losses = {}
    for turn in range(options.rounds):
        for name in VARIANTS[:: 1 if turn % 2 == 0 else -1]:
            is_captured = name.endswith("captured")
            if is_captured and options.device == "cpu":
                continue
            if options.steps_only and name in (UNTOUCHED, VARIANTS[-1]):
                continue
            with training.computing(name):
                losses[name] = training.step().item()
                for task, call in calls.items():
                    if is_captured and task != "step":
                        continue
                    if name == UNTOUCHED and task not in OF_UNTOUCHED:
                        continue
                    times[name][task] += times_of(call)
                held.clear()
    first = next(iter(losses.values()))
    if not all(abs(loss - first) <= TOLERANCE * abs(first) for loss in losses.values()):
        raise ValueError(f"nothing is timed that is not right, got losses {losses}")
    return {
        name: {task: statistics.median(ms) for task, ms in by_task.items() if ms}
        for name, by_task in times.items()
        if any(by_task.values())
    }


def in_process(name: str, arguments: list[str]) -> dict:
    """Measure a case in a process of its own."""
    command = [sys.executable, __file__, name, "--worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the process of {name} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(processes: list[dict]) -> str:
    """Return the median and the range over processes, and relative to the untouched step."""
    rows = []
    for name in processes[0]:
        row = [name]
        for task in TASKS:
            values = sorted(process[name][task] for process in processes if task in process[name])
            cell = EMPTY
            if values:
                cell = f"{statistics.median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"
            row.append(cell)
        share = EMPTY
        if UNTOUCHED in processes[0]:
            shares = sorted(
                process[name]["step"] / process[UNTOUCHED]["step"] for process in processes
            )
            share = f"{statistics.median(shares):.2f} ({shares[0]:.2f} to {shares[-1]:.2f})"
        rows.append([*row, share])
    return markdown(["variant", *TASKS, "step / untouched"], rows)


def main(arguments=None) -> None:
    """Measure each case in fresh processes; print the tables and write the report."""
    parser = make_parser(
        __doc__, seconds=540, variables=100, warmup=6, repeats=10, processes=5, rounds=1
    )
    add_model_options(parser)
    parser.add_argument("--precision", choices=PRECISIONS, default="16-mixed")
    parser.add_argument("--mapper-chunks", type=int, help="default: as in the YAML")
    parser.add_argument("--steps-only", action="store_true", help="launched and replayed alone")
    parser.add_argument("--worker", action="store_true", help="of one process: print its times")
    options = parser.parse_args(arguments)
    if options.worker:
        (name,) = options.cases
        print(json.dumps(measure(sized(name, options), options)))
        return
    worker_arguments = list(sys.argv[1:] if arguments is None else arguments)
    for name in options.cases:
        worker_arguments.remove(name)
    results = Results(start_report(options) | {"cases": []}, options.output, options.seconds)
    for name in options.cases:
        record = {"name": name, "case": sized(name, options)._asdict(), "processes": []}
        results.report["cases"].append(record)
        for number in range(options.processes):
            times = results.run(
                f"{name} {number}", lambda name=name: in_process(name, worker_arguments)
            )
            if times is not None:
                record["processes"].append(times)
                print(name, number, times, flush=True)
        if record["processes"]:
            print(f"\n{name}: {record['case']}\n{table(record['processes'])}", flush=True)
    results.end()


def sized(name: str, options):
    """Return a case; a graph network has O96, too."""
    case = case_of(CASES[name], options)
    return (
        case._replace(grid="O96", refinement=5) if name == "gnn" and options.grid is None else case
    )


if __name__ == "__main__":
    main()
