"""The training application, `anemoi-gt train`, in one process or under torchrun.

`--help` lists all groups and options.
"""

import logging
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import record

from anemoi_gt.app import hydra_app, objects
from anemoi_gt.app.command_line import GROUPS
from anemoi_gt.app.datasets.fields import minutes
from anemoi_gt.app.datasets.forecast_dataset import (
    Splits,
    share_of_batch,
    with_units,
)
from anemoi_gt.app.evaluate_command import (
    log_explanation,
    warn_of_training_samples,
    write_report,
)
from anemoi_gt.app.plots import chosen_variables
from anemoi_gt.app.training import Trainer, TrainingConfig
from anemoi_gt.app.training.config import choose_device, cpu_threads
from anemoi_gt.app.training.loggers import import_logger, open_metrics
from anemoi_gt.app.training.progress import Stopped
from anemoi_gt.app.training.run_files import load_checkpoint, load_fitting_weights, load_weights
from anemoi_gt.app.training.run_folder import (
    BEST,
    CONFIG,
    LAST,
    ONE_PROCESS,
    TORCHRUN,
    checkpoint_to_continue,
    config_of,
    find_run,
    flatten,
    has_records,
    own,
    read_config,
    read_run,
    schema_of,
    write_config,
)
from anemoi_gt.app.training.sharded import check_same_data, fit_sharded, make_sharded_trainer
from anemoi_gt.app.training.step import autocast
from anemoi_gt.distributed import init_distributed, is_launched
from anemoi_gt.distributed.consensus import broadcast_from_rank0, check_same, run_on_rank0
from anemoi_gt.distributed.model_shard import scatter_model
from anemoi_gt.distributed.process_group import (
    exit_without_finalization,
    local_device,
    make_cpu_group,
)
from anemoi_gt.toolchain import compile_problem

log = logging.getLogger(__name__)

# Options, and groups of them, that may change when a run is continued. Results are the same or
# agree to rounding, except that compiled code draws other dropout masks.
MAY_DIFFER = (
    *("kernels", "data.path", "data.train", "data.valid", "data.test", "sharding"),
    *("training.compile", "training.cuda_graph", "training.device", "training.logger"),
    "training.threads",
)
SHARDING = {"sharding", "sharding.strategy"}  # options that select another sharding
# options that may differ between ranks
RANKS_MAY_DIFFER = ("data.path", "training.device", "training.threads", "kernels.backend")


def prepare(config: "hydra_app.DictConfig") -> Callable[[], float | None]:
    """Build the objects of a config, and return a function that trains the model."""
    if not isinstance(config.resume, bool):
        raise ValueError(f"resume must be true or false, got {config.resume!r}")
    objects.check_types(config, "sharding", *GROUPS)
    if is_launched():
        if config.explain is not None or hydra_app.is_multirun():
            raise ValueError(
                "explain and --multirun must be left out under torchrun, which trains one run on "
                "parts of the graph"
            )
        return partial(train_on_ranks, config)
    sharding = objects.instantiate(config.sharding)
    if sharding.strategy != "none" or sharding.parameters:
        option = "sharding.parameters=true" if sharding.parameters else "sharding=edges"
        raise ValueError(
            f"{option} must be started on several ranks: torchrun --nproc-per-node=NUMBER -m "
            "anemoi_gt.train ..."
        )
    folder = hydra_app.output_folder()
    description = objects.describe(config)
    with ExitStack() as ownership:
        ownership.enter_context(own(folder))
        trainer = make_trainer(config, folder, description)
        write_config(folder, config, description)
        return partial(train, trainer, config.plots.variables, ownership.pop_all())


def make_trainer(
    config: "hydra_app.DictConfig", folder: Path, description: dict[str, Any]
) -> Trainer:
    """Return the trainer of a run, with the state of the run that it continues, if any."""
    state = checkpoint_to_resume(folder, description, ONE_PROCESS, resume=config.resume)
    splits, training = build_data(config, state, folder)
    model = build_model(config, splits)
    if training.compile:
        # code compiled by earlier runs of a sweep counts towards PyTorch's recompilation limit
        torch.compiler.reset()
    trainer = Trainer(model, splits, training, folder, description)
    if state is not None:
        trainer.load_state_dict({"schema": trainer.schema.to_dict()} | state)
        log.info("continues after step %d", trainer.step.global_step)
    if config.explain is not None:
        with autocast(training.precision, trainer.device):
            log_explanation(trainer.step.model.train(), splits.train, training, config.explain)
    return trainer


