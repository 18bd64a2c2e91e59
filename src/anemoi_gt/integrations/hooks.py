"""Hooks on modules that we read instead of calling them: the only place that knows which would be missed."""

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list:
    """Return the hooks that a call of the module would run; spectral norms and pruning of PyTorch are such hooks, too."""
    return [hook for name in HOOKS for hook in getattr(module, name).values()]
