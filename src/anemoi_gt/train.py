"""The training application, `python -m anemoi_gt.train`: trains what Hydra configs describe, or goes on training it.

`--help` lists the configs.
"""

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anemoi_gt.application import build, describe, launch, output_folder
from anemoi_gt.training import Trainer
from anemoi_gt.training.checkpoint import load_checkpoint
from anemoi_gt.training.device import cpu_threads
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.report import write_report
from anemoi_gt.training.trainer import LAST

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

MAY_DIFFER = ("attention.", "data.path", "training.device", "training.threads")  # where and how fast a run computes


def prepare(config: "DictConfig") -> Callable[[], float]:
    """Make what Hydra composed; returns the training of it."""
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
        If the folder holds a run that is not to be continued, or one of another config.
    """
    if not isinstance(resume, bool):
        raise ValueError(f"resume must be true or false, got {resume!r}")
    path = folder / LAST
    if not path.exists():
        return None
    if not resume:
        raise ValueError(f"{folder} holds a run: resume=true continues it, another hydra.run.dir begins a new one")
    state = load_checkpoint(path)
    changes = list(differences(state.get("config", {}), description))
    if changes:
        raise ValueError(f"a run is continued with its own config, {path} was written with {'; '.join(changes)}")
    return state


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


def main() -> None:
    """Run the application with the arguments of the command line."""
    launch("train", prepare)


if __name__ == "__main__":
    main()
