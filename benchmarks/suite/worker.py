"""One process per baseline, which checks and times problems; a broken process is replaced."""

import gc
import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from suite import baselines, correctness, graphs
from suite.operands import Operands, draw, rotation
from suite.problems import Problem
from suite.timing import CLOCKS, Gpu, copy_speed, measure

PATIENCE = 10  # seconds that a process has to end by itself


class Refused(Exception):
    """A baseline does not support something; the message is the reason."""


def forward(operands: Operands, attend: Callable) -> Callable:
    """Return a call of the attention without gradients."""

    def call():
        with torch.no_grad():
            return attend()

    return call


def forward_backward(operands: Operands, attend: Callable) -> Callable:
    """Return a call of the attention with the gradients of all leaves."""
    leaves = operands.leaves
    return lambda: torch.autograd.grad(attend(), leaves, operands.grad_out)


def replay(operands: Operands, attend: Callable) -> Callable:
    """Return the same replayed from a CUDA graph, which removes the host time.

    Raises
    ------
    Refused
        Without a GPU.
    """
    if operands.query.device.type != "cuda":
        raise Refused("CUDA graphs need a GPU")
    return Gpu.record(forward_backward(operands, attend))


CALLS = {"forward": forward, "forward_backward": forward_backward, "replay": replay}


class Baseline:
    """A baseline on a device: the methods that a process answers."""

    def __init__(self, name: str, device: str, folder: Path):
        self.baseline, self.device, self.folder = baselines.load(name), device, folder
        self.clock = CLOCKS[device]

    def copy_speed(self) -> float:
        """Bytes per second of a copy."""
        return copy_speed(self.clock, self.device)

    def check(self, problem: Problem) -> None:
        """Compile and check all passes of a problem."""
        operands = draw(problem, self._graph(problem))
        correctness.check_attention(problem, operands, self.baseline.attention)

    def time(self, problem: Problem, kind: str) -> tuple[list[float], int | None]:
        """Return the milliseconds of each call of a pass, and the peak memory of one in bytes."""
        calls = self._calls(problem, self._graph(problem), kind)
        times = measure(self.clock, calls)
        return times, self.clock.peak_bytes(calls[0])

    def _graph(self, problem: Problem) -> graphs.Coo:
        unsupported_reason = self.baseline.unsupported_reason(problem, self.device)
        if unsupported_reason:
            raise Refused(unsupported_reason)
        return graphs.load(problem.graph, self.folder).to(self.device)

    def _calls(self, problem: Problem, coo: graphs.Coo, kind: str) -> list[Callable]:
        """Return one call per set of operands; the sets are used in turn."""
        cache = self.clock.cache_bytes()
        sets = rotation(partial(draw, problem, coo), cache)
        return [CALLS[kind](operands, self.baseline.attention(operands)) for operands in sets]


def answer(baseline: Baseline, method: str, arguments: tuple) -> tuple[str, object]:
    """Return ("done", result), ("refused", reason) or ("broken", error) of a baseline's method."""
    try:
        return "done", getattr(baseline, method)(*arguments)
    except Refused as refusal:
        return "refused", str(refusal)
    except AssertionError as error:
        return "refused", f"wrong: {error}"
    except torch.OutOfMemoryError:
        return "refused", "out of memory"
    # of the device perhaps, which leaves the process useless: the caller starts another one
    except Exception as error:
        traceback.print_exc()
        return "broken", f"{type(error).__name__}: {error}"


def _serve(connection: Connection, name: str, device: str, folder: Path) -> None:
    """Answer requests (method, arguments) until None is received."""
    if device == "cuda":
        torch.set_num_threads(1)  # many processes share the cores while they check
    baseline = Baseline(name, device, folder)
    while True:
        request = connection.recv()
        if request is None:
            return
        verdict, value = answer(baseline, *request)
        gc.collect()
        if verdict != "broken":
            baseline.clock.free()
        connection.send((verdict, value))


class Worker:
    """A process for one baseline, restarted if it breaks. Use as a context."""

    def __init__(self, name: str, device: str, folder: Path):
        self.arguments = name, device, folder
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self.arguments), daemon=True)
        self.process.start()
        theirs.close()  # so that the death of the process ends a wait for its answer

    def call(self, method: str, *arguments):
        """Return a `Baseline` method's result; raise Refused if it refuses, fails or breaks."""
        if self.connection.closed:
            self._start()
        try:
            self.connection.send((method, arguments))
            verdict, value = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            verdict, value = "broken", f"its process ended with exit code {self.process.exitcode}"
        if verdict == "broken":
            self._kill()
            raise Refused(f"broken: {value.strip().splitlines()[0]}")
        if verdict == "refused":
            raise Refused(value)
        return value

    def _kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception) -> None:
        if not self.connection.closed:
            with suppress(ConnectionError):
                self.connection.send(None)
                self.process.join(PATIENCE)
            self._kill()
