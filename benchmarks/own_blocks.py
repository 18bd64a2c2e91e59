"""Blocks of `anemoi_gt.nn` in place of those of an Anemoi model, on the same parameters: the same checkpoint.

Anemoi's blocks stay in the module tree, for optimiser and state dict; what they compute is what ours compute, compiled.
"""

from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi.cache import structure_of
from anemoi_gt.nn import GraphTransformerMapperBlock, GraphTransformerProcessorBlock

OURS = {
    "GraphTransformerProcessorBlock": GraphTransformerProcessorBlock,
    "GraphTransformerMapperBlock": GraphTransformerMapperBlock,
}


@contextmanager
def own_blocks(model: nn.Module, **compile_options):
    """Every block of `model` computes with one of ours; with options, each under `torch.compile` with these."""
    blocks = [module for module in model.modules() if type(module).__name__ in OURS]
    with integration.install():  # which remembers the edge lists
        for block in blocks:
            block.forward = Stand(block, compile_options)
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


class Stand:
    """Called as Anemoi's block is, it calls ours, on the samples of a batch side by side.

    Parameters
    ----------
    theirs : nn.Module
        Anemoi's block, of default options.
    compile_options : dict
        Of `torch.compile`; empty: nothing is compiled.
    """

    def __init__(self, theirs: nn.Module, compile_options: dict):
        self.block = with_parameters_of(theirs)
        if compile_options:
            self.block.compile(**compile_options)

    def __call__(
        self, x, edge_attr: Tensor, edge_index: Tensor, shard_info, batch_size: int, size,
        model_comm_group=None, cond=None, edges_are_dst_sorted: bool = True,
    ):  # fmt: skip
        if cond is not None or (model_comm_group is not None and model_comm_group.size() > 1):
            raise ValueError("our blocks stand in for unconditioned ones on one rank, got a condition or several ranks")
        rows = x if isinstance(x, tuple) else (x, x)
        reverse = torch.is_grad_enabled()
        graph, samples = structure_of(edge_index, (rows[0].shape[0], rows[1].shape[0]), reverse=reverse)
        fold, unfold = (lambda t: t.unflatten(0, (samples, -1)), lambda t: t.flatten(0, 1))
        if samples == 1:
            fold = unfold = lambda t: t
        inputs = tuple(map(fold, x)) if isinstance(x, tuple) else fold(x)
        out = self.block(inputs, graph, fold(edge_attr))
        return tuple(map(unfold, out)) if isinstance(x, tuple) else unfold(out), edge_attr


def with_parameters_of(theirs: nn.Module) -> nn.Module:
    """Our block of the sizes of `theirs`, whose parameters are its own."""
    hidden, channels = theirs.node_dst_mlp.mlp[0].weight.shape
    sizes = {"in_channels": channels, "out_channels": channels, "hidden_dim": hidden}
    sizes |= {"num_heads": theirs.num_heads, "edge_dim": theirs.lin_edge.in_features}
    sizes |= {"attn_channels": theirs.attn_channels, "bias": theirs.lin_self.bias is not None}
    if theirs.update_src_nodes:
        sizes["update_src_nodes"] = True
    with torch.device("meta"):
        ours = OURS[type(theirs).__name__](**sizes)
    parameters = dict(theirs.named_parameters(remove_duplicate=False))
    expected = dict(ours.named_parameters(remove_duplicate=False))
    if parameters.keys() != expected.keys():
        raise ValueError(
            f"only blocks of default options have a stand-in, got also {parameters.keys() ^ expected.keys()}"
        )
    for name, parameter in parameters.items():
        path, _, leaf = name.rpartition(".")
        setattr(ours.get_submodule(path), leaf, parameter)
    return ours
