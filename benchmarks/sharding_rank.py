"""One rank of benchmarks/sharding.py: times and memory of a model sharded by torchrun.

Times are medians over repetitions on the slowest rank. Memory is the maximum peak of a rank. Halo
bytes are totals over all layers, forward and backward, on the busiest rank. Loss and gradients are
compared with one rank before timing. After the same number of whole training steps, `last_loss` is
the loss.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from suite.timing import CLOCKS
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.app.training.sharded import average_local_shards
from anemoi_gt.app.training.step import compile_blocks, share_buffers
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.distributed import make_mesh, optimizer_step, shard_parameters, sum_loss
from anemoi_gt.distributed.model_shard import shard_model

FIELDS = 100  # in and out of the data grid
# relative tolerance of loss and gradients: bfloat16 on a GPU, float32 on a CPU
AGREE = {"cuda": 3e-2, "cpu": 1e-4}
WARM_UP = 8  # calls replay themselves after some steps
COMPARED = (  # in the processor: of a graph transformer, and of a graph network
    *("lin_edge.weight", "lin_key.weight", "lin_value.weight"),
    *("edge_mlp.mlp.0.weight", "node_mlp.mlp.0.weight"),
)
GRAPHS = {}  # by grid and refinement


class AnemoiGtModel:
    """The model of a task on this rank, with the rank's rows of one batch entry."""

    def __init__(self, task: dict, graph, mesh, device: torch.device):
        torch.manual_seed(0)
        sizes = {
            "channels": task["heads"] * task["channels"],
            "heads": task["heads"],
            "num_layers": task["layers"],
        }
        with device:  # weights are drawn on the device
            self.model = EncoderProcessorDecoder(graph, FIELDS, FIELDS, **sizes)
        shard = shard_model(self.model.to(device), mesh)
        if task["part"] == "steps":
            average = partial(average_local_shards, get_ema_multi_avg_fn(0.99))
            self.average = AveragedModel(self.model, multi_avg_fn=average)
            share_buffers(self.average.module, self.model)
        if task["compiled"]:
            compile_blocks(self.model, has_messages=True)
        if task["divided"]:
            for model in (self.model, self.average.module):
                shard_parameters(model, shard, mesh)
        if task["part"] == "steps":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.mesh = mesh
        self.weights = list(self.model.parameters())
        self.parameters = shard.parameters(self.model)
        num_nodes = graph["data"].x.shape[0]
        local_nodes = shard.partitions["data"].nodes(mesh.get_local_rank("model"), "cpu")
        fields = torch.randn(num_nodes, FIELDS, generator=torch.Generator().manual_seed(1))
        self.fields = fields[local_nodes].unsqueeze(0).to(device)
        self.scale = 1 / (num_nodes * FIELDS)
        self.layers = task["layers"]
        itemsize = 2 if device.type == "cuda" else 4  # bfloat16 or float32
        self.row_bytes = sizes["channels"] * itemsize

    def forward(self) -> Tensor:
        """Return this rank's part of the loss, a mean square."""
        return self.model(self.fields).float().square().sum() * self.scale

    def update(self) -> None:
        """Reduce and clip the gradients, take a step of AdamW, and update the averages."""
        optimizer_step(self.optimizer, *self.parameters, self.mesh, max_norm=1.0)
        self.average.update_parameters(self.model)

    def traffic(self) -> dict:
        """Return the halo bytes of a forward and backward pass."""
        encoder, decoder = self.model.encoder_edges["data"], self.model.decoder_edges["data"]
        rows = 0
        for times, edges in [(1, encoder), (self.layers, self.model.processor_edges), (1, decoder)]:
            halo = edges.structure().halo
            rows += times * (halo.num_sent + halo.num_received)
        return {"halo_bytes": rows * self.row_bytes}


