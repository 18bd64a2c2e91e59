"""Checks on ranks: a trainer of a divided model is that of one device: losses, signals, checkpoints, what it continues."""

import os
import shutil
import signal
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from anemoi_gt.training.parallel.sharded_batches import ShardedBatches
from anemoi_gt.training.parallel.sharded_signals import AgreedStop
from anemoi_gt.training.parallel.sharded_step import own_draws
from anemoi_gt.training.parallel.sharded_trainer import Silence, check_samples, shard_trainer, train_on_ranks

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.sphere import sphere
from anemoi_gt.distributed import run_on_rank0, save_checkpoint
from anemoi_gt.train import continues_on_ranks
from anemoi_gt.training import Trainer, TrainingConfig
from anemoi_gt.training.metrics import MetricsFile
from anemoi_gt.training.signals import Stopped
from distributed.ranks import everywhere, mesh_of, on_all_ranks, on_ranks, shared_folder, without_default_device


class Records:
    """Metrics in memory."""

    def __init__(self):
        self.losses = []

    def write(self, **record):
        self.losses.append((record["split"], record["step"], record["loss"]))

    def sync(self):
        pass


def make_trainer(folder, steps=6):
    """A trainer of a small model on a sphere of 208 points."""
    numbers = {"steps": steps, "batch_size": 4, "warmup_steps": 2, "valid_every": 2, "log_every": 1, "device": "auto"}
    splits = sphere("O4", train_size=8, valid_size=3, test_size=1)
    graph, train = icosphere_graph(splits.train.nodes, refinement=1), splits.train
    torch.manual_seed(0)
    options = {"channels": 8, "heads": 4, "num_layers": 1, "config": AttentionConfig(backend="torch")}
    model = EncoderProcessorDecoder(graph, train.in_channels, train.out_channels, **options)
    return Trainer(model, splits, TrainingConfig(**numbers), folder, {"name": "test"})


def same_losses(verdict, label, actual, expected):
    verdict.same(f"{label}: records", [record[:2] for record in actual], [record[:2] for record in expected])
    for (split, step, loss), (_, _, wanted) in zip(actual, expected, strict=True):
        verdict.close(f"{label}: {split} {step}", torch.tensor(loss), torch.tensor(wanted))


