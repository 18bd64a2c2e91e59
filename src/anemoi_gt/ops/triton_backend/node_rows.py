"""Rows of nodes in the attention sub-layer: three kinds of sets, with norms and projections.

Query, y, key and value of nodes are columns of wider tensors, each computed by one GEMM. Column y
starts as the self term, and the attention is added to it. Gradients have the same layout, so the
gradients of n and of the weights take one GEMM each.

    OneSet           sources are the destinations, with one norm      [q, y, k, v]
    OneSetAndHalo    the same, followed by the halo of other ranks    [q, y] and [k, v]
    TwoSets          sources differ, as in a mapper; perhaps a halo   [q, y] and [k, v]
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

from anemoi_gt.ops.operands import Operand
from anemoi_gt.ops.sublayer_tensors import AttentionOptions, AttentionTensors, NormOptions
from anemoi_gt.ops.triton_backend import row_launches
from anemoi_gt.ops.triton_backend.plan import Buffer
from anemoi_gt.ops.triton_backend.sublayer_builder import NodeSums, SublayerBuilder
from anemoi_gt.ops.triton_backend.sublayer_steps import NormSteps, Rows


class NodeSizes(NamedTuple):
    """Numbers of rows and columns of a call."""

    batch: int
    heads: int
    width: int  # H * C
    destinations: int  # of a batch entry
    own_sources: int
    halo: int
    is_one_tensor: bool  # query, y, key and value are columns of one tensor

    @classmethod
    def of(cls, t: AttentionTensors[Operand], options: AttentionOptions) -> "NodeSizes":
        """Read the sizes of tensors, or of what has their shapes."""
        x_src = t.x_dst if t.x_src is None else t.x_src
        halo = 0 if t.halo is None else t.halo.shape[0] // options.batch
        return cls(
            options.batch,
            options.heads,
            t.query.weight.shape[0],
            t.x_dst.shape[0] // options.batch,
            x_src.shape[0] // options.batch,
            halo,
            t.x_src is None and not halo,
        )

    @property
    def sources(self) -> int:
        """Own sources and halo of a batch entry."""
        return self.own_sources + self.halo

    @property
    def row_stride(self) -> int:
        """Elements between the queries of two nodes, and between their keys."""
        return (4 if self.is_one_tensor else 2) * self.width

    def row_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the shapes of the tensors of rows: "dst", and "src" unless they are one."""
        shapes = {"dst": (self.batch * self.destinations, self.row_stride)}
        if not self.is_one_tensor:
            shapes["src"] = (self.batch * self.sources, self.row_stride)
        return shapes

    def attribute_shape(self, edge_attr: Operand) -> tuple[int, ...]:
        """Return the shape of the edge attributes as the attention takes them."""
        if self.batch > 1 and len(edge_attr.shape) == 2:
            return (1, *edge_attr.shape)  # shared by the batch
        return tuple(edge_attr.shape)

    def split_heads(self, rows: Buffer) -> Buffer:
        """Return rows [B * N, H * C] as [N, H, C], or [B, N, H, C] of a batch."""
        heads = rows.unflatten(1, (self.heads, self.width // self.heads))
        if self.batch == 1:
            return heads
        return heads.unflatten(0, (self.batch, rows.shape[0] // self.batch))

    def columns(self, tensors: dict[str, Buffer]) -> "NodeRows":
        """Return query, y, key and value, columns of the tensors of rows."""
        width = self.width
        dst = tensors["dst"]
        src, first = (dst, 2 * width) if self.is_one_tensor else (tensors["src"], 0)
        return NodeRows(
            dst.slice(1, 0, width),
            dst.slice(1, width, 2 * width),
            src.slice(1, first, first + width),
            src.slice(1, first + width, first + 2 * width),
        )


class NodeRows(NamedTuple):
    """Rows of nodes [B * N, H * C], columns of wider tensors; or their gradients."""

    query: Buffer
    attended: Buffer  # y
    key: Buffer
    value: Buffer


class RowGradients(NamedTuple):
    """Gradients of rows and their conditions, None for what is absent or not needed."""

    x_src: Buffer | None
    halo: Buffer | None
    x_dst: Buffer
    condition_src: Buffer | None
    condition_dst: Buffer | None


class Projections(NamedTuple):
    """Some of the stacked projections of nodes, with the gradient of their weight."""

    builder: SublayerBuilder
    weight: Buffer
    bias: Buffer | None
    grad_weight: Buffer | None = None  # None if no weight needs a gradient

    def slice(self, first: int, stop: int) -> "Projections":
        """Return the projections that make columns `first` to `stop` of [q, y, k, v]."""
        parts = []
        for stacked in (self.weight, self.bias, self.grad_weight):
            parts.append(None if stacked is None else stacked.slice(0, first, stop))
        return Projections(self.builder, *parts)  # type: ignore[arg-type]  # the weight is there

    def forward(self, normed: Buffer, out: Buffer) -> None:
        """Write the projections of rows n."""
        self.builder.linear(normed, self.weight, self.bias, out)

    def differentiate(self, gradients: Buffer, normed: Buffer, *, is_first: bool = True) -> None:
        """Write the gradient of the weight if needed, or add to it unless `is_first`."""
        if self.grad_weight is not None:
            self.builder.outer_product(gradients, normed, self.grad_weight, is_first=is_first)


class NodeSets(ABC):
    """Norms and projections of sources and destinations, of both passes."""

    def __init__(
        self,
        builder: SublayerBuilder,
        t: AttentionTensors[Buffer],
        options: AttentionOptions,
        weights: dict[str, Buffer],
    ):
        self.builder = builder
        self.tensors = t
        self.options = options
        self.sizes = NodeSizes.of(t, options)
        self.norm = NormSteps(builder, "norm", t.norm, weights, options.norm)
        self.projections = Projections(builder, weights["nodes"], weights.get("nodes_bias"))

    @staticmethod
    def of(
        builder: SublayerBuilder,
        t: AttentionTensors[Buffer],
        options: AttentionOptions,
        weights: dict[str, Buffer],
    ) -> "NodeSets":
        """Return the kind of sets that these tensors have."""
        kind: type[NodeSets] = OneSet
        if t.x_src is not None:
            kind = TwoSets
        elif not NodeSizes.of(t, options).is_one_tensor:
            kind = OneSetAndHalo
        return kind(builder, t, options, weights)

    @abstractmethod
    def project(self, tensors: dict[str, Buffer]) -> NodeRows:
        """Write the projections of normalised rows into the tensors of rows; return them."""

    @abstractmethod
    def differentiate(self, grad: Buffer) -> RowGradients:
        """Differentiate projections and norms, of `gradient_rows`; `grad` is dz."""

    def kept_rows(self, tensors: dict[str, Buffer]) -> NodeRows:
        """Return rows in the tensors that `project` wrote."""
        return self.sizes.columns(tensors)

    def allocate_gradients(
        self, sums: NodeSums, parameters: dict[str, Buffer], needs: AttentionTensors[bool]
    ) -> None:
        """Set the memory of gradients: rows, weights, sums over nodes, conditions."""
        self.gradient_tensors = {}
        for name, shape in self.sizes.row_shapes().items():
            self.gradient_tensors[name] = self.builder.empty(shape, self.options.gemm_dtype)
        self.gradient_rows = self.sizes.columns(self.gradient_tensors)
        grad_weight = parameters.get("nodes_weight")
        self.projections = self.projections._replace(grad_weight=grad_weight)
        needs_condition = bool(needs.norm.condition)
        self.norm.allocate_gradients(
            sums, parameters.get("norm_map"), needs_condition=needs_condition
        )

    def of_destinations(self) -> Projections:
        """Return the projections to [q, y]."""
        return self.projections.slice(0, 2 * self.sizes.width)

    def of_sources(self) -> Projections:
        """Return the projections to [k, v]."""
        return self.projections.slice(2 * self.sizes.width, 4 * self.sizes.width)

    def normed_sources(self, norm: NormSteps, x: Buffer) -> Buffer:
        """Return normalised own sources, each batch entry followed by its halo."""
        sizes = self.sizes
        normed = self.builder.empty(
            (sizes.batch * sizes.sources, x.shape[1]), self.options.gemm_dtype
        )
        norm.forward(x, normed, rows=Rows(sizes.batch, sizes.sources))
        if sizes.halo:
            self.builder.copy(self.entries_of_halo(), self.halo_of(normed))
        return normed

    def halo_of(self, rows: Buffer) -> Buffer:
        """Return the rows of the halo [B, R, ..] of rows [B * (N + R), ..]."""
        sizes = self.sizes
        entries = rows.unflatten(0, (sizes.batch, sizes.sources))
        return entries.slice(1, sizes.own_sources, sizes.sources)

    def entries_of_halo(self) -> Buffer:
        """Return the halo as [B, R, F]."""
        halo = self.tensors.halo
        assert halo is not None  # it has rows
        return halo.unflatten(0, (self.sizes.batch, self.sizes.halo))

    def differentiate_norm(
        self, norm: NormSteps, x: Buffer, dx: Buffer, grad_total: Buffer | None, dn: Buffer
    ) -> Buffer:
        """Fill dx from the gradient of the normalised rows; return them, recomputed."""
        normed = self.builder.empty_like(dn)
        parts = [(0, x.shape[0])]
        if norm.condition is not None:
            parts = list(self.builder.chunks(x.shape[0]))
        for begin, end in parts:
            total_rows = None if grad_total is None else grad_total.slice(0, begin, end)
            norm.backward(
                x.slice(0, begin, end),
                dn.slice(0, begin, end),
                total_rows,
                dx.slice(0, begin, end),
                normed.slice(0, begin, end),
                first=begin,
            )
        return normed

    def differentiate_source_norm(
        self, norm: NormSteps, x: Buffer, dx: Buffer, grad_total: Buffer | None, dn: Buffer
    ) -> tuple[Buffer, Buffer | None]:
        """Fill dx of own sources; return normalised rows of all sources, and the halo's dx."""
        sizes = self.sizes
        halo = self.tensors.halo
        if sizes.batch > 1 and sizes.halo:
            normed = self.builder.empty_like(dn)
            rows = Rows(sizes.batch, sizes.sources)
            norm.backward(x, dn, grad_total, dx, normed, rows=rows)
        else:
            normed = self.differentiate_norm(norm, x, dx, grad_total, dn)
        if halo is None:
            return normed, None
        dhalo = self.builder.empty_like(halo)  # which may be empty
        if sizes.halo:
            entries = (sizes.batch, sizes.halo)
            self.builder.copy(self.entries_of_halo(), self.halo_of(normed))
            self.builder.copy(self.halo_of(dn), dhalo.unflatten(0, entries))
        return normed, dhalo


class OneSet(NodeSets):
    """One set of nodes: [q, y, k, v]."""

    def project(self, tensors: dict[str, Buffer]) -> NodeRows:
        """Normalise and project by one GEMM."""
        normed = self.normed_sources(self.norm, self.tensors.x_dst)
        self.projections.forward(normed, tensors["dst"])
        return self.sizes.columns(tensors)

    def differentiate(self, grad: Buffer) -> RowGradients:
        """Differentiate by one GEMM each for n and the weights."""
        x = self.tensors.x_dst
        dx = self.builder.empty_like(x)
        gradients = self.gradient_tensors["dst"]
        dn = self.builder.product(gradients, self.projections.weight)
        normed, dhalo = self.differentiate_source_norm(self.norm, x, dx, grad, dn)
        self.projections.differentiate(gradients, normed)
        return RowGradients(None, dhalo, dx, None, self.norm.grad_condition)


class OneSetAndHalo(NodeSets):
    """One set of nodes, followed by a halo in each batch entry: [q, y] and [k, v]."""

    def project(self, tensors: dict[str, Buffer]) -> NodeRows:
        """Project all rows to [k, v], and the own rows of each entry to [q, y]."""
        normed = self.normed_sources(self.norm, self.tensors.x_dst)
        self.of_sources().forward(normed, tensors["src"])
        for local, among_sources in self._entries():
            self.of_destinations().forward(normed.rows(among_sources), tensors["dst"].rows(local))
        return self.sizes.columns(tensors)

    def differentiate(self, grad: Buffer) -> RowGradients:
        """Add the gradients of own rows in [q, y] to those in [k, v]."""
        x = self.tensors.x_dst
        dx = self.builder.empty_like(x)
        dst, src = self.gradient_tensors["dst"], self.gradient_tensors["src"]
        of_destinations, of_sources = self.of_destinations(), self.of_sources()
        dn = self.builder.product(src, of_sources.weight)
        for local, among_sources in self._entries():
            dn_own = dn.rows(among_sources)
            self.builder.add_product(dst.rows(local), of_destinations.weight, dn_own)
        normed, dhalo = self.differentiate_source_norm(self.norm, x, dx, grad, dn)
        of_sources.differentiate(src, normed)
        for local, among_sources in self._entries():
            is_first = local.start == 0
            of_destinations.differentiate(
                dst.rows(local), normed.rows(among_sources), is_first=is_first
            )
        return RowGradients(None, dhalo, dx, None, self.norm.grad_condition)

    def _entries(self) -> Iterator[tuple[slice, slice]]:
        """Yield the rows of each batch entry among destinations, and among sources."""
        sizes = self.sizes
        for entry in range(sizes.batch):
            first_dst, first_src = entry * sizes.destinations, entry * sizes.sources
            yield (
                slice(first_dst, first_dst + sizes.destinations),
                slice(first_src, first_src + sizes.own_sources),
            )


class TwoSets(NodeSets):
    """Sources and destinations with a norm each: [q, y] and [k, v]."""

    def __init__(
        self,
        builder: SublayerBuilder,
        t: AttentionTensors[Buffer],
        options: AttentionOptions,
        weights: dict[str, Buffer],
    ):
        super().__init__(builder, t, options, weights)
        assert t.x_src is not None  # `of` chose this class
        self.x_src = t.x_src
        self.norm_src = NormSteps(builder, "norm_src", t.norm_src, weights, options.norm_src)

    def project(self, tensors: dict[str, Buffer]) -> NodeRows:
        """Normalise and project each set."""
        normed = self.normed_sources(self.norm_src, self.x_src)
        self.of_sources().forward(normed, tensors["src"])
        x = self.tensors.x_dst
        normed = self.builder.empty(x.shape, self.options.gemm_dtype)
        self.norm.forward(x, normed)
        self.of_destinations().forward(normed, tensors["dst"])
        return self.sizes.columns(tensors)

    def allocate_gradients(
        self, sums: NodeSums, parameters: dict[str, Buffer], needs: AttentionTensors[bool]
    ) -> None:
        """Set the memory of gradients, those of the sources' norm too."""
        super().allocate_gradients(sums, parameters, needs)
        needs_condition = bool(needs.norm_src.condition)
        self.norm_src.allocate_gradients(
            sums, parameters.get("norm_src_map"), needs_condition=needs_condition
        )

    def differentiate(self, grad: Buffer) -> RowGradients:
        """Differentiate destinations, then sources."""
        x = self.tensors.x_dst
        of_destinations = self.of_destinations()
        of_sources = self.of_sources()
        dx = self.builder.empty_like(x)
        dst, src = self.gradient_tensors["dst"], self.gradient_tensors["src"]
        dn = self.builder.product(dst, of_destinations.weight)
        normed = self.differentiate_norm(self.norm, x, dx, grad, dn)
        of_destinations.differentiate(dst, normed)
        dx_src = self.builder.empty_like(self.x_src)
        dn = self.builder.product(src, of_sources.weight)
        normed, dhalo = self.differentiate_source_norm(self.norm_src, self.x_src, dx_src, None, dn)
        of_sources.differentiate(src, normed)
        conditions = (self.norm_src.grad_condition, self.norm.grad_condition)
        return RowGradients(dx_src, dhalo, dx, *conditions)


class HeadNorms:
    """The norms of queries and keys over the channels of each head; the identity without eps."""

    def __init__(
        self,
        builder: SublayerBuilder,
        sizes: NodeSizes,
        t: AttentionTensors[Buffer],
        options: AttentionOptions,
    ):
        self.builder = builder
        self.sizes = sizes
        self.options = options
        self.query = (t.query_scale, options.query_norm)
        self.key = (t.key_scale, options.key_norm)

    def forward(self, rows: NodeRows) -> NodeRows:
        """Return rows with query and key normalised, in scratch; unchanged without norms."""
        if not self.options.query_norm.eps and not self.options.key_norm.eps:
            return rows
        # The attention reads query, key and value with one stride, so these rows lie as they do.
        tensors = {}
        for name, shape in self.sizes.row_shapes().items():
            tensors[name] = self.builder.empty(shape, self.options.gemm_dtype)
        normed = self.sizes.columns(tensors)
        query = self._normalise(rows.query, normed.query, *self.query)
        key = self._normalise(rows.key, normed.key, *self.key)
        return rows._replace(query=query, key=key)

    def _normalise(self, x: Buffer, out: Buffer, scale: Buffer | None, norm: NormOptions) -> Buffer:
        """Return rows x [B * N, H * C] normalised per head, in `out`."""
        if not norm.eps:
            return x
        launch = row_launches.head_norm_forward(
            x.shape[0],
            self.sizes.heads,
            self.sizes.width // self.sizes.heads,
            norm,
            x_stride=x.stride[0],
            out_stride=out.stride[0],
        )
        self.builder.launch(launch, x=x, scale=scale, out=out)
        return out

    def backward(self, sums: NodeSums, rows: NodeRows, gradients: NodeRows) -> None:
        """Differentiate the norms of rows in place of the gradients of their outputs."""
        self._differentiate(sums, "query_norm", rows.query, gradients.query, *self.query)
        self._differentiate(sums, "key_norm", rows.key, gradients.key, *self.key)

    def _differentiate(
        self,
        sums: NodeSums,
        name: str,
        x: Buffer,
        gradient: Buffer,
        scale: Buffer | None,
        norm: NormOptions,
    ) -> None:
        if not norm.eps:
            return
        columns = sums.columns.get(name)
        launch = row_launches.head_norm_backward(
            x.shape[0],
            self.sizes.heads,
            self.sizes.width // self.sizes.heads,
            norm,
            x_stride=x.stride[0],
            grad_stride=gradient.stride[0],
            dx_stride=gradient.stride[0],
            programs=sums.programs,
            sums=0 if columns is None else sums.width,
            first_sum=0 if columns is None else columns.start,
            is_first=True,
        )
        partial = None if columns is None else sums.partial
        self.builder.launch(
            launch, x=x, grad_normed=gradient, scale=scale, dx=gradient, partial=partial
        )
