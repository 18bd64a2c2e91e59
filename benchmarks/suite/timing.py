"""Clocks: times of calls, peak memory, bandwidth of a copy; one class for each kind of device."""

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice

import torch

from anemoi_gt.replay.cuda_graph import capture_cuda_graph


class Gpu:
    """Device events around every call; calls are queued one after the other, as in training."""

    WARM_UP, FEWEST, MOST = 3, 10, 200  # calls
    BUDGET, ROUNDS = 0.3, 1  # seconds of one measurement; measurements in turn

    @staticmethod
    def cache_bytes() -> int:
        """Return the size of the L2 cache, which the operands of a benchmark must exceed."""
        return torch.cuda.get_device_properties(0).L2_cache_size

    @staticmethod
    def synchronize() -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    @staticmethod
    def times(calls: list[Callable]) -> list[float]:
        """Return the milliseconds of each call."""
        pairs = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in calls
        ]
        for call, (begin, end) in zip(calls, pairs, strict=True):
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in pairs]

    @staticmethod
    def record(call: Callable) -> Callable:
        """Capture a call in a CUDA graph, which owns its memory; return the replay."""
        _, replay = capture_cuda_graph(call)
        return replay

    @staticmethod
    def peak_bytes(call: Callable) -> int:
        """Return the peak memory of a call in bytes, beyond the memory in use before it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    @staticmethod
    def free() -> None:
        """Return unused memory to the device, for other processes."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Cpu:
    """Host clock around every call; baselines take turns, so all see the same machine state."""

    WARM_UP, FEWEST, MOST = 1, 2, 50
    BUDGET, ROUNDS = 0.5, 3

    @staticmethod
    def cache_bytes() -> int:
        """Return 0: the caches of a CPU are ignored."""
        return 0

    @staticmethod
    def synchronize() -> None:
        """Do nothing: no work is asynchronous on a CPU."""

    @staticmethod
    def times(calls: list[Callable]) -> list[float]:
        """Return the milliseconds of each call."""
        measured = []
        for call in calls:
            begin = time.perf_counter()
            call()
            measured.append(1e3 * (time.perf_counter() - begin))
        return measured

    @staticmethod
    def record(call: Callable) -> Callable:
        """Return the call itself: a CPU captures nothing."""
        return call

    @staticmethod
    def peak_bytes(call: Callable) -> None:
        """Return None: PyTorch does not count the memory of a CPU."""

    @staticmethod
    def free() -> None:
        """Do nothing: the allocator of a CPU keeps no memory."""


CLOCKS = {"cuda": Gpu, "cpu": Cpu}


def measure(clock: type[Gpu] | type[Cpu], calls: Sequence[Callable]) -> list[float]:
    """Return milliseconds of calls that take turns, after warm-up; their time sets the number."""
    for call in islice(cycle(calls), max(clock.WARM_UP, len(calls))):
        call()
    clock.synchronize()
    begin = time.perf_counter()
    calls[0]()
    clock.synchronize()
    fitting = int(clock.BUDGET / max(time.perf_counter() - begin, 1e-6))
    number = min(max(fitting, clock.FEWEST), clock.MOST)
    return clock.times(list(islice(cycle(calls), number)))


def seconds_of(call: Callable, repeats: int, device: str) -> list[float]:
    """Return the seconds of each call, synchronising the device between calls."""
    wait = CLOCKS[device].synchronize
    times = []
    wait()
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        wait()
        times.append(time.perf_counter() - begin)
    return times


def copy_speed(clock: type[Gpu] | type[Cpu], device: str) -> float:
    """Return the bandwidth of a copy on the device in bytes per second, read plus written."""
    numbers = 2**30 if device == "cuda" else 2**24
    source = torch.randn(2**20, device=device).repeat(numbers // 2**20)
    target = torch.empty_like(source)
    median = statistics.median(measure(clock, [lambda: target.copy_(source)]))
    return 2 * source.nbytes / (1e-3 * median)
