"""Learning rate schedule: linear warm-up, then half a cosine down to 0."""

import math


def warmup_cosine(step: int, warmup_steps: int, steps: int) -> float:
    """Return the learning rate of a step as a fraction of its maximum.

        (step + 1) / (warmup_steps + 1)                                         step < warmup_steps
        (1 + cos(pi (step - warmup_steps) / (steps - warmup_steps))) / 2        after that, down to 0

    Parameters
    ----------
    step : int
        From 0 to steps - 1.
    warmup_steps, steps : int
        As in `TrainingConfig`.

    Returns
    -------
    float
        In [0, 1].

    Examples
    --------
    >>> [round(warmup_cosine(step, warmup_steps=2, steps=6), 3) for step in range(7)]
    [0.333, 0.667, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    return (1 + math.cos(math.pi * min(progress, 1.0))) / 2
