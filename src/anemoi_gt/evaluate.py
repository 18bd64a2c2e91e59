"""The evaluation application, `anemoi-gt evaluate checkpoint=FILE`: scores, plots and rollouts of a model.

The config of the run is read from the checkpoint and can be overridden on the command line.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from anemoi_gt import hydra_app
from anemoi_gt.distributed import is_launched
from anemoi_gt.distributed.sharded_checkpoint import require_file
from anemoi_gt.option_checks import check_integer
from anemoi_gt.training.checkpoint import load_checkpoint
from anemoi_gt.training.config import cpu_threads
from anemoi_gt.training.metrics_log import read_metrics
from anemoi_gt.training.score_report import write_report, write_rollout_report

log = logging.getLogger(__name__)


def prepare(config: "hydra_app.DictConfig") -> Callable[[], None]:
    """Build the checkpoint's model and data, and return the evaluation as a function."""
    check_integer("rollout", config.rollout)
    hydra_app.check_explain(config.explain)
    run, step = hydra_app.build_trained(config)
    if config.rollout > 1:
        run.splits.test.advance(0, [])  # raise before scoring if there are no rollouts
    log.info("%s, after step %s", config.checkpoint, step)
    if config.explain is not None:
        with torch.no_grad():
            hydra_app.write_explanation(run.model, run.splits.test, run.training, config.explain)
    return partial(evaluate, run, Path(config.checkpoint), hydra_app.output_folder(), config.rollout)


def evaluate(run: hydra_app.Run, checkpoint: Path, folder: Path, steps: int) -> None:
    """Write scores and plots, also of the metrics beside the checkpoint, to an existing folder.

    The run is from `build_trained`. Rollouts have `steps` steps; 1 disables them.
    """
    with cpu_threads(run.training.threads):
        write_report(folder, run.model, run.splits.test, read_metrics(checkpoint.parent / "metrics.jsonl"))
        if steps > 1:
            write_rollout_report(folder, run.model, run.splits.test, steps)


def launch_on_checkpoint(name: str, prepare: Callable[["hydra_app.DictConfig"], Callable[[], Any]]) -> None:
    """Run a Hydra application on the config of the checkpoint that the command line names."""

    def choose_config() -> str:
        if is_launched():
            raise ValueError(f"{name} runs in one process, without torchrun: anemoi-gt {name} ...")
        given = [argument for argument in sys.argv if argument.startswith("checkpoint=")]
        if given:  # --help needs none; otherwise Hydra reports it as missing
            value = hydra_app.argument_value(given, "checkpoint")
            if not isinstance(value, str):
                raise ValueError(
                    f"checkpoint must name one file, got {given[-1]!r}; quote names with spaces or special characters "
                    "twice: \"checkpoint='run (1)/best.pt'\""
                )
            path = Path(value)
            require_file(path)
            hydra_app.store_config(load_checkpoint(path).get("config"), path)
        return name

    hydra_app.launch(name, prepare, choose_config)


def main() -> None:
    """Run the application with the arguments of the command line."""
    launch_on_checkpoint("evaluate", prepare)


if __name__ == "__main__":
    main()
