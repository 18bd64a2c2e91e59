"""GraphStructure: the edges of a bipartite graph, sorted once for both directions of traversal.

A weather model's graph never changes, so whatever follows from the edges alone is computed once and
passed to every layer. The caller's edge features are never permuted: they are read through `perm`.

    edge_index = [[2, 0, 2, 1],     src      4 edges, 3 sources, 3 destinations
                  [0, 2, 2, 0]]     dst

    perm       = [0, 3, 1, 2]       caller's edge at each CSC position, sorted stably by dst
    row        = [2, 1, 0, 2]       src of each edge, CSC order
    colptr     = [0, 2, 2, 4]       in-edges of dst i are colptr[i] : colptr[i + 1]; dst 1 has none

    rowptr     = [0, 1, 2, 4]       out-edges of src j are rowptr[j] : rowptr[j + 1]
    col        = [2, 0, 0, 2]       dst of each edge, CSR order
    csr_to_csc = [2, 1, 0, 3]       CSC position of each CSR edge

Sizes are shapes (of `colptr` N_dst, of `row` E, of the empty `sources` N_src), so torch.compile and
torch.export can treat them as dynamic; an int attribute would become a constant of the program. A
structure is a pytree node whose leaves are its tensors.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true
from torch.utils._pytree import KeyEntry, MappingKey, register_pytree_node, tree_map

from anemoi_gt.graph.checks import (
    HUB_DEGREE,
    INDEX_DTYPES,
    as_size,
    assert_pointers,
    assert_range,
    check_edge_ids,
    check_edge_index,
    check_ends,
    check_index,
    check_permutation,
    check_pointers,
    check_range,
    check_shape,
    have_size,
    is_size,
    max_degree,
)
from anemoi_gt.graph.grouping import GroupedEdges, group_coo, group_edges, pointers
from anemoi_gt.graph.ordering import morton_order
from anemoi_gt.torch_compat import assert_async, is_exporting


class ReverseIndex(NamedTuple):
    """The edges of a graph by source (CSR), as `GraphStructure` documents them."""

    rowptr: Tensor  # [N_src + 1]
    col: Tensor  # [E]
    csr_to_csc: Tensor  # [E]


@dataclass(frozen=True, eq=False)
class GraphStructure:
    """The edges of a bipartite graph by destination (CSC) and, unless left out, by source (CSR).

    Make one with `from_edge_index`, `from_csc`, `from_adj_t` or `disjoint`, once per graph, and
    pass it to every layer. It is an immutable value: every method that adds something returns a new
    one, and these four copy what they keep. The constructor and `from_state` keep the tensors
    passed, which must not be modified.

    Parameters
    ----------
    colptr : Tensor [N_dst + 1], int32 or int64
        In-edges of destination i are the CSC positions `colptr[i] : colptr[i + 1]`.
    row : Tensor [E], dtype of colptr
        Source of each edge, CSC order.
    sources : Tensor [N_src, 0]
        Has no elements: its shape is the number of sources.
    perm : Tensor [E], dtype of colptr, or None
        Caller's edge at each CSC position; None when the caller's order is the CSC order.
    global_edge_id : Tensor [E], int64, or None
        Id of each edge in the whole graph, CSC order; the key of dropout, so that a shard or chunk
        of a graph drops what the whole graph would. None: this is the whole graph and `perm` holds
        the ids.
    rowptr : Tensor [N_src + 1], dtype of colptr, or None
        Out-edges of source j are the CSR positions `rowptr[j] : rowptr[j + 1]`; None without the
        reverse structure.
    col : Tensor [E], dtype of colptr, or None
        Destination of each edge, CSR order.
    csr_to_csc : Tensor [E], dtype of colptr, or None
        CSC position of each edge, CSR order.
    dst_schedule : Tensor [N_dst], dtype of colptr, or None
        Order in which GPU programs process the destinations; None is 0, 1, 2, ... It changes speed,
        not results.
    fixed_in_degree : Tensor [K, 0], or None
        Marks a constant in-degree K of all destinations (k nearest neighbours), for faster kernels.
        Has no elements. None if it is unknown or not constant. Detected when values are checked.
    dst_hubs, src_hubs : Tensor [257, 0], or None
        Mark that a destination or source has, or may have, 257 edges or more: GPU kernels split
        such hubs into segments of half that many edges. Have no elements. None disables hub
        splitting. Detected when values are checked; present if values are not checked.

    Raises
    ------
    ValueError
        When ranks, dtypes, lengths or devices do not fit together. Values are checked by
        `validate`.
    """

    colptr: Tensor
    row: Tensor
    sources: Tensor
    perm: Tensor | None = None
    global_edge_id: Tensor | None = None
    rowptr: Tensor | None = None
    col: Tensor | None = None
    csr_to_csc: Tensor | None = None
    dst_schedule: Tensor | None = None
    fixed_in_degree: Tensor | None = None
    dst_hubs: Tensor | None = None
    src_hubs: Tensor | None = None

    def __post_init__(self):
        check_index("colptr", self.colptr, like=self.colptr)
        check_index("row", self.row, like=self.colptr)
        if self.colptr.shape[0] < 1:
            raise ValueError("colptr must have num_dst + 1 >= 1 entries, got an empty tensor")
        check_shape("sources", self.sources, "[num_src, 0], one row per source", is_size)
        if len({self.rowptr is None, self.col is None, self.csr_to_csc is None}) > 1:
            raise ValueError(
                "rowptr, col, csr_to_csc must come together: pass all three, or none and call "
                "with_reverse()"
            )
        lengths = dict.fromkeys(("perm", "global_edge_id", "col", "csr_to_csc"), self.num_edges)
        for name, length in (
            lengths | {"rowptr": self.num_src + 1, "dst_schedule": self.num_dst}
        ).items():
            if (index := getattr(self, name)) is not None:
                check_index(
                    name,
                    index,
                    like=self.colptr,
                    dtypes=(torch.int64,) if name == "global_edge_id" else None,
                )
                if not have_size(index.shape[0], length):
                    raise ValueError(f"{name} must have {length} entries, got {index.shape[0]}")
        if (degree := self.fixed_in_degree) is not None:
            check_shape(
                "fixed_in_degree", degree, "[K, 0], K the in-edges of every destination", is_size
            )
            if (
                not torch.compiler.is_compiling()
                and degree.shape[0] * self.num_dst != self.num_edges
            ):
                raise ValueError(
                    f"fixed_in_degree must have shape [K, 0] with K * {self.num_dst} destinations "
                    f"= {self.num_edges} "
                    f"edges, got K = {degree.shape[0]}"
                )
        for name in HUBS:  # their size is not looked at, so that it may be a symbol
            if (hubs := getattr(self, name)) is not None:
                check_shape(
                    name,
                    hubs,
                    f"[{HUB_DEGREE + 1}, 0]: some node may have that many edges",
                    is_size,
                )

    def __repr__(self) -> str:
        state = self.state_dict()
        # unflattened with other leaves
        if not all(isinstance(leaf, Tensor) for leaf in state.values()):
            return f"GraphStructure({state})"
        degree = (
            ""
            if self.fixed_in_degree is None
            else f", fixed_in_degree={self.fixed_in_degree.shape[0]}"
        )
        return (
            f"GraphStructure(num_src={self.num_src}, num_dst={self.num_dst}, "
            f"num_edges={self.num_edges}, "
            f"reverse={self.has_reverse}{degree}, {str(self.row.dtype).removeprefix('torch.')}, "
            f"{self.device})"
        )

    @property
    def num_src(self) -> int:
        """Number of source nodes."""
        return self.sources.shape[0]

    @property
    def num_dst(self) -> int:
        """Number of destination nodes."""
        return self.colptr.shape[0] - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.row.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the index tensors."""
        return self.colptr.device

    @property
    def has_reverse(self) -> bool:
        """True if the reverse (CSR) structure `rowptr`, `col`, `csr_to_csc` is present."""
        return self.rowptr is not None

    def reverse_index(self) -> "ReverseIndex | None":
        """Return the reverse (CSR) structure, or None without one."""
        if self.rowptr is None or self.col is None or self.csr_to_csc is None:
            return None
        return ReverseIndex(self.rowptr, self.col, self.csr_to_csc)

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Tensor,
        num_nodes: tuple[int, int] | int | None = None,
        *,
        global_edge_id: Tensor | None = None,
        stable: bool = True,
        validate: bool = True,
        reverse: bool = True,
    ) -> "GraphStructure":
        """Sort the edges of a COO `edge_index` stably by destination and by source.

        Parameters
        ----------
        edge_index : Tensor [2, E], int32 or int64, or torch_geometric.EdgeIndex
            Row 0 holds sources, row 1 destinations.
        num_nodes : (num_src, num_dst), int or None
            An int means the same nodes on both sides. None is allowed only for an EdgeIndex that
            knows its sizes.
        global_edge_id : Tensor [E], int64, optional
            Id of each edge in the larger graph that these edges are taken from, caller's order.
        stable : bool
            Keep the caller's order within a destination. False leaves it unspecified and is faster
            on a GPU, for graphs that change every step; sums may then differ in the last bit from
            run to run. Both structures are built in one sweep. The sort is still used on a CPU and
            under deterministic algorithms.
        validate : bool
            Check the values, which synchronises with the device, and find fixed in-degree and hubs.
            False, and in compiled code: the device asserts the ranges without waiting
            (RuntimeError, on a GPU at a later call), and there may be hubs. Layers that convert an
            edge_index on a GPU do so.
        reverse : bool
            Build the reverse (CSR) structure, which gradients of key and value need. False saves a
            sort and 8 bytes an edge, for inference.

        Returns
        -------
        GraphStructure
            Index dtype int32 when sizes and E are known to be below 2^31, else int64. Shares no
            memory with the inputs.

        Raises
        ------
        ValueError
            Wrong rank, dtype or device; an index that is negative or not below its side's size.

        Examples
        --------
        >>> edge_index = torch.tensor([[2, 0, 2, 1], [0, 2, 2, 0]])
        >>> graph = GraphStructure.from_edge_index(edge_index, (3, 3))
        >>> graph.colptr.tolist(), graph.row.tolist(), graph.perm.tolist()
        ([0, 2, 2, 4], [2, 1, 0, 2], [0, 3, 1, 2])
        """
        num_src, num_dst = _sizes(edge_index, num_nodes)
        edge_index = edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index
        check_edge_index(edge_index)
        dtype = _index_dtype(num_src, num_dst, edge_index.shape[1])
        check_ends(edge_index, num_src, num_dst, check=check_range if validate else assert_range)
        is_read = validate and not torch.compiler.is_compiling()
        if is_read and bool((edge_index[1, 1:] >= edge_index[1, :-1]).all()):
            colptr = pointers(edge_index[1].to(dtype), num_dst)
            groups = GroupedEdges(colptr, None, _copy(edge_index[0], dtype))
        else:
            groups = group_coo(edge_index, num_src, num_dst, dtype, stable=stable, reverse=reverse)
        if global_edge_id is not None:
            check_edge_ids(global_edge_id, edge_index)
            global_edge_id = (
                global_edge_id.clone() if groups.perm is None else global_edge_id[groups.perm]
            )
        graph = cls(
            groups.colptr,
            groups.row,
            torch.empty(num_src, 0, device=edge_index.device),
            groups.perm,
            global_edge_id,
            groups.rowptr,
            groups.col,
            groups.csr_to_csc,
        )
        return (graph.with_reverse(stable=stable) if reverse else graph)._with_degrees(
            is_known=validate
        )

    @classmethod
    def from_csc(
        cls,
        colptr: Tensor,
        row: Tensor,
        num_src: int,
        perm: Tensor | None = None,
        *,
        validate: bool = True,
        reverse: bool = True,
    ) -> "GraphStructure":
        """Copy edges that are already sorted by destination.

        Parameters
        ----------
        colptr : Tensor [N_dst + 1], int32 or int64
        row : Tensor [E], int32 or int64
        num_src : int
        perm : Tensor [E], int32 or int64, optional
            Caller's edge at each CSC position, when edge features are in another order than `row`.
        validate, reverse : bool
            As in `from_edge_index`.

        Raises
        ------
        ValueError
            Wrong rank, dtype, length or device; colptr not from 0 to E or decreasing; a source out
            of range.
        """
        for name, index in (("colptr", colptr), ("row", row)):
            check_index(name, index, like=colptr, dtypes=INDEX_DTYPES)
        num_src = as_size("num_src", num_src)
        dtype = _index_dtype(num_src, colptr.shape[0] - 1, row.shape[0])
        if perm is not None:
            check_index("perm", perm, like=colptr, dtypes=INDEX_DTYPES)
            perm = _copy(perm, dtype)
        graph = cls(
            _copy(colptr, dtype),
            _copy(row, dtype),
            torch.empty(num_src, 0, device=colptr.device),
            perm=perm,
        )
        if validate:
            graph.validate()
        else:
            assert_pointers("colptr", graph.colptr, graph.num_edges)
            assert_range("row", graph.row, graph.num_src)
        return (graph.with_reverse() if reverse else graph)._with_degrees(is_known=validate)

    @classmethod
    def from_adj_t(
        cls, adj_t, *, stable: bool = True, validate: bool = True, reverse: bool = True
    ) -> "GraphStructure":
        """Convert PyG's transposed adjacency matrix: row i holds the in-edges of destination i.

        Parameters
        ----------
        adj_t : torch.sparse tensor [N_dst, N_src] (COO, CSR or CSC layout), or
        torch_sparse.SparseTensor
            The order of its stored values is the caller's edge order.
        stable, validate, reverse : bool
            As in `from_edge_index`.

        Raises
        ------
        ValueError
            For another layout or other dimensions, and as in `from_csc` and `from_edge_index`.
        """
        csr = None
        # torch_sparse.SparseTensor; torch_sparse is not a dependency
        if hasattr(adj_t, "sparse_sizes"):
            csr = (*adj_t.csr()[:2], adj_t.sparse_size(1))
        elif not isinstance(adj_t, Tensor):
            raise ValueError(
                "adj_t must be a torch.sparse tensor or a torch_sparse.SparseTensor [N_dst, "
                "N_src], got "
                f"{type(adj_t).__name__}; use from_edge_index or from_csc for others"
            )
        elif adj_t.layout != torch.strided and (
            adj_t.sparse_dim() != 2 or adj_t.dim() - adj_t.dense_dim() != 2
        ):
            raise ValueError(
                "adj_t must have two sparse dimensions [N_dst, N_src], followed by dense "
                "dimensions of its values if "
                f"any, got shape {tuple(adj_t.shape)} with {adj_t.sparse_dim()} sparse and "
                f"{adj_t.dense_dim()} dense "
                "dimensions"
            )
        elif adj_t.layout == torch.sparse_csr:
            csr = adj_t.crow_indices(), adj_t.col_indices(), adj_t.shape[1]
        if csr is not None:
            graph = cls.from_csc(*csr, validate=validate, reverse=False)
            return graph.with_reverse(stable=stable) if reverse else graph
        num_dst, num_src = adj_t.shape[:2]  # dense dimensions of the values may follow
        if adj_t.layout == torch.sparse_csc:
            dst, lengths = adj_t.row_indices(), adj_t.ccol_indices().diff()
            src = torch.arange(num_src, device=dst.device).repeat_interleave(
                lengths, output_size=dst.shape[0]
            )
        elif adj_t.layout == torch.sparse_coo:
            dst, src = adj_t._indices()
        else:
            layout = adj_t.layout
            raise ValueError(
                f"adj_t must have a sparse COO, CSR or CSC layout, got {layout}; use "
                "from_edge_index"
            )
        edge_index = torch.stack([src, dst.to(src.dtype)])
        return cls.from_edge_index(
            edge_index, (num_src, num_dst), stable=stable, validate=validate, reverse=reverse
        )

    @classmethod
    def disjoint(cls, graphs: Sequence["GraphStructure"]) -> "GraphStructure":
        """Concatenate the nodes and edges of several graphs, as PyG's Batch does.

        Parameters
        ----------
        graphs : sequence of GraphStructure, at least one, all on one device
            Nodes and edges of graph b follow the nodes and edges of graph b - 1.

        Returns
        -------
        GraphStructure
            With the reverse structure if all graphs have it; nothing is sorted. If any graph has a
            `dst_schedule`, the schedules are concatenated.

        Raises
        ------
        ValueError
            For no graph, graphs on several devices, or a shard or chunk of a graph (one with
            `global_edge_id`).
        """
        graphs = tuple(graphs) if isinstance(graphs, Iterable) else graphs
        if not isinstance(graphs, tuple) or not all(
            isinstance(graph, GraphStructure) for graph in graphs
        ):
            kinds = {
                type(graph).__name__
                for graph in (graphs if isinstance(graphs, tuple) else [graphs])
            }
            raise ValueError(
                f"disjoint must get a sequence of GraphStructures, got {', '.join(sorted(kinds))}"
            )
        if not graphs:
            raise ValueError("disjoint must get at least one graph, got none")
        if len({graph.device for graph in graphs}) > 1:
            raise ValueError(
                f"graphs must be on one device, got {[str(graph.device) for graph in graphs]}"
            )
        if any(graph.global_edge_id is not None for graph in graphs):
            raise ValueError(
                "graphs must be whole, got one with global_edge_id: merge its shards or chunks "
                "first"
            )
        sizes = zip(
            *((graph.num_src, graph.num_dst, graph.num_edges) for graph in graphs), strict=True
        )
        src_begin, dst_begin, edge_begin = ([0, *accumulate(numbers)] for numbers in sizes)
        dtype = _index_dtype(src_begin[-1], dst_begin[-1], edge_begin[-1])
        kept = {"row": ([graph.row for graph in graphs], src_begin)}
        if any(graph.perm is not None for graph in graphs):
            kept["perm"] = [graph.edge_order() for graph in graphs], edge_begin
        if any(graph.dst_schedule is not None for graph in graphs):
            schedules = [
                g._numbers(g.num_dst) if g.dst_schedule is None else g.dst_schedule for g in graphs
            ]
            kept["dst_schedule"] = schedules, dst_begin
        pointers = ["colptr"]
        if all(graph.has_reverse for graph in graphs):
            kept["col"] = [graph.col for graph in graphs], dst_begin
            kept["csr_to_csc"] = [graph.csr_to_csc for graph in graphs], edge_begin
            pointers.append("rowptr")
        joined: dict[str, Any] = {
            name: _concatenate(indices, offsets, dtype) for name, (indices, offsets) in kept.items()
        }
        for name in pointers:  # pointers count the edges of all graphs
            begins = _concatenate(
                [getattr(graph, name)[:-1] for graph in graphs], edge_begin, dtype
            )
            joined[name] = torch.cat([begins, begins.new_full((1,), edge_begin[-1])])
        for name in HUBS:
            joined[name] = next(
                (hubs for graph in graphs if (hubs := getattr(graph, name)) is not None), None
            )
        degrees = {
            None if graph.fixed_in_degree is None else graph.fixed_in_degree.shape[0]
            for graph in graphs
        }
        joined["fixed_in_degree"] = graphs[0].fixed_in_degree if len(degrees) == 1 else None
        return cls(**joined, sources=torch.empty(src_begin[-1], 0, device=graphs[0].device))

    def with_reverse(self, *, stable: bool = True) -> "GraphStructure":
        """Return this structure with its reverse (CSR) structure, for key and value gradients.

        `stable` keeps CSC order within a source; see `from_edge_index`.
        """
        if self.rowptr is not None:
            return self
        rowptr, csr_to_csc, col = group_edges(self.row, self.dst, self.num_src, stable=stable)
        return replace(self, rowptr=rowptr, col=col, csr_to_csc=csr_to_csc)

    def with_dst_schedule(self, positions: Tensor) -> "GraphStructure":
        """Return this structure with a destination schedule on a Morton curve, for cache locality.

        Nearby destinations share sources, so programs that run at the same time share rows in the
        cache. `positions` [N_dst, 1 to 3] are coordinates of the destinations in any unit. Raise
        ValueError for another shape.
        """
        sizes = [(self.num_dst, axes) for axes in (1, 2, 3)]
        wanted = f"[{self.num_dst}, 1 to 3], one row per destination"
        check_shape("positions", positions, wanted, lambda x: tuple(x.shape) in sizes)
        return replace(
            self,
            dst_schedule=morton_order(positions).to(device=self.device, dtype=self.colptr.dtype),
        )

    @property
    def dst(self) -> Tensor:
        """Destination of each edge [E], CSC order; computed from colptr."""
        return torch.repeat_interleave(self.colptr.diff(), output_size=self.num_edges)

    def edge_index(self) -> Tensor:
        """Return the edges as COO [2, E], int64, in the caller's order."""
        coo = torch.stack([self.row, self.dst]).long()
        return (
            coo
            if self.perm is None
            else torch.empty_like(coo).index_copy_(1, self.perm.long(), coo)
        )

    def global_edge_ids(self) -> Tensor:
        """Return the id of each edge in the whole graph [E], int64, CSC order."""
        return self.edge_order().long() if self.global_edge_id is None else self.global_edge_id

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "GraphStructure":
        """Return this structure on `device`, also for PyG's `Data`. Raise ValueError for dtypes."""
        if isinstance(device, torch.dtype):
            raise ValueError(
                f"device must be a device, got {device}: index dtypes follow from the sizes"
            )
        return tree_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def validate(self) -> "GraphStructure":
        """Check every value and return this structure; synchronises with the device.

        Raise ValueError for colptr or rowptr not from 0 to E or decreasing; an index out of range;
        perm, csr_to_csc or dst_schedule not a permutation; CSC and CSR with different edges;
        in-degrees other than `fixed_in_degree`.
        """
        check_pointers("colptr", self.colptr, self.num_edges)
        check_range("row", self.row, self.num_src)
        is_readable = not torch.compiler.is_compiling()
        if (
            is_readable
            and self.fixed_in_degree is not None
            and not self._has_fixed_in_degree(max_degree(self.colptr))
        ):
            raise ValueError(
                "fixed_in_degree must be the in-degree of every destination, got "
                f"{self.fixed_in_degree.shape[0]} "
                "and other in-degrees in colptr; leave it out"
            )
        for name, length in (("perm", self.num_edges), ("dst_schedule", self.num_dst)):
            if getattr(self, name) is not None:
                check_permutation(name, getattr(self, name), length)
        reverse = self.reverse_index()
        if reverse is not None:
            check_pointers("rowptr", reverse.rowptr, self.num_edges)
            check_range("col", reverse.col, self.num_dst)
            check_permutation("csr_to_csc", reverse.csr_to_csc, self.num_edges)
            degrees = reverse.rowptr.diff()
            src = self._numbers(self.num_src).repeat_interleave(degrees, output_size=self.num_edges)
            position = reverse.csr_to_csc.long()
            same = self.row[position].eq(src).all() & self.dst[position].eq(reverse.col).all()
            claim = (
                "rowptr, col must hold the edges of colptr, row: leave them out and call "
                "with_reverse()"
            )
            if not is_readable:
                assert_async(same, claim)
            elif not bool(same):
                raise ValueError(claim)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors by field, without None; safe for `torch.load(weights_only=True)`."""
        return {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "GraphStructure":
        """Make a structure from the tensors of `state_dict()`, checking metadata only.

        Raise ValueError for unknown or missing fields, or tensors that do not fit together.
        """
        if not isinstance(state, Mapping):
            raise ValueError(
                f"state must be a dict of tensors from state_dict(), got {type(state).__name__}"
            )
        if unknown := set(state) - set(FIELDS):
            raise ValueError(
                f"state must hold only fields of a GraphStructure, got also {sorted(unknown)}"
            )
        if missing := {"colptr", "row", "sources"} - set(state):
            raise ValueError(
                f"state must hold colptr, row and sources, got no {', '.join(sorted(missing))}"
            )
        return cls(**state)

    def edge_order(self) -> Tensor:
        """Return the caller's edge at each CSC position [E]: `perm`, or 0, 1, 2, ..."""
        return self._numbers(self.num_edges) if self.perm is None else self.perm

    def _with_degrees(self, is_known: bool) -> "GraphStructure":
        """Return this structure with fixed in-degree and hubs from checked values; synchronises."""
        if not is_known or torch.compiler.is_compiling():
            return replace(self, dst_hubs=self._hubs(), src_hubs=self._hubs())
        most = max_degree(self.colptr)
        fixed = self.colptr.new_empty(most, 0) if self._has_fixed_in_degree(most) else None
        if self.num_edges <= HUB_DEGREE:
            return replace(self, fixed_in_degree=fixed, dst_hubs=None, src_hubs=None)
        rowptr = pointers(self.row, self.num_src) if self.rowptr is None else self.rowptr
        dst_hubs, src_hubs = (
            self._hubs() if degree > HUB_DEGREE else None for degree in (most, max_degree(rowptr))
        )
        return replace(self, fixed_in_degree=fixed, dst_hubs=dst_hubs, src_hubs=src_hubs)

    def _has_fixed_in_degree(self, most: int) -> bool:
        """Return whether every destination has `most` in-edges, the most that one has."""
        return self.num_edges > 0 and most * self.num_dst == self.num_edges

    def _hubs(self) -> Tensor:
        return self.colptr.new_empty(HUB_DEGREE + 1, 0)

    def _numbers(self, count: int) -> Tensor:
        """Return 0, 1, 2, ... in the dtype of indices."""
        return torch.arange(count, dtype=self.colptr.dtype, device=self.device)


