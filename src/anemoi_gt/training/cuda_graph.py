"""Forward and backward of a training step, captured once in a CUDA graph and replayed for every batch.

    first batch     copied into static tensors;  warm-up passes;  the pass is captured;  random generators set back
    every batch     copied into the same tensors;  the graph is replayed;  gradients are assigned to their parameters

A graph reads and writes the same memory each time, so batch, loss and gradients stay where they were during capture. It
draws from PyTorch's generator on the device what the same pass would draw without it: a replay starts at the
generator's seed and offset, and advances the offset by what the pass uses.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.data.datasets import Sample
from anemoi_gt.nn import GraphTransformerBaseBlock, GraphTransformerBaseMapper, GraphTransformerProcessor
from anemoi_gt.training.rng import generator_states, set_generator_states

WARM_UP = 3  # passes, as PyTorch recommends: kernels are compiled, libraries allocate, ranks connect


class Outputs(NamedTuple):
    """Static outputs of a pass."""

    loss: Tensor  # a scalar
    gradients: list[Tensor | None]  # of each parameter; None where it gets none


class CapturedPass(NamedTuple):
    """Static inputs and outputs of a replay, and the replay."""

    batch: Sample
    outputs: Outputs
    replay: Callable[[], None]


Capture = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]


class CUDAGraphedStep:
    """A function that computes forward and backward, captured at the first batch; the results are the same bit for bit.

    Parameters
    ----------
    function : callable
        Takes a batch, leaves gradients at the parameters and returns the loss, a scalar without history. It works on
        the device alone, does the same for every batch, and changes nothing but gradients and random generators.
    parameters : sequence of Parameter
        Those that may get a gradient.
    device : torch.device
        Whose random generator the function draws from.
    capture : callable
        Takes a function without arguments, which it may call more than once. Returns what the last call returned, and a
        replay of that call on the same memory: `capture_cuda_graph`.
    """

    def __init__(
        self,
        function: Callable[[Sample], Tensor],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        capture: Capture,
    ):
        self.function, self.parameters, self.device, self.capture = function, parameters, device, capture
        self._captured: CapturedPass | None = None

    def __call__(self, batch: Sample) -> Tensor:
        """Leave the gradients of a batch at the parameters; return the loss, a scalar.

        Raises ValueError for a batch of other shapes or dtypes than the first.
        """
        if self._captured is None:
            self._captured = self._capture(batch)
        static, outputs, replay = self._captured
        _check_same_kind(batch, static)
        for tensor, values in zip(static, batch, strict=True):
            tensor.copy_(values)
        replay()
        self._assign(outputs.gradients)
        return outputs.loss.clone()  # the next replay overwrites it

    def reset(self) -> None:
        """Release the captured pass and its memory, gradients included; the next batch is captured again."""
        if self._captured is not None:
            self._assign([None] * len(self.parameters))
        self._captured = None

    def _capture(self, batch: Sample) -> CapturedPass:
        states = generator_states(self.device)
        static = Sample(*(tensor.clone() for tensor in batch))
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                outputs, replay = self.capture(lambda: self._outputs(static))
        except RuntimeError as error:
            error.add_note(
                "while capturing the step (training.cuda_graph=true); set training.cuda_graph=false to run without"
            )
            raise
        set_generator_states(states, self.device)
        return CapturedPass(static, outputs, replay)

    def _outputs(self, batch: Sample) -> Outputs:
        """Compute the pass and take its gradients; parameters have none before, so backward does not accumulate."""
        nothing = [None] * len(self.parameters)
        self._assign(nothing)
        loss = self.function(batch)
        gradients = [parameter.grad for parameter in self.parameters]
        self._assign(nothing)
        return Outputs(loss, gradients)

    def _assign(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.requires_grad else None  # frozen since the capture


def capture_cuda_graph(
    function: Callable[[], Any], warm_up: Callable[[], Any] | None = None
) -> tuple[Any, Callable[[], None]]:
    """Capture a function in a CUDA graph on the current device, as `CUDAGraphedStep` needs it.

    The function is called once during capture, when nothing is computed, and `warm_up` (None: the function) `WARM_UP`
    times before. Returns the outputs of the function, in memory of the graph and undefined before the first replay, and
    `replay`, which computes them on the current stream.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            (warm_up or function)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog queries events meanwhile
        outputs = function()
    return outputs, graph.replay


def check_capturable(model: nn.Module, device: torch.device) -> None:
    """Raise a ValueError unless a step of a model can be captured in a CUDA graph.

    It cannot on a device without CUDA graphs, nor with activation checkpointing of layers with dropout, for which
    PyTorch would read the state of the generator during capture, and refuses.
    """
    check_device_has_cuda_graphs(device)
    checkpointed = [name or type(part).__name__ for name, part in model.named_modules() if _checkpoints_dropout(part)]
    if checkpointed:
        raise ValueError(
            "training.cuda_graph must be false with activation checkpointing of layers with dropout, got true and "
            f"{', '.join(checkpointed)}: set model.checkpoint_groups=null or model.dropout=0"
        )


def check_device_has_cuda_graphs(device: torch.device) -> None:
    """Raise a ValueError unless a device has CUDA graphs."""
    if device.type != "cuda":
        raise ValueError(f"training.cuda_graph must be false on device {device}, got true: set training.device=cuda")


def _checkpoints_dropout(part: nn.Module) -> bool:
    """Return True if a module recomputes layers with dropout in backward."""
    checkpoints = (isinstance(part, GraphTransformerProcessor) and part.checkpoint_groups is not None) or (
        isinstance(part, GraphTransformerBaseMapper) and part.gradient_checkpointing
    )
    blocks = (block for block in part.modules() if isinstance(block, GraphTransformerBaseBlock))
    return checkpoints and any(block.dropout > 0 for block in blocks)


def _check_same_kind(batch: Sample, static: Sample) -> None:
    got, expected = _described(batch), _described(static)
    if got != expected:
        raise ValueError(
            f"all batches must have the shapes and dtypes of the first, {expected}, with training.cuda_graph=true, "
            f"got {got}: set training.cuda_graph=false for batches that differ"
        )


def _described(batch: Sample) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in batch._asdict().items())
