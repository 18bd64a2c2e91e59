"""Checks on ranks: captured and compiled steps of a sharded model; only NCCL can be captured."""

from contextlib import nullcontext
from functools import partial

import torch.distributed as dist
from support.capturing import capture_in_place, without_inductor

from anemoi_gt import AttentionConfig
from anemoi_gt.app.training.sharded import check_messages_capturable
from distributed.checks_trainer import Records, make_parts, make_sharded, same_losses
from distributed.ranks import (
    device_type,
    mesh_of,
    on_all_ranks,
    shared_folder,
    without_default_device,
)


def trained(
    folder, mesh, *, captured=False, compiled=False, precision="16-mixed", chunks=1, group=None
):
    """The losses and the last weights of a run; on GPUs with a CUDA graph and Inductor."""
    on_gpu = device_type() == "cuda"
    attention = AttentionConfig(backend="triton" if on_gpu else "torch")
    options = {"compile": compiled, "cuda_graph": captured and on_gpu, "precision": precision}
    sizes = {"channels": 64, "dropout": 0.1, "config": attention, "mapper_chunks": chunks}
    parts = make_parts(folder, sizes, steps=4, **options)
    with nullcontext() if on_gpu else without_inductor():
        trainer, _ = make_sharded(mesh, *parts, group=group)
    trainer._save = lambda *_: None  # takes longer than the steps
    if captured and not on_gpu:
        trainer.step.capture(capture_in_place)
    records = Records()
    trainer.fit(records)
    return records.losses, [parameter.detach() for parameter in trainer.step.model.parameters()]


@on_all_ranks
def captured_steps_have_the_bits_of_launched_ones(group, verdict):
    with without_default_device():
        world = dist.get_world_size()
        for shape, compiled, chunks in (
            ((world // 2, 2), False, 3),
            ((1, world), device_type() == "cuda", 1),
        ):
            mesh, folder, options = (
                mesh_of(*shape),
                shared_folder(group),
                {"compiled": compiled, "chunks": chunks},
            )
            launched, captured = (
                trained(folder, mesh, captured=way, **options) for way in (False, True)
            )
            label = f"{shape}{' compiled' * compiled}"
            verdict.same(f"{label}: losses", captured[0], launched[0])
            for n, (actual, expected) in enumerate(zip(captured[1], launched[1], strict=True)):
                verdict.same(f"{label}: parameter {n}", actual, expected)


@on_all_ranks
def compiled_steps_agree_with_launched_ones_to_rounding(group, verdict):
    with without_default_device():
        options = {"precision": "32-true", "group": dist.new_group(range(2), backend="gloo")}
        folder, mesh = shared_folder(group), mesh_of(1, 2)
        for chunks in () if mesh.get_coordinate() is None else (1, 3):
            eager, compiled = (
                trained(folder, mesh, compiled=way, chunks=chunks, **options)
                for way in (False, True)
            )
            same_losses(verdict, f"compiled, {chunks} chunks", compiled[0], eager[0])
            for n, (actual, expected) in enumerate(zip(compiled[1], eager[1], strict=True)):
                verdict.close(f"parameter {n}, {chunks} chunks", actual, expected)


@on_all_ranks
def messages_that_no_graph_captures_are_refused(group, verdict):
    check = partial(check_messages_capturable, mesh_of(1, dist.get_world_size()))
    if device_type() == "cuda":
        check()
    else:
        verdict.raises(
            ValueError,
            "unless the ranks of a model communicate by NCCL, got true and cpu:gloo",
            check,
        )
