"""The two tables of the README: training steps of Anemoi's models, and everything else."""

from suite.results_files import load
from suite.table import markdown
from suite.training_tables import FAMILIES, NONE, mode_rows

GIB = 2**30 / 1e9  # GB


def training_steps() -> str:
    """Training steps without activation checkpointing, on one H200."""
    rows = []
    for family in ("benchmark", "O96", "ensemble", "diffusion", "gnn"):
        rows.append([FAMILIES[family], *mode_rows(family, "h200")[NONE]])
    header = ["training step", "anemoi-models, ms", "GB", "anemoi_gt, ms", "GB", "faster"]
    return markdown([*header, "CUDA graph, ms", "faster"], rows)


def other_models() -> str:
    """Forecasts, a step at 9 km and PyG models, on one H200."""
    steps = {}
    for name, title in (("", "forecast step, N320"), ("0.9.3_", "encoder of AIFS Single")):
        for line in load(f"anemoi_inference_{name}h200.json")["results"]:
            if line["part"] in ("forecast", "encoder") and line["chunks"] == 1:
                measured = line["median_ms"], line["peak_gib"] * GIB
                steps.setdefault(title, {})[line["contender"]] = measured
    for line in load("train_9km_h200.json")["runs"]:
        if line["outcome"] == "done" and line["num_chunks"] == 8 and line["compiled"]:
            measured = 1000 * line["seconds"], line["peak_gb"]
            steps.setdefault("training step, 9 km", {})[line["contender"]] = measured
    for model, title in (
        ("UnifiedMessagePassing", "PyG, unified message passing"),
        ("TemporalEmbedding", "PyG, temporal embedding"),
    ):
        for contender, line in load("pyg_models_h200.json")["models"][model].items():
            if contender in ("pyg", "one graph"):
                measured = line["median_ms"], line["peak_gb"]
                steps.setdefault(title, {})[contender] = measured
    rows = []
    for title, by_contender in steps.items():
        ours = by_contender.get("install") or by_contender.get("anemoi_gt")
        ours = ours or by_contender["one graph"]
        (theirs,) = (measured for measured in by_contender.values() if measured != ours)
        times = [f"{value:.1f}" for value in (*theirs, *ours)]
        rows.append([title, *times, f"{theirs[0] / ours[0]:.2f}x"])
    return markdown(["", "baseline, ms", "GB", "anemoi_gt, ms", "GB", "faster"], rows)
