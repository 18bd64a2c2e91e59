"""`CUDAGraphCallback`: training steps of Anemoi, in Lightning's loop, replayed from a CUDA graph.

`InstallCallback` also calls `install`, and leaves steps without a graph that cannot be captured.

strategy.training_step     replays forward and backward, logs what the module logs, returns the loss
zero_grad                  Lightning's
module.backward            adds the gradients of the replay, averaged over all ranks
unscale, clip, optimiser   Lightning's
"""

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anemoi_gt.distributed.gradients import average_gradients
from anemoi_gt.integrations.anemoi.captured_step import (
    check_device,
    check_submodules,
    indices_on_device,
)
from anemoi_gt.integrations.anemoi.installation import install
from anemoi_gt.integrations.anemoi.report import warn_once
from anemoi_gt.replay.cuda_graph import Capture, CUDAGraphedStep, capture_cuda_graph
from anemoi_gt.replay.slots import replaced_values

log = logging.getLogger(__name__)
REMEDY = "remove CUDAGraphCallback from diagnostics.callbacks"
REMEDY_OF_INSTALL = "set cuda_graphs: false in InstallCallback of diagnostics.callbacks"


class CUDAGraphCallback(Callback):
    """Replay forward and backward of every training step from a CUDA graph, with equal results.

    The step is captured at the first batch of every epoch, since an epoch may change the rollout.
    Validation, and batches of other shapes, run without it. With several processes, gradients are
    averaged after the replay, because a replay does not run the hooks of DDP. Host code of the
    captured step is not run again: numbers that the module logs without a tensor, and `batch_idx`,
    keep the values of the captured batch.
    `capture` is as for `CUDAGraphedStep`.
    """

    remedy = REMEDY

    def __init__(self, capture: Capture = capture_cuda_graph):
        self._capture = capture
        self._step: CUDAGraphedStep | None = None
        self._differentiate: Any = None  # the module's backward, while it is replaced
        self._gradients: list[Tensor | None] | None = None  # of the replayed batch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the strategy's `training_step` and the module's `backward`.

        Raises ValueError for a trainer whose steps cannot be captured.
        """
        check_capturable(trainer, pl_module, self._capture, self.remedy)
        self._differentiate = pl_module.backward
        # Lightning 2.6 calls the strategy's training_step, which enters train_step_context and
        # DDP's forward; the instance attribute hides it until on_train_end deletes that
        trainer.strategy.training_step = partial(self._training_step, trainer, pl_module)
        pl_module.backward = partial(self._backward, trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Capture the first batch again: rollout or trained weights may have changed."""
        self._release()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the replaced methods, and release the captured step."""
        if self._differentiate is not None:
            del trainer.strategy.training_step, pl_module.backward
        self._differentiate = None
        self._release()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """End as `on_train_end`."""
        self.on_train_end(trainer, pl_module)

    def _training_step(
        self, trainer: Trainer, module: LightningModule, batch: Any, *rest: Any
    ) -> Any:
        """Replay a batch and return the output of `training_step`; `_backward` adds gradients."""
        inputs = (batch, trainer.accumulate_grad_batches)
        if self._step is not None and not self._step.accepts(inputs):
            warn_once(
                "training batches of other shapes than the captured one run without the CUDA graph"
            )
            self._gradients = None
            with trainer.precision_plugin.train_step_context():
                # past DDP, which would average gradients
                return module.training_step(batch, *rest)
        if self._step is None:
            indices = indices_on_device(module, trainer.strategy.root_device)
            function = partial(self._forward_backward, trainer, module, indices, rest)
            device = trainer.strategy.root_device
            self._step = CUDAGraphedStep(function, module, device, self._capture, self.remedy)
        # of the last step; Lightning discards it after `training_step`
        self._step.release_gradients()
        (output, logged), self._gradients = self._step.replay(inputs)
        if trainer.world_size > 1 and trainer.strategy.model.broadcast_buffers:
            check_processes(self._step.changed, self.remedy)
        for arguments, options in logged:
            module.log(*arguments, **options)
        return output

    def _forward_backward(
        self,
        trainer: Trainer,
        module: LightningModule,
        indices: list,
        rest: tuple,
        inputs: tuple,
    ) -> tuple[Any, list]:
        """Run the captured pass; return the output of `training_step` and the calls of `log`."""
        batch, accumulated = inputs
        logged = []
        recorder = (
            (vars(module), "log"),
            lambda *arguments, **options: logged.append((arguments, options)),
        )
        slots = [recorder, *indices]
        with trainer.precision_plugin.train_step_context(), replaced_values(slots):
            output = module.training_step(batch, *rest)
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if not isinstance(loss, Tensor):
                raise ValueError(
                    f"training_step must return a loss to be captured, got {output!r}: "
                    f"{self.remedy}"
                )
            loss = loss / accumulated
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            self._differentiate(loss if scaler is None else scaler.scale(loss))
        return tree_map_only(Tensor, Tensor.detach, (output, logged))

    def _backward(
        self,
        trainer: Trainer,
        module: LightningModule,
        loss: Tensor,
        *arguments: Any,
        **options: Any,
    ) -> None:
        """Add the gradients of the replay to the parameters, or run backward without one."""
        gradients = self._gradients
        if gradients is None:
            self._differentiate(loss, *arguments, **options)
        else:
            keeps = trainer.accumulate_grad_batches > 1  # beyond the next replay
            self._add_gradients(module, gradients, keeps=keeps)
        # False inside DDP's no_sync, which accumulates gradients (torch 2.13)
        if trainer.world_size > 1 and trainer.strategy.model.require_backward_grad_sync:
            trained = [weight for weight in module.parameters() if weight.requires_grad]
            # names take several times as long, and are needed for the message only
            if any(weight.grad is None for weight in trained):
                check_processes(_without_gradient(module), self.remedy)
            average_gradients(trained, trainer.strategy.model.process_group)

    def _add_gradients(
        self, module: LightningModule, gradients: list[Tensor | None], *, keeps: bool
    ) -> None:
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            if gradient is not None and parameter.requires_grad:
                if parameter.grad is not None:
                    parameter.grad.add_(gradient)
                else:
                    parameter.grad = gradient.clone() if keeps else gradient
        self._gradients = None

    def _release(self) -> None:
        if self._step is not None:
            self._step.reset()
        self._step = None
        self._gradients = None


class InstallCallback(CUDAGraphCallback):
    """Call `install`, and replay training steps from CUDA graphs where they can be captured.

    It is one entry of `diagnostics.callbacks` for both. If a trainer's steps cannot be captured,
    as on a CPU, they run without, and one line of the log gives the reason. Faults that appear
    only during capture, such as dropout inside activation checkpointing, raise with the remedy.

    While it trains, backward passes run on the thread that asks for them. Autograd's own thread
    runs on another core, whose caches would have to take over what the forward pass left behind.

    Parameters
    ----------
    cuda_graphs : bool
        False captures no step.
    capture : callable
        As for `CUDAGraphCallback`.
    **options
        As for `install`, which is called when the callback is made, before Anemoi builds its model.
    """

    remedy = REMEDY_OF_INSTALL

    def __init__(
        self, *, cuda_graphs: bool = True, capture: Capture = capture_cuda_graph, **options: Any
    ):
        super().__init__(capture)
        self._cuda_graphs = cuda_graphs
        self._settings = ExitStack()
        install(**options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace the strategy's `training_step` if steps can be captured, else log why not."""
        self._settings.enter_context(torch.autograd.set_multithreading_enabled(mode=False))
        if not self._cuda_graphs:
            return
        try:
            super().on_train_start(trainer, pl_module)
        except ValueError as reason:
            # a warning, because Anemoi's logging hides other libraries' INFO records
            log.warning("CUDA graph disabled: %s", reason)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore what `on_train_start` changed, and release the captured step."""
        self._settings.close()
        super().on_train_end(trainer, pl_module)


def check_capturable(
    trainer: Trainer, module: LightningModule, capture: Capture, remedy: str = REMEDY
) -> None:
    """Raise ValueError, with the remedy, unless a trainer's steps can be captured."""
    strategy = trainer.strategy
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise ValueError(
            "CUDA graphs need a strategy on one device or DDP, got "
            f"{type(strategy).__name__}: set "
            "training.strategy._target_=anemoi.training.distributed.single.SingleDeviceStrategy, "
            f"or {remedy}"
        )
    if not module.automatic_optimization:
        raise ValueError(
            f"CUDA graphs need automatic optimisation, got {type(module).__name__} with "
            f"manual: {remedy}"
        )
    if torch.is_anomaly_enabled():
        raise ValueError(
            "CUDA graphs need diagnostics.debug.anomaly_detection=false, because it reads back "
            "from the device at every operation, "
            f"got true: set it to false, or {remedy}"
        )
    check_device(strategy.root_device, capture)
    check_submodules(module, remedy)


def _without_gradient(module: LightningModule) -> set[str]:
    """Return the names of weights that are not frozen and have no gradient."""
    named = module.named_parameters()
    return {name for name, weight in named if weight.requires_grad and weight.grad is None}


def check_processes(others: set[str], remedy: str) -> None:
    """Raise ValueError if DDP would do more in a step than to average gradients.

    `others` are the buffers that a pass changes, if DDP broadcasts them, or weights without a
    gradient. DDP leaves None where no process has one, and an optimiser skips the weight; the
    average would be zero, and weights decay.
    """
    if others:
        raise ValueError(
            "a step that several processes replay must not change buffers unless "
            "broadcast_buffers of the strategy is False, and must differentiate by all weights "
            f"that are not frozen, got {', '.join(sorted(others))}: {remedy}"
        )
