"""A runner of anemoi-inference whose models compute with anemoi_gt: `runner: anemoi-gt` in its config.

It is found by the entry-point group `anemoi.inference.runners`, and is the runner of the checkpoint's task, after
`install`.
"""

import logging
from functools import wraps
from importlib import import_module

from anemoi_gt.integrations.anemoi.patch import BLOCK, install
from anemoi_gt.integrations.anemoi.upstream import find

log = logging.getLogger(__name__)


def runner(
    config,
    *,
    runner: str = "auto",
    backend: str = "auto",
    precision: str | None = None,
    fuse_edges: bool = True,
    **options,
):
    """Call `install` and build a runner of anemoi-inference, which logs how many blocks compute with us.

    `config` is the RunConfiguration, `runner` the name of the runner to build (`auto`: the one of the checkpoint's
    task), and `options` are those of that runner; the others are as for `install`, which may raise. Raise ValueError at
    the first step if the model has no graph-transformer block.
    """
    install(backend, precision, fuse_edges)
    made = import_module("anemoi.inference.runners").runner_registry.from_config({runner: options}, config)
    predict_step = made.predict_step

    @wraps(predict_step)
    def count_first(model, *args, **kwargs):
        blocks = sum(isinstance(module, find(*BLOCK)) for module in model.modules())
        if not blocks:
            raise ValueError(
                "the model of runner 'anemoi-gt' must have a graph-transformer block, got "
                f"{type(model).__name__} without one: use a runner of anemoi-inference"
            )
        log.info("anemoi_gt computes the attention of %d graph-transformer blocks", blocks)
        made.predict_step = predict_step
        return predict_step(model, *args, **kwargs)

    made.predict_step = count_first
    return made
