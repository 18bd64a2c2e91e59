"""A package beside the model that it was made of: are the numbers the same, and what are size and time."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}  # of the error: about 80, 4 and 5 eps
REPEATS = 11


@dataclass(frozen=True)
class Trial:
    """What a package was found to be.

    Attributes
    ----------
    error : float
        Root of the mean squared difference from the model over that of the model's output; the largest of all batches.
    size : int
        Bytes of the file.
    package_ms, model_ms : float
        Milliseconds of a call with one sample, median; of the model as eager PyTorch runs it.
    """

    error: float
    size: int
    package_ms: float
    model_ms: float


def try_package(path: str | Path, model: nn.Module, batches: list[Tensor], dtype: torch.dtype) -> Trial:
    """Run a package and its model on the same inputs.

    Parameters
    ----------
    path : str or Path
        The package.
    model : nn.Module
        Computes as the package should, in `eval()`, on the device that the package is for.
    batches : list of Tensor [B, N, in_channels]
        Inputs, on that device; the first is timed.
    dtype : torch.dtype
        In which most of the model computes; it decides what rounding may do. One of `LIMITS`.

    Returns
    -------
    Trial

    Raises
    ------
    ValueError
        For another dtype.
    FloatingPointError
        When the numbers differ by more than rounding in `dtype` explains.
    """
    if dtype not in LIMITS:
        raise ValueError(f"dtype must be one of {', '.join(map(str, LIMITS))}, got {dtype}")
    package = torch._inductor.aoti_load_package(str(path))
    with torch.no_grad():
        error = max(relative_error(package(batch), model(batch)) for batch in batches)
        if not error <= LIMITS[dtype]:
            raise FloatingPointError(
                f"the package must give the numbers of the model within {LIMITS[dtype]:g}, its error is {error:.2g}"
            )
        package_ms, model_ms = (_milliseconds(call, batches[0]) for call in (package, model))
    return Trial(error, Path(path).stat().st_size, package_ms, model_ms)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS of the difference over that of `expected`; NaN where any number is, 0 where all are 0."""
    actual, expected = actual.double(), expected.double()
    difference = (actual - expected).square().mean()
    return 0.0 if difference == 0 else (difference / expected.square().mean()).sqrt().item()


def _milliseconds(call: Callable[[Tensor], Tensor], batch: Tensor) -> float:
    """Median time of a call; nothing is left running on the device before and after each."""
    times = []
    for _ in range(REPEATS):
        _wait(batch)
        begin = time.perf_counter()
        call(batch)
        _wait(batch)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