def build_data(
    config: "hydra_app.DictConfig", state: dict | None, folder: Path
) -> tuple[Splits, TrainingConfig]:
    """Build data set and training config of a run, which continues from a state if there is one.

    Raises ValueError for what would end the run after training has begun.
    """
    schema = None
    if state is not None:
        config.init_from = None  # the weights come from the checkpoint
        schema = schema_of(state, folder / LAST)
    splits, training = objects.build_data(config, schema)
    for split in splits:
        split.require_samples()
    check_periods(splits, config)
    chosen_variables(splits.test, config.plots.variables)  # raises for unknown variables
    import_logger(training.logger)
    problem = compile_problem(choose_device(training.device)) if training.compile else None
    if problem is not None:
        raise ValueError(f"training.compile must be false here, got true: {problem}")
    return splits, training


def build_model(config: "hydra_app.DictConfig", splits: Splits) -> nn.Module:
    """Build the model of a config, with the weights of `init_from` that fit it, if any.

    Weights that do not fit are logged.
    """
    model = objects.build_model(config, splits.train)
    path = config.get("init_from")
    if path is not None:
        unfit = load_fitting_weights(model, load_checkpoint(Path(path)))
        names = "; ".join(unfit) or "none"
        log.info("weights loaded from %s; initialised, as they do not fit: %s", path, names)
    return model


def checkpoint_to_resume(
    folder: Path, description: dict, writer: str, *, resume: bool
) -> dict | None:
    """Return the state that a run continues, or None if it starts from scratch.

    Of `last.pt` the whole state, of torchrun's folder `last` config and schema; `writer` is
    ONE_PROCESS or TORCHRUN, and `description` the config as plain values. Raises ValueError if the
    folder holds a run but `resume` is False, or the run is of the other kind or has another config.
    """
    path = checkpoint_to_continue(folder, writer, resume=resume)
    if path is not None:
        state = read_run(path)
        check_same_config(path, config_of(state, path), description)
        return state
    config = read_config(folder) if has_records(folder) else None
    if config is not None:  # of a run that ended before its first checkpoint, and starts again
        own_config = {group: config[group] for group in description if group in config}
        check_same_config(folder / CONFIG, own_config, description)
    if resume:
        log.info("%s holds no checkpoint: the run starts at step 0", folder)
    return None


def check_periods(splits: Splits, config: "hydra_app.DictConfig") -> None:
    """Raise ValueError if a run that continues would have other training samples, unless told.

    It is told by the dates of the splits. Then validation samples of the former training period are
    logged.
    """
    former = splits.train.trained_periods
    periods = splits.train.periods()
    if former and len(periods) > len(former) and config.data.get("train") is None:
        text = "; ".join(_period(*period) for period in former)
        now = "; ".join(_period(*period) for period in periods[len(former) :])
        raise ValueError(
            f"a run is continued with its training samples, which start {text}; those of the data "
            f"start {now}: give data.train, data.valid and data.test as dates"
        )
    warn_of_training_samples("validation", splits.valid)
    warn_of_training_samples("test", splits.test)


def _period(label: str, first: str, last: str) -> str:
    """Return the training period of a member as text."""
    return f"{first} to {last}" + (f", member {label}" if label else "")


def check_same_config(path: Path, before: dict, now: dict) -> None:
    """Raise ValueError if the config of a checkpoint differs from the config of the run.

    Options in `MAY_DIFFER` may differ, and `training.steps` may increase.
    """
    before = dict(flatten(before))
    now = dict(flatten(now))
    # more steps stretch the learning rate of a run that has ended or was stopped
    if before.get("training.steps", math.inf) < now.get("training.steps", 0):
        now["training.steps"] = before["training.steps"]
    changes = []
    for key in dict.fromkeys([*before, *now]):
        if before.get(key) != now.get(key) and not _may_differ(key):
            changes.append(f"{key}={before.get(key)}, not {now.get(key)}")
    if changes:
        raise ValueError(
            f"a run is continued with its own config, {path} was written with {'; '.join(changes)}"
        )


def _may_differ(key: str) -> bool:
    """Return whether an option is in `MAY_DIFFER`, or in a group of it."""
    # with the dot, because data.train_size is no part of data.train
    return f"{key}.".startswith(tuple(f"{name}." for name in MAY_DIFFER))


