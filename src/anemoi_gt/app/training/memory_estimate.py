"""Estimate of the memory of a training step, and advice for a GPU that is too small.

    state          16 bytes per parameter: weight, two moments of AdamW, average; divided among
                   ranks, and of the largest unit, weights and gradients while they are gathered
    graph          buffers of the model; for a sharded model, also this rank's structures
    kept           what is alive after the forward pass, input included
    working set    what is alive at most in either pass besides, gradients included

A step is run on tensors without data, whose sizes are counted while they are alive. So it holds for
any model, and no layer has to say what it keeps. The scratch memory of a plan is added while it
runs. Compiled blocks need less.
"""

import logging
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.app.training.step import autocast
from anemoi_gt.distributed.parameter_shard import units
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn import StaticEdges, StaticNodes
from anemoi_gt.ops.operator import OPERATORS, ListedOperator
from anemoi_gt.torch_compat import fake_tensor_mode

log = logging.getLogger(__name__)

STATE = 16
GATHERED = 16  # per parameter: the weights of two units, gradients, and a copy to be sent


class MemoryEstimate(NamedTuple):
    """Bytes of a training step by purpose; `print` shows GB, MB or kB."""

    state: int
    graph: int
    kept: int
    working_set: int

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return sum(self)

    def __str__(self) -> str:
        parts = []
        for name, size in self._asdict().items():
            parts.append(f"{name.replace('_', ' ')} {format_bytes(size)}")
        return f"about {format_bytes(self.total)}: {', '.join(parts)}"


