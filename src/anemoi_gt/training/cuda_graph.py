"""Forward and backward of a step, recorded once and replayed on every batch: Python launches nothing. The only place that captures a
CUDA graph.

    first batch     a copy of it is made;  passes that warm up;  the pass is captured;  random generators as before
    every batch     it is copied into that copy;  the graph is replayed;  gradients go back to their parameters

A graph reads and writes the same memory each time, so its batch, its loss and its gradients stay where they were when it was captured.
It draws from PyTorch's generator on the device what the same pass would draw without it: a replay starts at the seed and the offset
that the generator has then, and moves the offset on by as much as the pass did.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.data.datasets import Sample
from anemoi_gt.nn import GraphTransformerBaseBlock, GraphTransformerBaseMapper, GraphTransformerProcessor
from anemoi_gt.training.rng import generator_states, set_generator_states

WARM_UP = 3  # passes, as PyTorch asks for: kernels are compiled, libraries have their memory, ranks have met


class Outputs(NamedTuple):
    """What a pass writes."""

    loss: Tensor  # a scalar
    gradients: list[Tensor | None]  # of each parameter; None where it gets none


class Recording(NamedTuple):
    """What a replay reads and writes, and the replay."""

    batch: Sample
    outputs: Outputs
    replay: Callable[[], None]


Recorder = Callable[[Callable[[], Outputs]], tuple[Outputs, Callable[[], None]]]


class RecordedPass:
    """Forward and backward, recorded at the first batch; called as the function that it records, with the same results, bit by bit.

    Parameters
    ----------
    function : callable
        Takes a batch, leaves gradients at the parameters and returns the loss, a scalar without history. It works on the device
        alone, does the same for every batch, and changes nothing but gradients and random generators.
    parameters : sequence of Parameter
        Those that may get a gradient.
    device : torch.device
        Whose random generator the function draws from.
    recorder : callable
        Takes a function without arguments and calls it, more than once if it likes. Returns what the last call returned, and what
        does the work of that call again, from the same memory into the same memory: `record_cuda_graph`.
    """

    def __init__(
        self,
        function: Callable[[Sample], Tensor],
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        recorder: Recorder,
    ):
        self.function, self.parameters, self.device, self.recorder = function, parameters, device, recorder
        self._recording: Recording | None = None

    def __call__(self, batch: Sample) -> Tensor:
        """Leave the gradients of a batch at the parameters; returns the loss, a scalar.

        Parameters
        ----------
        batch : Sample
            Of the same shapes and dtypes each time.

        Raises
        ------
        ValueError
            For a batch that is not like the first.
        """
        if self._recording is None:
            self._recording = self._record(batch)
        held, outputs, replay = self._recording
        _check_like(batch, held)
        for tensor, values in zip(held, batch, strict=True):
            tensor.copy_(values)
        replay()
        self._put(outputs.gradients)
        return outputs.loss.clone()  # the next replay writes there

    def forget(self) -> None:
        """Let go of the recording and its memory, gradients included; the next batch is recorded anew."""
        if self._recording is not None:
            self._put([None] * len(self.parameters))
        self._recording = None

    def _record(self, batch: Sample) -> Recording:
        states = generator_states(self.device)
        held = Sample(*(tensor.clone() for tensor in batch))
        try:
            with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
                outputs, replay = self.recorder(lambda: self._outputs(held))
        except RuntimeError as error:
            error.add_note(
                "while training.cuda_graph=true recorded the step; training.cuda_graph=false records nothing"
            )
            raise
        set_generator_states(states, self.device)
        return Recording(held, outputs, replay)

    def _outputs(self, batch: Sample) -> Outputs:
        """Run the pass and take its gradients; a parameter has none before it, so backward writes one and adds to none."""
        nothing = [None] * len(self.parameters)
        self._put(nothing)
        loss = self.function(batch)
        gradients = [parameter.grad for parameter in self.parameters]
        self._put(nothing)
        return Outputs(loss, gradients)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient if parameter.requires_grad else None  # what was frozen since does not move


def record_cuda_graph(
    function: Callable[[], Any], warm_up: Callable[[], Any] | None = None
) -> tuple[Any, Callable[[], None]]:
    """Capture a function in a CUDA graph on the current device, as `RecordedPass` wants it.

    Parameters
    ----------
    function : callable
        Called once while it is captured, when nothing is computed.
    warm_up : callable, optional
        Called `WARM_UP` times before; None is `function`.

    Returns
    -------
    outputs
        What the function returned, in memory of the graph; nothing is there before the first replay.
    replay : callable
        Computes them, behind what the current stream has to do.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            (warm_up or function)()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks for events meanwhile
        outputs = function()
    return outputs, graph.replay


def check_recordable(model: nn.Module, device: torch.device) -> None:
    """Raise unless a step of a model can be recorded in a CUDA graph.

    Raises
    ------
    ValueError
        As `check_device_records` does; when layers that are computed again for backward drop attention, for which PyTorch would read the
        state of the generator while it captures, and refuses.
    """
    check_device_records(device)
    again = [name or type(part).__name__ for name, part in model.named_modules() if _draws_again(part)]
    if again:
        raise ValueError(
            "training.cuda_graph must be false where layers that drop attention are computed again for backward, got true and "
            f"{', '.join(again)}: set model.checkpoint_groups=null or model.dropout=0"
        )


def check_device_records(device: torch.device) -> None:
    """Raise a ValueError unless a device has CUDA graphs."""
    if device.type != "cuda":
        raise ValueError(
            f"training.cuda_graph must be false on device {device}, got true: CUDA graphs are for training.device=cuda"
        )


def _draws_again(part: nn.Module) -> bool:
    """Whether a part computes layers again for backward, and draws random numbers in them."""
    is_recomputed = (isinstance(part, GraphTransformerProcessor) and part.checkpoint_groups is not None) or (
        isinstance(part, GraphTransformerBaseMapper) and part.gradient_checkpointing
    )
    blocks = (block for block in part.modules() if isinstance(block, GraphTransformerBaseBlock))
    return is_recomputed and any(block.dropout > 0 for block in blocks)


def _check_like(batch: Sample, held: Sample) -> None:
    came, wanted = _described(batch), _described(held)
    if came != wanted:
        raise ValueError(
            f"batches must all be like the first, {wanted}, when a step is recorded, got {came}: "
            "set training.cuda_graph=false for batches that differ"
        )


def _described(batch: Sample) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in batch._asdict().items())