def train(trainer: Trainer, variables: Sequence[str] | None, ownership: ExitStack) -> float:
    """Train a model, write scores and plots to its folder, and return the lowest validation loss.

    `variables` are plotted; None plots the first three. `ownership` of the folder ends with the
    run.
    """
    splits = trainer.splits
    folder = trainer.folder
    with ownership:
        num_parameters = sum(parameter.numel() for parameter in trainer.step.model.parameters())
        log.info("%s\n%d parameters", describe_data(splits), num_parameters)
        start = time.perf_counter()
        with open_metrics(trainer) as metrics:
            trainer.fit(metrics)
        log.info("trained %.0f s on %s", time.perf_counter() - start, trainer.device)
        with cpu_threads(trainer.config.threads):
            write_report(folder, trainer.best_model(), splits.test, metrics.records, variables)
        return trainer.best_loss


def describe_data(splits: Splits) -> str:
    """Describe the data for the log: variables, forcings, lead time, samples of each split."""
    data = splits.train
    variables = ", ".join(
        with_units(name, units) for name, units in zip(data.variables, data.units, strict=True)
    )
    steps = f"{data.input_steps} input time{'s' if data.input_steps > 1 else ''}"
    lines = [f"{data.lead_time:g} h forecasts of {variables}, from {steps}"]
    if data.diagnostics:
        lines.append(f"diagnostics, which are no inputs: {', '.join(data.diagnostics)}")
    if data.forcings:
        lines.append(f"forcings: {', '.join(data.forcings)}")
    for name, split in zip(("training", "validation", "test"), splits, strict=True):
        line = f"{len(split)} {name} samples"
        first = split.start_time(0)
        last = split.start_time(len(split) - 1)
        if first is not None and last is not None:
            line += f", starting {minutes(first)} to {minutes(last)} UTC"
        if split.left_out:
            total = len(split) + split.left_out
            line += f"; {split.left_out} of {total} are left out, because times are missing"
        lines.append(line)
    return "\n".join(lines)


def train_on_ranks(config: "hydra_app.DictConfig") -> float | None:
    """Train on all ranks of torchrun; rank 0 writes the files of a run, with a folder `last`.

    Apart from `RANKS_MAY_DIFFER`, the config is the same on all ranks. Returns the lowest
    validation loss on rank 0, and None on the others. If any rank received a signal, raises Stopped
    on rank 0, and the others exit with its status.
    """

    @record  # records errors, so that torchrun reports the first one with its traceback
    def run() -> float | None:
        with ExitStack() as ownership:  # of the folder, on rank 0
            return _train_on_ranks(config, ownership)

    try:
        return run()
    except hydra_app.ERRORS_OF_PREPARATION as error:
        raise hydra_app.ConfigError(error) from error


def _train_on_ranks(config: "hydra_app.DictConfig", ownership: ExitStack) -> float | None:
    sharding = objects.instantiate(config.sharding)
    whole: Any = None  # the whole model, on rank 0 only
    with init_distributed(sharding, choose_device(config.training.device).type) as mesh:
        group = make_cpu_group(sharding)
        check_same(shared_config(config, mesh), group)
        share_of_batch(config.training.batch_size, mesh["data"].size())
        description = objects.describe(config) | {"sharding": asdict(sharding)}
        # the others run in the working directory, and their Hydra makes no folder
        folder = Path(broadcast_from_rank0(str(hydra_app.output_folder())))
        run_on_rank0(lambda: ownership.enter_context(own(folder)))
        state = run_on_rank0(
            partial(checkpoint_to_resume, folder, description, TORCHRUN, resume=config.resume)
        )
        splits, training = build_data(config, state, folder)
        check_same_data(splits, folder)
        if mesh.get_rank() == 0:  # the memory of a host may hold the graph once, not once a rank
            whole = build_model(config, splits)
        model, shard = scatter_model(whole, mesh, group)
        trainer = make_sharded_trainer(
            model,
            shard,
            splits,
            training,
            folder,
            description,
            mesh=mesh,
            group=group,
            divide_parameters=sharding.parameters,
        )
        run_on_rank0(partial(write_config, folder, config, description))
        log.info("%s", describe_data(splits))
        log.info("%d ranks, %d of them for a model", mesh.size(), mesh["model"].size())
        test = splits.test if whole is not None else None
        del splits, model  # keep only this rank's shard
        stopped = None
        try:
            records = fit_sharded(trainer, shard, resume=state is not None)
        except Stopped as error:
            if not error.saved:  # other ranks may still be in the step
                raise
            # torchrun sends SIGTERM to the other ranks when the first one has exited
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            stopped = error
    if stopped is not None:
        if whole is not None:
            raise stopped
        sys.exit(stopped.exit_status)
    if whole is None or test is None or records is None:  # not rank 0
        return None
    # The process group has ended: rank 0 scores the whole model, and the others exit.
    whole = whole.to(trainer.device)
    load_weights(whole, load_checkpoint(folder / BEST))
    with cpu_threads(training.threads):
        write_report(folder, whole.eval(), test, records, config.plots.variables)
    return trainer.best_loss


