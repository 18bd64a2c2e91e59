"""Whole blocks by one operator, `anemoi_gt.ops.block`, from the modules of a block; ours and Anemoi's share this."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from anemoi_gt.attention_config import AttentionConfig
from anemoi_gt.custom_ops import refuse_forward_mode
from anemoi_gt.graph import GraphStructure
from anemoi_gt.nn.norm import AutocastLayerNorm
from anemoi_gt.ops.backends import choose_backend_name
from anemoi_gt.ops.block import BlockOptions, BlockTensors, transformer_block
from anemoi_gt.ops.dtypes import autocast_is_active
from anemoi_gt.ops.triton_backend.problem import IndexTensors
from anemoi_gt.ops.triton_backend.tiles import MOST_ATTRIBUTES

WIDEST = 4096  # features of a node: the row kernels hold a row in registers
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class BlockModules(NamedTuple):
    """The submodules of a block that the operator computes, or rather their parameters."""

    norm_src: nn.Module | None  # None: sources and destinations are one set
    norm: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    self: nn.Module
    edge: nn.Module
    projection: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module  # holds a Sequential of linear map, GELU, linear map as `mlp`


def unsupported_reason(modules: BlockModules, x: Tensor, config: AttentionConfig, norms: tuple = ()) -> str | None:
    """Return why the operator cannot compute a block with these modules and features like `x`, None if it can.

    `norms` are classes that compute what `torch.nn.LayerNorm` does.
    """
    *inner, mlp = modules
    layers = list(mlp.mlp) if type(getattr(mlp, "mlp", None)) is nn.Sequential else []
    if [type(layer) for layer in layers] != [nn.Linear, nn.GELU, nn.Linear] or layers[1].approximate != "none":
        return "its feed-forward network is not a linear map, an exact GELU and a linear map"
    if getattr(mlp, "layer_norm", None) is not None:
        return "its feed-forward network ends with a norm"
    for name, module in zip(modules._fields, (*inner, layers[0]), strict=True):
        if module is None:
            continue
        is_norm = "norm" in name
        kinds = (nn.LayerNorm, AutocastLayerNorm, *norms) if is_norm else (nn.Linear,)
        if type(module) not in kinds:
            return f"its {name} is a {type(module).__name__}, and torch.nn.{kinds[0].__name__} is needed"
        if is_norm and len(module.normalized_shape) != 1:
            return f"its {name} is over several dimensions"
        if module.weight is None or (module.bias is None and name != "self"):
            return f"its {name} lacks a weight or a bias"
    if layers[2].bias is None:
        return "its feed-forward network lacks a bias"
    if any(getattr(module, name) for module in (*inner, mlp, mlp.mlp, *layers) if module is not None for name in HOOKS):
        return "hooks watch a part of it that would not be called"
    if max(modules.query.weight.shape) > WIDEST:
        return f"it has more than {WIDEST} features"
    if modules.edge.in_features >= MOST_ATTRIBUTES:
        return f"its edges have {MOST_ATTRIBUTES} attributes or more"
    if config.precision is not None or config.tile is not None or not config.fixed_degree_kernels:
        return "the precision or the kernels of its attention are set"
    if x.dtype != modules.query.weight.dtype and not autocast_is_active(x.device.type):
        return f"its features are {x.dtype} and its parameters {modules.query.weight.dtype}, without autocast"
    return None


def run_block(
    modules: BlockModules, x_src: Tensor | None, x_dst: Tensor, edge_attr: Tensor, graph: GraphStructure,
    heads: int, batch: int, config: AttentionConfig,
) -> Tensor:  # fmt: skip
    """Return destinations [B * N_dst, F] after a block for which there is no `unsupported_reason`.

    Parameters
    ----------
    modules : BlockModules
    x_src : Tensor [B * N_src, F], or None
        None where the sources are the destinations.
    x_dst : Tensor [B * N_dst, F]
    edge_attr : Tensor [B * E, D]
    graph : GraphStructure
        Of one batch entry.
    heads, batch : int
    config : AttentionConfig
        Backend.
    """
    refuse_forward_mode(x_src, x_dst, edge_attr)
    dtype = x_dst.dtype
    if autocast_is_active(x_dst.device.type) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x_dst.device.type)
    if batch > 1:
        edge_attr = edge_attr.unflatten(0, (batch, -1))
    hidden, _, out = modules.mlp.mlp
    linear = {name: getattr(modules, name) for name in modules._fields[:-1]} | {"in": hidden, "out": out}
    parts = {
        f"{name}_{kind}": getattr(m, kind) for name, m in linear.items() if m is not None for kind in ("weight", "bias")
    }
    parts |= {"x_src": x_src, "x_dst": x_dst, "edge_attr": edge_attr}
    tensors = BlockTensors(*[parts.get(name) for name in BlockTensors._fields])
    save = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    graph = graph.with_reverse() if save else graph
    backend = choose_backend_name(config.backend, x_dst.new_empty(0, dtype=dtype))
    eps = (0.0 if modules.norm_src is None else modules.norm_src.eps, modules.norm.eps, modules.mlp_norm.eps)
    options = BlockOptions(heads, batch, *eps, dtype, backend)
    return transformer_block(*tensors, *IndexTensors.of(graph), *options, save)[0]
