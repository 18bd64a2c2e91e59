"""Training curves of the application with the two backends, against the spread of two seeds.

    python benchmarks/training_curves.py --era5 FILE --output benchmarks/results/training_curves_h200.txt
    python benchmarks/training_curves.py --data sphere --steps 20 --precisions bf16-mixed --processes 1

For every data set and precision, two seeds are trained with the backend torch and two with triton. The backends agree
within noise when the curves of one seed are nearer to each other than those of two seeds.
"""

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import torch
from suite.environment import describe

from anemoi_gt.training.metrics_log import read_metrics

BACKENDS, SEEDS = ("torch", "triton"), (0, 1)
WARM_UP = 50  # steps


def train(folder: Path, run: tuple[str, str, str, int], options: argparse.Namespace) -> list[dict]:
    """Train once; returns the records of the run."""
    data, precision, backend, seed = run
    out = folder / f"{data}_{precision}_{backend}_{seed}"
    overrides = [
        f"data={data}", f"training.precision={precision}", f"attention/backend={backend}", f"training.seed={seed}",
        f"training.steps={options.steps}", f"training.warmup_steps={min(WARM_UP, options.steps)}",
        f"hydra.run.dir={out}",
    ]  # fmt: skip
    if data == "era5_uk":
        overrides.append(f"data.path={options.era5}")
    result = subprocess.run([sys.executable, "-m", "anemoi_gt.train", *overrides], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{run}: {result.stdout[-2000:]}{result.stderr[-2000:]}")
    return read_metrics(out / "metrics.jsonl")


def curve(records: list[dict], split: str) -> torch.Tensor:
    """Losses on the samples of `split`, in the order of steps."""
    return torch.tensor([record["loss"] for record in records if record["split"] == split])


def apart(a: list[dict], b: list[dict]) -> float:
    """RMS distance of two training curves."""
    return (curve(a, "train") - curve(b, "train")).square().mean().sqrt().item()


def report(data: str, precision: str, runs: dict) -> list[str]:
    """Lines on one data set and precision, the verdict last."""
    of = {(backend, seed): runs[data, precision, backend, seed] for backend in BACKENDS for seed in SEEDS}
    lines = [f"{data} {precision}"]
    for (backend, seed), records in of.items():
        losses = " ".join(f"{loss:.4f}" for loss in curve(records, "valid").tolist())
        lines.append(f"  {backend:6s} seed {seed} valid {losses}")
    backends = [apart(of["torch", seed], of["triton", seed]) for seed in SEEDS]
    seeds = [apart(of[backend, SEEDS[0]], of[backend, SEEDS[1]]) for backend in BACKENDS]
    verdict = "PASS" if max(backends) < min(seeds) else "FAIL"
    figures, spread = (", ".join(f"{distance:.4f}" for distance in found) for found in (backends, seeds))
    return [*lines, f"  {verdict} triton - torch, by seed: {figures}; seed 0 - seed 1, by backend: {spread}"]


def main(arguments: list[str] | None = None) -> int:
    """Train, compare, write; 1 if the backends are farther apart than the seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", default=["sphere", "era5_uk"])
    parser.add_argument("--precisions", nargs="+", default=["bf16-mixed", "16-mixed"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--era5", type=Path, help="GRIB file of data=era5_uk")
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--commit", help="to record if git is not available")
    options = parser.parse_args(arguments)
    keys = list(product(options.data, options.precisions, BACKENDS, SEEDS))
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        runs = dict(zip(keys, pool.map(lambda run: train(Path(folder), run, options), keys), strict=True))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = describe(device, {"torch", "triton", "torch-geometric"}, options.commit)
    lines = [f"{name}: {value}" for name, value in about.items()]
    lines += [f"{options.steps} steps; validation losses; below, RMS distances between training curves", ""]
    for data, precision in product(options.data, options.precisions):
        lines += report(data, precision, runs)
    text = "\n".join(lines)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")
    return int("FAIL" in text)


if __name__ == "__main__":
    sys.exit(main())
