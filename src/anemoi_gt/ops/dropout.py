"""The dropout mask of edge attention: a function of seed, sample, edge and head, whatever the order of the work.

    keep = philox(counter = (edge mod 2^32, edge div 2^32, sample, head), key = seed)[0] >= rate * 2^32

so two backends, two edge orders and two shardings see the same mask.

References
----------
Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3, SC'11 (Philox-4x32 with 10 rounds).
"""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF  # uint32 arithmetic, held in int64
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed [1] from the device's generator, so that manual_seed and activation checkpointing give it again."""
    return torch.randint(2**62, (1,), device=device)


def keep_factor(seed: Tensor, sample: int, edge: Tensor, head: int, rate: float, dtype: torch.dtype) -> Tensor:
    """Return the factor of each attention weight: 0 where it is dropped, 1 / (1 - rate) where it is kept.

    Parameters
    ----------
    seed : Tensor [1] or [2], int64
        The seed, and the number of the first head among all of a layer where the caller has some of them; else that is 0.
    sample, head : int
        Counted from 0 in what the caller has.
    edge : Tensor [E], int64
        Number of each edge in the whole graph.
    rate : float in 0 .. 1
    dtype : torch.dtype of the result

    Returns
    -------
    Tensor [E]
    """
    number = torch.full_like(edge, head) + seed[1:].sum()
    bits = philox((edge & _LOW, edge >> 32, torch.full_like(edge, sample), number), seed[:1])[0]
    survivor = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    return (bits >= drop_threshold(rate)).to(dtype) * survivor


def drop_threshold(rate: float) -> int:
    """The number of 32-bit values, out of 2^32, that are dropped."""
    return round(rate * 2**32)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Philox-4x32-10: four 32-bit counters [E] and a 64-bit seed [1] to four 32-bit values [E], all held in int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 by 32 bit product, by 16-bit halves so that int64 does not overflow."""
    low = constant * (x & 0xFFFF)
    middle = constant * (x >> 16) + (low >> 16)
    return middle >> 16, ((middle << 16) | (low & 0xFFFF)) & _LOW
