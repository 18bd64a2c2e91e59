"""Which sub-layers can be fused in the blocks of the first anemoi-models on the path.

For each sub-layer of a block, the report has "parts", or the reason that it cannot be fused.
"""

import inspect
import warnings
from itertools import product

import torch
from anemoi.models.layers import block
from anemoi.models.layers.utils import load_layer_kernels

from anemoi_gt.integrations.anemoi.upstream import recognise_modules
from anemoi_gt.nn.sublayers import AttentionModules, Computation, read_attention, read_network
from anemoi_gt.ops.backends import BACKENDS
from anemoi_gt.refusal import Refusal

SIZES = {
    "in_channels": 24,
    "hidden_dim": 40,
    "out_channels": 24,
    "num_heads": 2,
    "edge_dim": 3,
    "qk_norm": True,
    "num_chunks": 1,
    "graph_attention_backend": "pyg",
    "update_src_nodes": True,
}
CONDITIONAL = {
    "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
    "condition_shape": 4,
}


def build(kind, kernels, **options):
    """Return a block with the options that this version has."""
    block_class = getattr(block, kind)
    known = inspect.signature(block_class.__init__).parameters
    options = {name: value for name, value in (SIZES | options).items() if name in known}
    return block_class(layer_kernels=load_layer_kernels(kernels), **options)


def describe(parts):
    """Return "parts" with the features of the sub-layer, or the reason that it cannot be fused."""
    if isinstance(parts, Refusal):
        return parts.text
    words = ["parts"]
    if parts.has_condition:
        words.append("condition")
    if isinstance(parts, AttentionModules):
        if parts.options.key_norm.eps > 0:
            words.append("qk-norm")
    elif parts.network.first.gate.weight is not None:
        words.append("gated")
    return " ".join(words)


def feed_forward_parts(layer, call, side):
    norm, mlp = f"layer_norm_mlp_{side}", f"node_{side}_mlp"
    return read_network(getattr(layer, mlp), call, mlp, norm_in=(norm, getattr(layer, norm)))


def report_sublayers():
    """Return by kind of block, of norm and of network what each sub-layer is read as."""
    recognise_modules()
    call = Computation(torch.float32, is_autocast=False, backend=BACKENDS["triton"])
    report = {}
    norms = {"plain": {}, "conditional": {"LayerNorm": CONDITIONAL}}
    for kind, norm, mlp_kind in product(("Processor", "Mapper"), norms, ("mlp", "swiglu")):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = build(f"GraphTransformer{kind}Block", norms[norm], mlp_implementation=mlp_kind)
        parts = {
            "attention": read_attention(layer, call),
            "feed_forward": feed_forward_parts(layer, call, "dst"),
        }
        if kind == "Mapper":
            parts["sources"] = feed_forward_parts(layer, call, "src")
        descriptions = {part: describe(value) for part, value in parts.items()}
        report[f"{kind} {norm} {mlp_kind}"] = descriptions
    return report
