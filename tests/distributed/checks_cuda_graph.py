"""Checks on ranks: captured, default and compiled steps of a sharded model; only NCCL can be captured."""

from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import torch
import torch.distributed as dist
from support.capturing import capture_in_place, without_inductor

from anemoi_gt import KernelConfig
from anemoi_gt.app.training.capture_choice import (
    messages_unsupported_reason,
    replays_steps,
    unknown_code_reason,
)
from distributed.checks_trainer import Records, make_parts, make_sharded, same_losses
from distributed.ranks import (
    device_type,
    mesh_of,
    on_all_ranks,
    shared_folder,
    whole_tensor,
    without_default_device,
)


def trained(
    folder,
    mesh,
    *,
    captured=False,
    compiled=False,
    precision="16-mixed",
    chunks=1,
    dropout=0.1,
    group=None,
    divided=False,
):
    """Return the losses, the last weights and the first ones; on GPUs with a CUDA graph and Inductor.

    `captured` None takes the default of the configuration.
    """
    on_gpu = device_type() == "cuda"
    attention = KernelConfig(backend="triton" if on_gpu else "torch")
    cuda_graph = None if captured is None else captured and on_gpu
    options = {"compile": compiled, "cuda_graph": cuda_graph, "precision": precision}
    options |= {"steps": 2, "valid_every": 2}  # the second step reads what the first one changed
    # Matrix products in 16 bits are slow on a CPU, which therefore gets narrow layers.
    channels = 64 if on_gpu else 16
    sizes = {"channels": channels, "dropout": dropout, "config": attention, "mapper_chunks": chunks}
    parts = make_parts(folder, sizes, **options)
    with nullcontext() if on_gpu else without_inductor("eager"):
        trainer, _ = make_sharded(mesh, *parts, group=group, divided=divided, foreach=on_gpu)
    trainer._save = lambda *_: None  # takes longer than the steps
    weights = list(trainer.step.model.parameters())
    first = [whole_tensor(weight.detach()) for weight in weights]
    if captured and not on_gpu:
        trainer.step.capture(capture_in_place)
    records = Records()
    trainer.fit(records)
    return records.losses, [whole_tensor(weight.detach()) for weight in weights], first


@on_all_ranks
def captured_steps_have_the_bits_of_uncaptured_ones(group, verdict):
    with without_default_device():
        world = dist.get_world_size()
        half = (world // 2, 2)
        cases = [(half, False, 2, True)]
        if device_type() == "cuda":
            cases += [(half, False, 2, False), (half, False, 1, True), ((1, world), True, 1, False)]
        for shape, compiled, chunks, divided in cases:
            mesh = mesh_of(*shape)
            folder = shared_folder(group)
            options = {"compiled": compiled, "chunks": chunks, "divided": divided}
            uncaptured = trained(folder, mesh, captured=False, **options)
            captured = trained(folder, mesh, captured=True, **options)
            label = f"{shape}, compiled {compiled}, divided {divided}"
            verdict.same(f"{label}: losses", captured[0], uncaptured[0])
            for n, (actual, expected) in enumerate(zip(captured[1], uncaptured[1], strict=True)):
                verdict.same(f"{label}: parameter {n}", actual, expected)


@on_all_ranks
def the_default_replays_between_gpus_with_the_bits_of_uncaptured_steps(group, verdict):
    with without_default_device():
        world = dist.get_world_size()
        on_gpu = device_type() == "cuda"
        choice = "anemoi_gt.app.training.step.replays_steps"
        for shape in ((1, world), (world, 1)):
            mesh = mesh_of(*shape)
            folder = shared_folder(group)
            with patch(choice, side_effect=replays_steps) as choose:
                trainer, _ = make_sharded(mesh, *make_parts(folder))
            verdict.same(f"{shape}: mesh", choose.call_args.args[3], mesh)
            reason = unknown_code_reason(trainer.step.model, type(trainer.step))
            verdict.same(f"{shape}: reason", reason, None)
            divided, _ = make_sharded(mesh, *make_parts(folder), divided=True)
            for step in (trainer.step, divided.step):
                verdict.same(f"{shape}: replays", step._captured is not None, on_gpu)
            if not on_gpu:
                continue
            uncaptured = trained(folder, mesh)
            default = trained(folder, mesh, captured=None)
            verdict.same(f"{shape}: losses", default[0], uncaptured[0])
            for n, (actual, expected) in enumerate(zip(default[1], uncaptured[1], strict=True)):
                verdict.same(f"{shape}: parameter {n}", actual, expected)


@on_all_ranks
def compiled_steps_agree_with_uncaptured_ones_to_rounding(group, verdict):
    with without_default_device():
        # Two ranks suffice, but with NCCL as the default group, a gloo group of some ranks deadlocks:
        # `new_group` splits NCCL's communicator on the other ranks only.
        ranks = dist.get_world_size() if device_type() == "cuda" else 2
        members = dist.new_group(range(ranks), backend="gloo")
        # Inductor draws other random numbers than uncaptured steps, so dropout masks differ.
        options = {"precision": "32-true", "dropout": 0.0, "group": members}
        folder = shared_folder(group)
        mesh = mesh_of(1, ranks)
        if mesh.get_coordinate() is None:
            return
        cases = product((1, 2), (False, True))  # chunks, divided
        if device_type() == "cpu":
            cases = ((2, True),)  # all ranks compile on the same cores
        for chunks, divided in cases:
            options["chunks"] = chunks
            eager = trained(folder, mesh, compiled=False, **options)
            compiled = trained(folder, mesh, compiled=True, divided=divided, **options)
            label = f"{chunks} chunks, divided {divided}"
            close_results(verdict, label, compiled, eager)


def close_results(verdict, label, compiled, eager):
    """Compare losses and weights of compiled steps with those of eager ones."""
    same_losses(verdict, label, compiled[0], eager[0])
    # Inductor's kernels, and sums of parts, round otherwise. AdamW divides by the size of a
    # gradient, so a weight whose gradient is little more than rounding may move elsewhere; all
    # weights together do not.
    _, expected, first = eager
    moved = distance(expected, first)
    apart = distance(compiled[1], expected)
    verdict.that(apart < 0.01 * moved, f"{label}: weights moved by {moved}, {apart} apart")


def distance(weights, others):
    """Return the Euclidean distance between two lists of tensors."""
    squares = [
        (weight - other).double().square().sum()
        for weight, other in zip(weights, others, strict=True)
    ]
    return torch.stack(squares).sum().sqrt().item()


@on_all_ranks
def messages_that_no_graph_captures_are_refused(group, verdict):
    reason = messages_unsupported_reason(mesh_of(1, dist.get_world_size()))
    if device_type() == "cuda":
        verdict.same("reason", reason, None)
    else:
        expected = "the ranks of a model must communicate by NCCL, got cpu:gloo"
        verdict.that(str(reason).startswith(expected), f"got {reason!r}")