@on_all_ranks
def a_trainer_records_the_losses_of_one_device_and_continues_on_other_meshes(group, verdict):
    with without_default_device():
        shared, alone = shared_folder(group), Path(tempfile.mkdtemp())
        whole, expected = make_trainer(alone), Records()
        whole.fit(expected)
        world = dist.get_world_size()
        for shape, strategy in (((1, world), "edges"), ((world // 2, 2), "heads"), ((world, 1), "edges")):
            trainer, records = make_trainer(shared), Records()
            shard_trainer(trainer, mesh_of(*shape), strategy)
            trainer.fit(records)
            same_losses(verdict, f"{shape} {strategy}", records.losses, expected.losses)
        shared = shared_folder(group)
        half = make_trainer(shared)
        shard_trainer(half, mesh_of(1, world), overlap=True)
        half.config, half.batches.steps = replace(half.config, steps=4), 4  # the schedule stays that of all steps
        with MetricsFile(shared / "metrics.jsonl") if dist.get_rank() == 0 else Silence() as metrics:
            half.fit(metrics)
        for shape, strategy in (((world // 2, 2), "heads"), ((world, 1), "edges")):
            folder = shared.with_name(f"{shared.name}_{strategy}")
            if dist.get_rank() == 0:
                shutil.copytree(shared, folder)
                if strategy == "heads":
                    (folder / "last").rename(folder / "last.former")  # as if cut off between the two names
            dist.barrier()
            trainer = make_trainer(folder)
            cut = shard_trainer(trainer, mesh_of(*shape), strategy)
            records = train_on_ranks(trainer, cut, resumes=True)
            losses = [(record["split"], record["step"], record["loss"]) for record in records or []]
            same_losses(verdict, f"resumed on {shape}", losses, expected.losses if dist.get_rank() == 0 else [])
        if dist.get_rank() == 0:
            best = make_trainer(folder).best_model()
            for name, parameter in best.named_parameters():
                verdict.same(f"shape of {name}", parameter.shape, whole.learner.model.get_parameter(name).shape)


class Bar:
    """What a progress bar is told."""

    last = None

    def __init__(self, samples, done=0):
        self.samples, self.done = samples, done
        Bar.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def advance(self, samples):
        self.done += samples

    def show(self, **numbers):
        pass


@on_all_ranks
def the_bar_and_the_speed_count_the_samples_of_all_models(group, verdict):
    with without_default_device():
        trainer, speeds = make_trainer(shared_folder(group), steps=2), []
        trainer.progress, Bar.last = Bar, None
        add = trainer._meter.add
        trainer._meter.add = lambda loss, samples: (speeds.append(samples), add(loss, samples))
        shard_trainer(trainer, mesh_of(dist.get_world_size() // 2, 2))
        trainer.fit(Records())
        verdict.same("bar", (Bar.last.done, Bar.last.samples) if Bar.last else None, (8, 8) if is_first() else None)
        verdict.same("samples of a step", speeds, [4, 4])


@on_all_ranks
def models_draw_differently_and_the_ranks_of_one_alike(group, verdict):
    world = dist.get_world_size()
    for shape in ((world // 2, 2), (world, 1), (1, world)):
        mesh = mesh_of(*shape)
        torch.manual_seed(4)
        with own_draws(mesh, torch.get_default_device()):
            drawn = float(torch.rand(1))
        by_model = {}
        for model, number in everywhere((mesh.get_local_rank("data"), drawn), group):
            by_model.setdefault(model, set()).add(number)
        verdict.same(f"{shape}: draws of a model", {len(numbers) for numbers in by_model.values()}, {1})
        verdict.same(f"{shape}: draws", len(set.union(*by_model.values())), shape[0])
        verdict.same(f"{shape}: draws behind", len(set(everywhere(float(torch.rand(1)), group))), 1)


def is_first():
    return dist.get_rank() == 0


def tell_one_rank(trainer, rank, step, number):
    """Send a signal to one rank while it takes a step."""
    since = trainer.batches.since

    def telling(first):
        for at, batch in enumerate(since(first), first + 1):
            if (dist.get_rank(), at) == (rank, step):
                os.kill(os.getpid(), number)
            yield batch

    trainer.batches.since = telling


@on_all_ranks
def a_signal_to_one_rank_stops_all_after_the_same_step_which_is_saved(group, verdict):
    with without_default_device():
        shared = shared_folder(group)
        whole, expected = make_trainer(Path(tempfile.mkdtemp())), Records()
        whole.fit(expected)
        trainer = make_trainer(shared)
        world = dist.get_world_size()
        cut = shard_trainer(trainer, mesh_of(1, world))
        tell_one_rank(trainer, world - 1, 2, signal.SIGTERM)
        before = signal.getsignal(signal.SIGTERM)
        try:
            train_on_ranks(trainer, cut, resumes=False)
        except Stopped as stopped:
            verdict.same("said", (str(stopped), stopped.exit_status), (f"stopped by SIGTERM {SAVED}", 143))
        else:
            verdict.that(False, "nothing stopped")
        verdict.same("handler", signal.getsignal(signal.SIGTERM), before)
        again = make_trainer(shared)
        records = train_on_ranks(again, shard_trainer(again, mesh_of(world // 2, 2)), resumes=True) or []
        losses = [(record["split"], record["step"], record["loss"]) for record in records]
        same_losses(verdict, "continued", losses, expected.losses if is_first() else [])


SAVED = "after step 3, which is saved"  # one step after the signal: the ranks count the votes of the step before


@on_all_ranks
def a_vote_that_nobody_needs_is_counted_at_the_end(group, verdict):
    with AgreedStop(dist.new_group(backend="gloo")) as stop:
        said = [stop.due() for _ in range(3)]
    verdict.same("said", said, [None] * 3)
    verdict.that(stop._vote is None, "a vote is still under way")


@on_all_ranks
def what_a_run_continues_is_decided_once_for_all_ranks(group, verdict):
    with without_default_device():
        shared = shared_folder(group)

        def decide(**changes):
            description = {"model": {"heads": 4, "flows": ["a", "b"]}, "attention": {"backend": "torch"}} | changes
            return run_on_rank0(partial(continues_on_ranks, shared, True, description))

        verdict.same("an empty folder", decide(), False)
        config = {"model": {"heads": 4, "flows": ["a", "b"]}, "attention": {"backend": "auto"}}
        save_checkpoint(shared / "last", {"step": 1, "config": config}, {}, group)
        verdict.same("the run", decide(), True)
        changed = partial(decide, model={"heads": 2, "flows": ["a", "b"], "layers": 1})
        said = f"a run is continued with its own config, {shared / 'last'} was written with "
        verdict.raises(ValueError, said + "model.heads=4, not 2; model.layers=None, not 1", changed)
        (shared / "last.pt").write_bytes(b"a run")
        verdict.raises(ValueError, "holds a run of one process, in last.pt: resume=true without torchrun", decide)


@on_all_ranks
def ranks_with_other_samples_or_without_the_folder_are_found(group, verdict):
    with without_default_device():
        folder, rank = shared_folder(group), dist.get_rank()

        def splits(grid="O4", size=2, seed=0):
            return sphere(grid, train_size=size, valid_size=1, test_size=1, seed=seed)

        others = {"the nodes": {"grid": "O8"}, "the numbers of samples": {"size": 3}, "the normalisation": {"seed": 1}}
        for name, other in others.items():
            own = splits(**other) if rank == dist.get_world_size() - 1 else splits()
            verdict.raises(ValueError, f"{name}", partial(check_samples, own, folder))
        elsewhere = folder / "nowhere" if rank == 1 else folder
        verdict.raises(ValueError, "rank 1: ", partial(check_samples, splits(), elsewhere))
        check_samples(splits(), folder)


@on_ranks(4)
def a_batch_that_data_ranks_cannot_share_is_refused(group, verdict):
    options = {"dataset": range(8), "batch_size": 6, "steps": 1, "seed": 0, "device": torch.device("cpu")}
    verdict.raises(
        ValueError,
        "must be a multiple of the 4 ranks of the data axis, got 6",
        lambda: ShardedBatches(mesh_of(4, 1), **options),
    )
