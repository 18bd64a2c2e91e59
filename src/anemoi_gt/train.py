"""The training application, `python -m anemoi_gt.train`: trains what Hydra configs describe, or goes on training it.

`--help` lists the configs.
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from anemoi_gt.distributed import ShardingConfig, broadcast_from_rank0, is_launched, run_on_rank0, started
from anemoi_gt.distributed.launcher import own_rank
from anemoi_gt.distributed.meeting import code_in_use, leave_last, meeting
from anemoi_gt.distributed.mesh import check_model_options, own_device
from anemoi_gt.distributed.model_shard import scatter_model
from anemoi_gt.distributed.sharded_checkpoint import ONE_PROCESS, TORCHRUN, checkpoint_to_continue, load_values
from anemoi_gt.distributed.watch import leave
from anemoi_gt.explanation import explain
from anemoi_gt.hydra_app import (
    ERRORS_OF_PREPARATION,
    build,
    build_data,
    build_model,
    check_backend,
    check_device,
    check_explain,
    check_types,
    describe,
    instantiate,
    is_multirun,
    launch,
    output_folder,
    stop,
    tell,
)
from anemoi_gt.training import Trainer
from anemoi_gt.training.checkpoint import load_checkpoint, load_weights
from anemoi_gt.training.data_loading import load
from anemoi_gt.training.device import choose_device, cpu_threads
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.parallel.sharded_batches import share_of_batch
from anemoi_gt.training.parallel.sharded_trainer import check_samples, cpu_group, divide_trainer, train_on_ranks
from anemoi_gt.training.report import write_report
from anemoi_gt.training.signals import Stopped
from anemoi_gt.training.step import AUTOCAST
from anemoi_gt.training.trainer import BEST, LAST

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)

# Where and how fast a run computes: its numbers stay the same, or agree to rounding, but for what compiled blocks drop.
MAY_DIFFER = (
    *("attention.", "data.path"),
    *("training.compile", "training.cuda_graph", "training.device", "training.threads"),
)
EMPTY = (None, {})  # a checkpoint of ranks keeps no key that has none below it
# Between ranks; what comes of device and backend is compared instead.
RANKS_MAY_DIFFER = ("data.path", "training.device", "training.threads", "attention.backend")


def prepare(config: "DictConfig") -> Callable[[], float]:
    """Make what Hydra composed; returns the training of it."""
    check_types("sharding", config.sharding)
    check_explain(config.explain)
    if is_launched():
        if config.explain is not None:
            raise ValueError("explain must be null under torchrun: one process explains the layers of the whole graph")
        if is_multirun():
            raise ValueError(
                "torchrun trains one run on all ranks, --multirun asks for several: start torchrun for each"
            )
        return partial(train_together, config)
    if instantiate(config.sharding).strategy != "none":
        raise ValueError(
            f"sharding={config.sharding.strategy} must be started on several ranks: "
            "torchrun --nproc-per-node=NUMBER -m anemoi_gt.train ..."
        )
    folder, description = output_folder(), describe(config)
    check_device(config)
    state = former_state(folder, config.resume, description)
    run = build(config)
    if run.training.compile:
        torch.compiler.reset()  # what earlier runs of a sweep compiled counts against PyTorch's limit
    trainer = Trainer(run.model, run.splits, run.training, folder, description)
    if state is not None:
        trainer.load_state_dict(state)
        log.info("continues after step %d", trainer.learner.step)
    if config.explain is not None:
        explain_step(trainer, config.explain)
    return partial(train, trainer)


def explain_step(trainer: Trainer, where: str) -> None:
    """Tell which kernels serve the steps of a run, as `tell` does; nothing of the run changes by it."""
    samples = load(trainer.splits.train, trainer.config.batch_size, trainer.device)
    model, dtype = trainer.learner.model.train(), AUTOCAST[trainer.config.precision]
    with (
        cpu_threads(trainer.config.threads),
        torch.autocast(trainer.device.type, dtype=dtype, enabled=dtype is not None),
    ):
        found = explain(model, next(samples).inputs)
    tell(found, where, trainer.folder)


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
    elif before != now and not (before in EMPTY and now in EMPTY) and not key.startswith(MAY_DIFFER):
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
        The same on all ranks, but for `RANKS_MAY_DIFFER`.

    Returns
    -------
    float or None
        The lowest validation loss; None on a rank that is not the first.

    Raises
    ------
    Stopped
        On the first rank, when one of them was told to stop; the others exit with its status.
    """
    try:
        sharding, device_type = instantiate(config.sharding), choose_device(config.training.device).type
        with (
            meeting(what_ranks_share(config, sharding, device_type), sharding.timeout),
            started(sharding, device_type) as mesh,
        ):
            try:
                return train_on_mesh(config, sharding, mesh)
            except Stopped as error:
                stopped = error  # leaves the block as a value: the ranks end together, and none has failed
    except ERRORS_OF_PREPARATION as error:
        stop("anemoi_gt.train", error)
    if own_rank() != 0:
        leave_last(stopped.exit_status)
    raise stopped


