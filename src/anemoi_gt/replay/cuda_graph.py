"""Forward and backward of a step, captured once in a CUDA graph and replayed for every batch.

    first batch     copied into static tensors; warm-up passes; pass captured; state put back
    every batch     copied into the same tensors; graph replayed; gradients assigned to parameters

    attributes      tensors that are neither parameters nor buffers: copied in as the batch is, and
                    back where the pass writes into them or assigns others

A graph reads and writes the same memory each time, so batch, result and gradients stay where they
were during capture. It draws from PyTorch's generator on the device what the same pass would draw
without it: a replay starts at the generator's seed and offset, and advances the offset by what the
pass uses. Generators, parameters and buffers that the warm-up passes change, such as the running
means of a batch norm, are put back before the first replay.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from anemoi_gt.replay.rng import generator_states, set_generator_states
from anemoi_gt.replay.slots import Path, replaced_values, slot_at, value_at, values_of

# passes, as PyTorch recommends: kernels are compiled, libraries allocate, ranks connect
WARM_UP = 3


class Outputs(NamedTuple):
    """Static outputs of a pass."""

    result: Any  # the function's result, tensors in any nesting
    gradients: list[Tensor | None]  # one per parameter, None without a gradient
    attributes: dict[Path, Any]  # what the pass leaves there


class CapturedPass(NamedTuple):
    """Static inputs and outputs of a replay, the replay, and the tensors that it reads."""

    batch: Any
    attributes: dict[Path, Tensor]
    outputs: Outputs
    written: set[Path]  # attributes that the pass writes into
    replay: Callable[[], None]
    memory: list[tuple[int, int, bool]]  # as `_memory`


Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]


class CUDAGraphedStep:
    """A captured forward and backward pass; replays are bitwise identical to eager calls.

    It is captured again when a parameter or buffer has been replaced or has moved to other memory,
    when a tensor in an attribute is of another shape or dtype, and when a parameter is frozen or
    trained again. Errors during capture name the alternative.

    Parameters
    ----------
    function : callable
        Takes a batch, sets the parameters' gradients and returns detached tensors in any nesting,
        such as the loss. It runs on the device only, does the same work for every batch, and
        changes only gradients, random generators, parameters and buffers of `module` in place, and
        tensors in attributes of `module` and their dictionaries.
    module : torch.nn.Module
        Its parameters may get a gradient.
    device : torch.device
        Device whose random generator the function draws from.
    capture : callable
        Takes a function without arguments, which it may call more than once. Returns what the last
        call returned, and a replay of that call on the same memory: `capture_cuda_graph`.
    remedy : str
        For messages, the way to do without a CUDA graph: "set training.cuda_graph=false".
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        module: nn.Module,
        device: torch.device,
        capture: Capture,
        remedy: str,
    ):
        self.function = function
        self.module = module
        self.device = device
        self.capture = capture
        self.remedy = remedy
        self.changed: set[str] = set()  # parameters and buffers that every pass changes
        self._parameters: list[nn.Parameter] = []  # of the captured pass
        self._captured: CapturedPass | None = None

    def __call__(self, batch: Any) -> Any:
        """Set the parameters' gradients for a batch, replacing old ones; return the result.

        Raises ValueError for a batch of other shapes or dtypes than the first, and at capture for
        parameters and buffers that a pass creates or replaces, and other state that it creates.
        """
        result, gradients = self.replay(batch)
        self._assign(gradients)
        return result

    def replay(self, batch: Any) -> tuple[Any, list[Tensor | None]]:
        """Return result and gradients of a batch, valid until the next replay.

        Gradients of the parameters do not change.

        Raises ValueError as a call does.
        """
        if self._captured is not None and not self._is_current(self._captured):
            self.reset()
        if self._captured is None:
            self._captured = self._capture(batch)
        captured = self._captured
        if not self.accepts(batch):
            raise ValueError(
                "all batches must have the shapes and dtypes of the first, "
                f"{_described(captured.batch)}, to be "
                f"replayed from a CUDA graph, got {_described(batch)}: {self.remedy} for batches "
                "that differ"
            )
        values = [*tree_leaves(batch), *self._values_at(captured.attributes)]
        static = [*tree_leaves(captured.batch), *captured.attributes.values()]
        with torch.no_grad():
            for tensor, value in zip(static, values, strict=True):
                if isinstance(tensor, Tensor):
                    tensor.copy_(value)
        captured.replay()
        result, gradients, left = captured.outputs
        for path, tensor in captured.attributes.items():
            holder, key = slot_at(self.module, path)
            value = left[path]
            if value is not tensor:
                holder[key] = value.clone() if isinstance(value, Tensor) else value
            elif path in captured.written:
                holder[key].copy_(tensor)
        return tree_map_only(Tensor, Tensor.clone, result), gradients

    def accepts(self, batch: Any) -> bool:
        """Return whether a batch can be replayed, or captured because none has been yet."""
        return self._captured is None or _kind(batch) == _kind(self._captured.batch)

    def reset(self) -> None:
        """Release the captured pass, its memory and gradients; the next batch is captured again."""
        self.release_gradients()
        self._captured = None

    def release_gradients(self) -> None:
        """Remove the gradients that the next replay overwrites from the parameters."""
        if self._captured is None:
            return
        static = {id(gradient) for gradient in self._captured.outputs.gradients}
        for parameter in self._parameters:
            if id(parameter.grad) in static:
                parameter.grad = None

    def _is_current(self, captured: CapturedPass) -> bool:
        """Return whether a captured pass reads the tensors that the module has now."""
        values = self._values_at(captured.attributes)
        static = [*captured.attributes.values()]
        return captured.memory == _memory(self.module) and _kind(values) == _kind(static)

    def _values_at(self, paths: Iterable[Path]) -> list[Any]:
        return [value_at(self.module, path) for path in paths]

    def _attributes(self) -> dict[Path, Tensor]:
        """Return the tensors on the device that attributes hold, without parameters and buffers.

        Those that need a gradient, or are sparse, stay where they are.
        """

        def is_attribute(name: str, value: Any) -> bool:
            return (
                isinstance(value, Tensor)
                and name not in ("_parameters", "_buffers")
                and value.device.type == self.device.type
                and value.layout is torch.strided
                and not value.requires_grad
            )

        return values_of(self.module, is_attribute)

    def _capture(self, batch: Any) -> CapturedPass:
        static = tree_map_only(Tensor, Tensor.clone, batch)
        attributes = {path: tensor.clone() for path, tensor in self._attributes().items()}
        self._parameters = list(self.module.parameters())
        before = _State(self.module, self.device)
        # when the captured pass begins, which is the last
        addresses: dict[str, int] = {}
        versions: dict[Path, tuple[Tensor, int]] = {}

        def run() -> Outputs:
            slots = [slot_at(self.module, path) for path in attributes]
            addresses.update(
                {name: _address(tensor) for name, tensor in _tensors(self.module).items()}
            )
            with replaced_values(zip(slots, attributes.values(), strict=True)):
                for path, held in self._attributes().items():
                    versions[path] = held, held._version
                result, gradients = self._outputs(static)
                left = map(_detached, self._values_at(attributes))
                return Outputs(result, gradients, dict(zip(attributes, left, strict=True)))

        def is_written(path: Path, held: Tensor) -> bool:
            former, version = versions.get(path, (None, 0))
            return held is former and held._version != version

        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                outputs, replay = self.capture(run)
        except RuntimeError as error:
            error.add_note(
                f"while capturing the step in a CUDA graph; {self.remedy} to run without"
            )
            raise
        present = self._attributes()
        # a pass may replace a dictionary with one that has other keys
        kept = {
            path: held
            for path, held in attributes.items()
            if _kind(present.get(path)) == _kind(held)
        }
        # a batch norm writes without a new version
        written = {
            path
            for path, held in kept.items()
            if is_written(path, held) or not torch.equal(_bits(held), _bits(present[path]))
        }
        self.changed = before.put_back()
        others = [
            name
            for name, tensor in _tensors(self.module).items()
            if tensor is not before.tensors.get(name) or _address(tensor) != addresses[name]
        ]
        # values from before the first pass, which could be put back, do not exist
        others += [
            ".".join(str(key) for key in path if key != "_modules")
            for path, held in present.items()
            if path not in attributes and is_written(path, held)
        ]
        if others:  # a replay would read the former ones, in memory that may be free
            raise ValueError(
                "a step that is captured in a CUDA graph must change parameters and buffers in "
                f"place, got others for {', '.join(others)}: create them before the first step and "
                f"write into them, or {self.remedy}"
            )
        memory = _memory(self.module)
        return CapturedPass(static, kept, outputs, written, replay, memory)

    def _outputs(self, batch: Any) -> tuple[Any, list[Tensor | None]]:
        """Run the pass and take its gradients; parameters have none yet, so none accumulate."""
        before = [parameter.grad for parameter in self._parameters]
        self._assign([None] * len(self._parameters))

        def state() -> Tensor | None:
            if torch.cuda.is_current_stream_capturing():
                return None
            return torch.cuda.get_rng_state(self.device)

        is_on_gpu = self.device.type == "cuda"
        try:
            with checkpoints_without_generator(state) if is_on_gpu else nullcontext():
                result = self.function(batch)
            return result, [parameter.grad for parameter in self._parameters]
        finally:
            self._assign(before)

    def _assign(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient


class _State:
    """Random generators, and parameters and buffers of a module, as they are at one time.

    Copies are in host memory, because the device may have no more than the step needs.
    """

    def __init__(self, module: nn.Module, device: torch.device):
        self.device = device
        self.generators = generator_states(device)
        self.tensors = _tensors(module)
        self.values = {
            name: _values(tensor).detach().to("cpu", copy=True)
            for name, tensor in self.tensors.items()
        }

    @torch.no_grad()
    def put_back(self) -> set[str]:
        """Put all of it back; return the names of parameters and buffers that had changed."""
        set_generator_states(self.generators, self.device)
        changed = set()
        for name, former in self.values.items():
            tensor = _values(self.tensors[name])
            # a batch norm does not change `_version`, and a needless write would
            if not torch.equal(_bits(tensor.cpu()), _bits(former)):
                tensor.copy_(former)
                changed.add(name)
        return changed


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


@torch.no_grad()
def _memory(module: nn.Module) -> list[tuple[int, int, bool]]:
    """Return id and address of parameters and buffers, and whether they need a gradient.

    It is asked in every step: with names, or with gradients of DTensors, it takes several times as
    long.
    """
    modules = [module]
    tensors: list[Tensor | None] = []
    for part in modules:  # which grow
        tensors += part._parameters.values()
        tensors += part._buffers.values()
        modules += [child for child in part._modules.values() if child is not None]
    return [(id(t), _address(t), t.requires_grad) for t in tensors if t is not None]


def _detached(value: Any) -> Any:
    """Return a value without its graph of autograd, which would keep what it saved."""
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def _address(tensor: Tensor) -> int:
    # most are plain, of which nothing else is asked
    return (tensor if type(tensor) is nn.Parameter else _values(tensor)).data_ptr()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # where NaN equals NaN


def _values(tensor: Any) -> Tensor:
    """Return a DTensor's values on this rank, a sparse tensor's values, or the tensor."""
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is torch.sparse_coo:
        return tensor._values()
    return tensor if tensor.layout is torch.strided else tensor.values()


def capture_cuda_graph(
    function: Callable[[], Any],
) -> tuple[Any, Callable[[], None]]:
    """Capture a function in a CUDA graph on the current device, as `CUDAGraphedStep` needs it.

    The function is called `WARM_UP` times, and once during capture, when nothing is computed.
    Returns the outputs of the last call, in memory of the graph and undefined before the first
    replay, and `replay`, which computes them on the current stream.
    """
    # Memory cached by uncaptured steps is usable by neither the side stream nor the graph:
    # the device would hold it up to three times. `torch.cuda.graph` frees the side stream's memory.
    gc.collect()
    torch.cuda.empty_cache()
    stream = _capture_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog queries events meanwhile
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        outputs = function()
    return outputs, graph.replay


@cache
def _capture_stream(device: int) -> torch.cuda.Stream:
    """Return the stream of warm-ups and captures on a device.

    cuBLAS keeps workspaces of 68 MB for each stream that it has computed on (torch 2.11), so a
    stream for each capture would add them at every epoch.
    """
    return torch.cuda.Stream(device)


@contextmanager
def checkpoints_without_generator(state: Callable[[], Tensor | None]) -> Iterator[None]:
    """Keep `torch.utils.checkpoint` from reading the generator's state, which fails during capture.

    Raises ValueError at the end if a recomputation drew random numbers, which would differ from the
    forward pass. `state` returns the state of the generator, None during capture.
    """
    module = torch.utils.checkpoint
    begin = None
    drew = False

    def end_recomputation() -> None:
        nonlocal begin, drew
        if begin is not None and (now := state()) is not None:
            drew |= not torch.equal(begin, now)  # a draw moves the generator
        begin = None

    def begin_forward(*_: object) -> tuple[list, list]:
        end_recomputation()
        return [], []  # no states

    def begin_recomputation(*_: object, **__: object) -> None:
        nonlocal begin
        end_recomputation()
        begin = state()

    upstream = module.get_device_states, module.set_device_states
    module.get_device_states, module.set_device_states = begin_forward, begin_recomputation
    try:
        yield
    finally:
        module.get_device_states, module.set_device_states = upstream
    end_recomputation()
    if drew:
        raise ValueError(
            "layers with dropout or noise must not be checkpointed in a step that is captured in "
            "a CUDA graph, "
            "which would draw other numbers in backward, got both: switch dropout or activation "
            "checkpointing off"
        )


def _kind(batch: Any) -> list[tuple]:
    """Return name, shape, dtype and device of every tensor, name and value of everything else."""
    return [
        (_name(path), leaf.shape, leaf.dtype, leaf.device)
        if isinstance(leaf, Tensor)
        else (_name(path), leaf)
        for path, leaf in tree_flatten_with_path(batch)[0]
    ]


def _described(batch: Any) -> str:
    return ", ".join(
        f"{name} {tuple(rest[0])} {rest[1]}" if len(rest) == 3 else f"{name}={rest[0]!r}"
        for name, *rest in _kind(batch)
    )


def _name(path: tuple) -> str:
    """Return the keys on the way to a leaf, such as batch/inputs."""
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path]
    return "/".join(map(str, keys)) or "batch"
