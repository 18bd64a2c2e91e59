"""Integrations with anemoi-models and PyTorch Geometric; import each by its own name."""

from torch import nn

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooks_of(module: nn.Module) -> list:
    """Return the hooks that a call of the module would run; PyTorch's spectral norm and pruning are such hooks, too."""
    return [hook for name in HOOKS for hook in getattr(module, name).values()]
