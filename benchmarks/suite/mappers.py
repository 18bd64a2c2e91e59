"""Mappers between grid and icosphere: operands, and plain PyTorch at some destinations."""

import copy
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from anemoi_gt.nn import GraphTransformerBackwardMapper, GraphTransformerForwardMapper

TRAINED = 8  # attributes of an edge besides its length and direction
POSITION = 12  # features of a hidden node that come in: sines, cosines and trained numbers


@dataclass(frozen=True)
class Problem:
    """A mapper in float32 and its inputs, on the device."""

    part: str
    heads: int
    mapper: nn.Module
    x: tuple[Tensor, Tensor]  # [N_src, F_src], [N_dst, F_dst]
    edge_index: Tensor  # [2, E], by destination
    edge_attr: Tensor  # [E, 11]


def draw(part: str, options: Namespace, folder: Path) -> Problem:
    """Draw mapper and operands of a part, "encoder" or "decoder".

    The file holds edge_index [2, E] int64 by destination, edge_attr [E, 3] float32, and (N_src,
    N_dst).
    """
    edge_index, edge_attr, sizes = torch.load(folder / f"{part}.graph")
    device = options.device
    torch.manual_seed(0)
    mapper = _mapper(part, options).to(device)
    generator = torch.Generator(device).manual_seed(1)
    widths = (mapper.in_channels_src, mapper.in_channels_dst)
    trained = torch.randn(edge_index.shape[1], TRAINED, generator=generator, device=device)
    x = tuple(
        torch.randn(number, width, generator=generator, device=device)
        for number, width in zip(sizes, widths, strict=True)
    )
    edge_attr = torch.cat([edge_attr.to(device), trained], dim=1)
    return Problem(part, options.heads, mapper, x, edge_index.to(device), edge_attr)


def _mapper(part: str, options: Namespace) -> nn.Module:
    fields, _ = options.fields
    sizes = {"num_channels": options.channels, "num_heads": options.heads, "edge_dim": 3 + TRAINED}
    if part == "encoder":
        return GraphTransformerForwardMapper(
            in_channels_src=fields, in_channels_dst=POSITION, **sizes
        )
    return GraphTransformerBackwardMapper(
        in_channels_src=options.channels, in_channels_dst=fields, out_channels_dst=fields, **sizes
    )


def checked_destinations(problem: Problem, most: int) -> Tensor:
    """Return `most` destinations each: first, middle, last, and readers of the last sources."""
    number = problem.x[1].shape[0]
    count = min(most, number)
    near = torch.arange(count, device=problem.edge_index.device)
    last = problem.edge_index[0].topk(min(count, problem.edge_index.shape[1])).indices
    kinds = (near, near + (number - count) // 2, near + number - count, problem.edge_index[1, last])
    return torch.cat(kinds).unique()


def plain_mapper(
    problem: Problem, destinations: Tensor, dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, nn.Module]:
    """Compute some destinations by plain PyTorch; return them with the mapper copy used."""
    src, dst = problem.edge_index[0], problem.edge_index[1].contiguous()
    starts = torch.searchsorted(dst, destinations)
    ends = torch.searchsorted(dst, destinations, right=True)
    edges = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        edges.append(torch.arange(start, end, device=dst.device))
    edges = torch.cat(edges)
    sources, origin = src[edges].unique(return_inverse=True)
    operands = (problem.x[0][sources], problem.x[1][destinations], problem.edge_attr[edges])
    x_src, x_dst, edge_attr = (operand.to(device, dtype) for operand in operands)
    mapper = copy.deepcopy(problem.mapper).to(device, dtype)
    x_src = mapper.emb_nodes_src(x_src)
    x = mapper.emb_nodes_dst(x_dst)
    degrees = (ends - starts).tolist()
    x = x + _attend(mapper.proc, x_src, x, edge_attr, origin.to(device), degrees, problem.heads)
    x = x + mapper.proc.node_dst_mlp(mapper.proc.layer_norm_mlp_dst(x))
    if problem.part == "decoder":
        x = mapper.node_data_extractor(x)
    return x, mapper


def _attend(
    block: nn.Module, x_src, x_dst, edge_attr, origin: Tensor, degrees: list[int], heads: int
) -> Tensor:
    """Return the attention of a mapper block, with one row per edge, before the residual sum."""
    sources, normed = block.layer_norm_attention_src(x_src), block.layer_norm_attention(x_dst)
    query, key, value = block.lin_query(normed), block.lin_key(sources), block.lin_value(sources)
    query, key, value = (rows.unflatten(1, (heads, -1)) for rows in (query, key, value))
    edges = block.lin_edge(edge_attr).unflatten(1, (heads, -1))
    keys = (key[origin] + edges).split(degrees)
    values = (value[origin] + edges).split(degrees)
    out = []
    for q, k, v in zip(query, keys, values, strict=True):  # [H, C], [degree, H, C], [degree, H, C]
        scores = (q * k).sum(-1).div(q.shape[-1] ** 0.5)
        out.append((scores.softmax(0)[..., None] * v).sum(0))
    return block.projection(torch.stack(out).flatten(1) + block.lin_self(normed))
