"""GraphStructure: the edges of a bipartite graph, sorted once for both directions of traversal.

A weather model's graph never changes, so everything that depends only on the edges is computed
once and passed to every layer. The caller's edge features are never permuted: they are read through
`perm`.

    edge_index = [[2, 0, 2, 1],     src      4 edges, 3 sources, 3 destinations
                  [0, 2, 2, 0]]     dst

    perm       = [0, 3, 1, 2]       caller's edge at each CSC position, sorted stably by dst
    row        = [2, 1, 0, 2]       src of each edge, CSC order
    colptr     = [0, 2, 2, 4]       in-edges of dst i are colptr[i] : colptr[i + 1]; dst 1 has none

    rowptr     = [0, 1, 2, 4]       out-edges of src j are rowptr[j] : rowptr[j + 1]
    col        = [2, 0, 0, 2]       dst of each edge, CSR order
    csr_to_csc = [2, 1, 0, 3]       CSC position of each CSR edge

Sizes are stored as shapes: `colptr` has N_dst + 1 elements, `row` has E, and the empty `sources` is
[N_src, 0]. This lets torch.compile and torch.export treat them as dynamic; an int attribute would
become a constant of the program. A structure is a pytree node whose leaves are its tensors.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

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
from anemoi_gt.torch_compat import is_exporting


@dataclass(frozen=True, eq=False)
class GraphStructure:
    """The edges of a bipartite graph by destination (CSC) and optionally by source (CSR).

    Build one with `from_edge_index`, `from_csc`, `from_adj_t` or `disjoint`, once per graph, and
    pass it to every layer. It is immutable: methods that add something return a new structure.
    These four class methods copy their inputs. The constructor and `from_state` keep references to
    the tensors, which must not be modified afterwards.

    Parameters
    ----------
    colptr : Tensor [N_dst + 1], int32 or int64
        In-edges of destination i are the CSC positions `colptr[i] : colptr[i + 1]`.
    row : Tensor [E], dtype of colptr
        Source of each edge, CSC order.
    sources : Tensor [N_src, 0]
        Its shape holds the number of sources; it has no elements.
    perm : Tensor [E], dtype of colptr, or None
        Caller's edge at each CSC position; None when the caller's order is the CSC order.
    global_edge_id : Tensor [E], int64, or None
        Id of each edge in the whole graph, CSC order. Dropout depends on it, so that a shard or
        chunk drops the same edges as the whole graph. None if this is the whole graph; `perm` then
        holds the ids.
    rowptr : Tensor [N_src + 1], dtype of colptr, or None
        Out-edges of source j are the CSR positions `rowptr[j] : rowptr[j + 1]`; None without the
        reverse structure.
    col : Tensor [E], dtype of colptr, or None
        Destination of each edge, CSR order.
    csr_to_csc : Tensor [E], dtype of colptr, or None
        CSC position of each edge, CSR order.
    fixed_in_degree : Tensor [K, 0], or None
        Marks that every destination has K in-edges (k nearest neighbours), for faster kernels; it
        has no elements. None if the in-degree is unknown or not constant. Detected when values are
        checked.
    dst_hubs, src_hubs : Tensor [257, 0], or None
        Mark that a destination or source has, or may have, at least 257 edges; they have no
        elements. GPU kernels split such hubs into segments of 128 edges. None disables
        hub splitting. Detected when values are checked, and always present otherwise.

    Raises
    ------
    ValueError
        If ranks, dtypes, lengths or devices are inconsistent. Values are checked by `validate`.
    """

    colptr: Tensor
    row: Tensor
    sources: Tensor
    perm: Tensor | None = None
    global_edge_id: Tensor | None = None
    rowptr: Tensor | None = None
    col: Tensor | None = None
    csr_to_csc: Tensor | None = None
    fixed_in_degree: Tensor | None = None
    dst_hubs: Tensor | None = None
    src_hubs: Tensor | None = None

    def __post_init__(self) -> None:
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
        self._check_index("perm", self.num_edges)
        self._check_index("global_edge_id", self.num_edges, dtypes=(torch.int64,))
        self._check_index("col", self.num_edges)
        self._check_index("csr_to_csc", self.num_edges)
        self._check_index("rowptr", self.num_src + 1)
        degree = self.fixed_in_degree
        if degree is not None:
            expected = "[K, 0], K the in-edges of every destination"
            check_shape("fixed_in_degree", degree, expected, is_size)
            is_readable = not torch.compiler.is_compiling()
            if is_readable and degree.shape[0] * self.num_dst != self.num_edges:
                raise ValueError(
                    f"fixed_in_degree must have shape [K, 0] with K * {self.num_dst} destinations "
                    f"= {self.num_edges} edges, got K = {degree.shape[0]}"
                )
        for name in HUBS:  # their size is not read, because it may be symbolic
            hubs = getattr(self, name)
            if hubs is not None:
                expected = f"[{HUB_DEGREE + 1}, 0]: some node may have that many edges"
                check_shape(name, hubs, expected, is_size)

    def _check_index(
        self, name: str, length: int, dtypes: tuple[torch.dtype, ...] | None = None
    ) -> None:
        """Raise ValueError unless an optional field is None or a valid index of this length."""
        index = getattr(self, name)
        if index is None:
            return
        check_index(name, index, like=self.colptr, dtypes=dtypes)
        if not have_size(index.shape[0], length):
            raise ValueError(f"{name} must have {length} entries, got {index.shape[0]}")

    def __repr__(self) -> str:
        state = self.state_dict()
        # a pytree transform may replace the tensors with other leaves
        if not all(isinstance(leaf, Tensor) for leaf in state.values()):
            return f"GraphStructure({state})"
        degree = ""
        if self.fixed_in_degree is not None:
            degree = f", fixed_in_degree={self.fixed_in_degree.shape[0]}"
        dtype = str(self.row.dtype).removeprefix("torch.")
        return (
            f"GraphStructure(num_src={self.num_src}, num_dst={self.num_dst}, "
            f"num_edges={self.num_edges}, reverse={self.has_reverse}{degree}, {dtype}, "
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
            An int means that sources and destinations are the same nodes. None is allowed only for
            an EdgeIndex with known sizes.
        global_edge_id : Tensor [E], int64, optional
            Id of each edge in the larger graph that contains these edges, caller's order.
        stable : bool
            Keep the caller's order within a destination. False leaves the order unspecified and is
            faster on a GPU, for graphs that change every step; sums may then differ in the last bit
            from run to run. Both structures are built in one pass. On a CPU and under deterministic
            algorithms, edges are sorted regardless.
        validate : bool
            Check the values, which synchronises with the device, and detect fixed in-degree and
            hubs. If False, and in compiled code, ranges are asserted on the device without
            synchronising (RuntimeError, on a GPU at a later call), and the graph is marked as if it
            had hubs. Layers that convert an edge_index on a GPU pass False.
        reverse : bool
            Build the reverse (CSR) structure, which gradients of key and value need. For inference,
            False saves a sort and 8 bytes per edge.

        Returns
        -------
        GraphStructure
            Indices are int32 if sizes and E are known to be below 2^31, otherwise int64. Shares no
            memory with the inputs.

        Raises
        ------
        ValueError
            For a wrong rank, dtype or device, or an index out of range.

        Examples
        --------
        >>> edge_index = torch.tensor([[2, 0, 2, 1], [0, 2, 2, 0]])
        >>> graph = GraphStructure.from_edge_index(edge_index, (3, 3))
        >>> graph.colptr.tolist(), graph.row.tolist(), graph.perm.tolist()
        ([0, 2, 2, 4], [2, 1, 0, 2], [0, 3, 1, 2])
        """
        num_src, num_dst = _sizes(edge_index, num_nodes)
        if hasattr(edge_index, "as_tensor"):  # torch_geometric.EdgeIndex
            edge_index = edge_index.as_tensor()
        check_edge_index(edge_index)
        dtype = _index_dtype(num_src, num_dst, edge_index.shape[1])
        validate = validate and not torch.compiler.is_compiling()  # which cannot read values
        check = check_range if validate else assert_range
        check("source (row 0 of edge_index)", edge_index[0], num_src)
        check("destination (row 1 of edge_index)", edge_index[1], num_dst)
        if validate and bool((edge_index[1, 1:] >= edge_index[1, :-1]).all()):
            colptr = pointers(edge_index[1].to(dtype), num_dst)
            groups = GroupedEdges(colptr, None, _copy(edge_index[0], dtype))
        else:
            groups = group_coo(edge_index, num_src, num_dst, dtype, stable=stable, reverse=reverse)
        if global_edge_id is not None:
            check_edge_ids(global_edge_id, edge_index)
            if groups.perm is None:
                global_edge_id = global_edge_id.clone()
            else:
                global_edge_id = global_edge_id[groups.perm]
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
        if reverse:
            graph = graph.with_reverse(stable=stable)
        return graph._with_degrees(is_known=validate)

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
        """Build a structure from edges that are already sorted by destination.

        Parameters
        ----------
        colptr : Tensor [N_dst + 1], int32 or int64
        row : Tensor [E], int32 or int64
        num_src : int
        perm : Tensor [E], int32 or int64, optional
            Caller's edge at each CSC position, if edge features are in a different order from
            `row`.
        validate, reverse : bool
            As in `from_edge_index`.

        Raises
        ------
        ValueError
            For a wrong rank, dtype, length or device, a colptr that decreases or does not run from
            0 to E, a source out of range, or a perm that is no permutation.
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
        validate = validate and not torch.compiler.is_compiling()  # which cannot read values
        if validate:
            graph.validate()
        else:
            assert_pointers("colptr", graph.colptr, graph.num_edges)
            assert_range("row", graph.row, graph.num_src)
            if graph.perm is not None:
                assert_range("perm", graph.perm, graph.num_edges, of="edges")
        if reverse:
            graph = graph.with_reverse()
        return graph._with_degrees(is_known=validate)

    @classmethod
    def from_adj_t(
        cls, adj_t: Any, *, stable: bool = True, validate: bool = True, reverse: bool = True
    ) -> "GraphStructure":
        """Build a structure from PyG's transposed adjacency matrix.

        Row i of the matrix holds the in-edges of destination i.

        Parameters
        ----------
        adj_t : torch.sparse tensor [N_dst, N_src] (COO, CSR or CSC layout), or
        torch_sparse.SparseTensor
            The caller's edge order is the order of its stored values.
        stable, validate, reverse : bool
            As in `from_edge_index`.

        Raises
        ------
        ValueError
            For an unsupported layout or shape, and as in `from_csc` and `from_edge_index`.
        """
        csr = None
        # torch_sparse.SparseTensor; torch_sparse is not a dependency
        if hasattr(adj_t, "sparse_sizes"):
            csr = (*adj_t.csr()[:2], adj_t.sparse_size(1))
        elif adj_t.layout != torch.strided and (
            adj_t.sparse_dim() != 2 or adj_t.dim() - adj_t.dense_dim() != 2
        ):
            raise ValueError(
                "adj_t must have two sparse dimensions [N_dst, N_src], followed by dense "
                f"dimensions of its values if any, got shape {tuple(adj_t.shape)} with "
                f"{adj_t.sparse_dim()} sparse and {adj_t.dense_dim()} dense dimensions"
            )
        elif adj_t.layout == torch.sparse_csr:
            csr = adj_t.crow_indices(), adj_t.col_indices(), adj_t.shape[1]
        if csr is not None:
            graph = cls.from_csc(*csr, validate=validate, reverse=False)
            if reverse:
                graph = graph.with_reverse(stable=stable)
            return graph
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
            With the reverse structure if all graphs have it; nothing is sorted.

        Raises
        ------
        ValueError
            If a graph is a shard or chunk (has `global_edge_id`).
        """
        graphs = tuple(graphs)
        if any(graph.global_edge_id is not None for graph in graphs):
            raise ValueError(
                "graphs must be whole, got one with global_edge_id: merge its shards or chunks "
                "first"
            )
        src_begin = [0, *accumulate(graph.num_src for graph in graphs)]
        dst_begin = [0, *accumulate(graph.num_dst for graph in graphs)]
        edge_begin = [0, *accumulate(graph.num_edges for graph in graphs)]
        dtype = _index_dtype(src_begin[-1], dst_begin[-1], edge_begin[-1])
        fields_and_offsets = [("row", src_begin)]
        pointer_fields = ["colptr"]
        if all(graph.has_reverse for graph in graphs):
            fields_and_offsets += [("col", dst_begin), ("csr_to_csc", edge_begin)]
            pointer_fields.append("rowptr")

        joined: dict[str, Any] = {}
        for name, offsets in fields_and_offsets:
            indices = [getattr(graph, name) for graph in graphs]
            joined[name] = _concatenate(indices, offsets, dtype)
        for name in pointer_fields:  # pointers count the edges of all graphs
            starts = [getattr(graph, name)[:-1] for graph in graphs]
            all_starts = _concatenate(starts, edge_begin, dtype)
            joined[name] = torch.cat([all_starts, all_starts.new_full((1,), edge_begin[-1])])
        if any(graph.perm is not None for graph in graphs):
            orders = [graph.edge_order() for graph in graphs]
            joined["perm"] = _concatenate(orders, edge_begin, dtype)
        for name in HUBS:
            all_hubs = [getattr(graph, name) for graph in graphs]
            joined[name] = next((hubs for hubs in all_hubs if hubs is not None), None)
        degrees = {graph._known_in_degree() for graph in graphs}
        if len(degrees) == 1:
            joined["fixed_in_degree"] = graphs[0].fixed_in_degree
        return cls(**joined, sources=torch.empty(src_begin[-1], 0, device=graphs[0].device))

    def with_reverse(self, *, stable: bool = True) -> "GraphStructure":
        """Return this structure with its reverse (CSR) structure, for key and value gradients.

        `stable` keeps CSC order within each source, see `from_edge_index`.
        """
        if self.rowptr is not None:
            return self
        rowptr, csr_to_csc, col = group_edges(self.row, self.dst, self.num_src, stable=stable)
        return replace(self, rowptr=rowptr, col=col, csr_to_csc=csr_to_csc)

    def with_dst_schedule(self, positions: Tensor) -> "GraphStructure":
        """Return this structure. Deprecated: the order of GPU programs made no difference."""
        message = "with_dst_schedule does nothing and will be removed in 0.6.0: leave it out"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self

    @property
    def dst(self) -> Tensor:
        """Destination of each edge [E], CSC order; computed from colptr."""
        return torch.repeat_interleave(self.colptr.diff(), output_size=self.num_edges)

    def edge_index(self) -> Tensor:
        """Return the edges as COO [2, E], int64, in the caller's order."""
        coo = torch.stack([self.row, self.dst]).long()
        if self.perm is None:
            return coo
        return torch.empty_like(coo).index_copy_(1, self.perm.long(), coo)

    def global_edge_ids(self) -> Tensor:
        """Return the id of each edge in the whole graph [E], int64, CSC order."""
        if self.global_edge_id is not None:
            return self.global_edge_id
        return self.edge_order().long()

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "GraphStructure":
        """Return this structure on `device`; PyG's `Data.to` calls this method.

        Raise ValueError for a dtype.
        """
        if isinstance(device, torch.dtype):
            raise ValueError(
                f"device must be a device, got {device}: index dtypes follow from the sizes"
            )
        return tree_map(lambda tensor: tensor.to(device, non_blocking=non_blocking), self)

    def validate(self) -> "GraphStructure":
        """Check every value and return this structure; in eager code, synchronises with the device.

        Raises
        ------
        ValueError
            If colptr or rowptr decreases or does not run from 0 to E; an index is out of range;
            perm or csr_to_csc is not a permutation; CSC and CSR have different edges; or an
            in-degree differs from `fixed_in_degree`.
        """
        check_pointers("colptr", self.colptr, self.num_edges)
        check_range("row", self.row, self.num_src)
        if self.fixed_in_degree is not None and not self._has_fixed_in_degree(
            max_degree(self.colptr)
        ):
            raise ValueError(
                "fixed_in_degree must be the in-degree of every destination, got "
                f"{self.fixed_in_degree.shape[0]} and other in-degrees in colptr; leave it out"
            )
        if self.perm is not None:
            check_permutation("perm", self.perm, self.num_edges)
        rowptr, col, csr_to_csc = self.rowptr, self.col, self.csr_to_csc
        if rowptr is not None and col is not None and csr_to_csc is not None:
            check_pointers("rowptr", rowptr, self.num_edges)
            check_range("col", col, self.num_dst)
            check_permutation("csr_to_csc", csr_to_csc, self.num_edges)
            degrees = rowptr.diff()
            src = self._arange(self.num_src).repeat_interleave(degrees, output_size=self.num_edges)
            position = csr_to_csc.long()
            same = self.row[position].eq(src).all() & self.dst[position].eq(col).all()
            if not bool(same):
                raise ValueError(
                    "rowptr, col must hold the edges of colptr, row: leave them out and call "
                    "with_reverse()"
                )
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that are not None, by field, for `torch.load(weights_only=True)`."""
        return {name: getattr(self, name) for name in FIELDS if getattr(self, name) is not None}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "GraphStructure":
        """Build a structure from the tensors of `state_dict()`, checking metadata only.

        Raise ValueError for inconsistent tensors.
        """
        state = {name: tensor for name, tensor in state.items() if name != "dst_schedule"}  # of 0.4
        return cls(**state)

    def edge_order(self) -> Tensor:
        """Return the caller's edge at each CSC position [E]: `perm`, or 0, 1, 2, ..."""
        return self._arange(self.num_edges) if self.perm is None else self.perm

    def _known_in_degree(self) -> int | None:
        """Return the fixed in-degree K, or None."""
        return None if self.fixed_in_degree is None else self.fixed_in_degree.shape[0]

    def _with_degrees(self, *, is_known: bool) -> "GraphStructure":
        """Return this structure with fixed in-degree and hubs; synchronises if values are known."""
        if not is_known:
            return replace(self, dst_hubs=self._hubs(), src_hubs=self._hubs())
        max_in_degree = max_degree(self.colptr)
        fixed_in_degree = dst_hubs = src_hubs = None
        if self._has_fixed_in_degree(max_in_degree):
            fixed_in_degree = self.colptr.new_empty(max_in_degree, 0)
        if self.num_edges > HUB_DEGREE:
            rowptr = pointers(self.row, self.num_src) if self.rowptr is None else self.rowptr
            if max_in_degree > HUB_DEGREE:
                dst_hubs = self._hubs()
            if max_degree(rowptr) > HUB_DEGREE:
                src_hubs = self._hubs()
        return replace(self, fixed_in_degree=fixed_in_degree, dst_hubs=dst_hubs, src_hubs=src_hubs)

    def _has_fixed_in_degree(self, max_in_degree: int) -> bool:
        """Return whether every destination has as many in-edges as the one with the most."""
        return self.num_edges > 0 and max_in_degree * self.num_dst == self.num_edges

    def _hubs(self) -> Tensor:
        """Return the empty tensor that marks hubs."""
        return self.colptr.new_empty(HUB_DEGREE + 1, 0)

    def _arange(self, count: int) -> Tensor:
        """Return 0, 1, 2, ... in the index dtype."""
        return torch.arange(count, dtype=self.colptr.dtype, device=self.device)