def train_on_mesh(config: "DictConfig", sharding: ShardingConfig, mesh: "DeviceMesh") -> float | None:
    """Train as `train_together` does, on ranks that have joined. Collective; raises Stopped on all of them."""
    check_shares(config, sharding, mesh)
    is_first, description = mesh.get_rank() == 0, describe(config)
    folder = Path(broadcast_from_rank0(str(output_folder())))
    resumes = run_on_rank0(partial(continues_on_ranks, folder, config.resume, description))
    splits, training = build_data(config)
    check_samples(splits, folder)
    group, whole = cpu_group(), build_model(config, splits.train) if is_first else None
    model, cut = scatter_model(whole, mesh, group)
    trainer = Trainer(model, splits, training, folder, description)
    divide_trainer(trainer, cut, mesh, group)
    log.info("%d ranks, %d of them for a model; %d nodes", mesh.size(), mesh["model"].size(), len(splits.train.nodes))
    test = splits.test if is_first else None
    del splits, model  # what is left holds this rank's part alone
    records = train_on_ranks(trainer, cut, resumes=resumes)
    if is_first:
        whole = whole.to(trainer.device)
        load_weights(whole, load_checkpoint(folder / BEST))
        with cpu_threads(training.threads):
            write_report(folder, whole.eval(), test, records)
    dist.barrier(group)  # however long that takes: the group is patient
    return trainer.best_loss if is_first else None


def check_shares(config: "DictConfig", sharding: ShardingConfig, mesh: "DeviceMesh") -> None:
    """Raise a ValueError where the config alone says that these ranks cannot share the run: data, graph and model are not made yet."""
    check_types("model", config.model)
    share_of_batch(check_device(config).batch_size, mesh["data"].size())
    check_backend(instantiate(config.attention), own_device(mesh.device_type))
    check_model_options(config.model)


def continues_on_ranks(folder: Path, resume: bool, description: dict) -> bool:
    """Whether a run of torchrun continues what is in its folder; raises as `former_state` does."""
    path = checkpoint_to_continue(folder / LAST, TORCHRUN, resume=resume)
    if path is None:
        return False
    refuse_changes(path, load_values(path, "config"), description)
    return True


def what_ranks_share(config: "DictConfig", sharding: ShardingConfig, device_type: str) -> dict[str, Any]:
    """Return what must be the same on all ranks, by name: values of the config, and what they come to here."""
    shared = dict(flatten(describe(config) | {"sharding": asdict(sharding), "resume": config.resume}))
    shared = {key: value for key, value in shared.items() if key not in RANKS_MAY_DIFFER}
    backend = check_backend(instantiate(config.attention), own_device(device_type))
    return shared | {"the device": device_type, "the attention backend": backend} | code_in_use()


def flatten(values: dict, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested dicts by their path with dots."""
    for name, value in values.items():
        path = f"{key}.{name}" if key else name
        if isinstance(value, dict):
            yield from flatten(value, path)
        else:
            yield path, value


def main() -> None:
    """Run the application with the arguments of the command line."""
    if not is_launched():
        return launch("train", prepare)
    if own_rank() != 0:  # Hydra's folder and log are the first rank's
        sys.argv += ["hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=disabled"]
    status = 0
    try:
        launch("train", prepare)
    except SystemExit as end:
        status = end.code or 0
    leave(status)


if __name__ == "__main__":
    main()
