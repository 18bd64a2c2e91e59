"""The operators that are called in a `with` block."""

from torch.utils._python_dispatch import TorchDispatchMode

from anemoi_gt.ops.tensors import AttentionTensors, NetworkTensors
from anemoi_gt.ops.tree import leaf_types
from anemoi_gt.ops.triton_backend.formulas import attention_triton, network_triton

# the names of a network without hidden layers, and of an attention with the network after it
LINEAR_LAYER = "anemoi_gt.network_triton.default, linear"
BLOCK = "anemoi_gt.attention_sublayer_triton.default, block"
FIRST_LAYER = list(leaf_types(NetworkTensors)).index("network_first_value_weight")
LAST_LAYER = list(leaf_types(AttentionTensors)).index("out_weight")


class Operators(TorchDispatchMode):
    """Names of the operators, such as aten.sort.stable, in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = str(operator)
        if operator is network_triton.op and args[FIRST_LAYER] is None:
            name = LINEAR_LAYER
        elif operator is attention_triton.op and args[LAST_LAYER] is not None:
            name = BLOCK
        self.names.append(name)
        return operator(*args, **(kwargs or {}))
