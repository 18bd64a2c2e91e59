"""The operators that are called in a `with` block."""

from torch.utils._python_dispatch import TorchDispatchMode

from anemoi_gt.ops.tensors import NetworkTensors
from anemoi_gt.ops.tree import leaf_types
from anemoi_gt.ops.triton_backend.formulas import network_triton

# the name of a network without hidden layers
LINEAR_LAYER = "anemoi_gt.network_triton.default, linear"
FIRST_LAYER = list(leaf_types(NetworkTensors)).index("network_first_value_weight")


class Operators(TorchDispatchMode):
    """Names of the operators, such as aten.sort.stable, in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        is_linear = operator is network_triton.op and args[FIRST_LAYER] is None
        self.names.append(LINEAR_LAYER if is_linear else str(operator))
        return operator(*args, **(kwargs or {}))
