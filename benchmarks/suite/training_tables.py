"""Tables of training steps of Anemoi's model families, from results of benchmarks/families.py.

A family may have been measured in several runs, at several commits. anemoi_gt's step is that of the
newest run with the variant. anemoi-models does not change with a commit of ours, so its step is the
fastest of all runs, on whatever machine of the same kind that was.
"""

import json
from typing import NamedTuple

from suite.results_files import RESULTS, FileFacts, sources
from suite.table import EMPTY, markdown

NONE, HIDDEN, FULL = "none", "hidden layers", "on"
MODES = (NONE, HIDDEN, FULL)  # activation checkpointing
# The modes of anemoi-models that a step is compared with: the first in which it fits. It cannot
# recompute hidden layers only.
COMPARED = {NONE: (NONE, FULL), HIDDEN: (NONE, FULL), FULL: (FULL,)}
GPUS_GB = (24, 40, 80, 141)
FITS = 0.95  # of the nominal memory; the allocator of PyTorch may need the rest
FORMS = ("eager", "blocks compiled", "compiled whole")
OURS, THEIRS = "anemoi_gt", "anemoi-models"

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
    kernels_ms: float | None
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
        kernels_ms=record.get("profile", {}).get("total_ms"),
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


def memory(theirs: Step | None, ours: Step | None) -> str:
    """Return the memory relative to a baseline with the same checkpointing, as 55%."""
    if theirs is None or ours is None or ours.gb is None or ours.mode != theirs.mode:
        return EMPTY
    return f"{ours.gb / theirs.gb:.0%}"


def family_table(*families: str, device: str = "h200") -> str:
    """Return all measured configurations of families, and where they come from."""
    header = ["checkpointing", "configuration", "ms", "GB", "kernels, ms", "faster", "memory"]
    header.append("commit")
    rows, used = [], []
    for family in families:
        steps = steps_of(family, device)
        for step in steps:
            row = [step.mode, step.name, "out of memory", EMPTY, EMPTY, EMPTY, EMPTY]
            if step.ms is not None:
                theirs = baseline(steps, step.mode) if step.library == OURS else None
                row = [step.mode, step.name, f"{step.ms:.1f}", f"{step.gb:.1f}"]
                row += [_or_empty(step.kernels_ms), faster(theirs, step), memory(theirs, step)]
            row.append(step.facts.commit)
            rows.append([FAMILIES[family], *row] if len(families) > 1 else row)
        used += [step.facts for step in steps]
    header = ["training step", *header] if len(families) > 1 else header
    return f"{markdown(header, rows)}\n\n{sources(used)}"


def mode_rows(family: str, device: str) -> list[list[str]]:
    """Return a row for each mode of a family: baseline, step, and the step from a CUDA graph.

    The step is eager where that was measured. Both steps of a row have the commit of the row.
    """
    steps = steps_of(family, device)
    rows = []
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
        rows.append(
            [
                FAMILIES[family],
                mode,
                f"{theirs.ms:.1f}" + ("" if theirs.mode == mode else "*"),
                f"{theirs.gb:.1f}",
                f"{step.ms:.1f}",
                f"{step.gb:.1f}",
                faster(theirs, step),
                memory(theirs, step),
                _or_empty(replayed.ms if replayed else None),
                faster(theirs, replayed),
                step.facts.commit,
            ]
        )
    return rows


def overview_table(device: str) -> str:
    """Return a row for each family and mode, beside the fastest step of anemoi-models."""
    header = ["training step", "checkpointing", "anemoi-models, ms", "GB", "anemoi_gt, ms", "GB"]
    header += ["faster", "memory", "CUDA graph, ms", "faster", "commit"]
    rows, used = [], []
    for family in FAMILIES:
        rows += mode_rows(family, device)
        used += [step.facts for step in steps_of(family, device)]
    return f"{markdown(header, rows)}\n\n{sources(used)}"


def fits_table() -> str:
    """Return the peak memory under `install` by family and mode, and the GPUs that have it."""
    rows, used = [], []
    for family, title in FAMILIES.items():
        steps = [s for s in steps_of(family, "h200") if s.library == OURS and s.gb]
        for mode in MODES:
            step = next((s for s in steps if s.mode == mode and not s.captured), None)
            if step is None:
                continue
            gpus = [str(gb) for gb in GPUS_GB if step.gb <= FITS * gb]
            rows.append([title, mode, f"{step.gb:.1f}", ", ".join(gpus)])
            used.append(step.facts)
    header = ["training step", "checkpointing", "peak, GB", "fits on GPUs with, GB"]
    return f"{markdown(header, rows)}\n\n{sources(used)}"


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


def _or_empty(value: float | None) -> str:
    return EMPTY if value is None else f"{value:.1f}"
