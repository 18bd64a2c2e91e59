"""The operators that are called in a `with` block."""

from torch.utils._python_dispatch import TorchDispatchMode


class Operators(TorchDispatchMode):
    """Names of the operators, such as aten.sort.stable, in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))
