"""The dropout mask of edge attention, a function of seed, batch index, global edge id and head.

    word = philox(counter = (edge mod 2^32, edge div 2^32, batch, head), key = seed)[0]
    keep = word >= rate * 2^32

so it is the same for all backends, edge orders and shardings.

References
----------
Salmon et al. (2011), Parallel random numbers: as easy as 1, 2, 3, SC'11 (Philox-4x32 with 10
rounds).
"""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF  # uint32 arithmetic, held in int64
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_AT_ONCE = 2**16  # values that are drawn together: more leave the caches of a CPU


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed [1] from the device's generator; manual_seed and checkpointing reproduce it."""
    return torch.randint(2**62, (1,), device=device)


def dropout_factor(
    seed: Tensor, batch: int, global_edge_id: Tensor, heads: range, rate: float, dtype: torch.dtype
) -> Tensor:
    """Return dropout factors, 0 if dropped, else 1 / (1 - rate), rate in 0 .. 1.

    `seed` [1] and `global_edge_id` [E] are int64. The result [E, len(heads)] is `dtype`.
    """
    edge = global_edge_id.unsqueeze(1)
    low, high, entry = edge & _LOW, edge >> 32, edge.new_full((), batch)
    survivor = 1.0 / (1.0 - rate) if rate < 1.0 else 0.0
    step = max(1, _AT_ONCE // max(1, len(edge)))
    factors = []
    for first in range(0, len(heads), step):
        group = heads[first : first + step]
        head = torch.arange(group.start, group.stop, device=edge.device)
        bits = philox((low, high, entry, head), seed)[0]
        factors.append((bits >= drop_threshold(rate)).to(dtype) * survivor)
    return torch.cat(factors, dim=1)


def drop_threshold(rate: float) -> int:
    """Return the number of the 2^32 32-bit values that are dropped."""
    return round(rate * 2**32)


def refuse_in_export(seed: Tensor | None, rate: float) -> None:
    """Raise ValueError if the exported call with this seed has dropout."""
    if seed is not None:
        raise ValueError(
            f"a program is exported for inference, got dropout_p={rate}; call model.eval() first"
        )


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: Tensor) -> tuple[Tensor, ...]:
    """Return Philox-4x32-10 of four counters and a 64-bit seed [1]: four 32-bit values.

    All are held in int64; counters are broadcast.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(constant: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of a 32 by 32 bit product: int64 wraps around as uint64 does."""
    product = constant * x
    return (product >> 32).bitwise_and_(_LOW), product.bitwise_and_(_LOW)
