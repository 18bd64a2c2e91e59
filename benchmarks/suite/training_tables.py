"""Tables of training steps of Anemoi's model families, from results of benchmarks/families.py.

A family may have been measured in several runs, at several commits. anemoi_gt's step is that of the
newest run with the variant. anemoi-models does not change with a commit of ours, so its step is the
fastest of all runs, on whatever machine of the same kind that was.
"""

import json
from statistics import median
from typing import NamedTuple

from suite.results_files import RESULTS, FileFacts, load, sources
from suite.table import EMPTY, markdown, of_processes

NONE, HIDDEN, FULL = "none", "hidden layers", "on"
MODES = (NONE, HIDDEN, FULL)  # activation checkpointing
# The modes of anemoi-models that a step is compared with: the first in which it fits. It cannot
# recompute hidden layers only.
COMPARED = {NONE: (NONE, FULL), HIDDEN: (NONE, FULL), FULL: (FULL,)}
FORMS = ("eager", "blocks compiled", "compiled whole")
OURS, THEIRS = "anemoi_gt", "anemoi-models"
NINE_KM = "train_9km_h200.json"
HOST_BOUND = "host_bound_h200.json"

FAMILIES = {  # cases of families.py, as pages name them
    "benchmark": "graph transformer, N320",
    "O96": "graph transformer, O96",
    "O32": "graph transformer, O32",
    "stretched": "stretched grid",
    "ensemble": "ensemble of 2",
    "ensemble of 4": "ensemble of 4",
    "diffusion": "diffusion",
    "transformer": "transformer",
    "aifs": "AIFS's architecture",
    "gnn": "graph network",
}


class Step(NamedTuple):
    """A measured training step; without `ms`, it runs out of memory."""

    library: str
    form: str
    mode: str
    captured: bool
    ms: float | None
    gb: float | None
    difference: dict[str, float]  # of loss and gradients from the untouched model, relative
    facts: FileFacts

    @property
    def name(self) -> str:
        """Library and form."""
        return f"{self.library}, {self.form}" + (", CUDA graph" if self.captured else "")


def step_of(name: str, record: dict, facts: FileFacts) -> Step | None:
    """Return a variant of families.py as a step; None if it has no step or is not told."""
    if "attention alone" in name or not ("median_ms" in record or "outcome" in record):
        return None
    mode = FULL
    if "no recomputation" in name:
        mode = NONE
    elif "hidden recomputed" in name:
        mode = HIDDEN
    return Step(
        library=THEIRS if name.startswith("untouched") else OURS,
        form=next((form for form in FORMS if form in name), FORMS[0]),
        mode=mode,
        captured=name.endswith("captured"),
        ms=record.get("median_ms"),
        gb=record.get("peak_gb"),
        difference=record.get("difference", {}),
        facts=facts,
    )


def steps_of(family: str, device: str) -> list[Step]:
    """Return the steps of a family on a device ("h200"), sorted as tables show them."""
    chosen = {}
    for facts, results in _runs(device):
        for case in results["cases"]:
            variants = case["variants"] if case["name"] == family else {}
            for name, record in variants.items():
                step = step_of(name, record, facts)
                if step is None:
                    continue
                if name not in chosen or _replaces(step, chosen[name]):
                    chosen[name] = step
    return sorted(
        chosen.values(),
        key=lambda step: (
            MODES.index(step.mode),
            step.library == OURS,
            FORMS.index(step.form),
            step.captured,
        ),
    )


def _replaces(step: Step, before: Step) -> bool:
    """Return whether a step of a newer run is told instead of the one before."""
    if step.library == OURS or before.ms is None:
        return True
    return step.ms is not None and step.ms < before.ms


def _runs(device: str) -> list[tuple[FileFacts, dict]]:
    """Return all runs of families.py on a device, the newest last."""
    runs = []
    for path in RESULTS.glob(f"families_*_{device}.json"):
        runs.append((FileFacts.of(path.name), json.loads(path.read_text())))
    return sorted(runs, key=lambda run: run[0].date)


def baseline(steps: list[Step], mode: str) -> Step | None:
    """Return the fastest step of anemoi-models that a mode is compared with, if one was timed."""
    for compared in COMPARED[mode]:
        timed = [s for s in steps if s.library == THEIRS and s.mode == compared and s.ms]
        if timed:
            return min(timed, key=lambda step: step.ms)
    return None


def faster(theirs: Step | None, ours: Step | None) -> str:
    """Return a speedup, as 1.32x."""
    if theirs is None or ours is None or ours.ms is None:
        return EMPTY
    return factor(theirs.ms / ours.ms)


def factor(ratio: float) -> str:
    """Return a factor with three digits."""
    return f"{ratio:.2f}x" if ratio < 10 else f"{ratio:.1f}x"


def family_table(family: str, device: str, *modes: str) -> str:
    """Return the measured configurations of a family in some modes, and where they come from."""
    rows = []
    steps = [step for step in steps_of(family, device) if step.mode in modes]
    for step in steps:
        row = [step.mode, step.name, "out of memory", EMPTY, EMPTY]
        if step.ms is not None:
            theirs = baseline(steps, step.mode) if step.library == OURS else None
            row = [step.mode, step.name, f"{step.ms:.1f}", f"{step.gb:.1f}", faster(theirs, step)]
        rows.append(row)
    header = ["checkpointing", "configuration", "ms", "GB", "faster"]
    return f"{markdown(header, rows)}\n\n{sources(step.facts for step in steps)}"


