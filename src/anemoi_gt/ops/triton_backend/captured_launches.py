"""What a function launches, captured in a CUDA graph through CUDA's driver, and replayed.

`torch.cuda.CUDAGraph` is for whole steps. While it captures, it holds the random generator of the
device: a draw in another thread raises "Offset increment outside graph capture encountered
unexpectedly" (torch 2.11), which nobody can expect of a capture that they did not ask for.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from threading import Lock

import torch

THREAD_LOCAL = 1  # CUstreamCaptureMode: other threads may do as they like meanwhile


class CapturedLaunches:
    """A CUDA graph, ready to be launched.

    It holds addresses, not tensors.
    """

    def __init__(self, executable: ctypes.c_void_p):
        self._executable = executable
        # here, because globals may be gone when the interpreter ends
        self._launch = _driver().cuGraphLaunch
        self._destroy = _driver().cuGraphExecDestroy

    def replay(self) -> None:
        """Launch the graph on the default stream of the current device."""
        code = self._launch(self._executable, None)
        if code:
            _raise("cuGraphLaunch", code)

    def __del__(self) -> None:
        """Release the graph; CUDA waits for replays under way."""
        self._destroy(self._executable)


def capture(run: Callable[[], None]) -> Callable[[], None] | None:
    """Return a replay of what `run` launches on the current device, or None if one is under way.

    `run` launches on the current stream, and is not executed. One thread captures at a time: all
    share a stream, whose cuBLAS workspaces and temporary memory come from a pool that outlives the
    graphs. Sharing is safe, because replays follow each other on the default stream.

    Raises RuntimeError if something cannot be captured.
    """
    if not _capturing.acquire(blocking=False):
        return None
    try:
        return _captured(run).replay
    finally:
        _capturing.release()


_capturing = Lock()


def _captured(run: Callable[[], None]) -> CapturedLaunches:
    stream, pool = _side_stream(torch.cuda.current_device())
    torch.cuda.current_blas_handle()  # each thread has one, which must not be made in a capture
    graph = ctypes.c_void_p()
    executable = ctypes.c_void_p()
    handle = ctypes.c_void_p(stream.cuda_stream)
    try:
        with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
            _call("cuStreamBeginCapture_v2", handle, ctypes.c_int(THREAD_LOCAL))
            try:
                run()
            finally:
                _call("cuStreamEndCapture", handle, ctypes.byref(graph))
        flags = ctypes.c_ulonglong(0)
        _call("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, flags)
    finally:
        if graph:
            _call("cuGraphDestroy", graph)
    return CapturedLaunches(executable)


@cache
def _side_stream(device: int) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
    """Return the stream of captures on a device, and the pool of what is allocated meanwhile.

    The default stream cannot be captured.
    """
    return torch.cuda.Stream(device), torch.cuda.MemPool()


@cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuGraphLaunch.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    return library


def _call(name: str, *arguments: object) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        _raise(name, code)


def _raise(name: str, code: int) -> None:
    text = ctypes.c_char_p()
    _driver().cuGetErrorString(code, ctypes.byref(text))
    reason = (text.value or b"unknown error").decode()
    raise RuntimeError(f"{name} failed with CUDA error {code}: {reason}")
