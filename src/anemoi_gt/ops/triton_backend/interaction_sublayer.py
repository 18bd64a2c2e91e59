"""The edge update of a graph network as one operator: gather, network, norm, residual.

    z_e = W_e e_e        a_i = W_i x_i + b        b_j = W_j x_j        p_e = z_e + a_i + b_j
    e'_e = e_e + norm(r_e), r: see `network_steps`

W_1 of the first layer is [W_i, W_j, W_e]. Edges stay in the caller's order; sums over the edges of
a node read them through the structure, those of hubs in segments. On a shard of a graph, own
sources are followed by a halo, whose b_j and gradients are rows of the same tensors. Kept for the
backward pass: p, q, r and the ends of the edges.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anemoi_gt.custom_ops import needs_gradient
from anemoi_gt.graph import GraphStructure
from anemoi_gt.ops.network_tensors import (
    InteractionOptions,
    InteractionTensors,
    check_interaction,
)
from anemoi_gt.ops.operands import Operand
from anemoi_gt.ops.operator import GradientLayout, Spec
from anemoi_gt.ops.tree import leaves
from anemoi_gt.ops.triton_backend import interaction_launches, network_steps
from anemoi_gt.ops.triton_backend.edge_sums import add_segment_sum
from anemoi_gt.ops.triton_backend.network_steps import (
    NetworkGradients,
    NetworkSteps,
    NetworkSums,
    residual_gradient,
)
from anemoi_gt.ops.triton_backend.packing import PackedWeights
from anemoi_gt.ops.triton_backend.plan import Buffer, MemoryLayout
from anemoi_gt.ops.triton_backend.planned_operator import PlannedOperator
from anemoi_gt.ops.triton_backend.sizes import IndexTensors, segment_of
from anemoi_gt.ops.triton_backend.sublayer_builder import SublayerBuilder

# results of the backward pass by number; the packed gradients follow
X_SRC, HALO, X_DST, EDGES = range(4)


def interaction_sublayer(
    tensors: InteractionTensors[Tensor], graph: GraphStructure, options: InteractionOptions
) -> Tensor:
    """Return e' [B * E, F].

    `graph` is the structure of one batch entry, from own sources and halo to destinations.
    """
    check_interaction(tensors, graph, options)
    flat = interaction_triton.flatten(tensors)
    save = needs_gradient(*flat)
    if save:
        graph = graph.with_reverse()
    (edges,) = interaction_triton(flat, IndexTensors.of(graph), options, save=save)
    return edges


class InteractionSublayer(PlannedOperator):
    """Returns e'; keeps the cast weights, p, q, r and the ends of the edges."""

    builder_class = SublayerBuilder

    def __init__(self) -> None:
        super().__init__(
            "interaction",
            tensors=InteractionTensors,
            constants=IndexTensors,
            options=InteractionOptions,
            outputs=("edges",),
            num_results=5,
        )

    def forward_specs(
        self,
        tensors: InteractionTensors[Operand],
        constants: IndexTensors[Operand],
        options: InteractionOptions,
    ) -> list[Spec]:
        """Return the specs of e' and the kept bytes."""
        t = tensors
        dtype = network_steps.out_dtype(t.edges.dtype, options.network)
        kept = _kept_layout(t, constants, options)
        return [(t.edges.shape, dtype), ((kept.num_bytes,), torch.uint8)]

    def add_forward(
        self,
        builder: SublayerBuilder,
        tensors: InteractionTensors[Buffer],
        constants: IndexTensors[Buffer],
        options: InteractionOptions,
        *,
        save: bool,
    ) -> list[Buffer]:
        """Add the steps of the forward pass."""
        t = tensors
        layout = _kept_layout(t, constants, options)
        if save:
            kept = builder.empty_parts(layout, together=True)
        else:
            names = ("packed", "dst", "src")
            kept = {name: builder.empty(*layout.parts[name][1:]) for name in names}
        weights = builder.pack(network_steps.packed_network(t.network), kept["packed"])
        call = _Call(builder, t, constants, options, weights, kept)
        call.find_ends()
        steps = NetworkSteps(builder, t.network, weights, options.network, kept)
        at_dst, at_src = call.project_nodes()
        out = builder.empty(*self.forward_specs(t, constants, options)[0])
        for begin, end in builder.chunks(t.edges.shape[0]):
            p = steps.rows("first", begin, end)
            builder.linear(call.edge_rows(begin, end), call.of_edges, None, p)
            h = call.gather_and_activate(p, at_dst, at_src, begin, end)
            steps.forward(h, t.edges.slice(0, begin, end), out.slice(0, begin, end), begin, end)
        return [out, builder.whole(kept["packed"])] if save else [out]

    def gradient_layout(
        self,
        tensors: InteractionTensors[Operand],
        constants: IndexTensors[Operand],
        options: InteractionOptions,
        needs: InteractionTensors[bool],
    ) -> GradientLayout:
        """Return the layout of the gradients of rows, and the packed gradients."""
        t = tensors
        whole: list[Spec | None] = [None, None, None, None]
        rows = {X_SRC: (t.x_src, needs.x_src), HALO: (t.halo, needs.halo)}
        rows |= {X_DST: (t.x_dst, needs.x_dst), EDGES: (t.edges, needs.edges)}
        for result, (tensor, need) in rows.items():
            if tensor is not None and need:
                whole[result] = (tensor.shape, tensor.dtype)
        parts = NetworkGradients.of(t.network)
        tree: InteractionTensors = InteractionTensors(X_SRC, HALO, X_DST, EDGES, parts.tree)
        packed = parts.packed(needs.network)
        return packed.layout(whole, leaves(tree), leaves(t), leaves(needs))

    def add_backward(
        self,
        builder: SublayerBuilder,
        tensors: InteractionTensors[Buffer],
        constants: IndexTensors[Buffer],
        options: InteractionOptions,
        kept: Buffer,
        grads: Sequence[Buffer | None],
        needs: InteractionTensors[bool],
    ) -> list[Buffer | None]:
        """Add the steps of the backward pass."""
        t = tensors
        (grad,) = grads
        assert grad is not None  # or there would be no backward pass
        kept_parts = _kept_layout(t, constants, options).buffers(kept)
        groups = network_steps.packed_network(t.network)
        weights = PackedWeights.of(groups).views(kept_parts["packed"])
        call = _Call(builder, t, constants, options, weights, kept_parts)
        steps = NetworkSteps(builder, t.network, weights, options.network, kept_parts)
        parts = NetworkGradients.of(t.network)
        packed_gradients, parameters = parts.packed(needs.network).allocate(builder)
        grad_weight = parameters.get("first")
        sums = NetworkSums(builder, parts.sums)
        dedges = builder.empty_like(t.edges) if needs.edges else None
        dp = builder.empty_like(kept_parts["first"])
        for begin, end in builder.chunks(t.edges.shape[0]):
            dp_rows = dp.slice(0, begin, end)
            dedge_rows = None if dedges is None else dedges.slice(0, begin, end)
            p = steps.rows("first", begin, end)
            steps.differentiate(grad, dedge_rows, sums, parameters, p, dp_rows, begin, end)
            if dedge_rows is not None:
                residual_gradient(builder, dp_rows, call.of_edges, dedge_rows, adds=True)
            if grad_weight is not None:
                into = call.columns_of_edges(grad_weight)
                rows = call.edge_rows(begin, end)
                builder.outer_product(dp_rows, rows, into, is_first=begin == 0)
        dx = call.differentiate_nodes(dp, needs, grad_weight)
        sums.reduce_into(parameters["sums"])
        return [dx.get(X_SRC), dx.get(HALO), dx.get(X_DST), dedges, packed_gradients]


