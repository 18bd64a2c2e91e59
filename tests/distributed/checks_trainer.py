"""Checks on ranks: a sharded trainer has the losses of one device, stops on all ranks, resumes on other meshes."""

import os
import signal
import tempfile
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist

from anemoi_gt import EncoderProcessorDecoder, KernelConfig
from anemoi_gt.app.datasets.sphere_advection import sphere
from anemoi_gt.app.train_command import checkpoint_to_resume
from anemoi_gt.app.training import Trainer, TrainingConfig, run_files
from anemoi_gt.app.training.loggers import open_metrics
from anemoi_gt.app.training.progress import Stopped
from anemoi_gt.app.training.run_folder import TORCHRUN
from anemoi_gt.app.training.sharded import (
    SharedStopRequest,
    check_same_data,
    data_parallel_rng,
    fit_sharded,
    make_sharded_trainer,
)
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.distributed import save_checkpoint
from anemoi_gt.distributed.consensus import run_on_rank0
from anemoi_gt.distributed.model_shard import shard_model
from distributed.ranks import (
    cpu_group,
    device_type,
    everywhere,
    mesh_of,
    on_all_ranks,
    shared_folder,
    without_default_device,
)


class Records:
    """Metrics in memory."""

    def __init__(self):
        self.losses = []

    def write(self, **record):
        self.losses.append((record["split"], record["step"], record["loss"]))

    def sync(self):
        pass


small_sphere = cache(partial(sphere, "O4", train_size=8, valid_size=3, test_size=1))


def is_first():
    return dist.get_rank() == 0


def make_parts(folder, model_options=None, **numbers):
    """Return the arguments of a trainer: a model on a sphere of 208 points, data, config, folder, description."""
    defaults = {
        "steps": 4,
        "batch_size": 4,
        "warmup_steps": 1,
        "valid_every": 2,
        "log_every": 1,
        "device": device_type(),
    }
    splits = small_sphere()
    train = splits.train
    graph = icosphere_graph(train.nodes, refinement=1)
    torch.manual_seed(0)
    options = {"channels": 8, "heads": 4, "num_layers": 1, "config": KernelConfig("torch")}
    options |= model_options or {}
    model = EncoderProcessorDecoder(graph, train.in_channels, train.out_channels, **options)
    config = TrainingConfig(**defaults | numbers)
    return model.to(device_type()), splits, config, folder, {"name": "test"}


def make_sharded(mesh, model, *parts, group=None, divided=False, foreach=True):
    """Return a sharded trainer of these parts, by default with a group of all ranks, and the shard of its model.

    `foreach` is the default on GPUs. On a CPU PyTorch takes a second to plan it for divided parameters.
    """
    shard = shard_model(model, mesh)
    group = group or cpu_group()
    options = {"mesh": mesh, "group": group, "divide_parameters": divided}
    trainer = make_sharded_trainer(model, shard, *parts, **options)
    for parameters in trainer.step.optimizer.param_groups:
        parameters["foreach"] = foreach
    return trainer, shard


def losses_of_one_device(**numbers):
    trainer = Trainer(*make_parts(Path(tempfile.mkdtemp()), **numbers))
    trainer._save_checkpoint = lambda *_: None  # no test reads the checkpoints
    records = Records()
    trainer.fit(records)
    return records.losses


def same_losses(verdict, label, actual, expected):
    steps = [(split, step) for split, step, _ in actual]
    expected_steps = [(split, step) for split, step, _ in expected]
    verdict.same(f"{label}: records", steps, expected_steps)
    for (split, step, loss), (_, _, expected_loss) in zip(actual, expected, strict=True):
        verdict.close(f"{label}: {split} {step}", torch.tensor(loss), torch.tensor(expected_loss))


def losses_of(records):
    """Return the losses of the records, which only the first rank has."""
    return [(record["split"], record["step"], record["loss"]) for record in records or []]


def rates_of(records):
    """Return the learning rates of the records of training steps."""
    return [record["learning_rate"] for record in records or [] if record["split"] == "train"]


