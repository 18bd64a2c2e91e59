"""Compilers and caches that Triton and torch.compile need when a kernel first runs.

Images without a C compiler and folders that cannot be written are common in production. Functions
named `.._problem` return one sentence that says what to mend, or None if there is nothing to mend.
"""

import errno
import os
import shutil
from collections.abc import Callable
from functools import cache
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch

Result = TypeVar("Result")

# On a network file system, Triton's removal of an empty temporary folder may race with files of the
# file system itself. Its content is in the cache by then, so the same launch gets further.
REMOVAL_RACED = (errno.EBUSY, errno.ENOTEMPTY, errno.ESTALE)
ATTEMPTS = 10  # a kernel has fewer files


@cache  # found out once per process
def driver_problem() -> str | None:
    """Return why Triton cannot launch kernels on the GPUs of this process, or None.

    Triton builds its driver in C at first use, unless its cache has it.
    """
    from triton.runtime import driver

    # Before Triton 3.5, the active driver is a proxy that builds it at the first use of a method.
    return build_problem(lambda: driver.active.get_current_device)


def build_problem(build: Callable[[], object]) -> str | None:
    """Return why `build()`, by which Triton compiles and loads C code, fails, or None."""
    try:
        build()
    except Exception as error:
        return (
            f"Triton cannot build or load its driver: {type(error).__name__}: {error}; it needs a "
            "C compiler (gcc or clang, or one that the environment variable CC names), Python's "
            "headers, and a cache folder that can be written (TRITON_CACHE_DIR)"
        )
    return None


def with_cache(launch: Callable[[], Result]) -> Result:
    """Return `launch()`, by which Triton compiles and launches a kernel.

    Triton writes its cache before it launches, so a launch that raised OSError can be repeated.
    Raise OSError with a sentence about the cache if it cannot be written.
    """
    for _ in range(ATTEMPTS):
        try:
            return launch()
        except OSError as error:
            problem = error
        if problem.errno not in REMOVAL_RACED:
            break
    raise OSError(
        f"Triton's cache must be a folder that can be written, got {problem}; name another in the "
        "environment variable TRITON_CACHE_DIR, best on a disk of the host"
    ) from problem


def compile_problem(device: "torch.device") -> str | None:
    """Return why torch.compile cannot compile for a device, or None."""
    problem = compile_cache_problem()
    if problem is not None:
        return problem
    if device.type == "cuda":
        return driver_problem()
    compiler = os.environ.get("CXX", "g++")  # as PyTorch chooses it
    if shutil.which(compiler) is None:
        return (
            f"torch.compile needs a C++ compiler on a CPU, found no {compiler}; install g++, or "
            "name one in the environment variable CXX"
        )
    return None


def compile_cache_problem() -> str | None:
    """Return why the cache folder of torch.compile cannot be written, or None.

    Without the variable, it is below Python's temporary folder, which can be written.
    """
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if folder is None:
        return None
    try:
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    except OSError as error:
        return (
            "the environment variable TORCHINDUCTOR_CACHE_DIR must name a folder that can be "
            f"written, best on a disk of the host, got {folder}: {error.strerror}"
        )
    return None
