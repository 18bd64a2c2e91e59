"""Loggers of a run besides `metrics.jsonl`, through their own packages.

    tensorboard    events in the folder `tensorboard` of the run
    mlflow         a run on the server and in the experiment of MLflow's own settings, the variables
                   MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME; a run that continues is the same
                   run there, by the id in `mlflow_run`

Numbers are named split/number, such as train/loss and valid/loss, by step.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from anemoi_gt.app.training.run_files import MetricsFile, atomic_write
from anemoi_gt.app.training.run_folder import METRICS, flatten
from anemoi_gt.app.training.trainer import Trainer
from anemoi_gt.extras import import_extra

log = logging.getLogger(__name__)

Record = Mapping[str, int | float | str]
LogRecord = Callable[[Record], None]
MLFLOW_RUN = "mlflow_run"


def import_logger(name: str | None) -> None:
    """Import the package of a logger; raise ImportError if it is missing."""
    if name is not None:
        import_extra(name, name)


@contextmanager
def open_metrics(trainer: Trainer) -> Iterator[MetricsFile]:
    """Open the metrics of a run in its folder, and the logger of its config, for `fit`.

    Raises OSError if the logger cannot begin.
    """
    step = trainer.step.global_step
    path = trainer.folder / METRICS
    with (
        open_logger(trainer.config.logger, trainer.folder, trainer.description, step) as log_record,
        MetricsFile(path, until=step, log_record=log_record) as metrics,
    ):
        yield metrics


def open_logger(
    name: str | None, folder: Path, description: Mapping[str, Any], step: int
) -> AbstractContextManager[LogRecord | None]:
    """Return a context with a function that logs a record of `metrics.jsonl`, or with None.

    Parameters
    ----------
    name : {"tensorboard", "mlflow"}, optional
    folder : Path
        The folder of the run.
    description : dict
        The config, for the parameters of a run of MLflow.
    step : int
        The step from which the run continues, or 0.
    """
    if name == "tensorboard":
        return _tensorboard(folder, step)
    if name == "mlflow":
        return _mlflow(folder, description)
    return nullcontext()


def numbers_of(record: Record) -> dict[str, float]:
    """Return the numbers of a record by name.

    Examples
    --------
    >>> numbers_of({"split": "train", "step": 2, "time": "2026-01-01T00:00:00Z", "loss": 0.5})
    {'train/loss': 0.5}
    """
    numbers = {}
    for name, value in record.items():
        if name != "step" and not isinstance(value, str):
            numbers[f"{record['split']}/{name}"] = float(value)
    return numbers


@contextmanager
def _tensorboard(folder: Path, step: int) -> Iterator[LogRecord]:
    import_logger("tensorboard")
    from torch.utils.tensorboard import SummaryWriter

    # Events after the step from which a run continues are not shown.
    writer = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def log_record(record: Record) -> None:
        for name, number in numbers_of(record).items():
            writer.add_scalar(name, number, record["step"])
        writer.flush()  # as metrics.jsonl, so that an interrupted run loses nothing

    with writer:
        yield log_record


@contextmanager
def _mlflow(folder: Path, description: Mapping[str, Any]) -> Iterator[LogRecord]:
    mlflow = import_extra("mlflow", "mlflow")
    identity = folder / MLFLOW_RUN
    try:
        if identity.exists():
            mlflow.start_run(run_id=identity.read_text().strip())
        else:
            run = mlflow.start_run(run_name=folder.name, tags={"folder": str(folder)})
            with atomic_write(identity) as file:
                file.write(run.info.run_id.encode())
            mlflow.log_params(dict(flatten(description)))
    except mlflow.MlflowException as error:
        raise OSError(
            f"MLflow must accept the run, set MLFLOW_TRACKING_URI to a server that it can reach: "
            f"{error}"
        ) from error

    def log_record(record: Record) -> None:
        try:
            mlflow.log_metrics(numbers_of(record), step=record["step"])
        except mlflow.MlflowException as error:  # metrics.jsonl has the record
            log.warning("MLflow did not take the record of step %s: %s", record["step"], error)

    status = "FAILED"
    try:
        yield log_record
        status = "FINISHED"
    finally:
        mlflow.end_run(status)
