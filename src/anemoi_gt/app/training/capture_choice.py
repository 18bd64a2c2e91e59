"""Choice, once per run, whether training steps are captured in a CUDA graph and replayed.

training.cuda_graph    a step can be captured    a step cannot be captured
null                   replayed                  not captured; on a GPU, the log gives the reason
true                   replayed                  ValueError with the reason
false                  not captured              not captured

With null, steps and modules of other packages or with hooks are not captured, because their Python
code would run only at capture.
"""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from anemoi_gt.app.training.config import TrainingConfig
from anemoi_gt.nn import GraphTransformerBaseBlock
from anemoi_gt.nn.plain import has_global_hooks, has_hooks, qualified_name

log = logging.getLogger(__name__)

# Packages whose modules run the same code in every call with the same shapes. Others of torch hold
# code of users (torch.fx.GraphModule, torch.jit.ScriptModule) or have threads and messages of their
# own (torch.nn.parallel). PyG's sums are children of each layer that passes messages.
KNOWN_PACKAGES = (
    "anemoi_gt.",
    "torch.nn.modules.",
    "torch.nn.utils.",
    "torch_geometric.nn.aggr.",
)


def replays_steps(
    config: TrainingConfig,
    model: nn.Module,
    device: torch.device,
    mesh: DeviceMesh | None,
    step_class: type,
) -> bool:
    """Return whether the training steps of a run are replayed from a CUDA graph.

    See the table above; on a GPU, the choice is logged. `mesh`, with axes (data, model), has the
    ranks that train a sharded model, which all make the same choice; None is for one device.
    `step_class` is `TrainingStep` or a class derived from it, whose methods compute the loss.
    Raises ValueError if `config.cuda_graph` is True and a step cannot be captured.
    """
    if config.cuda_graph is False:
        return False
    reason = capture_unsupported_reason(model, device, mesh)
    if config.cuda_graph is True and reason is not None:
        raise ValueError(f"training.cuda_graph must be null or false, got true: {reason}")
    if config.cuda_graph is None and reason is None:
        reason = unknown_code_reason(model, step_class)
    if device.type == "cuda":  # there is no choice on a CPU
        if reason is None:
            log.info("training steps are replayed from a CUDA graph")
        else:
            log.info("CUDA graph disabled: %s", reason)
    return reason is None


def capture_unsupported_reason(
    model: nn.Module, device: torch.device, mesh: DeviceMesh | None
) -> str | None:
    """Return the reason why a training step cannot be captured in a CUDA graph, or None."""
    if device.type != "cuda":
        return f"device {device} has no CUDA graphs; set training.device=cuda"
    reason = _checkpointed_dropout(model)
    if reason is None and mesh is not None:
        reason = messages_unsupported_reason(mesh)
    return reason


def messages_unsupported_reason(mesh: DeviceMesh) -> str | None:
    """Return the reason why messages between model ranks cannot be captured, or None for NCCL."""
    backends = str(dist.get_backend_config(mesh.get_group("model")))
    if "cuda:nccl" in backends:
        return None
    return f"the ranks of a model must communicate by NCCL, got {backends}"


def unknown_code_reason(model: nn.Module, step_class: type) -> str | None:
    """Return the reason why later steps of a model may differ from the captured one, or None.

    It is a step or a module of another package, or a hook, for example one that counts calls or
    logs values.
    """
    if not _is_known(step_class):
        return _runs_once(f"the Python code of {qualified_name(step_class)}")
    if has_global_hooks():
        return _runs_once("hooks on all modules")
    for name, part in model.named_modules():
        kind = type(part)
        path = f"{name or 'the model'} ({qualified_name(kind)})"
        if not _is_known(kind):
            return _runs_once(f"the Python code of {path}")
        if has_hooks(part):
            return _runs_once(f"hooks of {path}")
    for name, parameter in model.named_parameters():
        # set to None, or absent, until the first hook is registered
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return _runs_once(f"hooks of {name}")
    return None


def _is_known(kind: type) -> bool:
    """Return whether a class belongs to `KNOWN_PACKAGES`."""
    return kind.__module__.startswith(KNOWN_PACKAGES)


def _runs_once(code: str) -> str:
    """Return a reason not to capture third-party code."""
    return (
        f"{code} would run at capture only; if it does the same in every step, set "
        "training.cuda_graph=true"
    )


def _checkpointed_dropout(model: nn.Module) -> str | None:
    """Return which processor or mapper recomputes layers with dropout in backward, or None.

    PyTorch would read the state of the generator during capture, and refuses.
    """
    for name, part in model.named_modules():
        recomputes = getattr(part, "checkpoint_groups", None) is not None or getattr(
            part, "gradient_checkpointing", False
        )
        blocks = (block for block in part.modules() if isinstance(block, GraphTransformerBaseBlock))
        if recomputes and any(block.dropout > 0 for block in blocks):
            return (
                "activation checkpointing of layers with dropout cannot be captured, got "
                f"{name or type(part).__name__}; set model.checkpoint_groups=null or "
                "model.dropout=0"
            )
    return None
