"""Structures of Anemoi's edge lists, made once: the only place that recognises an edge list.

A list that we handed out is recognised by its place in memory, which nobody else can have while we hold it, and by its
version, which changes when somebody writes into it. Any other tensor is known for as long as it lives, so that the layers of
one pass share a structure. Sizes never identify anything, and nothing is kept alive: a list that is handed out belongs to the
one it was made from, and the first of them to whom `lists` gives it.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anemoi_gt.custom_ops import define_operator
from anemoi_gt.graph import GraphStructure


class Folded(NamedTuple):
    """A structure, and the number of samples that share it."""

    graph: GraphStructure
    samples: int


class Known:
    """What is known of one edge list.

    Parameters
    ----------
    edge_index : Tensor [2, E]
        The list, which is not kept.
    samples : int
        How many copies of one graph, side by side, the list may hold; verified before it is believed.
    """

    def __init__(self, edge_index: Tensor, samples: int = 1):
        self.version = version_of(edge_index)
        self.samples = samples
        self._structures: dict[tuple[int, int, int], Folded] = {}

    def folded(self, edge_index: Tensor, num_nodes: tuple[int, int], samples: int, *, reverse: bool) -> Folded:
        """Return the structure of the list between so many nodes, made at the first call; `samples` 1 folds nothing."""
        key = (*num_nodes, samples)
        if key not in self._structures:
            self._structures[key] = self._make(edge_index, num_nodes, samples)
        held = self._structures[key]
        if reverse and not held.graph.has_reverse:
            with torch.inference_mode(False), torch.no_grad():
                held = self._structures[key] = held._replace(graph=held.graph.with_reverse())
        return held

    def _make(self, edge_index: Tensor, num_nodes: tuple[int, int], samples: int) -> Folded:
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor could not serve a later training step
            if samples > 1 and _is_replicated(edge_index, num_nodes, samples):
                edge_index = edge_index[:, : edge_index.shape[1] // samples]
                num_nodes = (num_nodes[0] // samples, num_nodes[1] // samples)
            else:
                samples = 1
            return Folded(self._sort(edge_index, num_nodes), samples)

    def _sort(self, edge_index: Tensor, num_nodes: tuple[int, int]) -> GraphStructure:
        """The declaration that edges are sorted is not believed; a tensor of unknown life must not wait for the device."""
        return GraphStructure.from_edge_index(edge_index, num_nodes, validate=False)


class HandedOut(Known):
    """An edge list that we remember and hand out again, with those that are cut from it.

    Parameters
    ----------
    edge_index : Tensor [2, E]
        Kept, so that its place in memory is its own.
    samples : int
        As for `Known`.
    sources : Tensor [N_src], int64, or None
        For a chunk, the sources of the whole that are left.
    whole : HandedOut or None
        For a shard, the list whose shards, gathered from all ranks, are this one; not kept alive.

    Attributes
    ----------
    partitions : dict
        Anemoi's `GraphPartition` by number of parts and nodes.
    """

    def __init__(
        self,
        edge_index: Tensor,
        samples: int = 1,
        sources: Tensor | None = None,
        whole: "HandedOut | None" = None,
    ):
        super().__init__(edge_index, samples)
        self.edge_index = edge_index
        self.sources = sources
        self._whole = (lambda: None) if whole is None else weakref.ref(whole)
        self.partitions: dict[tuple[int, ...], object] = {}
        self._parts: dict[tuple, HandedOut] = {}
        if edge_index.data_ptr():  # nothing is at 0, where empty tensors are
            _BY_ADDRESS[_address(edge_index)] = self

    @property
    def is_intact(self) -> bool:
        """Whether nobody has written into the list."""
        return self.version == version_of(self.edge_index)

    @property
    def whole(self) -> "HandedOut | None":
        """The list that this shard was cut from, while that lives and nobody has written into it."""
        held = self._whole()
        return held if held is not None and held.is_intact else None

    def part(self, key: tuple, make: Callable[[], "HandedOut"]) -> "HandedOut":
        """Return what is cut from this list by a rule that `key` describes in full, made at the first call."""
        held = self._parts.get(key)
        if held is None or not held.is_intact:
            held = self._parts[key] = make()
        return held

    def _sort(self, edge_index: Tensor, num_nodes: tuple[int, int]) -> GraphStructure:
        """Once for a graph the values may be checked, though it waits for the device."""
        return GraphStructure.from_edge_index(edge_index, num_nodes)


_BY_ADDRESS: weakref.WeakValueDictionary[tuple, HandedOut] = weakref.WeakValueDictionary()
_BY_TENSOR = WeakTensorKeyDictionary()


def recognise(edge_index: Tensor) -> HandedOut | None:
    """Return what is remembered of a list that we handed out, or None."""
    held = _BY_ADDRESS.get(_address(edge_index))
    return held if held is not None and held.version == version_of(edge_index) else None


def structure_of(edge_index: Tensor, num_nodes: tuple[int, int], *, reverse: bool) -> Folded:
    """Return the structure of an edge list between (num_src, num_dst) nodes, and how many samples share it."""
    known = recognise(edge_index) or _known_by_tensor(edge_index)
    return known.folded(edge_index, num_nodes, known.samples, reverse=reverse)


def traced_structure(edge_index: Tensor, num_nodes: tuple[int, int], *, reverse: bool) -> GraphStructure:
    """`structure_of` for torch.compile: one operator, so that the compiled code looks the structure up too; not folded."""
    colptr, row, perm, *source_side = edge_structure(edge_index, *num_nodes, reverse)
    names = ("rowptr", "col", "csr_to_csc")[: len(source_side)]
    sources = torch.empty(num_nodes[0], 0, device=edge_index.device)
    return GraphStructure(colptr, row, sources, perm=perm, **dict(zip(names, source_side, strict=True)))


@define_operator
def edge_structure(edge_index: Tensor, num_src: int, num_dst: int, reverse: bool) -> list[Tensor]:
    """Copies of colptr, row, perm and, with `reverse`, rowptr, col, csr_to_csc: compiled code may reuse their memory."""
    known = recognise(edge_index) or _known_by_tensor(edge_index)
    graph = known.folded(edge_index, (num_src, num_dst), 1, reverse=reverse).graph
    tensors = [graph.colptr.clone(), graph.row.clone(), graph.edge_order().clone()]
    return tensors + [tensor.clone() for tensor in (graph.rowptr, graph.col, graph.csr_to_csc)] if reverse else tensors


@torch.library.register_fake("anemoi_gt::edge_structure")
def _(edge_index, num_src, num_dst, reverse):
    num_edges = edge_index.shape[1]
    dtype = torch.int32 if max(num_src, num_dst, num_edges) < 2**31 else torch.int64
    lengths = (num_dst + 1, num_edges, num_edges) + ((num_src + 1, num_edges, num_edges) if reverse else ())
    return [edge_index.new_empty(length, dtype=dtype) for length in lengths]


def forget() -> None:
    """Forget all lists."""
    _BY_ADDRESS.clear()
    _BY_TENSOR.clear()


def _is_replicated(edge_index: Tensor, num_nodes: tuple[int, int], samples: int) -> bool:
    """Whether the list is that of one graph, `samples` times, its nodes behind one another; waits for the device."""
    if edge_index.shape[1] % samples or num_nodes[0] % samples or num_nodes[1] % samples:
        return False
    stride = edge_index.new_tensor(num_nodes).div(samples, rounding_mode="floor").view(2, 1, 1)
    copies = edge_index.unflatten(1, (samples, -1))
    shifts = torch.arange(samples, device=edge_index.device).view(1, samples, 1) * stride
    return bool((copies == copies[:, :1] + shifts).all())


def _known_by_tensor(edge_index: Tensor) -> Known:
    held = _BY_TENSOR.get(edge_index)
    if held is None or held.version != version_of(edge_index):
        held = _BY_TENSOR[edge_index] = Known(edge_index)
    return held


def _address(tensor: Tensor) -> tuple:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been written into; inference tensors, which do not count, are all of one version."""
    return -1 if tensor.is_inference() else tensor._version