HUBS = ("dst_hubs", "src_hubs")
FIELDS = tuple(field.name for field in fields(GraphStructure))


def _sizes(edge_index: Tensor, num_nodes: tuple[int, int] | int | None) -> tuple[int, int]:
    """Return (num_src, num_dst) from the caller or an EdgeIndex; never guess from the indices."""
    known_src, known_dst = None, None
    if hasattr(edge_index, "sparse_size"):
        known_src, known_dst = edge_index.sparse_size()
    if num_nodes is None:
        if known_src is None or known_dst is None:
            raise ValueError(
                "num_nodes must be (num_src, num_dst), got None and an edge_index without sizes"
            )
        num_src, num_dst = known_src, known_dst
    elif isinstance(num_nodes, Iterable) and not isinstance(num_nodes, Tensor):
        pair = tuple(num_nodes)
        if len(pair) != 2:
            raise ValueError(
                f"num_nodes must be (num_src, num_dst) or one number for both, got {num_nodes!r}"
            )
        num_src, num_dst = pair
    else:
        num_src = num_dst = num_nodes
    num_src, num_dst = as_size("num_src", num_src), as_size("num_dst", num_dst)
    for name, size, known in (("num_src", num_src, known_src), ("num_dst", num_dst, known_dst)):
        if known is not None and known != size:
            raise ValueError(f"{name} must be {known}, the size of the EdgeIndex, got {size}")
    return num_src, num_dst


