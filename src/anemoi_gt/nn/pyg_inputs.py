"""Edges in all forms that PyG has, as the attention reads them."""

from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch_geometric.utils import is_torch_sparse_tensor

from anemoi_gt.graph import GraphStructure
from anemoi_gt.kernel_config import KernelConfig


def read_edges(
    edges: Any, edge_attr: Tensor | None, num_nodes: tuple[int, int], config: KernelConfig
) -> tuple[GraphStructure, Tensor | None]:
    """Return `edges` as a structure, and the attributes in the caller's edge order.

    `edges` is a GraphStructure, a tensor [2, E], an EdgeIndex, or a sparse matrix [N_dst, N_src],
    whose values [E, D] replace a missing `edge_attr` (scalars are edge weights, which attention
    ignores, as PyG does). They have a reverse structure only if grouping without order may make it
    too; else the attention does, if needed. Indices are checked on the CPU only.
    """
    if isinstance(edges, GraphStructure):
        return edges, edge_attr
    stable = config.stable_sort
    # grouping makes both structures at once; after sorting, the reverse waits for a backward pass
    reverse = not stable and torch.is_grad_enabled()
    if is_adjacency(edges):
        values = _values(edges)
        if edge_attr is None and values is not None and values.dim() > 1:
            edge_attr = values
        graph = GraphStructure.from_adj_t(edges, stable=stable, validate=False, reverse=reverse)
        return graph, edge_attr
    graph = GraphStructure.from_edge_index(
        edges, num_nodes, stable=stable, validate=_is_readable(edges), reverse=reverse
    )
    return graph, edge_attr


def _is_readable(edges: Tensor) -> bool:
    """Return whether the host can read values without synchronising: a real tensor on a CPU."""
    return type(edges) is Tensor and edges.is_cpu and not torch.compiler.is_compiling()


def is_edge_index(edges: Any) -> bool:
    """Return whether `edges` is a tensor [2, E]."""
    return isinstance(edges, Tensor) and not is_adjacency(edges)


def is_adjacency(edges: Any) -> bool:
    """Return whether `edges` is a sparse matrix."""
    return is_sparse_tensor(edges) or is_torch_sparse_tensor(edges)


def is_sparse_tensor(edges: Any) -> TypeGuard[Any]:
    """Return whether `edges` is a torch_sparse.SparseTensor, without importing its package."""
    return hasattr(edges, "sparse_sizes") and hasattr(edges, "csr")


def _values(adj_t: Any) -> Tensor | None:
    """Return the stored values, in the edge order of `GraphStructure.from_adj_t`."""
    if is_sparse_tensor(adj_t):
        return adj_t.csr()[2]
    # is_sparse means COO, which may be uncoalesced
    return adj_t._values() if adj_t.is_sparse else adj_t.values()
