"""A corpus of edits of modules and of what their code calls, by name, and the layers that they are applied to.

An edit takes a block and holds while it computes, as a context. What an untouched copy of the block computes under the
same edit is right.
"""

import copy
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from anemoi.models.distributed.shapes import GraphShardInfo
from anemoi.models.layers import conv as anemoi_conv
from anemoi.models.layers.block import GraphConvProcessorBlock, GraphTransformerProcessorBlock
from anemoi.models.layers.utils import load_layer_kernels
from torch import nn
from torch.overrides import TorchFunctionMode
from torch_geometric.nn import MeanAggregation, TransformerConv
from torch_geometric.nn.conv import transformer_conv

from anemoi_gt import GraphStructure, InteractionBlock, KernelConfig
from anemoi_gt import GraphTransformerProcessorBlock as OwnBlock
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.pyg import swap_layers
from anemoi_gt.nn.plain import PYG_HOOKS

CHANNELS, NODES, EDGES = 8, 6, 13
TRITON = KernelConfig("triton")


# ----------------------------------------------------------------------------------------------
# owners: an untouched block, and a call of a copy of it as this library computes it


def attention_block():
    sizes = {"in_channels": CHANNELS, "hidden_dim": CHANNELS, "out_channels": CHANNELS}
    sizes |= {"num_heads": 2, "edge_dim": CHANNELS}
    kernels = load_layer_kernels()
    return GraphTransformerProcessorBlock(
        **sizes, layer_kernels=kernels, graph_attention_backend="pyg"
    )


def network_block():
    sizes = {"in_channels": CHANNELS, "out_channels": CHANNELS, "num_chunks": 1}
    return GraphConvProcessorBlock(**sizes, layer_kernels=load_layer_kernels({}))


def call_anemoi(block, x, edges, index):
    shards = GraphShardInfo()
    if isinstance(block, GraphTransformerProcessorBlock):
        return block(x, edges, index, shards, 1, NODES)
    return block(x, edges, index, shards)


def installed(block):
    """Anemoi's own block under `install`, whose classes it changes while it computes."""

    def call(*arguments):
        with integration.install("triton", fusion="sublayers"):
            return call_anemoi(block, *arguments)

    return block, call


def own_attention(theirs):
    sizes = {"in_channels": CHANNELS, "hidden_dim": CHANNELS, "out_channels": CHANNELS}
    ours = OwnBlock(**sizes, num_heads=2, edge_dim=CHANNELS, config=TRITON)
    ours.load_state_dict(theirs.state_dict())

    def call(x, edges, index):
        return ours(x, GraphStructure.from_edge_index(index, NODES), edges), edges

    return ours, call


def own_network(theirs):
    ours = InteractionBlock(CHANNELS, CHANNELS, hidden_layers=2, config=TRITON)
    ours.load_state_dict(theirs.state_dict())
    return ours, lambda x, edges, index: ours(x, index, edges)


def swapped(theirs):
    model = swap_layers(nn.ModuleList([theirs]), backend="triton")
    return model[0], lambda x, edges, index: (model[0](x, index, edges), edges)


