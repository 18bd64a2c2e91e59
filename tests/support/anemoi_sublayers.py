"""Print which sub-layers of the blocks of the anemoi-models that is first on the path can be fused, as JSON.

Per block its parts by sub-layer: "parts", or the reason why it cannot be fused.
"""

import inspect
import json
import warnings
from importlib.metadata import version

from anemoi.models.layers import block, mlp, normalization
from anemoi.models.layers.utils import load_layer_kernels

from anemoi_gt.nn.sublayers import attention_parts, feed_forward_parts, register

SIZES = {
    "in_channels": 24,
    "hidden_dim": 40,
    "out_channels": 24,
    "num_heads": 2,
    "edge_dim": 3,
    "qk_norm": True,
}
SIZES |= {"num_chunks": 1, "graph_attention_backend": "pyg", "update_src_nodes": True}
CONDITIONAL = {
    "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
    "condition_shape": 4,
}


def build(kind, kernels, **options):
    """A block with the options that this version takes."""
    made = getattr(block, kind)
    taken = inspect.signature(made.__init__).parameters
    options = {name: value for name, value in (SIZES | options).items() if name in taken}
    return made(layer_kernels=load_layer_kernels(kernels), **options)


def told(parts):
    """The reason, or what kind of network it is."""
    if isinstance(parts, str):
        return parts
    words = ["condition"] if parts.has_condition else []
    words += ["gated"] if getattr(parts, "weight_gate", None) is not None else []
    words += ["qk-norm"] if getattr(parts, "key_norm_eps", 0.0) > 0 else []
    return " ".join(["parts", *words])


def main():
    warnings.simplefilter("ignore")
    register(
        layer_norm=normalization.AutocastLayerNorm,
        conditional_norm=normalization.ConditionalLayerNorm,
        mlp=mlp.MLP,
        gated_linear=getattr(mlp, "GatedMLPLayer", None),
    )
    report = {"version": version("anemoi-models")}
    for kind in ("Processor", "Mapper"):
        for name, kernels in (("plain", {}), ("conditional", {"LayerNorm": CONDITIONAL})):
            for implementation in ("mlp", "swiglu"):
                one = build(
                    f"GraphTransformer{kind}Block", kernels, mlp_implementation=implementation
                )
                parts = {
                    "attention": attention_parts(one),
                    "feed_forward": feed_forward_parts(one.layer_norm_mlp_dst, one.node_dst_mlp),
                }
                if kind == "Mapper":
                    parts["sources"] = feed_forward_parts(one.layer_norm_mlp_src, one.node_src_mlp)
                key = f"{kind} {name} {implementation}"
                report[key] = {part: told(value) for part, value in parts.items()}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
