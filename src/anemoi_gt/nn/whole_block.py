"""A block by one operator, `anemoi_gt.ops.triton_backend.whole_block`: which blocks it computes, and their tensors.

Blocks of this library and of Anemoi have submodules of the same names; both are read here.
"""

import torch
from torch import Tensor, nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.layer_kernels import class_path, has_global_hooks, has_wrapped_weights, hooks_of
from anemoi_gt.nn.mlp import MLP
from anemoi_gt.nn.norm import AutocastLayerNorm
from anemoi_gt.ops.backends import BACKENDS, choose_backend
from anemoi_gt.ops.dtypes import autocast_dtype, autocast_is_active
from anemoi_gt.ops.operands import AttentionOperands, check_operands
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES
from anemoi_gt.ops.triton_backend.whole_block import BlockOptions, BlockTensors, transform_nodes

WIDEST = 1024  # features of a node: kernels hold a row in registers, and that for the gradient of a norm would spill
LINEAR = ("query", "key", "value", "self", "edge")


def is_proven(x: Tensor, config: AttentionConfig) -> bool:
    """Return whether blocks are faster by the operator: under 16-bit autocast, where backend `triton` attends."""
    halved = autocast_is_active(x.device.type) and autocast_dtype(x) in (torch.float16, torch.bfloat16)
    return halved and _attends_by_triton(x, config)


def unsupported_reason(block: nn.Module, x: Tensor, config: AttentionConfig, known: tuple = ()) -> str | None:
    """Return why the operator cannot compute a block with features like `x`, None if it can.

    `known` are classes that compute what `torch.nn.LayerNorm` or `anemoi_gt.nn.mlp.MLP` does.
    """
    mlp = block.node_dst_mlp
    layers = list(mlp.mlp) if type(mlp) in (MLP, *known) and type(mlp.mlp) is nn.Sequential else []
    is_served = [type(layer) for layer in layers] == [nn.Linear, nn.GELU, nn.Linear] and layers[1].approximate == "none"
    if not is_served or getattr(mlp, "layer_norm", None) is not None:
        return "its feed-forward network is not a linear map, an exact GELU and a linear map"
    modules = _modules(block)
    for name, module in modules.items():
        is_norm = "norm" in name
        if type(module) not in ((nn.LayerNorm, AutocastLayerNorm, *known) if is_norm else (nn.Linear,)):
            needed = "LayerNorm" if is_norm else "Linear"
            return f"its {name} is a {class_path(type(module))}, and torch.nn.{needed} is needed"
        if module.weight is None or (module.bias is None and name != "self") or (is_norm and module.weight.dim() != 1):
            return f"its {name} lacks a weight or a bias, or is over several dimensions"
        if has_wrapped_weights(module):
            return f"its {name} has weights that are a tensor subclass, as of DTensor or a quantisation"
    if has_global_hooks():
        return "hooks watch all modules, and those of its parts would not be called"
    if any(hooks_of(module) for module in (*modules.values(), mlp, mlp.mlp, layers[1])):
        return "hooks watch a part of it that would not be called"
    if max(modules["query"].weight.shape) > WIDEST:
        return f"it has more than {WIDEST} features"
    if modules["edge"].in_features >= MOST_ATTRIBUTES:
        return f"its edges have {MOST_ATTRIBUTES} attributes or more"
    if config.precision is not None:
        return "the precision of its attention is set"
    if x.dtype != modules["query"].weight.dtype and not autocast_is_active(x.device.type):
        return f"its features are {x.dtype} and its parameters {modules['query'].weight.dtype}, without autocast"
    return None if _attends_by_triton(x, config) else "another backend than triton computes its attention"


def update_destinations(
    block: nn.Module, x_src: Tensor | None, x_dst: Tensor, edge_attr: Tensor, graph, halo: Tensor | None = None
) -> Tensor:
    """Return destinations [.., N_dst, F] after a block of this library, for which there is no `unsupported_reason`.

    `x_src` [.., N_src, F] is None where the sources are the destinations; `halo` [.., R, F] are normed sources,
    numbered after the local ones; `edge_attr` is [.., E, D].
    """
    edges = edge_attr, weight, _ = block.edge_operands(edge_attr)
    num_src = (x_dst if x_src is None else x_src).shape[-2] + (0 if halo is None else halo.shape[-2])
    query, key = (_as_heads(x_dst, rows, block.num_heads, weight.shape[0]) for rows in (x_dst.shape[-2], num_src))
    check_operands(AttentionOperands(query, key, key, *edges), graph)
    batch = x_dst.shape[0] if x_dst.dim() == 3 else 1
    if batch > 1:
        edge_attr = edge_attr.expand(batch, *edge_attr.shape[-2:])
    elif edge_attr.dim() == 3:
        edge_attr = edge_attr.squeeze(0)
    x_src, halo, rows = (None if x is None else x.reshape(-1, x.shape[-1]) for x in (x_src, halo, x_dst))
    return run_block(block, x_src, rows, edge_attr, graph, batch, halo).view(x_dst.shape)


def run_block(
    block: nn.Module, x_src: Tensor | None, x_dst: Tensor, edge_attr: Tensor, graph: GraphStructure, batch: int,
    halo: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return destinations [B * N_dst, F] after a block for which there is no `unsupported_reason`.

    `x_src` [B * N_src, F] is None where the sources are the destinations; `halo` [B * R, F] are normed sources of each
    batch entry, numbered after its local ones; `edge_attr` is [E, D] or [B, E, D], after `edge_pre_mlp`; `graph` is
    that of one batch entry.
    """
    modules = _modules(block)
    if x_src is None:
        modules.pop("norm_src", None)  # of a mapper whose sides share it
    else:
        modules.setdefault("norm_src", modules["norm"])
    parts = {"x_src": x_src, "halo": halo, "x_dst": x_dst, "edge_attr": edge_attr}
    parts |= {
        f"{name}_{kind}": getattr(module, kind) for name, module in modules.items() for kind in ("weight", "bias")
    }
    tensors = BlockTensors(*[parts.get(name) for name in BlockTensors._fields])
    eps = [modules[name].eps if name in modules else 0.0 for name in ("norm_src", "norm", "mlp_norm")]
    return transform_nodes(tensors, graph, BlockOptions(block.num_heads, batch, *eps, autocast_dtype(x_dst)))


def _as_heads(x: Tensor, num_rows: int, heads: int, width: int) -> Tensor:
    """Return a stand-in for query or key in checks, [.., num_rows, heads, width / heads]."""
    return x.new_empty(()).expand(*x.shape[:-2], num_rows, heads, width // heads)


def _modules(block: nn.Module) -> dict[str, nn.Module]:
    """Return the submodules that the operator computes, by the names of their tensors in `BlockTensors`."""
    modules = {name: getattr(block, f"lin_{name}") for name in LINEAR}
    modules |= {"norm": block.layer_norm_attention, "mlp_norm": block.layer_norm_mlp_dst}
    if hasattr(block, "layer_norm_attention_src"):
        modules |= {"norm_src": block.layer_norm_attention_src, "norm": block.layer_norm_attention_dest}
    hidden, _, out = block.node_dst_mlp.mlp
    return modules | {"projection": block.projection, "in": hidden, "out": out}


def _attends_by_triton(x: Tensor, config: AttentionConfig) -> bool:
    return choose_backend(config.backend, x.new_empty(0, dtype=autocast_dtype(x))) is BACKENDS["triton"]
