"""Releases of PyTorch and Triton, for claims that do not hold for all that are tested: (2, 13)."""

from importlib.metadata import version


def _release(package):
    return tuple(int(number) for number in version(package).split(".")[:2])


TORCH = _release("torch")
TRITON = _release("triton")
