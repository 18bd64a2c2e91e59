"""The training application, `python -m anemoi_gt.train`: puts a run together from Hydra configs, and runs it.

The only place that reads configs. The groups are in `anemoi_gt.configs`; `--help` lists them.
"""

import logging
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from anemoi_gt.config import AttentionConfig
from anemoi_gt.data.datasets import Splits
from anemoi_gt.extras import import_extra
from anemoi_gt.ops.backends import choose_backend
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.device import choose_device, cpu_threads
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.report import write_report

if TYPE_CHECKING:
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

NEEDED = ("hydra", "tqdm", "matplotlib", "scipy")  # asked for at the start, not after an hour of training


class Run(NamedTuple):
    """What a config describes."""

    splits: Splits
    model: nn.Module
    training: TrainingConfig


def build(config: "DictConfig") -> Run:
    """Make the objects that a config describes.

    Parameters
    ----------
    config : DictConfig
        With the groups attention, data, graph, model and training.

    Returns
    -------
    Run
        The model is on the CPU, with weights drawn from `training.seed`.

    Raises
    ------
    ValueError, TypeError, ImportError, OSError
        When a part of the config cannot be made; whatever its maker raised.
    """
    training = instantiate(config.training)
    attention = instantiate(config.attention)
    check_backend(attention, choose_device(training.device))
    splits = instantiate(config.data)
    graph = instantiate(config.graph)(splits.train.nodes)
    torch.manual_seed(training.seed)
    make_model = instantiate(config.model)
    model = make_model(graph, splits.train.in_channels, splits.train.out_channels, config=attention)
    return Run(splits, model, training)


def instantiate(config: "DictConfig"):
    """Make an object from its config, and raise what its maker raises instead of Hydra's wrapping of it."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(config)
    except InstantiationException as error:
        raise (error.__cause__ or error) from None


def check_backend(attention: AttentionConfig, device: torch.device) -> None:
    """Raise a ValueError now, not in the first step, when the attention backend cannot run on this device."""
    choose_backend(attention.backend, torch.empty(1, 1, 1, 16, device=device))


def train(run: Run, folder: Path, description: dict) -> float:
    """Train, score and draw.

    Parameters
    ----------
    run : Run
        From `build`.
    folder : Path
        Where checkpoints, metrics, scores and the picture go; it exists.
    description : dict
        The config as plain values, kept in the checkpoints.

    Returns
    -------
    float
        The lowest validation loss.
    """
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    log.info(
        "%d parameters, %d nodes, %d training samples", parameters, len(run.splits.train.nodes), len(run.splits.train)
    )
    trainer = Trainer(run.model, run.splits, run.training, folder, description)
    start = time.perf_counter()
    with MetricsFile(folder / "metrics.jsonl") as metrics:
        trainer.fit(metrics)
    log.info("trained %.0f s on %s", time.perf_counter() - start, trainer.device)
    with cpu_threads(run.training.threads):
        write_report(folder, trainer.best_model(), run.splits.test, metrics.records)
    return trainer.best_loss


def run_config(config: "DictConfig") -> float:
    """Run what Hydra composed; what the user can mend ends with one sentence and exit status 1."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        run = build(config)
        description = OmegaConf.to_container(config, resolve=True)
    except (ValueError, TypeError, ImportError, OSError) as error:
        stop(error)
    try:
        return train(run, folder, description)
    except (FloatingPointError, OSError) as error:
        stop(error)


def stop(error: Exception) -> None:
    """Exit with the error as one sentence; the traceback goes to the log at DEBUG level (`hydra.verbose=true`)."""
    log.debug("where it happened", exc_info=error)
    sys.exit(f"anemoi_gt.train: {error}")


def quote_null(argument: str) -> str:
    """Quote the null of `attention/precision=null`: Hydra refuses a bare one where it wants the name of a choice."""
    return re.sub(r"^(\+?attention/precision(?:@[\w.]+)?)=null$", r"\1='null'", argument)


def main() -> None:
    """Run the application with the arguments of the command line."""
    try:
        hydra, *_ = (import_extra(module, "train") for module in NEEDED)
    except ImportError as error:
        stop(error)
    sys.argv[1:] = [quote_null(argument) for argument in sys.argv[1:]]
    hydra.main(version_base="1.3", config_path="pkg://anemoi_gt.configs", config_name="train")(run_config)()


if __name__ == "__main__":
    main()
