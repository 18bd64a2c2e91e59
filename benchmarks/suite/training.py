"""A training step of a model on one grid: ours and Anemoi's, and checks of ours."""

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anemoi_gt import EncoderProcessorDecoder, GraphStructure, KernelConfig
from anemoi_gt.app.datasets.forecast_dataset import Sample
from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.sharded import ShardedTrainingStep
from anemoi_gt.app.training.step import AUTOCAST, TrainingStep, compile_blocks
from anemoi_gt.distributed import (
    ShardingConfig,
    init_distributed,
    reduce_gradients,
    shard_model,
)
from anemoi_gt.distributed.module_shard import FixedGraph
from anemoi_gt.distributed.process_group import local_device, make_cpu_group
from anemoi_gt.nn import GraphTransformerBaseBlock, split_destinations
from suite import mappers
from suite.timing import CLOCKS, seconds_of

CHECKED = 64  # destinations of each kind
GRADIENT_FACTOR, OUTPUT_FACTOR = 3, 2  # times the error of plain PyTorch in the same dtype
NO_GRADIENT = "lin_key.bias"  # a constant on all keys changes no softmax: what is left is rounding
FLOAT32_ERROR = 1e-4  # of all gradients together, relative


def make_model(graph, options: Namespace) -> EncoderProcessorDecoder:
    """Return the model, its graph sorted and checked on the device."""
    torch.manual_seed(0)
    sizes = {"channels": options.channels, "heads": options.heads, "num_layers": options.layers}
    sizes["checkpoint_groups"] = options.layers
    with torch.device(options.device):
        return EncoderProcessorDecoder(graph.to(options.device), *options.fields, **sizes)


def draw(nodes: int, options: Namespace) -> Sample:
    """Return one random sample [1, N, fields] float32, and a target of the same kind."""
    generator = torch.Generator(options.device).manual_seed(1)
    sides = (
        torch.randn(1, nodes, fields, generator=generator, device=options.device)
        for fields in options.fields
    )
    return Sample(*sides)


@contextmanager
def computing(
    model: nn.Module, chunks: int, *, compiled: bool = False, average: nn.Module | None = None
) -> Iterator[None]:
    """Compute mappers in chunks, blocks compiled or not; an averaged model shares the chunks."""
    for name in ("encoder_edges", "decoder_edges"):
        for data_set, edges in getattr(model, name).items():
            if isinstance(edges.structure, FixedGraph):
                edges.structure.graph = edges.structure.graph.split(chunks)
            else:
                edges.split(chunks)
            if average is not None:
                other = getattr(average, name)[data_set]
                other.structure, other.chunks = edges.structure, edges.chunks
    if compiled:
        compile_blocks(model)
    try:
        yield
    finally:
        for module in model.modules():
            module._compiled_call_impl = None