def _index_dtype(*sizes: int) -> torch.dtype:
    """Return int32 if all sizes are known to be below 2^31, else int64.

    Data-dependent sizes in traced code are unbounded.

    An exported program must support the whole range of a named dimension, so no guard may narrow it
    there.
    """
    is_below = statically_known_true if is_exporting() else guard_or_false
    return torch.int32 if all(is_below(size < 2**31) for size in sizes) else torch.int64


def _concatenate(indices: Sequence[Tensor], offsets: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Concatenate indices of several graphs, shifted by `offsets`, whose last is the total."""
    return torch.cat(
        [index.to(dtype) + first for index, first in zip(indices, offsets[:-1], strict=True)]
    )


def _copy(index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy: the caller may write into `index`."""
    return index.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _flatten(graph: GraphStructure) -> tuple[list[Tensor], tuple[str, ...]]:
    state = graph.state_dict()
    return list(state.values()), tuple(state)


def _flatten_with_keys(graph: GraphStructure) -> tuple[list[tuple[KeyEntry, Any]], Any]:
    leaves, names = _flatten(graph)
    return list(zip(map(MappingKey, names), leaves, strict=True)), names


def _unflatten(leaves: Iterable, names: tuple[str, ...]) -> GraphStructure:
    """Make a structure without checks: leaves may be symbols, specs or batched tensors."""
    graph, state = object.__new__(GraphStructure), dict(zip(names, leaves, strict=True))
    for name in FIELDS:
        object.__setattr__(graph, name, state.get(name))
    return graph


register_pytree_node(
    GraphStructure,
    _flatten,
    _unflatten,
    serialized_type_name="anemoi_gt.graph.GraphStructure",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
    flatten_with_keys_fn=_flatten_with_keys,
)
torch.serialization.add_safe_globals([GraphStructure])
