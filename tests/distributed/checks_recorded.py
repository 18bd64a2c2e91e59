"""Checks on ranks: recorded steps of a divided model have the numbers of steps that are not; what ranks cannot record is refused."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from anemoi_gt.training.parallel.sharded_step import check_messages_recordable
from anemoi_gt.training.parallel.sharded_trainer import shard_trainer
from support.aot_eager import without_inductor
from support.recording import record_in_place

from anemoi_gt import AttentionConfig, EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.sphere import sphere
from anemoi_gt.training import Trainer, TrainingConfig
from distributed.checks_trainer import Records
from distributed.ranks import device_type, mesh_of, on_all_ranks, shared_folder, without_default_device

EDGES, OVERLAPPED, HEADS = ("edges", False), ("edges", True), ("heads", False)


def trained(folder, mesh, way, dropout, *, recorded, compiled=False):
    """The losses and the last weights of a run; on GPUs a CUDA graph records it, and Inductor compiles it."""
    on_gpu = device_type() == "cuda"
    splits = sphere("O4", train_size=8, valid_size=2, test_size=1)
    graph, train = icosphere_graph(splits.train.nodes, refinement=1), splits.train
    torch.manual_seed(0)
    options = {"channels": 64, "heads": 4, "num_layers": 1, "dropout": dropout}
    options["config"] = AttentionConfig(backend="triton" if on_gpu else "torch")
    model = EncoderProcessorDecoder(graph, train.in_channels, train.out_channels, **options)
    numbers = {
        "steps": 4,
        "batch_size": 4,
        "warmup_steps": 1,
        "valid_every": 2,
        "log_every": 1,
        "precision": "16-mixed",
    }
    config = TrainingConfig(**numbers, compile=compiled, cuda_graph=recorded and on_gpu, device=device_type())
    strategy, overlap = way
    with nullcontext() if on_gpu else without_inductor():
        trainer, records = Trainer(model, splits, config, folder, {}), Records()
        shard_trainer(trainer, mesh, strategy, overlap=overlap)
    if recorded and not on_gpu:
        trainer.learner.record(record_in_place)
    trainer.fit(records)
    return records.losses, [parameter.detach() for parameter in trainer.learner.model.parameters()]


@on_all_ranks
def recorded_steps_have_the_numbers_of_others_bit_by_bit(group, verdict):
    with without_default_device():
        world = dist.get_world_size()
        whole, halves = (1, world), (world // 2, 2)
        cases = [(halves, EDGES, 0.1), (whole, OVERLAPPED, 0.1), (halves, HEADS, 0.0)]
        for shape, way, dropout in cases:
            mesh, folder = mesh_of(*shape), shared_folder(group)
            plain, replayed = (trained(folder, mesh, way, dropout, recorded=recorded) for recorded in (False, True))
            compare(verdict, f"{shape} {way}", replayed, plain)


@on_all_ranks
def recorded_steps_of_compiled_blocks_have_the_numbers_of_others_bit_by_bit(group, verdict):
    with without_default_device():
        mesh, folder = mesh_of(1, dist.get_world_size()), shared_folder(group)
        case = folder, mesh, OVERLAPPED, 0.1
        plain, replayed = (trained(*case, compiled=True, recorded=recorded) for recorded in (False, True))
        compare(verdict, "compiled", replayed, plain)


def compare(verdict, label, actual, expected):
    """Losses and weights of two runs."""
    verdict.same(f"{label}: losses", actual[0], expected[0])
    for n, (ours, theirs) in enumerate(zip(actual[1], expected[1], strict=True)):
        verdict.same(f"{label}: parameter {n}", ours, theirs)


@on_all_ranks
def messages_that_no_graph_records_are_refused(group, verdict):
    check = partial(check_messages_recordable, mesh_of(1, dist.get_world_size()))
    if device_type() == "cuda":
        check()
    else:
        verdict.raises(ValueError, "do not communicate by NCCL, got true and cpu:gloo", check)