def measure(step: Callable[[], Tensor], options: Namespace) -> dict:
    """Return step times in seconds after warm-up, peak memory in GB, and the last loss."""
    on_gpu = options.device == "cuda"
    losses = []

    def keep_loss() -> None:
        losses.append(step())

    if on_gpu:
        torch.cuda.empty_cache()
    warmup = sum(seconds_of(step, options.warmup, options.device))
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = seconds_of(keep_loss, options.steps, options.device)
    record = {
        "outcome": "done",
        "seconds": sorted(times)[len(times) // 2],
        "all_seconds": times,
        "loss": losses[-1].item(),
        "warmup_seconds": warmup,
    }
    if on_gpu:
        record["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        record["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
    return record


def ours(options: Namespace, folder: Path) -> Iterator[dict]:
    """Yield time and memory of the application's steps per number of chunks; then the kernels."""
    from kernel_families import profile_of

    graph = torch.load(folder / "9km.graph", weights_only=False)
    wait = CLOCKS[options.device].synchronize
    batch = draw(graph["data"].num_nodes, options)
    begin = time.perf_counter()
    model = make_model(graph, options)
    config = TrainingConfig(
        steps=1000,
        batch_size=1,
        precision=options.precision,
        device=options.device,
        cuda_graph=False,  # the model changes between the steps
    )
    step = TrainingStep(
        model, torch.ones(graph["data"].num_nodes), config, torch.device(options.device)
    )
    sizes = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    wait()
    yield {
        "contender": "anemoi_gt",
        "outcome": "built",
        "seconds": time.perf_counter() - begin,
        **sizes,
    }
    del graph

    for compiled, chunks in product(options.compiled, options.chunks):
        record = {
            "contender": "anemoi_gt",
            "num_chunks": chunks,
            "compiled": bool(compiled),
        }
        with computing(model, chunks, compiled=bool(compiled), average=step.average.module):
            try:
                yield record | measure(lambda: step.training_step(batch), options)
            except torch.OutOfMemoryError as error:
                yield record | {"outcome": "out of memory", "message": str(error).split(". ")[0]}
        model.zero_grad()
    chunks = sorted(options.chunks)[len(options.chunks) // 2]
    for compiled in options.compiled:
        with computing(model, chunks, compiled=bool(compiled), average=step.average.module):
            step.training_step(batch)
            kernels = profile_of(lambda: step.training_step(batch), 1, wait, options.device)
        yield kernels | {
            "contender": "anemoi_gt",
            "num_chunks": chunks,
            "compiled": bool(compiled),
            "outcome": "profile",
        }


def sharded(options: Namespace, folder: Path) -> Iterator[dict]:
    """Yield, on rank 0, loss and gradients of all ranks and of one GPU, then timed steps.

    Times are from the slowest rank, memory from the rank that needs most.
    """
    sharding = ShardingConfig("edges", options.ranks, timeout=options.limit)
    device = options.device
    with init_distributed(sharding, device) as mesh:
        graph = torch.load(folder / "9km.graph", weights_only=False)
        batch = draw(graph["data"].num_nodes, options)
        model = make_model(graph, options)
        weights = torch.ones(graph["data"].num_nodes)
        del graph
        with computing(model, max(options.chunks)), autocast(options.precision, device):
            loss = (model(batch.inputs) - batch.target).square().mean()
            loss.backward()
        expected = {name: parameter.grad for name, parameter in model.named_parameters()}
        model.zero_grad()
        shard = shard_model(model, mesh)
        local_nodes = shard.partitions["data"].nodes(shard.rank, device)
        num_nodes = len(weights)
        weights = weights[local_nodes.cpu()]
        batch = Sample(*(fields[:, local_nodes] for fields in batch))
        config = TrainingConfig(
            steps=1000,
            batch_size=1,
            precision=options.precision,
            device=device,
            cuda_graph=False,  # the model changes between the steps
        )
        group = make_cpu_group(sharding)
        parts = {"num_nodes": num_nodes, "shard": shard, "mesh": mesh, "group": group}
        step = ShardedTrainingStep(model, weights, config, local_device(device), **parts)
        off = abs(step.forward_backward(batch) - loss).item()
        reduce_gradients(step.shared, step.own, mesh)
        for name, table in shard.tables.items():
            expected[name] = expected[name][table.index]
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        record = {"check": "loss and gradients of all ranks"}
        record |= difference(gradients, expected)
        record |= {
            "ranks": mesh.size(),
            "num_chunks": max(options.chunks),
            "loss_off": off / loss.item(),
        }
        is_right = max(record["off"], record["loss_off"]) < 5e-2
        record["outcome"] = "right" if is_right else "wrong"
        del expected, gradients
        yield from on_first_rank(record)
        for compiled, chunks in product(options.compiled, options.chunks):
            record = {
                "contender": "anemoi_gt",
                "ranks": mesh.size(),
                "num_chunks": chunks,
                "compiled": bool(compiled),
            }
            with computing(model, chunks, compiled=bool(compiled), average=step.average.module):
                record |= measure(lambda: step.training_step(batch), options)
                yield from on_first_rank(record)


def on_first_rank(record: dict) -> Iterator[dict]:
    """Yield, on rank 0, a record whose floats are the maxima over all ranks. Collective."""
    records = [None] * dist.get_world_size()
    dist.all_gather_object(records, record)
    if dist.get_rank() == 0:
        maxima = {}
        for key, value in record.items():
            if isinstance(value, float):
                maxima[key] = max(other[key] for other in records)
        yield record | maxima


def anemoi(options: Namespace, folder: Path, *, installed: bool = False) -> Iterator[dict]:
    """Yield time and memory of Anemoi's own steps, by decreasing number of chunks.

    Loss and gradients are compared with the untouched, eager model with the most chunks: one that
    is off by more than 5% computes nonsense.
    """
    from support.anemoi_model import build, make_options

    from anemoi_gt.integrations import anemoi as integration

    device = options.device
    half = options.fields[0] // 2  # the model reads two time steps
    graph = torch.load(folder / "9km.graph", weights_only=False)
    nodes = graph["data"].num_nodes
    changes = {
        "channels": options.channels,
        "heads": options.heads,
        "layers": options.layers,
        "layer_chunks": options.layers,
        "graph_attention_backend": "triton" if device == "cuda" else "pyg",
    }
    names = tuple(f"field_{i}" for i in range(half))
    model = build(graph, make_options(**changes), names, forcings=half - options.fields[1])
    model = model.to(device)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator(device).manual_seed(1)
    x = torch.randn(1, 2, 1, nodes, half, generator=generator, device=device)
    target = torch.randn(1, 1, 1, nodes, options.fields[1], generator=generator, device=device)
    mappers = [module for module in model.modules() if type(module).__name__.endswith("wardMapper")]

    def loss_backward() -> Tensor:
        model.zero_grad()
        with autocast(options.precision, device):
            loss = (model({"data": x})["data"] - target).square().mean()
        loss.backward()
        return loss.detach()

    def step() -> Tensor:
        loss = loss_backward()
        optimiser.step()
        return loss

    def gradients() -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_backward().cpu()
        weights = {}
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "proc" in name:
                weights[name] = parameter.grad.float().cpu()
        return loss, weights

    def split(chunks: int) -> None:
        model.load_state_dict(start)
        for mapper in mappers:
            mapper.num_chunks = chunks

    start = {name: tensor.to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    split(max(options.anemoi_chunks))
    expected_loss, expected = gradients()
    name = "anemoi-models"
    if installed:
        integration.install(fusion="sublayers", sharding=False)  # to the end of this process
        name += ", install"
    for compiled in options.compiled:
        for module in model.modules():
            if type(module).__name__ in (
                "GraphTransformerProcessorBlock",
                "GraphTransformerMapperBlock",
            ):
                module._compiled_call_impl = None
                if compiled:
                    module.compile()
        for chunks in sorted(options.anemoi_chunks, reverse=True):
            record = {"contender": name, "num_chunks": chunks, "compiled": bool(compiled)}
            split(chunks)
            try:
                loss, actual = gradients()
                record |= difference(actual, expected) | measure(step, options)
                loss_off = abs(loss - expected_loss) / abs(expected_loss)
                is_right = record["off"] < 5e-2 and loss_off < 5e-2
                yield record | {
                    "outcome": "done" if is_right else "nonsense",
                    "first_loss": loss.item(),
                }
            except torch.OutOfMemoryError as error:
                yield record | {"outcome": "out of memory", "message": str(error).split(". ")[0]}
                model.zero_grad()
                break
            except Exception as error:  # the failure is the result
                yield record | {
                    "outcome": "failed",
                    "message": f"{type(error).__name__}: {str(error)[-500:]}",
                }
                break


def autocast(precision: str, device: str) -> torch.autocast:
    """Return the context of a precision."""
    return torch.autocast(device, AUTOCAST[precision], enabled=AUTOCAST[precision] is not None)


def difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict:
    """Return the relative error of all gradients together, and the worst of any parameter."""
    errors = {}
    norms = {}
    for name, gradient in expected.items():
        if NO_GRADIENT not in name:
            errors[name] = (actual[name].double() - gradient).norm()
            norms[name] = gradient.double().norm()
    total = torch.stack(list(errors.values())).norm() / torch.stack(list(norms.values())).norm()
    ratios = {name: error / norms[name] for name, error in errors.items()}
    worst = max(ratios, key=lambda name: ratios[name].nan_to_num(float("inf")))
    return {"off": total.item(), "worst": ratios[worst].item(), "worst_of": worst}


def judge(actual: dict, exact: dict, baseline: dict, dtype: torch.dtype) -> dict:
    """Return "right" if every tensor meets the accuracy criterion, else the worst.

    The error of an output may be twice, of a gradient three times the error of plain PyTorch in the
    dtype, plus rounding of the tensor itself.
    """
    wrong = []
    for name, tensor in exact.items():
        if NO_GRADIENT in name:
            continue
        norm = tensor.double().norm()
        error = (actual[name].double() - tensor.double()).norm()
        baseline_error = (baseline[name].double() - tensor.double()).norm()
        factor = OUTPUT_FACTOR if name == "out" else GRADIENT_FACTOR
        if not error <= factor * baseline_error + torch.finfo(dtype).eps * norm:
            wrong.append(f"{name}: {error / norm:.2e}, plain PyTorch {baseline_error / norm:.2e}")
    outcome = "wrong" if wrong else "right"
    record = {"outcome": outcome, "tensors": len(exact), "wrong": wrong[:5]}
    record |= difference(actual, exact)
    record["off_of_plain"] = difference(baseline, exact)["off"]
    return record


def check_model(options: Namespace, folder: Path) -> Iterator[dict]:
    """Yield comparisons of loss and gradients on the small grid with float32 in many chunks."""
    graph = torch.load(folder / "check.graph", weights_only=False)
    batch = draw(graph["data"].num_nodes, options)
    model = make_model(graph, options)
    blocks = [module for module in model.modules() if isinstance(module, GraphTransformerBaseBlock)]
    many, few = max(options.chunks), min(options.chunks)

    def run(
        backend: str, precision: str, chunks: int, *, compiled: bool = False
    ) -> dict[str, Tensor]:
        for block in blocks:
            block.config = KernelConfig(backend=backend)
        model.zero_grad()
        with computing(model, chunks, compiled=compiled), autocast(precision, options.device):
            loss = (model(batch.inputs) - batch.target).square().mean()
            loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        return {"out": loss.detach()[None]} | gradients

    exact = run("torch", "32-true", many)
    errors = difference(run("auto", "32-true", many), exact)
    yield {
        "check": "model, 32-true",
        "outcome": "right" if errors["off"] < FLOAT32_ERROR else "wrong",
        **errors,
    }
    baseline = run("torch", options.precision, many)
    runs = [(few, False)] + [(many, compiled) for compiled in options.compiled]
    for chunks, compiled in runs:
        actual = run("auto", options.precision, chunks, compiled=bool(compiled))
        record = {
            "check": f"model, {options.precision}",
            "num_chunks": chunks,
            "compiled": bool(compiled),
        }
        yield record | judge(actual, exact, baseline, torch.bfloat16)


def check_mappers(options: Namespace, folder: Path) -> Iterator[dict]:
    """Yield comparisons of each mapper with float64 at some destinations of the large grid."""
    for part, numbers in zip(("encoder", "decoder"), options.check_chunks, strict=True):
        yield from check_mapper(part, numbers, options, folder)


def check_mapper(part: str, numbers: list[int], options: Namespace, folder: Path) -> Iterator[dict]:
    """Yield comparisons of one mapper, for each number of chunks."""
    problem = mappers.draw(part, options, folder)
    problem.mapper.train().gradient_checkpointing = True
    destinations = mappers.checked_destinations(problem, CHECKED)
    leaves = {"edge_attr": problem.edge_attr}
    if part == "decoder":
        leaves["x_src"] = problem.x[0]
    for leaf in leaves.values():
        leaf.requires_grad_()

    def differentiate(rows: Tensor, mapper: nn.Module) -> dict[str, Tensor]:
        shape = (len(destinations), rows.shape[-1])
        direction = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        rows.backward(direction.bfloat16().to(rows))
        results = {"out": rows.detach()}
        results |= {name: parameter.grad for name, parameter in mapper.named_parameters()}
        results |= {name: leaf.grad for name, leaf in leaves.items()}
        for tensor in (*leaves.values(), *mapper.parameters()):
            tensor.grad = None
        return {name: tensor.cpu() for name, tensor in results.items()}

    exact = differentiate(*mappers.plain_mapper(problem, destinations, torch.float64, "cpu"))
    with autocast(options.precision, options.device):
        baseline = differentiate(
            *mappers.plain_mapper(problem, destinations, torch.float32, options.device)
        )
    graph = GraphStructure.from_edge_index(
        problem.edge_index, tuple(side.shape[0] for side in problem.x)
    )
    for number in numbers:
        with autocast(options.precision, options.device):
            out = problem.mapper(problem.x, split_destinations(graph, number), problem.edge_attr)
        actual = differentiate(out.index_select(0, destinations), problem.mapper)
        yield {"check": part, "num_chunks": number} | judge(actual, exact, baseline, torch.bfloat16)


WORKERS = {
    "check_model": check_model,
    "check_mappers": check_mappers,
    "ours": ours,
    "anemoi": anemoi,
    "install": partial(anemoi, installed=True),
    "sharded": sharded,
}