def mode_rows(family: str, device: str) -> dict[str, list[str]]:
    """Return cells by mode of a family: baseline, step, and the step from a CUDA graph.

    The step is eager where that was measured. Both steps of a row have one commit.
    """
    steps = steps_of(family, device)
    rows = {}
    for mode in MODES:
        ours = [s for s in steps if s.library == OURS and s.mode == mode and s.ms]
        theirs = baseline(steps, mode)
        launched = [s for s in ours if not s.captured]
        if theirs is None or not launched:
            continue
        step = launched[0]
        replayed = None
        for s in ours:
            if s.captured and (s.form, s.facts.commit) == (step.form, step.facts.commit):
                replayed = s
        rows[mode] = [
            f"{theirs.ms:.1f}" + ("" if theirs.mode == mode else "*"),
            f"{theirs.gb:.1f}",
            f"{step.ms:.1f}",
            f"{step.gb:.1f}",
            faster(theirs, step),
            f"{replayed.ms:.1f}" if replayed else EMPTY,
            faster(theirs, replayed),
        ]
    if (family, device) == ("O96", "h200"):
        rows[NONE] = launch_bound(rows[NONE])
    return rows


def launch_bound(cells: list[str]) -> list[str]:
    """Return the cells of O96 with times that depend on the host: medians of processes, ranges."""
    _, theirs_gb, _, ours_gb, *_ = cells
    (case,) = (case for case in load(HOST_BOUND)["cases"] if case["name"] == "O96")
    ours = "install, no recomputation"
    theirs, replayed, captured = (
        sorted(process[variant]["step"] for process in case["processes"])
        for variant in ("untouched, no recomputation", ours, f"{ours}, captured")
    )
    return [
        of_processes(theirs),
        theirs_gb,
        of_processes(replayed),
        ours_gb,
        f"{median(theirs) / median(replayed):.2f}x",
        of_processes(captured),
        f"{median(theirs) / median(captured):.2f}x",
    ]


def overview_table() -> str:
    """Return a row for each family and mode, beside the fastest step of anemoi-models."""
    header = ["training step", "checkpointing", "anemoi-models, ms", "GB", "anemoi_gt, ms", "GB"]
    header += ["faster", "CUDA graph, ms", "faster", "H100, ms", "faster"]
    rows, used = [], []
    for family, title in FAMILIES.items():
        of_h100 = mode_rows(family, "h100")
        for mode, cells in mode_rows(family, "h200").items():
            _, _, ms, _, gain, _, _ = of_h100.get(mode, [EMPTY] * 7)
            rows.append([title, mode, *cells, ms, gain])
            used += [s.facts for gpu in ("h200", "h100") for s in steps_of(family, gpu)]
    used.append(FileFacts.of(HOST_BOUND))
    return f"{markdown(header, rows)}\n\n{sources(used)}"


MESHES = {  # grid: its points, their spacing in km, refinement of the icosphere
    "O32": ("5,248", 310, 4),
    "O96": ("40,320", 100, 5),
    "benchmark": ("542,080", 30, 6),
}
STEPS = 100_000


def mesh_table() -> str:
    """Return GPU hours of training by grid and mesh, from the step replayed from a CUDA graph."""
    rows, used = [], []
    for family, (points, spacing, refinement) in MESHES.items():
        (step,) = (
            step
            for step in steps_of(family, "h200")
            if (step.library, step.form, step.mode, step.captured) == (OURS, FORMS[0], NONE, True)
        )
        used.append(step.facts)
        rows.append(mesh_row(points, spacing, refinement, step.ms))
    line = next(
        line
        for line in load(NINE_KM)["runs"]
        if (line.get("contender"), line.get("num_chunks"), line.get("compiled"))
        == ("anemoi_gt", 8, True)
    )
    used.append(FileFacts.of(NINE_KM))
    rows.append(mesh_row("6,599,680", 9, 7, 1000 * line["seconds"]))
    header = ["grid spacing, km", "points", "mesh: `refinement`", "nodes", "spacing, km"]
    header += ["ms a step", "GPU hours"]
    return f"{markdown(header, rows)}\n\n{sources(used)}"


def mesh_row(points: str, spacing: int, refinement: int, ms: float) -> list[str | int]:
    """Return a row: an icosphere has 10 * 4^refinement + 2 nodes, 7054 km / 2^refinement apart."""
    nodes = f"{10 * 4**refinement + 2:,}"
    hours = ms * STEPS / 3.6e6
    cells = [spacing, points, refinement, nodes, 5 * round(7054 / 2**refinement / 5)]
    return [*cells, f"{ms:.1f}", f"{hours:.1f}"]


def differences() -> str:
    """Return a sentence on the largest differences from untouched models."""
    compared = []
    for family in FAMILIES:
        for step in steps_of(family, "h200"):
            if step.library == OURS and step.difference:
                compared.append(step.difference)
    loss = max(difference["loss"] for difference in compared)
    gradients = max(difference["gradients"] for difference in compared)
    return (
        f"Losses differ from the untouched model by at most {loss:.1e}, gradients by "
        f"{gradients:.1e} of their norm (16-mixed)."
    )
