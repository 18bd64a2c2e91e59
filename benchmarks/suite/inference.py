"""Mappers between grid and icosphere, without gradients: graphs, operands, baselines, check."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from anemoi_gt import GraphStructure
from anemoi_gt.nn import (
    GraphTransformerBackwardMapper,
    GraphTransformerForwardMapper,
    split_destinations,
)
from suite.baselines import missing

PARTS = ("encoder", "decoder")
TRAINED = 8  # attributes of an edge besides its length and direction
POSITION = 12  # features of a hidden node that come in: sines, cosines and trained numbers
CHECKED = 16  # destinations of each kind
LIMIT = 2**31


@dataclass(frozen=True)
class Setting:
    """Sizes and dtype of a run."""

    grid: str
    refinement: int
    channels: int
    heads: int
    fields: int
    dtype: str
    repeats: int
    device: str

    def problem(self, part: str, folder: Path) -> "Problem":
        """Mapper and operands of a part; the same numbers in every process on one kind of device.

        The file holds edge_index [2, E] int64 by destination, edge_attr [E, 3] float32, and (N_src,
        N_dst).
        """
        edge_index, edge_attr, sizes = torch.load(folder / f"{part}.graph")
        device, dtype = self.device, getattr(torch, self.dtype)
        torch.manual_seed(0)
        mapper = self._mapper(part).to(device, dtype).eval()
        generator = torch.Generator(device).manual_seed(1)
        widths = (mapper.in_channels_src, mapper.in_channels_dst)
        trained = torch.randn(edge_index.shape[1], TRAINED, generator=generator, device=device)
        edge_attr = torch.cat([edge_attr.to(device), trained], dim=1).to(dtype)
        x = tuple(
            torch.randn(number, width, generator=generator, device=device, dtype=dtype)
            for number, width in zip(sizes, widths, strict=True)
        )
        return Problem(self, part, mapper, x, edge_index.to(device), edge_attr)

    def _mapper(self, part: str) -> nn.Module:
        options = {"num_channels": self.channels, "num_heads": self.heads, "edge_dim": 3 + TRAINED}
        if part == "encoder":
            return GraphTransformerForwardMapper(
                in_channels_src=self.fields, in_channels_dst=POSITION, **options
            )
        options |= {
            "in_channels_src": self.channels,
            "in_channels_dst": self.fields,
            "out_channels_dst": self.fields,
        }
        return GraphTransformerBackwardMapper(**options)


@dataclass(frozen=True)
class Problem:
    """A mapper and its inputs, on the device."""

    setting: Setting
    part: str
    mapper: nn.Module
    x: tuple[Tensor, Tensor]  # [N_src, F_src], [N_dst, F_dst]
    edge_index: Tensor  # [2, E], by destination
    edge_attr: Tensor  # [E, 11]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all operands and weights."""
        tensors = (*self.x, self.edge_index, self.edge_attr, *self.mapper.parameters())
        return sum(tensor.nbytes for tensor in tensors)


def build_graphs(setting: Setting, parts: list[str], folder: Path) -> dict:
    """Write the graph of each part to `folder`; return nodes and edges of each."""
    import numpy as np

    from anemoi_gt.data import edges
    from anemoi_gt.data.edge_attributes import edge_direction, edge_length, unit_std
    from anemoi_gt.data.grids import grid
    from anemoi_gt.data.meshes import icosphere

    points, mesh = grid(setting.grid), icosphere(setting.refinement).nodes
    sizes = {}
    for part in parts:
        source, destination = (points, mesh) if part == "encoder" else (mesh, points)
        if part == "encoder":
            edge_index = edges.cutoff(source, destination, 0.6)
        else:
            edge_index = edges.nearest(source, destination, 3)
        ends = source, destination, edge_index
        attributes = np.concatenate(
            [unit_std(edge_length(*ends)), unit_std(edge_direction(*ends))], axis=1
        )
        numbers = len(source), len(destination)
        tensors = torch.from_numpy(edge_index), torch.from_numpy(attributes).float()
        torch.save((*tensors, numbers), folder / f"{part}.graph")
        beyond = max(numbers) * setting.channels / LIMIT
        sizes[part] = {"nodes": numbers, "edges": edge_index.shape[1], "features_over_2_31": beyond}
    return sizes


def _anemoi_gt(problem: Problem, num_chunks: int) -> Callable[[], Tensor]:
    sizes = tuple(side.shape[0] for side in problem.x)
    chunks = split_destinations(
        GraphStructure.from_edge_index(problem.edge_index, sizes, reverse=False), num_chunks
    )

    def call() -> Tensor:
        with torch.no_grad():
            return problem.mapper(problem.x, chunks, problem.edge_attr)

    return call


def _anemoi(problem: Problem, num_chunks: int) -> Callable[[], Tensor]:
    from anemoi.models.distributed.shapes import BipartiteGraphShardInfo
    from anemoi.models.layers import mapper as mappers

    setting = problem.setting
    options = {
        "num_channels": setting.channels,
        "num_heads": setting.heads,
        "edge_dim": problem.edge_attr.shape[1],
        "in_channels_src": problem.mapper.in_channels_src,
        "in_channels_dst": problem.mapper.in_channels_dst,
        "mlp_hidden_ratio": 4,
        "num_chunks": num_chunks,
        "layer_kernels": {},
        "gradient_checkpointing": False,
        "graph_attention_backend": "triton" if setting.device == "cuda" else "pyg",
    }
    if problem.part == "decoder":
        options["out_channels_dst"] = setting.fields
    upstream = getattr(mappers, type(problem.mapper).__name__)(**options)
    upstream = upstream.to(problem.x[0].device, problem.x[0].dtype).eval()
    upstream.load_state_dict(problem.mapper.state_dict())

    def call() -> Tensor:
        with torch.no_grad():
            out = upstream(
                problem.x, 1, BipartiteGraphShardInfo(), problem.edge_attr, problem.edge_index
            )
        return out if torch.is_tensor(out) else out[1]  # a forward mapper returns the sources too

    return call


CONTENDERS = {"anemoi_gt": _anemoi_gt, "anemoi": _anemoi}


def unsupported_reason(contender: str) -> str | None:
    """Return the reason that a contender cannot run here, or None."""
    return missing("anemoi.models", "anemoi-models") if contender == "anemoi" else None


def checked_destinations(problem: Problem, most: int = CHECKED) -> Tensor:
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
    heads = problem.setting.heads
    x = x + _attend(mapper.proc, x_src, x, edge_attr, origin.to(device), degrees, heads)
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


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


@torch.no_grad()
def compare_with_plain(problem: Problem, result: Tensor, destinations: Tensor) -> dict:
    """Compare the error of a result with twice the error of plain PyTorch, plus rounding."""
    dtype, device = result.dtype, result.device
    exact, _ = plain_mapper(problem, destinations, torch.float64, "cpu")
    baseline, _ = plain_mapper(problem, destinations, dtype, device)
    error = _rms(result[destinations].double().cpu() - exact)
    baseline_error = _rms(baseline.double().cpu() - exact)
    allowed = 2 * baseline_error + torch.finfo(dtype).eps * _rms(exact)
    outcome = "right" if error <= allowed else "wrong"  # NaN is wrong, too
    return {
        "outcome": outcome,
        "rms_error": error,
        "rms_error_of_plain": baseline_error,
        "checked": len(destinations),
    }
