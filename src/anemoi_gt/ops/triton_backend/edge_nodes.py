"""Nodes of formulas on the edges of a graph; edges are in the caller's order."""

from anemoi_gt.ops.tensors import CallSizes, IndexTensors, Operand
from anemoi_gt.ops.triton_backend import row_launches
from anemoi_gt.ops.triton_backend.derived_passes import Pass, Run
from anemoi_gt.ops.triton_backend.edge_sums import add_segment_sum
from anemoi_gt.ops.triton_backend.formula import Node, Program, Value
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.row_nodes import ActivationNode
from anemoi_gt.ops.triton_backend.sizes import segment_of


class EndsNode(Node):
    """Destination and source of each edge of a batch entry, kept for the backward pass."""

    def __init__(self, index: IndexTensors[Operand]):
        shape, dtype = tuple(index.row.shape), index.row.dtype
        super().__init__([], Value(shape, dtype))
        self.dst, self.src = self.out, Value(shape, dtype, self)
        self.extras = [self.dst, self.src]

    def forward(self, run: Run, out: Buffer) -> None:
        """Find the ends."""
        index = run.call.index
        launch = row_launches.edge_ends(index.colptr.shape[0] - 1, out.shape[0])
        run.builder.launch(
            launch,
            colptr=index.colptr,
            row=index.row,
            perm=index.perm,
            dst=out,
            src=run.call.whole(self.src),
        )


class GatherActivationNode(ActivationNode):
    """p_e = z_e + a_i + b_j and act(p_e), of rows a of destinations and b of sources.

    p takes the place of z. da and db are sums of dp over in-edges and out-edges.
    """

    def __init__(
        self,
        p: Program,
        z: Value,
        at_dst: Value,
        at_src: Value,
        ends: EndsNode,
        activation: str,
        batch: int,
    ):
        super().__init__(z, activation)
        self.inputs = [z, at_dst, at_src]
        self.ends, self.batch = ends, batch
        p.whole_gradients.add(z)

    def call_sizes(self) -> CallSizes:
        """Return the sizes of the graph, for people."""
        z, at_dst, at_src = self.inputs
        sizes = {
            "batch": self.batch,
            "sources": at_src.shape[0] // self.batch,
            "destinations": at_dst.shape[0] // self.batch,
            "edges": self.ends.out.shape[0],
            "hidden": self.out.shape[1],
        }
        return CallSizes(sizes, z.dtype)

    def forward(self, run: Run, out: Buffer) -> None:
        """Complete p in the forward pass, and activate it."""
        if run.call.needs is not None:
            super().forward(run, out)
            return
        z, at_dst, at_src = self.inputs
        launch = row_launches.gather_activation(
            out.shape[0],
            out.shape[1],
            self.activation,
            gated=self.is_gated,
            first_row=run.begin,
            num_edges=self.ends.out.shape[0],
            num_dst=at_dst.shape[0] // self.batch,
            num_src=at_src.shape[0] // self.batch,
            batch=self.batch,
        )
        whole = run.call.whole
        run.builder.launch(
            launch,
            p=run.value(z),
            at_dst=whole(at_dst),
            at_src=whole(at_src),
            dst=whole(self.ends.dst),
            src=whole(self.ends.src),
            out=out,
        )

    def finish(self, call: Pass) -> None:
        """Sum dp over the edges of destinations and of sources."""
        z, at_dst, at_src = self.inputs
        index = call.index
        dp = call.gradient_of(z)
        sides = (
            (at_dst, index.colptr, None, index.dst_hubs),
            (at_src, index.rowptr, index.csr_to_csc, index.src_hubs),
        )
        num_edges = self.ends.out.shape[0]
        for value, pointers, order, hubs in sides:
            if value in call.needed:
                add_segment_sum(
                    call.builder,
                    dp,
                    pointers,
                    order,
                    index.perm,
                    call.gradient_of(value),
                    num_nodes=value.shape[0] // self.batch,
                    num_edges=num_edges,
                    batch=self.batch,
                    segment=segment_of(hubs, num_edges),
                )
