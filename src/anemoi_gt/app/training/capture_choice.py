"""Choice, once per run, whether training steps are replayed from a CUDA graph or launched.

training.cuda_graph    a step can be captured    a step cannot be captured
null                   replayed                  launched; on a GPU, the log gives the reason
true                   replayed                  ValueError with the reason
false                  launched                  launched

With null, a model with modules of other packages or with hooks is launched too, because their
Python code would run only at capture.
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.nn import GraphTransformerBaseBlock
from anemoi_gt.nn.layer_kernels import HOOKS

log = logging.getLogger(__name__)

# packages whose modules run the same code in every call with the same shapes
KNOWN_PACKAGES = ("anemoi_gt", "torch")


def replays_steps(
    config: TrainingConfig, model: nn.Module, device: torch.device, mesh: DeviceMesh | None
) -> bool:
    """Return whether the training steps of a run are replayed from a CUDA graph.

    See the table above; on a GPU, the choice is logged. `mesh`, with axes (data, model), has the
    ranks that train a sharded model, which all make the same choice; None is for one device. Raises
    ValueError if `config.cuda_graph` is True and a step cannot be captured.
    """
    if config.cuda_graph is False:
        return False
    reason = capture_unsupported_reason(model, device, mesh)
    if config.cuda_graph is True:
        check_capturable(reason)
    elif reason is None:
        reason = unknown_code_reason(model)
    if device.type == "cuda":  # there is no choice on a CPU
        if reason is None:
            log.info("training steps are replayed from a CUDA graph")
        else:
            log.info("training steps are launched, not replayed from a CUDA graph: %s", reason)
    return reason is None


def check_capturable(reason: str | None) -> None:
    """Raise ValueError for `training.cuda_graph=true` if there is a reason against it."""
    if reason is not None:
        raise ValueError(f"training.cuda_graph must be null or false, got true: {reason}")


def capture_unsupported_reason(
    model: nn.Module, device: torch.device, mesh: DeviceMesh | None
) -> str | None:
    """Return the reason why a training step cannot be captured in a CUDA graph, or None."""
    reason = device_unsupported_reason(device)
    if reason is None:
        reason = _checkpointed_dropout(model)
    if reason is None and torch.is_anomaly_enabled():
        # It checks every gradient for NaN on the host, which fails during capture.
        reason = (
            "anomaly detection reads back from the device at every operation; switch "
            "torch.autograd.set_detect_anomaly off"
        )
    if reason is None and mesh is not None:
        reason = messages_unsupported_reason(mesh)
    return reason


def device_unsupported_reason(device: torch.device) -> str | None:
    """Return the reason why no step on a device can be captured, or None on a GPU."""
    if device.type == "cuda":
        return None
    return f"device {device} has no CUDA graphs; set training.device=cuda"


def messages_unsupported_reason(mesh: DeviceMesh) -> str | None:
    """Return the reason why messages between model ranks cannot be captured, or None for NCCL."""
    backends = str(dist.get_backend_config(mesh.get_group("model")))
    if "cuda:nccl" in backends:
        return None
    return f"the ranks of a model must communicate by NCCL, got {backends}"


def unknown_code_reason(model: nn.Module) -> str | None:
    """Return the reason why later calls of a model may run different code, or None.

    It is a module of another package or a hook, for example one that counts calls or logs values.
    """
    for name, part in model.named_modules():
        kind = type(part)
        path = f"{name or 'the model'} ({kind.__module__}.{kind.__qualname__})"
        if kind.__module__.partition(".")[0] not in KNOWN_PACKAGES:
            return (
                f"the Python code of {path} would run at capture only; if it does the same in "
                "every step, set training.cuda_graph=true"
            )
        if any(getattr(part, hooks) for hooks in HOOKS):
            return (
                f"hooks of {path} would run at capture only; if they do the same in every step, "
                "set training.cuda_graph=true"
            )
    return None


def _checkpointed_dropout(model: nn.Module) -> str | None:
    """Return which layers with dropout are recomputed in backward, None if no layers are.

    PyTorch would read the state of the generator during capture, and refuses.
    """
    checkpointed = [
        name or type(part).__name__
        for name, part in model.named_modules()
        if _checkpoints_dropout(part)
    ]
    if not checkpointed:
        return None
    return (
        "activation checkpointing of layers with dropout cannot be captured, got "
        f"{', '.join(checkpointed)}; set model.checkpoint_groups=null or model.dropout=0"
    )


def _checkpoints_dropout(part: nn.Module) -> bool:
    """Return whether a processor or mapper recomputes layers with dropout in backward."""
    recomputes = getattr(part, "checkpoint_groups", None) is not None or getattr(
        part, "gradient_checkpointing", False
    )
    blocks = (block for block in part.modules() if isinstance(block, GraphTransformerBaseBlock))
    return recomputes and any(block.dropout > 0 for block in blocks)