class AnemoiModel:
    """The same model in anemoi-models, sharded as `task["model"]` says, or a graph network."""

    def __init__(self, task: dict, graph, mesh, device: torch.device):
        from anemoi.models.distributed.shapes import get_shard_sizes
        from anemoi.models.layers.block import BaseBlock
        from support.anemoi_model import build, draw, make_family_options, make_options

        # The model reads two time steps, so FIELDS values are its input.
        names = tuple(f"field_{i}" for i in range(FIELDS // 2))
        sizes = {
            "channels": task["heads"] * task["channels"],
            "heads": task["heads"],
            "layers": task["layers"],
            "layer_chunks": 1,
            "mapper_chunks": 1,
            "checkpointing": False,
        }
        kind = task["model"].split(", ")[1]
        if kind == "network":
            options = make_family_options("graph network", **sizes)
        else:
            backend = "triton" if device.type == "cuda" else "pyg"
            options = make_options(**sizes, graph_attention_backend=backend, shard_strategy=kind)
        self.model = build(graph, options, names).to(device)
        if task["compiled"]:
            for block in self.model.modules():
                if isinstance(block, BaseBlock):
                    block.compile(dynamic=False)
        self.weights = list(self.model.parameters())
        whole = draw(graph, variables=names)["data"]
        self.scale = 1 / whole[:, 0, ..., :-1].numel()
        self.group = mesh.get_group("model") if mesh.size() > 1 else None
        self.sizes = None
        local = whole
        if self.group:
            self.sizes = get_shard_sizes(whole, 3, self.group)
            local = whole.split(self.sizes, 3)[mesh.get_local_rank("model")]
        self.x = {"data": local.to(device)}

    def forward(self) -> Tensor:
        """Return this rank's part of the loss, a mean square."""
        shards = {"grid_shard_sizes": {"data": self.sizes}} if self.group else {}
        out = self.model(self.x, model_comm_group=self.group, **shards)["data"]
        return out.float().square().sum() * self.scale

    def traffic(self) -> dict:
        """Return no values: the messages of anemoi-models are not counted."""
        return {}


def step(part: AnemoiGtModel | AnemoiModel, device: torch.device) -> Tensor:
    """Run forward, in bfloat16 on a GPU, and backward; return the loss of this rank."""
    for weight in part.weights:  # as an optimiser does, without a walk over modules
        weight.grad = None
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        loss = part.forward()
    with torch.autograd.set_multithreading_enabled(mode=False):  # as the application
        loss.backward()
    return loss.detach()


def signature(model: nn.Module, loss: Tensor) -> list[float]:
    """Return the loss and the norms of some gradients over all ranks."""
    total = loss.double()
    dist.all_reduce(total)
    norms = [total.norm().item()]
    for name, parameter in model.named_parameters():
        if name.startswith("processor.") and name.endswith(COMPARED) and ".0." in name:
            gradient = parameter.grad.double()
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()  # summed in backward
            else:
                dist.all_reduce(gradient)
            norms.append(gradient.norm().item())
    return norms


def train(part: AnemoiGtModel, forward_backward: Callable[[], Tensor]) -> Tensor:
    """Take a training step; return the loss of this rank."""
    loss = forward_backward()
    part.update()
    return loss


def replaying(part: AnemoiGtModel, device: torch.device) -> Callable[[], Tensor]:
    """Capture forward and backward; return a replay, which sets the captured gradients."""
    losses = []
    replay = CLOCKS[device.type].record(lambda: losses.append(step(part, device)))
    gradients = [weight.grad for weight in part.weights]

    def forward_backward() -> Tensor:
        for weight, gradient in zip(part.weights, gradients, strict=True):
            weight.grad = gradient
        replay()
        return losses[-1]

    return forward_backward


def check(actual: list[float], expected: list[float] | None, limit: float) -> None:
    """Raise ValueError unless loss and gradient norms agree with those on one rank."""
    agree = expected is not None and all(
        abs(a - b) <= limit * abs(b) for a, b in zip(actual, expected, strict=True)
    )
    if not agree:
        raise ValueError(
            f"loss and gradient norms must agree with one rank within {limit}, got {actual}, "
            f"expected {expected}"
        )


def largest(values: list[float], device: torch.device) -> list[float]:
    """Return the maximum of each value over the ranks."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


def times_of(call: Callable, repeats: int, device: torch.device) -> list[float]:
    """Return the milliseconds of each repetition, on the slowest rank."""
    wait = CLOCKS[device.type].synchronize
    times = []
    for _ in range(repeats):
        wait()
        dist.barrier()
        begin = time.perf_counter()
        call()
        wait()
        times.append(1e3 * (time.perf_counter() - begin))
    return largest(times, device)


def run(task: dict, expected: list[float] | None, repeats: int, device: torch.device) -> dict:
    """Return the record of a task."""
    name = task["grid"], task["refinement"]
    if name not in GRAPHS:
        GRAPHS[name] = icosphere_graph(grid(task["grid"]), refinement=task["refinement"])
    mesh = make_mesh(device.type, model=dist.get_world_size())
    make = AnemoiGtModel if task["model"] == "anemoi_gt" else AnemoiModel
    part = make(task, GRAPHS[name], mesh, device)
    if "install" in task["model"]:
        from anemoi_gt.integrations import anemoi

        installed = anemoi.install(sharding="halo" in task["model"])
    else:
        installed = nullcontext()
    with installed:
        norms = signature(part.model, step(part, device))
        if dist.get_world_size() > 1:
            check(norms, expected, AGREE[device.type])
        call = partial(step, part, device)
        if task["part"] == "steps":
            forward_backward = replaying(part, device) if task["replayed"] else call
            call = partial(train, part, forward_backward)
        for _ in range(WARM_UP):
            call()
        if task["replayed"] and task["part"] != "steps":
            call = CLOCKS[device.type].record(call)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        record = {"ms": statistics.median(times_of(call, repeats, device)), "signature": norms}
        if task["part"] == "steps":
            record["last_loss"] = sum_loss(call(), mesh).item()
    if device.type == "cuda" and not task["replayed"]:
        record["peak_gb"] = largest([torch.cuda.max_memory_allocated() / 1e9], device)[0]
    traffic = part.traffic()
    busiest = dict(zip(traffic, largest(list(traffic.values()), device), strict=True))
    return task | {"ranks": dist.get_world_size()} | record | busiest


def main(folder: Path) -> None:
    """Run the tasks in `work.json` one after the other; rank 0 adds records to `records.jsonl`."""
    work = json.loads((folder / "work.json").read_text())
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group(device_id=device if device.type == "cuda" else None)
    for task, expected in zip(work["tasks"], work["expected"], strict=True):
        record = run(task, expected, work["repeats"], device)
        if dist.get_rank() == 0:
            with (folder / "records.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        gc.collect()  # the model, with its CUDA graph, before the next one
        if device.type == "cuda":
            torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # threads of gloo can outlive Python's finalisation before 3.14
