"""GraphStructure: the edges of a bipartite graph, sorted once for both directions of traversal.

The only place that sorts edges. A weather model's graph never changes, so whatever follows from the edges alone is made
here once and handed down; layers read it and never sort. The caller's edge features are never permuted: they are read
through `perm`.

    edge_index = [[2, 0, 2, 1],     src      4 edges, 3 sources, 3 destinations
                  [0, 2, 2, 0]]     dst

    perm       = [0, 3, 1, 2]       caller's edge at each CSC position: edges by dst, the caller's order inside
    row        = [2, 1, 0, 2]       src of each edge, CSC order
    colptr     = [0, 2, 2, 4]       in-edges of dst i are colptr[i] : colptr[i + 1]; dst 1 has none

    rowptr     = [0, 1, 2, 4]       out-edges of src j are rowptr[j] : rowptr[j + 1]
    col        = [2, 0, 0, 2]       dst of each edge, CSR order
    csr_to_csc = [2, 1, 0, 3]       CSC position of each CSR edge

Sizes travel as shapes (`colptr` holds N_dst, `row` holds E, the empty `sources` holds N_src), so torch.compile and
torch.export see them as dynamic; an int attribute would be burnt into the program.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false

from anemoi_gt.graph import ordering
from anemoi_gt.graph.build import group_coo, group_edges, pointers
from anemoi_gt.graph.validation import (
    INDEX_DTYPES,
    as_size,
    check_adjacency,
    check_edge_index,
    check_fixed_in_degree,
    check_index,
    check_permutation,
    check_pointers,
    check_range,
    check_same_edges,
    find_fixed_in_degree,
    have_size,
)


@dataclass(frozen=True, eq=False)
class GraphStructure:
    """The edges of a bipartite graph by destination (CSC) and, after `with_reverse`, by source (CSR).

    Make one with `from_edge_index`, `from_csc`, `from_adj_t` or `disjoint`, once for a graph, and pass it to every
    layer. It is a value: nothing in it changes, and every method that adds something returns a new one.

    Parameters
    ----------
    colptr : Tensor [N_dst + 1], int32 or int64
        In-edges of destination i are the CSC positions `colptr[i] : colptr[i + 1]`.
    row : Tensor [E], dtype of colptr
        Source of each edge, CSC order.
    sources : Tensor [N_src, 0]
        Holds no element: its shape is the number of sources.
    perm : Tensor [E], dtype of colptr, or None
        Caller's edge at each CSC position; None when the caller's order is the CSC order.
    global_edge_id : Tensor [E], int64, or None
        Number of each edge in the whole graph, CSC order; the key of dropout, so that a part of a graph drops what the
        whole would. None: this is the whole graph and `perm` holds the numbers.
    rowptr : Tensor [N_src + 1], dtype of colptr, or None
        Out-edges of source j are the CSR positions `rowptr[j] : rowptr[j + 1]`; None before `with_reverse`.
    col : Tensor [E], dtype of colptr, or None
        Destination of each edge, CSR order.
    csr_to_csc : Tensor [E], dtype of colptr, or None
        CSC position of each edge, CSR order.
    dst_schedule : Tensor [N_dst], dtype of colptr, or None
        The order in which GPU programs take the destinations; None is 0, 1, 2, ... It changes speed, not results.
    fixed_in_degree : Tensor [K, 0], or None
        Every destination has K in-edges, as k nearest neighbours give: kernels that know it are faster. Holds no element.
        None: not so, or not known. Found out where values are checked.

    Raises
    ------
    ValueError
        When ranks, dtypes, lengths or devices do not fit together. Values are checked by `validate`.
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

    def __post_init__(self):
        check_index("colptr", self.colptr, like=self.colptr)
        check_index("row", self.row, like=self.colptr)
        if self.colptr.shape[0] < 1:
            raise ValueError("colptr must have num_dst + 1 >= 1 entries, got an empty tensor")
        if not isinstance(self.sources, Tensor) or self.sources.dim() != 2 or self.sources.shape[1] != 0:
            got = tuple(self.sources.shape) if isinstance(self.sources, Tensor) else repr(self.sources)
            raise ValueError(f"sources must have shape [num_src, 0], which counts them, got {got}")
        present = [self.rowptr is None, self.col is None, self.csr_to_csc is None]
        if any(present) != all(present):
            raise ValueError(
                "rowptr, col and csr_to_csc come together: pass all three, or none and call with_reverse()"
            )
        lengths = {
            "perm": self.num_edges,
            "global_edge_id": self.num_edges,
            "rowptr": self.num_src + 1,
            "col": self.num_edges,
            "csr_to_csc": self.num_edges,
            "dst_schedule": self.num_dst,
        }
        for name, length in lengths.items():
            index = getattr(self, name)
            if index is not None:
                check_index(name, index, like=self.colptr, dtypes=(torch.int64,) if name == "global_edge_id" else None)
                if not have_size(index.shape[0], length):
                    raise ValueError(f"{name} must have {length} entries, got {index.shape[0]}")
        if self.fixed_in_degree is not None:
            check_fixed_in_degree(self.fixed_in_degree, self.num_dst, self.num_edges)

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
        """Where the index tensors are."""
        return self.colptr.device

    @property
    def has_reverse(self) -> bool:
        """Whether the source side (`rowptr`, `col`, `csr_to_csc`) is there."""
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
    ) -> "GraphStructure":
        """Sort the edges of a COO `edge_index` by destination; inside a destination the caller's order stays.

        Parameters
        ----------
        edge_index : Tensor [2, E], int32 or int64, or torch_geometric.EdgeIndex
            Row 0 holds sources, row 1 destinations.
        num_nodes : (num_src, num_dst), int or None
            An int means the same nodes on both sides. None is allowed only for an EdgeIndex that knows its sizes.
        global_edge_id : Tensor [E], int64, optional
            Number of each edge in the graph that these edges are a part of, caller's order.
        stable : bool
            Keep the caller's order inside a destination. False leaves it open and is faster on a GPU, for graphs that
            change every step; sums may then differ in the last bit from run to run. While gradients are recorded the
            source side comes with it, in the same sweep over the edges. It steps aside for the sort on a CPU, and where
            PyTorch is asked for deterministic algorithms.
        validate : bool
            Check the values, which waits for the device. Layers that convert an edge_index in passing leave it
            out where a device holds it. In compiled code the device checks them when it comes to it (RuntimeError), and
            nothing waits.

        Returns
        -------
        GraphStructure
            Index dtype int32 when sizes and E are known to be below 2^31, else int64. Without its source side, unless
            grouping without order brought it; `with_reverse` adds it where it is missing.

        Raises
        ------
        ValueError
            Wrong rank, dtype or device; an index that is negative or not below its side's size.

        Examples
        --------
        >>> graph = GraphStructure.from_edge_index(torch.tensor([[2, 0, 2, 1], [0, 2, 2, 0]]), (3, 3))
        >>> graph.colptr.tolist(), graph.row.tolist(), graph.perm.tolist()
        ([0, 2, 2, 4], [2, 1, 0, 2], [0, 3, 1, 2])
        """
        num_src, num_dst = _sizes(edge_index, num_nodes)
        edge_index = _plain(edge_index)
        check_edge_index(edge_index)
        if validate:
            check_range("source (row 0 of edge_index)", edge_index[0], num_src)
            check_range("destination (row 1 of edge_index)", edge_index[1], num_dst)
        dtype = _index_dtype(num_src, num_dst, edge_index.shape[1])
        if validate and not torch.compiler.is_compiling() and _is_sorted(edge_index[1]):
            src, dst = edge_index.to(dtype).unbind(0)
            sides = {"colptr": pointers(dst, num_dst), "row": src.contiguous(), "perm": None}
        else:
            sides = group_coo(edge_index, num_src, num_dst, dtype, stable=stable)._asdict()
        fixed_in_degree = find_fixed_in_degree(sides["colptr"], edge_index.shape[1]) if validate else None
        if global_edge_id is not None:
            check_index("global_edge_id", global_edge_id, like=edge_index, dtypes=(torch.int64,))
            if not have_size(global_edge_id.shape[0], edge_index.shape[1]):
                raise ValueError(
                    f"global_edge_id must have {edge_index.shape[1]} entries, one per edge, got {global_edge_id.shape[0]}"
                )
            global_edge_id = global_edge_id if sides["perm"] is None else global_edge_id[sides["perm"]]
        sources = torch.empty(num_src, 0, device=edge_index.device)
        return cls(**sides, sources=sources, global_edge_id=global_edge_id, fixed_in_degree=fixed_in_degree)

    @classmethod
    def from_csc(
        cls, colptr: Tensor, row: Tensor, num_src: int, perm: Tensor | None = None, *, validate: bool = True
    ) -> "GraphStructure":
        """Take a structure that is sorted by destination already.

        Parameters
        ----------
        colptr : Tensor [N_dst + 1], int32 or int64
        row : Tensor [E], int32 or int64
        num_src : int
        perm : Tensor [E], int32 or int64, optional
            Caller's edge at each CSC position, when edge features come in another order than `row`.
        validate : bool
            Check the values, which waits for the device.

        Raises
        ------
        ValueError
            Wrong rank, dtype, length or device; colptr not from 0 to E or decreasing; a source out of range.
        """
        for name, index in (("colptr", colptr), ("row", row)):
            check_index(name, index, like=colptr, dtypes=INDEX_DTYPES)
        num_src = as_size("num_src", num_src)
        dtype = _index_dtype(num_src, colptr.shape[0] - 1, row.shape[0])
        if perm is not None:
            check_index("perm", perm, like=colptr, dtypes=INDEX_DTYPES)
            perm = perm.to(dtype).contiguous()
        sources = torch.empty(num_src, 0, device=colptr.device)
        graph = cls(colptr.to(dtype).contiguous(), row.to(dtype).contiguous(), sources, perm=perm)
        if not validate:
            return graph
        return replace(graph.validate(), fixed_in_degree=find_fixed_in_degree(graph.colptr, graph.num_edges))

    @classmethod
    def from_adj_t(cls, adj_t, *, validate: bool = True) -> "GraphStructure":
        """Take PyG's transposed adjacency matrix: row i holds the in-edges of destination i.

        Parameters
        ----------
        adj_t : torch.sparse tensor [N_dst, N_src] (COO, CSR or CSC layout), or torch_sparse.SparseTensor
            The order of its stored values is the caller's edge order.
        validate : bool
            Check the values, which waits for the device.

        Raises
        ------
        ValueError
            For another layout or other dimensions, and what `from_csc` and `from_edge_index` refuse.
        """
        if hasattr(adj_t, "sparse_sizes"):  # torch_sparse.SparseTensor, whose package has no wheel for every platform
            rowptr, col, _ = adj_t.csr()
            return cls.from_csc(rowptr, col, adj_t.sparse_size(1), validate=validate)
        if not isinstance(adj_t, Tensor):
            raise ValueError(
                "adj_t must be a torch.sparse tensor or a torch_sparse.SparseTensor [N_dst, N_src], got "
                f"{type(adj_t).__name__}; use from_edge_index or from_csc for others"
            )
        check_adjacency(adj_t)
        if adj_t.layout == torch.sparse_csr:
            return cls.from_csc(adj_t.crow_indices(), adj_t.col_indices(), adj_t.shape[1], validate=validate)
        num_dst, num_src = adj_t.shape[:2]  # behind them the values may carry attributes
        if adj_t.layout == torch.sparse_csc:
            dst, lengths = adj_t.row_indices(), adj_t.ccol_indices().diff()
            src = torch.arange(num_src, device=dst.device).repeat_interleave(lengths, output_size=dst.shape[0])
        elif adj_t.layout == torch.sparse_coo:
            dst, src = adj_t._indices()
        else:
            raise ValueError(
                f"adj_t must have a sparse COO, CSR or CSC layout, got {adj_t.layout}; use from_edge_index"
            )
        return cls.from_edge_index(torch.stack([src, dst.to(src.dtype)]), (num_src, num_dst), validate=validate)

    @classmethod
    def disjoint(cls, graphs: Sequence["GraphStructure"]) -> "GraphStructure":
        """One structure of several graphs side by side, as PyG's Batch concatenates their nodes and edges.

        Parameters
        ----------
        graphs : sequence of GraphStructure, at least one, all on one device
            Nodes of graph b follow those of graph b - 1 on both sides, and so do its edges.

        Returns
        -------
        GraphStructure
            Without its source side. Where a graph has a `dst_schedule`, programs take the graphs one after another and the
            destinations of each in its own order; None where no graph has one.

        Raises
        ------
        ValueError
            For no graph, graphs on several devices, or a part of a graph (one with `global_edge_id`).
        """
        graphs = tuple(graphs) if isinstance(graphs, Iterable) else graphs
        if not isinstance(graphs, tuple) or not all(isinstance(graph, GraphStructure) for graph in graphs):
            kinds = {type(graph).__name__ for graph in (graphs if isinstance(graphs, tuple) else [graphs])}
            raise ValueError(f"disjoint must get a sequence of GraphStructures, got {', '.join(sorted(kinds))}")
        if not graphs:
            raise ValueError("disjoint must get at least one graph, got none")
        if len({graph.device for graph in graphs}) > 1:
            raise ValueError(f"graphs must be on one device, got {[str(graph.device) for graph in graphs]}")
        if any(graph.global_edge_id is not None for graph in graphs):
            raise ValueError(
                "graphs must be whole, got one that carries global_edge_id: join the parts of a graph first"
            )
        src_begin = _offsets(graph.num_src for graph in graphs)
        dst_begin = _offsets(graph.num_dst for graph in graphs)
        edge_begin = _offsets(graph.num_edges for graph in graphs)
        dtype = _index_dtype(src_begin[-1], dst_begin[-1], edge_begin[-1])
        colptr = _side_by_side([graph.colptr[:-1] for graph in graphs], edge_begin, dtype)
        perm = dst_schedule = None
        if any(graph.perm is not None for graph in graphs):
            perm = _side_by_side([graph.edge_order() for graph in graphs], edge_begin, dtype)
        if any(graph.dst_schedule is not None for graph in graphs):
            dst_schedule = _side_by_side([_order_of_programs(graph) for graph in graphs], dst_begin, dtype)
        degrees = {None if graph.fixed_in_degree is None else graph.fixed_in_degree.shape[0] for graph in graphs}
        return cls(
            colptr=torch.cat([colptr, colptr.new_full((1,), edge_begin[-1])]),
            row=_side_by_side([graph.row for graph in graphs], src_begin, dtype),
            sources=torch.empty(src_begin[-1], 0, device=graphs[0].device),
            perm=perm,
            dst_schedule=dst_schedule,
            fixed_in_degree=graphs[0].fixed_in_degree if len(degrees) == 1 else None,
        )

    def with_reverse(self, *, stable: bool = True) -> "GraphStructure":
        """Return this structure with its source side, which gradients of key and value need; itself if it has it.

        Parameters
        ----------
        stable : bool
            Keep CSC order inside a source; see `from_edge_index`.
        """
        if self.has_reverse:
            return self
        rowptr, csr_to_csc, col = group_edges(self.row, self.dst, self.num_src, stable=stable)
        return replace(self, rowptr=rowptr, col=col, csr_to_csc=csr_to_csc)

    def with_dst_schedule(self, positions: Tensor | None = None) -> "GraphStructure":
        """Return this structure with an order of destinations in which neighbours in space come together.

        Destinations that are near share sources, so programs that run at the same time share rows in the cache.

        Parameters
        ----------
        positions : Tensor [N_dst, 1 to 3], optional
            Any coordinates of the destinations. None: coordinates are made from the edges (distances to landmarks).

        Raises
        ------
        ValueError
            When `positions` is no tensor, or has another shape.
        """
        if positions is None:
            positions = ordering.landmark_distances(self.row.long(), self.dst.long(), self.num_src, self.num_dst)
        if not isinstance(positions, Tensor):
            raise ValueError(f"positions must be a tensor [{self.num_dst}, 1 to 3], got {type(positions).__name__}")
        if positions.dim() != 2 or positions.shape[0] != self.num_dst or not 1 <= positions.shape[1] <= 3:
            raise ValueError(
                f"positions must have shape [{self.num_dst}, 1 to 3], one row per destination, got {tuple(positions.shape)}"
            )
        morton = ordering.morton_order(positions)
        return replace(self, dst_schedule=morton.to(device=self.device, dtype=self.colptr.dtype))

    @property
    def dst(self) -> Tensor:
        """Destination of each edge [E], CSC order; computed from colptr."""
        return torch.repeat_interleave(self.colptr.diff(), output_size=self.num_edges)

    def edge_index(self) -> Tensor:
        """Return the edges as COO [2, E], int64, in the caller's order."""
        coo = torch.stack([self.row, self.dst]).long()
        return coo if self.perm is None else torch.empty_like(coo).index_copy_(1, self.perm.long(), coo)

    def global_edge_ids(self) -> Tensor:
        """Return the number of each edge in the whole graph [E], int64, CSC order."""
        return self.edge_order().long() if self.global_edge_id is None else self.global_edge_id

    def to(self, device: torch.device | str) -> "GraphStructure":
        """Return this structure on `device`."""
        return self._map(lambda tensor: tensor.to(device))

    def validate(self) -> "GraphStructure":
        """Check every value, waiting for the device, and return this structure.

        Raises
        ------
        ValueError
            colptr or rowptr not from 0 to E or decreasing; an index out of range; perm, csr_to_csc or dst_schedule not
            a permutation; the two sides not the same edges; another degree than `fixed_in_degree` says.
        """
        check_pointers("colptr", self.colptr, self.num_edges)
        if self.fixed_in_degree is not None and find_fixed_in_degree(self.colptr, self.num_edges) is None:
            raise ValueError(
                f"fixed_in_degree says that every destination has {self.fixed_in_degree.shape[0]} in-edges, but colptr has others; leave it out"
            )
        check_range("row", self.row, self.num_src)
        for name, length in (("perm", self.num_edges), ("dst_schedule", self.num_dst)):
            if getattr(self, name) is not None:
                check_permutation(name, getattr(self, name), length)
        if self.has_reverse:
            check_pointers("rowptr", self.rowptr, self.num_edges)
            check_range("col", self.col, self.num_dst)
            check_permutation("csr_to_csc", self.csr_to_csc, self.num_edges)
            src = torch.arange(self.num_src, dtype=self.row.dtype, device=self.device)
            src = src.repeat_interleave(self.rowptr.diff(), output_size=self.num_edges)
            position = self.csr_to_csc.long()
            check_same_edges(self.row[position], src, self.dst[position], self.col)
        return self

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors by name, without those that are None: safe for `torch.load(weights_only=True)`."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: tensor for name, tensor in state.items() if tensor is not None}

    @classmethod
    def from_state(cls, state: dict[str, Tensor]) -> "GraphStructure":
        """Make a structure from `state_dict()`, checking metadata only.

        Parameters
        ----------
        state : dict of str to Tensor
            The tensors by field.

        Raises
        ------
        ValueError
            For a field that a structure does not have or that is missing, or tensors that do not fit together.
        """
        if not isinstance(state, Mapping):
            raise ValueError(f"state must map names to tensors as state_dict() does, got {type(state).__name__}")
        unknown = set(state) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"state must hold the fields of a GraphStructure, got also {sorted(unknown)}")
        missing = {"colptr", "row", "sources"} - set(state)
        if missing:
            raise ValueError(f"state must hold colptr, row and sources, got none named {', '.join(sorted(missing))}")
        return cls(**state)

    def edge_order(self) -> Tensor:
        """Return the caller's edge at each CSC position [E]: `perm`, or 0, 1, 2, ..."""
        if self.perm is not None:
            return self.perm
        return torch.arange(self.num_edges, dtype=self.row.dtype, device=self.device)

    def _map(self, function) -> "GraphStructure":
        return replace(self, **{name: function(tensor) for name, tensor in self.state_dict().items()})