OWNERS = {
    "Anemoi's graph transformer": (attention_block, call_anemoi, installed),
    "Anemoi's graph network": (network_block, call_anemoi, installed),
    "own graph transformer": (attention_block, call_anemoi, own_attention),
    "own graph network": (network_block, call_anemoi, own_network),
    "swapped TransformerConv": (
        lambda: TransformerConv(CHANNELS, CHANNELS // 2, heads=2, edge_dim=CHANNELS),
        lambda block, x, edges, index: (block(x, index, edges), edges),
        swapped,
    ),
}


def pair_of(owner):
    """Return an untouched block and its call, and a copy of it as this library computes it and its call."""
    make, call, serve = OWNERS[owner]
    torch.manual_seed(0)
    theirs = make()
    ours, call_ours = serve(copy.deepcopy(theirs))
    return (theirs, lambda *arguments: call(theirs, *arguments)), (ours, call_ours)


def results_of(block, call, edit):
    """Return outputs, and gradients of inputs and parameters, under an edit of a block that has computed before."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(NODES, CHANNELS, generator=generator).requires_grad_()
    edges = torch.randn(EDGES, CHANNELS, generator=generator).requires_grad_()
    index = torch.randint(NODES, (2, EDGES), generator=generator)
    with torch.no_grad():
        call(x, edges, index)
    block.zero_grad()
    with edit(block):
        nodes, updated = call(x, edges, index)
        (nodes.sin().sum() + updated.cos().sum()).backward()
    gradients = {name: p.grad for name, p in block.named_parameters()}
    return {"out": nodes.detach(), "edges": updated.detach(), "dx": x.grad, "de": edges.grad} | {
        f"d{name}": gradient for name, gradient in gradients.items()
    }


# ----------------------------------------------------------------------------------------------
# edits


def scaled(function, factor=1.1):
    return lambda *args, **kwargs: function(*args, **kwargs) * factor


class Scale(TorchFunctionMode):
    """As emulators of number formats and of analogue hardware do."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 1.1 if func is F.linear else out


class Noisy(nn.Parameter):
    """A parameter whose linear maps return something else."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 1.3 if func is F.linear else out


def linears_of(block):
    return [
        module
        for module in block.modules()
        if hasattr(module, "weight") and module.weight.dim() == 2
    ]


def patching(owner, name):
    def edit(block):
        return mock.patch.object(owner, name, scaled(getattr(owner, name)))

    return edit


@contextmanager
def calling(block):
    original = nn.Module.__call__

    def call(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        return out * 1.1 if isinstance(self, nn.Linear) else out

    with mock.patch.object(nn.Module, "__call__", call):
        yield


@contextmanager
def of_class(block):
    linear = linears_of(block)[0]
    plain = linear._parameters["weight"]
    noisy = plain.data.as_subclass(Noisy)
    linear._parameters["weight"] = noisy
    yield
    # the gradient of what the block holds again
    linear._parameters["weight"] = plain


@contextmanager
def in_a_mode(block):
    with Scale():
        yield


@contextmanager
def with_global_hook(block):
    def scale(module, args, out):
        return out * 1.1 if isinstance(module, nn.LayerNorm) else None

    handle = nn.modules.module.register_module_forward_hook(scale)
    yield
    handle.remove()


def hooking(register, hook):
    """Register a hook on each kind of submodule, one after another: the first linear map, norm and activation."""

    @contextmanager
    def edit(block):
        kinds = {}
        for module in block.modules():
            if type(module) in (nn.Linear, nn.LayerNorm, nn.GELU, nn.SiLU):
                kinds.setdefault(type(module), module)
        handles = [getattr(module, register)(hook) for module in kinds.values()]
        yield
        for handle in handles:
            handle.remove()

    return edit


@contextmanager
def forward_of_an_instance(block):
    linear = linears_of(block)[-1]
    forward = linear.forward
    linear.forward = lambda x: 1.2 * forward(x)
    yield
    del linear.forward


@contextmanager
def float64_weight(block):
    linear = linears_of(block)[0]
    weight = linear.weight
    linear.weight = nn.Parameter(weight.double())
    yield
    linear.weight = weight


@contextmanager
def float64_norm(block):
    norms = [module for module in block.modules() if isinstance(module, nn.LayerNorm)]
    for norm in norms:
        norm.double()
    yield


EDITS = {
    "an active mode": in_a_mode,
    "torch.nn.functional.linear": patching(F, "linear"),
    "torch.nn.functional.layer_norm": patching(F, "layer_norm"),
    "torch.nn.functional.gelu": patching(F, "gelu"),
    "softmax of PyG's TransformerConv": patching(transformer_conv, "softmax"),
    "softmax of Anemoi's attention": patching(anemoi_conv, "softmax"),
    "scatter of Anemoi's edge update": patching(anemoi_conv, "scatter"),
    "nn.Module.__call__": calling,
    "a parameter with a __torch_function__": of_class,
    "a hook of all modules": with_global_hook,
    "forward hooks": hooking("register_forward_hook", lambda module, args, out: 1.1 * out),
    "forward pre-hooks": hooking(
        "register_forward_pre_hook", lambda module, args: (1.1 * args[0], *args[1:])
    ),
    "backward hooks": hooking(
        "register_full_backward_hook", lambda module, grads, outs: tuple(1.1 * g for g in grads)
    ),
    "forward of an instance": forward_of_an_instance,
    "a weight in float64": float64_weight,
    "norms in float64": float64_norm,
}


# ----------------------------------------------------------------------------------------------
# edits of a layer of PyG's message passing, which last


def larger(result):
    """Return a result, or a pair of them, times 1.5."""
    return tuple(1.5 * part for part in result) if isinstance(result, tuple) else 1.5 * result


def with_message_hook(registry):
    """Return an edit that adds a hook to a registry, which scales what it sees."""
    register = f"register{registry}".removesuffix("s")

    def scale(module, arguments, *results):
        if results:
            return larger(results[0])
        (inputs,) = arguments[-1:]
        if registry == "_message_forward_pre_hooks":
            name = "value_j" if "value_j" in inputs else "edge_attr"
            return ({**inputs, name: 1.5 * inputs[name]},)
        if registry == "_aggregate_forward_pre_hooks":
            return ({**inputs},)
        return None

    return lambda conv: getattr(conv, register)(scale)


def with_method(name):
    def edit(conv):
        method = getattr(conv, name)
        setattr(conv, name, lambda *args, **kwargs: larger(method(*args, **kwargs)))

    return edit


def with_other_sum(conv):
    conv.aggr_module = MeanAggregation()


def with_hook_of_the_sum(conv):
    conv.aggr_module.register_forward_hook(lambda module, arguments, out: 1.5 * out)


LAYER_HOOKS = {registry: with_message_hook(registry) for registry in PYG_HOOKS}
LAYER_EDITS = LAYER_HOOKS | {
    name: with_method(name) for name in ("message", "aggregate", "update", "propagate")
}
LAYER_EDITS |= {"aggr_module": with_other_sum, "hook of aggr_module": with_hook_of_the_sum}


def layer_of(block):
    """Return the layer of message passing of a block."""
    return getattr(block, "conv", block)


def editing_the_layer(name):
    @contextmanager
    def edit(block):
        LAYER_EDITS[name](layer_of(block))
        yield

    return edit
