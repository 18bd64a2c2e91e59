"""Functions that the backward pass of compiled code calls."""

import pytest
from functorch.compile import min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.fx_passes.joint_graph import joint_graph_passes


def sublayers_of_backward(call):
    """Return the fused sub-layer operators in the backward graph of `call(backend)`, in order, without computing it."""
    names = []

    def partition(joint, *arguments, **options):
        joint_graph_passes(joint)  # Inductor's passes, which remove copies
        _, backward = min_cut_rematerialization_partition(joint, *arguments, **options)
        names.extend(str(node.target).removesuffix(".default") for node in backward.graph.nodes)
        raise InterruptedError("the graph is recorded")

    with pytest.raises(BackendCompilerFailed, match="the graph is recorded"):
        call(aot_autograd(fw_compiler=None, partition_fn=partition))
    kinds = ("anemoi_gt.attention_sublayer_triton", "anemoi_gt.network_triton")
    return [name.removeprefix("anemoi_gt.") for name in names if name.startswith(kinds)]
