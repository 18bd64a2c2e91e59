"""A whole model: training step in a CUDA graph, without synchronisation, and compiled."""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from support.weather import weather_graph
from torch import Tensor
from torch._dynamo.utils import counters

from anemoi_gt import EncoderProcessorDecoder, KernelConfig
from gpu_checks import DEVICE

FIELDS = 20  # in and out of the data grid
# Compiled results may have FACTOR times the error of eager ones against float32, plus rounding.
FACTOR, ROUNDING = 2.0, 1e-4
STEPS = 3  # training steps that are compared


@dataclass(frozen=True)
class ModelSize:
    """Size of the model of a check; by default the nodes of O96 and icosphere 5."""

    data: int = 40_320
    hidden: int = 10_242
    edges: int = 120_000  # of each kind
    channels: int = 512
    heads: int = 16
    layers: int = 2


TINY = ModelSize(data=8, hidden=3, edges=12, channels=8, heads=2, layers=1)
HERE = ModelSize() if DEVICE.type == "cuda" else TINY


class Training:
    """A model with optimiser and a static batch, as CUDA graphs need; bitwise fixed by its seed.

    Parameters
    ----------
    size : ModelSize
    options : of `EncoderProcessorDecoder`
    """

    def __init__(self, size: ModelSize, **options):
        torch.manual_seed(0)
        kinds = (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data"))
        nodes = {"data": size.data, "hidden": size.hidden}
        graph = weather_graph(nodes, {(src, "to", dst): size.edges for src, dst in kinds})
        sizes = {"channels": size.channels, "heads": size.heads, "num_layers": size.layers}
        config = KernelConfig(backend="triton" if DEVICE.type == "cuda" else "torch")
        self.model = EncoderProcessorDecoder(
            graph, FIELDS, FIELDS, config=config, **sizes, **options
        ).to(DEVICE)
        self.mixed = DEVICE.type == "cuda"
        self.x, self.target = (torch.empty(1, size.data, FIELDS, device=DEVICE) for _ in range(2))
        on_gpu = {"fused": True, "capturable": True} if DEVICE.type == "cuda" else {}
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **on_gpu)

    def load(self, step: int) -> None:
        """Put the fields of a step into the batch."""
        generator = torch.Generator(DEVICE).manual_seed(step)
        for tensor in (self.x, self.target):
            tensor.normal_(generator=generator)

    def forward(self, function: Callable | None = None) -> Tensor:
        """Run the model, or the compiled `function`; with `mixed` in bfloat16."""
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.mixed):
            if function is None:
                return self.model(self.x)
            return function(self.x)

    def loss_backward(self, function: Callable | None = None) -> Tensor:
        """Return the loss, and set the gradients of the parameters."""
        self.optimiser.zero_grad(set_to_none=True)
        loss = (self.forward(function).float() - self.target).square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> Tensor:
        """Run a whole training step and return its loss."""
        loss = self.loss_backward()
        self.optimiser.step()
        return loss

    def state(self) -> list[Tensor]:
        """Return the parameters and the optimiser state, not copied."""
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        for state in self.optimiser.state.values():
            tensors += state.values()
        return tensors

    def run(self, step: Callable[[], Tensor]) -> list[Tensor]:
        """Return the losses of some steps, and all parameters after them."""
        losses = []
        for number in range(STEPS):
            self.load(number)
            losses.append(step().clone())
        return losses + [parameter.detach().clone() for parameter in self.model.parameters()]


