"""Functions that the backward pass of compiled code calls."""

import pytest
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.fx_passes.joint_graph import joint_graph_passes


def sublayers_of_backward(call):
    """Return the operators of fused sub-layers in the backward graph of `call(backend)`, in order; nothing is computed."""
    names = []

    def partition(joint, *arguments, **options):
        joint_graph_passes(joint)  # those of Inductor, which remove copies
        _, backward = min_cut_rematerialization_partition(joint, *arguments, **options)
        names.extend(str(node.target).removesuffix(".default") for node in backward.graph.nodes)
        raise InterruptedError("all is known")

    with pytest.raises(BackendCompilerFailed, match="all is known"):
        call(aot_autograd(fw_compiler=None, partition_fn=partition))
    kinds = ("anemoi_gt.attention_sublayer_triton", "anemoi_gt.feed_forward_triton")
    return [name.removeprefix("anemoi_gt.") for name in names if name.startswith(kinds)]
