"""The anemoi-inference runner `anemoi-gt`, whose models use anemoi_gt.

It is found by the entry-point group `anemoi.inference.runners`, and is the runner of the
checkpoint's task, after `install`. On several ranks it is upstream's runner `parallel` around that
of the task, with `install` on every rank:

    runner: {parallel: {base_runner: anemoi-gt}}                       both are the same
    runner: {anemoi-gt: {runner: parallel}}
"""

import logging
from inspect import signature
from typing import Any

from anemoi.inference.checkpoint import Checkpoint
from anemoi.inference.runner import Runner
from anemoi.inference.runners import runner_registry
from anemoi.inference.runners.parallel import ParallelRunnerFactory, ParallelRunnerMixin

from anemoi_gt.integrations.anemoi.installation import count_blocks, install
from anemoi_gt.integrations.anemoi.settings import DEPRECATED_OPTIONS
from anemoi_gt.integrations.anemoi.without_flash_attn import flash_attn_stand_in

log = logging.getLogger(__name__)
NAME = "anemoi-gt"  # entry point
OPTIONS_OF_INSTALL = (*signature(install).parameters, *DEPRECATED_OPTIONS)


class AnemoiGTRunner(Runner):
    """Call `install` and build a runner of anemoi-inference, which is what the constructor returns.

    It is a class because upstream's `parallel` derives a class from its `base_runner`.

    Parameters
    ----------
    config : anemoi.inference.config.run.RunConfiguration
        The config of the forecast.
    runner : str
        Name of the runner to build; `auto` is the runner of the checkpoint's task, `parallel`
        splits it over ranks.
    **options
        Options of `install`, which may raise, and of the runner to build.

    Raises
    ------
    ValueError
        If the model has no block of a graph transformer, graph network or transformer; it is loaded
        here, before any data are read.
    """

    def __new__(
        cls,
        config: Any,
        *,
        runner: str = "auto",
        **options: Any,
    ) -> Any:
        settings = {name: options.pop(name) for name in OPTIONS_OF_INSTALL if name in options}
        if runner == "parallel":  # ranks that it starts read nothing but `parallel` in the config
            base = options.pop("base_runner", "auto")
            parallel = {"base_runner": NAME, "runner": base, **settings, **options}
            config = config.model_copy(update={"runner": {"parallel": parallel}})
            return runner_registry.from_config(config.runner, config)
        install(**settings)
        with flash_attn_stand_in():
            # derived by `parallel`, with `cls` as its base runner
            if issubclass(cls, ParallelRunnerMixin):
                kind = ParallelRunnerFactory.get_class(_runner_class(runner, config))
                built = kind(config, **options)
            else:
                built = runner_registry.from_config({runner: options}, config)
            number = count_blocks(built.model)
        log.info("anemoi_gt is installed for %d blocks", number)
        return built


def _runner_class(name: str, config: Any) -> type[Runner]:
    """Return the class of a runner; for `auto`, which cannot run on several ranks, the task's."""
    if name == "auto":
        checkpoint = Checkpoint(config.checkpoint, patch_metadata=config.patch_metadata)
        name = checkpoint.task or "forecaster"
    kind = runner_registry.lookup(name)
    if not isinstance(kind, type) or not issubclass(kind, Runner):
        raise ValueError(
            f"runner must be a runner that `parallel` can split over ranks, got {name!r}"
        )
    return kind