def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Capture a call in a CUDA graph; return its replay, which returns the output tensor."""
    recorded = torch.cuda.CUDAGraph()
    with torch.cuda.graph(recorded):
        result = call()

    def replay() -> Tensor:
        recorded.replay()
        return result

    return replay


def warm(call: Callable[[], Tensor]) -> None:
    """Warm up a call as PyTorch requires before a capture: kernels and memory."""
    if DEVICE.type != "cuda":
        call()
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)


def assert_same(actual: list[Tensor], expected: list[Tensor], name: str) -> None:
    """Raise unless all tensors hold the same bits, none of them NaN."""
    wrong = sum(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    if wrong:
        raise AssertionError(f"{name}: {wrong} of {len(actual)} tensors differ")


def forward_in_graph(capture: Callable = capture) -> str:
    """Compare replays of a captured forward pass on new fields with eager passes, bit for bit."""
    training = Training(HERE)
    expected = []
    outputs = []
    with torch.no_grad():
        for number in range(STEPS):
            training.load(number)
            expected.append(training.forward().clone())
        warm(training.forward)
        replay = capture(training.forward)
        for number in range(STEPS):
            training.load(number)
            outputs.append(replay().clone())
    assert_same(outputs, expected, "output")
    return f"{STEPS} replays on new fields gave the bits of eager passes"


def step_in_graph(capture: Callable = capture) -> str:
    """Compare replays of a captured training step on new fields with eager steps, bit for bit."""
    checked = []
    for options in ({}, {"checkpoint_groups": 1, "mapper_chunks": 2}):
        eager = Training(HERE, **options)
        expected = eager.run(eager.step)
        again = Training(HERE, **options)
        # otherwise a replay could not agree either
        assert_same(again.run(again.step), expected, "two eager runs")
        training = Training(HERE, **options)
        first = [parameter.detach().clone() for parameter in training.model.parameters()]
        warm(training.step)
        replay = capture(training.step)
        # warming up changed all state: reset it in place, because the graph keeps the addresses
        with torch.no_grad():
            for tensor in training.state():
                tensor.zero_()
            for parameter, begin in zip(training.model.parameters(), first, strict=True):
                parameter.copy_(begin)
        assert_same(training.run(replay), expected, f"losses and parameters with {options}")
        checked.append("checkpointed, in chunks" if options else "plain")
    names = ", ".join(checked)
    return f"{STEPS} replays of forward, backward and AdamW gave the bits of eager steps: {names}"


@contextmanager
def waiting_is_an_error():
    """Raise an error in the context if any operation synchronises with the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step_never_waits() -> str:
    """Check that eager and compiled steps never synchronise with the device."""
    for options in (
        {},
        {"checkpoint_groups": 1, "mapper_chunks": 2},
        {"dropout": 0.1, "mapper_chunks": 2},
    ):
        training = Training(HERE, **options)
        training.load(0)
        warm(training.step)
        with waiting_is_an_error():
            training.step()
    compiled = torch.compile(training.model, fullgraph=True)
    training.loss_backward(compiled)
    with waiting_is_an_error():
        training.loss_backward(compiled)
        training.optimiser.step()
    return "forward, backward and AdamW never waited: plain, checkpointed, with dropout, compiled"


def compiled(modes: tuple[str, ...] = ("default", "reduce-overhead"), **options) -> str:
    """Compare output and gradients of the compiled model, one graph, with eager."""
    problems = {}
    for mode in modes:
        torch.compiler.reset()
        counters.clear()
        training = Training(HERE)
        function = torch.compile(training.model, fullgraph=True, **(options or {"mode": mode}))
        messages = []
        for number in range(4):  # compiles, captures, replays twice
            message = _compare(training, function, number)
            if message is not None:
                messages.append(message)
        graphs = counters["stats"]["unique_graphs"]
        skips = counters["inductor"]["cudagraph_skips"]
        if graphs != 1 or skips:
            messages.append(f"{graphs} graphs instead of 1, {skips} of them not captured")
        if messages:
            problems[mode] = messages
    if problems:
        raise AssertionError(str(problems))
    exact = "loss and gradients as exact as eager's, one graph, no pass left out of a CUDA graph"
    return f"{exact}: {', '.join(modes)}"


def _compare(training: Training, function: Callable, number: int) -> str | None:
    """Return a message if an error exceeds eager's error against float32, or None."""
    training.load(number)
    eager = _results(training, None)
    mixed, training.mixed = training.mixed, False
    exact = _results(training, None)
    training.mixed = mixed
    torch.compiler.cudagraph_mark_step_begin()
    compiled = _results(training, function)
    for name in exact:
        norm = exact[name].norm()
        error = ((compiled[name] - exact[name]).norm() / norm).item()
        eager_error = ((eager[name] - exact[name]).norm() / norm).item()
        if not error <= FACTOR * eager_error + ROUNDING:
            return f"pass {number}: {name} off by {error}, eager by {eager_error}"
    return None


def _results(training: Training, function: Callable | None) -> dict[str, Tensor]:
    """Return the loss, and all gradients as one vector."""
    loss = training.loss_backward(function).clone()
    gradients = [p.grad.flatten() for p in training.model.parameters() if p.grad is not None]
    return {"loss": loss, "gradients": torch.cat(gradients)}
