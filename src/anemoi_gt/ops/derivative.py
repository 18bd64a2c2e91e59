"""What edge attention answers to derivatives other than a first one by a backward pass, whichever backend."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_second_derivative(ctx, *_):
    """Raise: the backward of edge attention has no backward."""
    raise RuntimeError(
        "edge_attention has a first derivative only, got a backward through its backward (create_graph=True); "
        "use plain PyTorch operations where a second derivative is needed"
    )


def refuse_forward_mode(*operands: Tensor | None) -> None:
    """Raise RuntimeError where an operand carries a tangent, which an operator of ours would drop in silence."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:  # nobody asks for tangents
        return
    if any(operand is not None and forward_ad.unpack_dual(operand).tangent is not None for operand in operands):
        raise RuntimeError(
            "edge_attention has a derivative by a backward pass only, got an operand with a tangent (torch.func.jvp, "
            "torch.autograd.forward_ad); use torch.autograd.grad, or plain PyTorch operations where tangents are needed"
        )