def shared_config(config: "hydra_app.DictConfig", mesh: DeviceMesh) -> dict[str, Any]:
    """Return the values that ranks must share: config, backend, PyTorch version."""
    values = flatten(objects.describe(config) | {"resume": config.resume})
    shared = {key: value for key, value in values if key not in RANKS_MAY_DIFFER}
    kernels = objects.instantiate(config.kernels)
    backend = objects.check_backend(kernels, local_device(mesh.device_type))
    return shared | {"the backend": backend, "the version of torch": torch.__version__}


def primary_config(arguments: list[str]) -> str:
    """Return the name of the primary config: `resume` to continue a run, otherwise `train`.

    `resume` takes the config from the checkpoint, or from the folder if it has none, and the choice
    of plots from the folder; under torchrun, with its sharding, unless the arguments select
    another. If the arguments select configs of groups, the primary config is `train`, and the
    composed config must equal the checkpoint's. Raises ValueError if `srun` has started several
    runs.
    """
    check_slurm_tasks(os.environ)
    folder = hydra_app.argument_value(arguments, "hydra.run.dir")
    if not folder or hydra_app.argument_value(arguments, "resume") is not True:
        return "train"
    checkpoint = find_run(Path(folder) / LAST)
    former = read_config(Path(folder))
    config = former if checkpoint is None else config_of(read_run(checkpoint), checkpoint)
    keys = {argument.lstrip("+~").split("=")[0].split("@")[0] for argument in arguments}
    if config is None or keys & set(GROUPS):
        return "train"
    kept = {key: config[key] for key in (*GROUPS, "init_from") if key in config}
    if is_launched() and config.get("sharding") and keys.isdisjoint(SHARDING):
        kept["sharding"] = config["sharding"]
    plots = {"variables": None}
    if former is not None:
        plots |= former.get("plots", {})
    hydra_app.store_config({"init_from": None, "plots": plots} | kept)
    return "resume"


def check_slurm_tasks(environment: Mapping[str, str]) -> None:
    """Raise ValueError if the tasks of a Slurm step would train a run each, in one folder.

    `srun` sets SLURM_STEP_NUM_TASKS, which a batch script does not have, and torchrun
    GROUP_WORLD_SIZE, the number of torchruns that share a job.
    """
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", 1))
    if tasks == 1:
        return
    if not is_launched():
        raise ValueError(
            f"several tasks of srun must train one run by torchrun, got {tasks} tasks without it: "
            "use srun --ntasks=1, or one torchrun per host"
        )
    if environment.get("GROUP_WORLD_SIZE") == "1":
        raise ValueError(
            f"the torchruns of all tasks of srun must share one job, got {tasks} tasks with a job "
            f"each: give torchrun --nnodes={tasks} and --rdzv-endpoint, or use srun --ntasks=1"
        )


def main() -> None:
    """Run the application with the arguments of the command line."""
    arguments = [hydra_app.expand_home(argument) for argument in sys.argv[1:]]
    choose_config = partial(primary_config, arguments)
    if not is_launched():
        hydra_app.run_command("train", prepare, choose_config)
        return
    if int(os.environ["RANK"]) != 0:  # only rank 0 has Hydra's folder and log
        own = ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
        keys = tuple(argument.partition("=")[0] + "=" for argument in own)
        sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith(keys)] + own
    status = 0
    try:
        hydra_app.run_command("train", prepare, choose_config)
    except SystemExit as end:
        if end.code:
            status = end.code if isinstance(end.code, int) else 1
    exit_without_finalization(status)
