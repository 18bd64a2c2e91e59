"""The training application, `python -m anemoi_gt.train`: trains what Hydra configs describe, or goes on training it.

`--help` lists the configs.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from anemoi_gt.application import (
    ERRORS_OF_PREPARATION,
    build,
    build_data,
    build_model,
    check_backend,
    check_types,
    describe,
    instantiate,
    launch,
    output_folder,
    stop,
)
from anemoi_gt.distributed import ShardingConfig, by_first_rank, is_launched, of_first_rank, started
from anemoi_gt.distributed.checkpoint import load_values
from anemoi_gt.distributed.folder import ONE_PROCESS, TORCHRUN, checkpoint_to_continue
from anemoi_gt.distributed.meeting import code_in_use, meeting
from anemoi_gt.distributed.model import scatter_model
from anemoi_gt.distributed.training import check_samples, cpu_group, divide_trainer, train_on_ranks
from anemoi_gt.distributed.watch import leave
from anemoi_gt.training import Trainer
from anemoi_gt.training.checkpoint import load_checkpoint, load_weights
from anemoi_gt.training.device import choose_device, cpu_threads
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.report import write_report
from anemoi_gt.training.stop import Stopped
from anemoi_gt.training.trainer import BEST, LAST

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

MAY_DIFFER = ("attention.", "data.path", "training.device", "training.threads")  # where and how fast a run computes
RANKS_MAY_DIFFER = (
    "data.path",
    "training.device",
    "training.threads",
    "attention.backend",
)  # what comes of it is compared


def prepare(config: "DictConfig") -> Callable[[], float]:
    """Make what Hydra composed; returns the training of it."""
    check_types("sharding", config.sharding)
    if is_launched():
        return partial(train_together, config)
    if instantiate(config.sharding).strategy != "none":
        raise ValueError(
            f"sharding={config.sharding.strategy} must be started on several ranks: "
            "torchrun --nproc-per-node=NUMBER -m anemoi_gt.train ..."
        )
    folder, description = output_folder(), describe(config)
    state = former_state(folder, config.resume, description)
    run = build(config)
    trainer = Trainer(run.model, run.splits, run.training, folder, description)
    if state is not None:
        trainer.load_state_dict(state)
        log.info("continues after step %d", trainer.learner.step)
    return partial(train, trainer)


def former_state(folder: Path, resume: bool, description: dict) -> dict | None:
    """Return the checkpoint to continue from, None to begin.

    Parameters
    ----------
    folder : Path
        The run's.
    resume : bool
        True continues from `last.pt` where there is one, False begins and wants a folder without.
    description : dict
        The config as plain values.

    Raises
    ------
    ValueError
        If the folder holds a run that is not to be continued, or one of torchrun or another config.
    """
    path = checkpoint_to_continue(folder / LAST, ONE_PROCESS, resume=resume)
    if path is None:
        return None
    state = load_checkpoint(path)
    refuse_changes(path, state.get("config", {}), description)
    return state


def refuse_changes(path: Path, before: dict, now: dict) -> None:
    """Raise a ValueError unless a checkpoint's config is that of the run which is to continue it, but for `MAY_DIFFER`."""
    changes = list(differences(before, now))
    if changes:
        raise ValueError(f"a run is continued with its own config, {path} was written with {'; '.join(changes)}")


def differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Yield what differs between two configs, as sentences; what says where or how fast a run computes may differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now and not key.startswith(MAY_DIFFER):
        yield f"{key}={before}, not {now}"


def train(trainer: Trainer) -> float:
    """Train, score and draw; everything goes to the trainer's folder.

    Parameters
    ----------
    trainer : Trainer
        New, or with the state of the run that it continues.

    Returns
    -------
    float
        The lowest validation loss.
    """
    splits, folder = trainer.splits, trainer.folder
    parameters = sum(parameter.numel() for parameter in trainer.learner.model.parameters())
    log.info("%d parameters, %d nodes, %d training samples", parameters, len(splits.train.nodes), len(splits.train))
    start = time.perf_counter()
    with MetricsFile(folder / "metrics.jsonl", until=trainer.learner.step) as metrics:
        trainer.fit(metrics)
    log.info("trained %.0f s on %s", time.perf_counter() - start, trainer.device)
    with cpu_threads(trainer.config.threads):
        write_report(folder, trainer.best_model(), splits.test, metrics.records)
    return trainer.best_loss


def train_together(config: "DictConfig") -> float | None:
    """Train on all ranks that torchrun started; the first leaves what `train` leaves, and `last` in place of `last.pt`.

    Parameters
    ----------
    config : DictConfig
        The same on all ranks.

    Returns
    -------
    float or None
        The lowest validation loss; None on a rank that is not the first.
    """
    try:
        sharding = instantiate(config.sharding)
        with started(sharding, choose_device(config.training.device).type) as mesh:
            folder, run = Path(of_first_rank(str(output_folder()))), build(config)
            trainer = Trainer(copy.deepcopy(run.model), run.splits, run.training, folder, describe(config))
            records = train_on_ranks(trainer, mesh, sharding, resumes=config.resume)
            if records is None:
                return None
            model = run.model.to(trainer.device)
            load_weights(model, load_checkpoint(folder / BEST))
            with cpu_threads(run.training.threads):
                write_report(folder, model.eval(), run.splits.test, records)
            return trainer.best_loss
    except ERRORS_OF_PREPARATION as error:
        stop("anemoi_gt.train", error)


def main() -> None:
    """Run the application with the arguments of the command line."""
    if is_launched() and os.environ["RANK"] != "0":  # Hydra's folder and log are the first rank's
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    launch("train", prepare)


if __name__ == "__main__":
    main()