@on_all_ranks
def a_signal_to_one_rank_stops_all_and_the_run_has_the_losses_of_one_device_on_another_mesh(
    group, verdict
):
    with SharedStopRequest(cpu_group()) as stop:
        verdict.same("signals", [stop.should_stop() for _ in range(3)], [None] * 3)
    with without_default_device():
        world = dist.get_world_size()
        expected = losses_of_one_device() if is_first() else []
        shared = shared_folder(group)
        trainer, shard = make_sharded(mesh_of(1, world), *make_parts(shared))
        since = trainer.batches.since

        def signalled(first):
            for step, batch in enumerate(since(first), first + 1):
                if dist.get_rank() == world - 1 and step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                yield batch

        trainer.batches.since = signalled
        before = signal.getsignal(signal.SIGTERM)
        try:
            fit_sharded(trainer, shard, resume=False)
        except Stopped as stopped:
            # one step after the signal: the ranks read the votes of the step before
            verdict.same("message", str(stopped), "stopped by SIGTERM after step 3, which is saved")
        else:
            verdict.that(holds=False, problem="nothing stopped")
        verdict.same("handler", signal.getsignal(signal.SIGTERM), before)
        if is_first():
            # as if killed between the two renames
            (shared / "last").rename(shared / "last.former")
        dist.barrier()
        *parts, _ = make_parts(shared)
        trainer, shard = make_sharded(mesh_of(world // 2, 2), *parts, {"name": "resumed"})
        states, load, valid = [], trainer.load_state_dict, trainer.valid

        def load_former(state):
            trainer.valid = valid
            states.append(state)
            load(state)

        trainer.valid, trainer.load_state_dict = {}, load_former
        losses = losses_of(fit_sharded(trainer, shard, resume=True))
        former = valid | {"data.valid": None}
        verdict.same("validation samples of the former run", states[0]["valid"], former)
        same_losses(verdict, "resumed", losses, expected)
        if is_first():
            model, *parts = make_parts(shared)
            best = Trainer(model, *parts).best_model()
            for name, parameter in best.named_parameters():
                expected_shape = model.get_parameter(name).shape
                verdict.same(f"shape of {name}", parameter.shape, expected_shape)


@on_all_ranks
def a_run_that_continues_with_more_steps_has_the_records_of_one_device(group, verdict):
    with without_default_device():
        folder = shared_folder(group)
        for path in (folder / "one", folder / "sharded"):
            path.mkdir(exist_ok=True)
        expected = []
        if is_first():
            for steps in (2, 4):
                trainer = Trainer(*make_parts(folder / "one", steps=steps))
                if steps == 4:
                    trainer.load_state_dict(run_files.load_checkpoint(folder / "one" / "last.pt"))
                with open_metrics(trainer) as metrics:
                    trainer.fit(metrics)
            expected = metrics.records
        records = None
        for steps in (2, 4):
            parts = make_parts(folder / "sharded", steps=steps)
            trainer, shard = make_sharded(mesh_of(1, dist.get_world_size()), *parts)
            records = fit_sharded(trainer, shard, resume=steps == 4)
        same_losses(verdict, "continued", losses_of(records), losses_of(expected))
        rates, expected_rates = rates_of(records), rates_of(expected)
        verdict.same("learning rates", rates, expected_rates)


@on_all_ranks
def models_draw_different_numbers_and_ranks_of_one_model_the_same(group, verdict):
    world = dist.get_world_size()
    for shape in ((world // 2, 2), (world, 1), (1, world)):
        mesh = mesh_of(*shape)
        torch.manual_seed(4)
        with data_parallel_rng(mesh, torch.get_default_device()):
            drawn = float(torch.rand(1))
        by_model = {}
        for model, number in everywhere((mesh.get_local_rank("data"), drawn), group):
            by_model.setdefault(model, set()).add(number)
        draws_per_model = {len(numbers) for numbers in by_model.values()}
        verdict.same(f"{shape}: draws of a model", draws_per_model, {1})
        verdict.same(f"{shape}: draws", len(set.union(*by_model.values())), shape[0])
        verdict.same(f"{shape}: draws after", len(set(everywhere(float(torch.rand(1)), group))), 1)


@on_all_ranks
def the_checkpoint_to_resume_is_decided_once_for_all_ranks(group, verdict):
    with without_default_device():
        shared = shared_folder(group)

        def decide(**changes):
            description = {
                "model": {"heads": 4, "flows": ["a", "b"]},
                "kernels": {"backend": "torch"},
            } | changes
            return run_on_rank0(
                partial(checkpoint_to_resume, shared, description, TORCHRUN, resume=True)
            )

        verdict.that(decide() is None, "an empty folder must be started")
        config = {"model": {"heads": 4, "flows": ["a", "b"]}, "kernels": {"backend": "auto"}}
        save_checkpoint(shared / "last", {"step": 1, "config": config}, {}, group)
        verdict.that(decide() is not None, "the run must be continued")
        changed = partial(decide, model={"heads": 2, "flows": ["a", "b"], "layers": 1})
        message = f"a run is continued with its own config, {shared / 'last'} was written with "
        message += "model.heads=4, not 2; model.layers=None, not 1"
        verdict.raises(ValueError, message, changed)
        (shared / "last.pt").write_bytes(b"a run")
        message = "holds a run of one process, in last.pt: resume=true without torchrun"
        verdict.raises(ValueError, message, decide)


@on_all_ranks
def ranks_with_other_data_or_without_the_folder_are_refused(group, verdict):
    with without_default_device():
        folder = shared_folder(group)
        rank = dist.get_rank()

        def splits(grid="O4", size=2, seed=0):
            return sphere(grid, train_size=size, valid_size=1, test_size=1, seed=seed)

        others = {
            "the nodes": {"grid": "O8"},
            "the number of samples": {"size": 3},
            "the normalisation": {"seed": 1},
        }
        for name, other in others.items():
            options = other if rank == dist.get_world_size() - 1 else {}
            verdict.raises(ValueError, name, partial(check_same_data, splits(**options), folder))
        elsewhere = folder / "nowhere" if rank == 1 else folder
        verdict.raises(ValueError, "rank 1: ", partial(check_same_data, splits(), elsewhere))
        check_same_data(splits(), folder)