class _Span(NamedTuple):
    """Consecutive sources that are rows of one tensor."""

    tensor: int  # X_SRC, HALO, or X_DST where sources are the destinations
    rows: slice
    among_sources: slice


class _Call:
    """Nodes, edges and structure of a call of the edge update."""

    def __init__(
        self,
        builder: SublayerBuilder,
        t: InteractionTensors[Buffer],
        index: IndexTensors[Buffer],
        options: InteractionOptions,
        weights: dict[str, Buffer],
        kept: dict[str, Buffer],
    ):
        self.builder, self.tensors, self.index, self.options = builder, t, index, options
        self.dst, self.src = kept["dst"], kept["src"]
        self.dtype = options.network.gemm_dtype
        self.gated = network_steps.is_gated(t.network)
        self.batch = options.batch
        # rows of nodes by the numbers of their gradients
        self.nodes = {X_DST: t.x_dst}
        for number, rows in ((X_SRC, t.x_src), (HALO, t.halo)):
            if rows is not None:
                self.nodes[number] = rows
        # the tensors of sources, in their order
        self.source_tensors = [X_DST if t.x_src is None else X_SRC]
        if t.halo is not None and t.halo.shape[0]:
            self.source_tensors.append(HALO)
        self.num_dst = t.x_dst.shape[0] // self.batch
        self.num_src = sum(self.nodes[tensor].shape[0] for tensor in self.source_tensors)
        self.num_src //= self.batch
        self.num_edges = index.row.shape[0]
        weight = weights["first"]
        self.of_dst = self.columns_of_dst(weight)
        self.of_src = self.columns_of_src(weight)
        self.of_edges = self.columns_of_edges(weight)
        self.bias = weights.get("first_bias")

    def columns_of_dst(self, weight: Buffer) -> Buffer:
        """Return W_i of W_1, or of its gradient."""
        return weight.slice(1, 0, self.tensors.x_dst.shape[1])

    def columns_of_src(self, weight: Buffer) -> Buffer:
        """Return W_j."""
        edges = self.tensors.edges.shape[1]
        return weight.slice(1, self.tensors.x_dst.shape[1], weight.shape[1] - edges)

    def columns_of_edges(self, weight: Buffer) -> Buffer:
        """Return W_e."""
        return weight.slice(1, weight.shape[1] - self.tensors.edges.shape[1], weight.shape[1])

    def find_ends(self) -> None:
        """Write destination and source of each edge in the caller's order."""
        launch = interaction_launches.edge_ends(self.num_dst, self.num_edges)
        index = self.index
        self.builder.launch(
            launch,
            colptr=index.colptr,
            row=index.row,
            perm=index.perm,
            dst=self.dst,
            src=self.src,
        )

    def source_spans(self) -> Iterator[_Span]:
        """Yield the spans of all sources: one, or with a halo two of each batch entry."""
        entries = self.batch if len(self.source_tensors) > 1 else 1
        first = 0
        for entry in range(entries):
            for tensor in self.source_tensors:
                number = self.nodes[tensor].shape[0] // entries
                rows = slice(entry * number, (entry + 1) * number)
                yield _Span(tensor, rows, among_sources=slice(first, first + number))
                first += number

    def node_rows(self) -> dict[int, Buffer]:
        """Return rows of nodes in the dtype of the products."""
        return {number: self.builder.cast(x, self.dtype) for number, x in self.nodes.items()}

    def edge_rows(self, begin: int, end: int) -> Buffer:
        """Return rows of edges in the dtype of the products."""
        return self.builder.cast(self.tensors.edges.slice(0, begin, end), self.dtype)

    def project_nodes(self) -> tuple[Buffer, Buffer]:
        """Return a of destinations and b of sources."""
        x = self.node_rows()
        at_dst = self.builder.linear(x[X_DST], self.of_dst, self.bias)
        at_src = self.builder.empty((self.batch * self.num_src, at_dst.shape[1]), self.dtype)
        for tensor, rows, among_sources in self.source_spans():
            out = at_src.rows(among_sources)
            self.builder.linear(x[tensor].rows(rows), self.of_src, None, out)
        return at_dst, at_src

    def gather_and_activate(
        self, p: Buffer, at_dst: Buffer, at_src: Buffer, begin: int, end: int
    ) -> Buffer:
        """Complete p of edges `begin` to `end`, which is z; return h."""
        features = self.tensors.network.first.value.weight.shape[0]
        h = self.builder.empty((end - begin, features), self.dtype)
        launch = interaction_launches.gather_activation(
            end - begin,
            features,
            self.options.network.activation,
            gated=self.gated,
            first_row=begin,
            num_edges=self.num_edges,
            num_dst=self.num_dst,
            num_src=self.num_src,
            batch=self.batch,
        )
        self.builder.launch(
            launch, p=p, at_dst=at_dst, at_src=at_src, dst=self.dst, src=self.src, out=h
        )
        return h

    def sum_in_edges(self, rows: Buffer, out: Buffer) -> None:
        """Write the sums of edge rows over in-edges."""
        index = self.index
        self._sum(rows, index.colptr, None, self.num_dst, index.dst_hubs, out)

    def sum_out_edges(self, rows: Buffer, out: Buffer) -> None:
        """Write the sums of edge rows over out-edges."""
        index = self.index
        assert index.rowptr is not None  # the backward pass has the reverse structure
        self._sum(rows, index.rowptr, index.csr_to_csc, self.num_src, index.src_hubs, out)

    def _sum(
        self,
        rows: Buffer,
        pointers: Buffer,
        order: Buffer | None,
        num_nodes: int,
        hubs: Buffer | None,
        out: Buffer,
    ) -> None:
        add_segment_sum(
            self.builder,
            rows,
            pointers,
            order,
            self.index.perm,
            out,
            num_nodes=num_nodes,
            num_edges=self.num_edges,
            batch=self.batch,
            segment=segment_of(hubs, self.num_edges),
        )

    def differentiate_nodes(
        self, dp: Buffer, needs: InteractionTensors[bool], grad_weight: Buffer | None
    ) -> dict[int, Buffer]:
        """Return the gradients of rows of nodes that are needed; write dW_i and dW_j."""
        builder = self.builder
        needed = {X_SRC: needs.x_src, HALO: needs.halo, X_DST: needs.x_dst}
        dx = {n: builder.empty_like(rows) for n, rows in self.nodes.items() if needed[n]}
        if grad_weight is None and not dx:
            return dx
        of_dst = builder.empty((self.batch * self.num_dst, dp.shape[1]), self.dtype)
        of_src = builder.empty((self.batch * self.num_src, dp.shape[1]), self.dtype)
        self.sum_in_edges(dp, of_dst)
        self.sum_out_edges(dp, of_src)
        if grad_weight is not None:
            self._differentiate_weights(of_dst, of_src, grad_weight)
        if X_DST in dx:
            residual_gradient(builder, of_dst, self.of_dst, dx[X_DST], adds=False)
        for tensor, rows, among_sources in self.source_spans():
            if tensor in dx:
                sums, into = of_src.rows(among_sources), dx[tensor].rows(rows)
                # to what the same nodes get as destinations
                residual_gradient(builder, sums, self.of_src, into, adds=tensor == X_DST)
        return dx

    def _differentiate_weights(self, of_dst: Buffer, of_src: Buffer, grad_weight: Buffer) -> None:
        """Write dW_i and dW_j from the sums of dp over the edges of destinations and sources."""
        x = self.node_rows()
        into = self.columns_of_dst(grad_weight)
        self.builder.outer_product(of_dst, x[X_DST], into, is_first=True)
        into = self.columns_of_src(grad_weight)
        is_first = True
        for tensor, rows, among_sources in self.source_spans():
            sums = of_src.rows(among_sources)
            self.builder.outer_product(sums, x[tensor].rows(rows), into, is_first=is_first)
            is_first = False


def _kept_layout(
    t: InteractionTensors[Operand], index: IndexTensors[Operand], options: InteractionOptions
) -> MemoryLayout:
    """Return the layout of what the forward pass keeps."""
    packed = PackedWeights.of(network_steps.packed_network(t.network))
    specs: dict[str, Spec] = {"packed": ((packed.num_elements,), options.network.gemm_dtype)}
    for name in ("dst", "src"):
        specs[name] = (tuple(index.row.shape), index.row.dtype)
    rows = network_steps.kept_specs(t.network, t.edges.shape[0], options.network)
    return MemoryLayout.of(specs | rows)


interaction_triton = InteractionSublayer()