HUBS = ("dst_hubs", "src_hubs")
FIELDS = tuple(field.name for field in fields(GraphStructure))


def check_structure(graph: object) -> None:
    """Raise ValueError unless `graph` is a GraphStructure."""
    if not isinstance(graph, GraphStructure):
        raise ValueError(
            f"graph must be a GraphStructure, got {type(graph).__name__}; build it once with "
            "GraphStructure.from_edge_index(edge_index, (num_src, num_dst))"
        )


def _sizes(edge_index: Tensor, num_nodes: tuple[int, int] | int | None) -> tuple[int, int]:
    """Return (num_src, num_dst) from `num_nodes` or an EdgeIndex, never inferred from indices."""
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
        num_src, num_dst = num_nodes
    else:
        num_src = num_dst = num_nodes
    num_src, num_dst = as_size("num_src", num_src), as_size("num_dst", num_dst)
    for name, size, known in (("num_src", num_src, known_src), ("num_dst", num_dst, known_dst)):
        if known is not None and known != size:
            raise ValueError(f"{name} must be {known}, the size of the EdgeIndex, got {size}")
    return num_src, num_dst


def _index_dtype(*sizes: int) -> torch.dtype:
    """Return int32 if all sizes are known to be below 2^31, otherwise int64.

    Data-dependent sizes in traced code are unbounded. An exported program must support the whole
    range of a named dimension, so no guard may narrow it.
    """
    is_below = statically_known_true if is_exporting() else guard_or_false
    return torch.int32 if all(is_below(size < 2**31) for size in sizes) else torch.int64


def _concatenate(indices: Sequence[Tensor], offsets: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Concatenate indices of several graphs, shifted by offsets; the last offset is the total."""
    return torch.cat(
        [index.to(dtype) + first for index, first in zip(indices, offsets[:-1], strict=True)]
    )


def _copy(index: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous copy, because the caller may modify `index`."""
    return index.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _flatten(graph: GraphStructure) -> tuple[list[Tensor], tuple[str, ...]]:
    state = graph.state_dict()
    return list(state.values()), tuple(state)


def _flatten_with_keys(graph: GraphStructure) -> tuple[list[tuple[KeyEntry, Any]], Any]:
    leaves, names = _flatten(graph)
    return list(zip(map(MappingKey, names), leaves, strict=True)), names


def _unflatten(leaves: Iterable, names: tuple[str, ...]) -> GraphStructure:
    """Build a structure without checks: leaves may be symbols, specs or batched tensors."""
    graph = object.__new__(GraphStructure)
    state = dict(zip(names, leaves, strict=True))
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