def format_bytes(size: int) -> str:
    """Return a number of bytes with three digits.

    Examples
    --------
    >>> [format_bytes(size) for size in (0, 1234, 999_600, 12_345_678, 73_500_000_000)]
    ['0 kB', '1.23 kB', '1 MB', '12.3 MB', '73.5 GB']
    """
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= 0.9995 * scale:  # rounds to 1
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def estimate_memory(
    model: nn.Module, config: TrainingConfig, inputs: tuple[int, int], ranks: int = 1
) -> MemoryEstimate | None:
    """Estimate the memory of a training step with eager blocks on this rank.

    `inputs` are the number of data nodes, of a shard this rank's, and of fields that the model
    takes. `config.batch_size` is the batch size of one model, whose parameters are to be divided
    among `ranks` (`shard_parameters`). Return None, with the reason in the log, for a model that
    cannot run on tensors without data.
    """
    in_checkpoint = model.state_dict().keys()
    # counters, as a batch norm has, count this step too
    counters = {n: buffer.clone() for n, buffer in model.named_buffers() if n in in_checkpoint}
    try:
        kept, peak = _measure(model, config, inputs)
    except Exception as error:
        log.info("the memory of a step is not estimated, because it needs data: %s", error)
        return None
    finally:
        for name, value in counters.items():
            model.get_buffer(name).copy_(value)
    rows = sum(
        _num_parameters(part)
        for part in model.modules()
        if isinstance(part, StaticEdges | StaticNodes)
    )
    state = STATE * (rows + (_num_parameters(model) - rows) // ranks)
    if ranks > 1:
        state += GATHERED * max(map(_num_parameters, units(model)), default=0)
    return MemoryEstimate(
        state=state,
        graph=sum(buffer.nbytes for buffer in model.buffers()) + _shard_bytes(model),
        kept=kept,
        working_set=peak - kept,
    )


def _measure(model: nn.Module, config: TrainingConfig, inputs: tuple[int, int]) -> tuple[int, int]:
    """Return the bytes alive between both passes, and the maximum of those in either."""
    first = next(model.parameters())
    step = _Step(model)
    eager = torch.compiler.set_stance("force_eager")  # of compiled blocks too
    with eager, fake_tensor_mode() as mode:
        # Parameters without data, too: operations on tensors with data are not in the mode's cache.
        # Buffers stay, because a graph may be kept that has them.
        weights: dict[str, Tensor] = {}
        for name, weight in step.named_parameters():
            weights[name] = mode.from_tensor(weight)
        buffers = [mode.from_tensor(buffer) for buffer in model.buffers()]
        allocations = _Allocations([*weights.values(), *buffers])
        with allocations, autocast(config.precision, first.device):
            x = first.new_empty(config.batch_size, *inputs)
            # With ties, PyTorch 2.13 does not restore the parameters of a module with two names.
            kept = functional_call(step, weights, (x, allocations), tie_weights=False)
    return kept, allocations.peak


class _Step(nn.Module):
    """A training step of a model."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, allocations: "_Allocations") -> int:
        """Run both passes; return the bytes alive between them."""
        out = self.model(x)
        kept = allocations.live
        target = torch.empty_like(out)
        loss = (out.float() - target).square().mean()
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        torch.autograd.grad(loss, parameters, allow_unused=True)
        return kept


class _Allocations(TorchDispatchMode):
    """The bytes of tensors that operations have made, while these are alive, and their maximum.

    Tensors in `held` do not count.
    """

    def __init__(self, held: Iterable[Tensor]):
        super().__init__()
        self.live = 0
        self.peak = 0
        # the operators that there are now: a backend of another package may have registered some
        self._listed: dict[Any, tuple[ListedOperator, bool]] = {}
        for operator in OPERATORS.values():
            self._listed[operator.op] = operator, False
            self._listed[operator.op_backward] = operator, True
        # by address, which another storage may have later
        self._storages: dict[int, Any] = {x.untyped_storage()._cdata: None for x in held}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        scratch = 0
        if operation in self._listed:
            operator, is_backward = self._listed[operation]
            scratch = operator.scratch_bytes(args, is_backward=is_backward)
        self.peak = max(self.peak, self.live + scratch)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        if address in self._storages:
            return
        num_bytes = storage.nbytes()

        def release(_: Any) -> None:
            del self._storages[address]
            self.live -= num_bytes

        self._storages[address] = weakref.ref(storage, release)
        self.live += num_bytes


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shard_bytes(model: nn.Module) -> int:
    """Return the bytes of graph shards and their chunks, which are not buffers of the model."""
    total = 0
    for edges in model.modules():
        if not isinstance(edges, StaticEdges):
            continue
        shard: Any = edges.structure()
        if not isinstance(shard, GraphStructure):  # which is in the buffers
            for graph in (shard.structure, *(chunk.graph for chunk in shard.chunks)):
                total += sum(tensor.nbytes for tensor in graph.state_dict().values())
    return total


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Return whether a GPU or the host ran out of memory; PyTorch has no type for the latter."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or "DefaultCPUAllocator" in str(error)


def out_of_memory(config: Mapping, error: RuntimeError | MemoryError) -> str:
    """Return an error message with advice for a run that ran out of memory."""
    training = config.get("training", {})
    remedy = advice(config.get("model", {}), training)
    if not isinstance(error, torch.OutOfMemoryError):
        return f"out of memory of the host: {remedy}"
    size = ""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        size = f", {properties.total_memory / 1e9:.0f} GB of {properties.name}"
    if training.get("cuda_graph", False) is not False:
        remedy += (
            "; training.cuda_graph=false shares the memory of a step with validation, which a CUDA "
            "graph does not"
        )
    return f"out of GPU memory{size}: {remedy}"


def advice(model: Mapping, training: Mapping) -> str:
    """Suggest changes to the configs `model` and `training` for a run that ran out of memory."""
    layers = model.get("num_layers")
    chunks = model.get("mapper_chunks", 1)
    if layers is not None and model.get("checkpoint_groups") is None:
        return f"set model.checkpoint_groups={layers} and model.mapper_chunks={2 * chunks}"
    if layers is not None and model["checkpoint_groups"] < layers:
        return f"set model.checkpoint_groups={layers}"
    if training.get("precision") == "32-true":
        return "set training.precision=bf16-mixed"
    if chunks < 64:
        return f"set model.mapper_chunks={4 * chunks}"
    return "lower training.batch_size or model.channels, or share the model among GPUs by torchrun"