def _plain(edge_index: Tensor) -> Tensor:
    return edge_index.as_tensor() if hasattr(edge_index, "as_tensor") else edge_index


def _sizes(edge_index: Tensor, num_nodes: tuple[int, int] | int | None) -> tuple[int, int]:
    """(num_src, num_dst), from the caller or from an EdgeIndex that knows them; never guessed from the indices."""
    known = tuple(edge_index.sparse_size()) if hasattr(edge_index, "sparse_size") else (None, None)
    if num_nodes is None:
        if None in known:
            raise ValueError("num_nodes must be given as (num_src, num_dst): the edge_index does not know its sizes")
        num_nodes = known
    is_pair = isinstance(num_nodes, Iterable) and not isinstance(num_nodes, Tensor)
    sizes = tuple(num_nodes) if is_pair else (num_nodes, num_nodes)
    if len(sizes) != 2:
        raise ValueError(f"num_nodes must be (num_src, num_dst) or one number for both, got {num_nodes!r}")
    sizes = tuple(map(as_size, ("num_src", "num_dst"), sizes))
    for name, size, expected in zip(("num_src", "num_dst"), sizes, known, strict=True):
        if expected is not None and expected != size:
            raise ValueError(f"{name} must be {expected}, which the EdgeIndex holds, got {size}")
    return sizes


def _index_dtype(*sizes: int) -> torch.dtype:
    """int32 where all sizes are known to allow it; a number of edges that compiled code finds may be any."""
    return torch.int32 if all(guard_or_false(size < 2**31) for size in sizes) else torch.int64


def _is_sorted(index: Tensor) -> bool:
    return bool((index.diff() >= 0).all())


def _order_of_programs(graph: GraphStructure) -> Tensor:
    """The destinations in the order in which programs take them: `dst_schedule`, or 0, 1, 2, ..."""
    if graph.dst_schedule is not None:
        return graph.dst_schedule
    return torch.arange(graph.num_dst, dtype=graph.colptr.dtype, device=graph.device)


def _side_by_side(indices: Sequence[Tensor], offsets: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Indices of several graphs as indices of all: those of each are counted from its offset; behind the last is the total."""
    return torch.cat([index.to(dtype) + first for index, first in zip(indices, offsets[:-1], strict=True)])


def _offsets(sizes: Iterable[int]) -> list[int]:
    """Running sums from 0 to the total."""
    return [0, *accumulate(sizes)]


torch.serialization.add_safe_globals([GraphStructure])
