"""Large problems; the oracle checks selected destinations and sources on their subgraph."""

from dataclasses import dataclass

import torch
from support.accuracy import assert_within
from support.oracle import Problem, magnitude, oracle, plain

from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from anemoi_gt.nn import AutocastLayerNorm
from anemoi_gt.nn.norm import OVERFLOW_NUMEL, apply_norm
from gpu_checks import DEVICE

TRITON = KernelConfig(backend="triton")
LIMIT = 2**31
SHAPE = (16, 64, 11) if DEVICE.type == "cuda" else (1, 16, 3)  # heads, channels, edge_dim
EDGES = (("data", "to", "hidden"), ("hidden", "to", "hidden"), ("hidden", "to", "data"))


@dataclass
class Large:
    """Operands on the device, for edges that the caller sorted by destination."""

    graph: GraphStructure
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    edge_attr: torch.Tensor
    edge_weight: torch.Tensor
    edge_bias: torch.Tensor
    grad_out: torch.Tensor

    @classmethod
    def random(
        cls, graph: GraphStructure, heads: int, channels: int, edge_dim: int, dtype: torch.dtype
    ) -> "Large":
        """Draw operands for a graph."""
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=generator, device=DEVICE, dtype=dtype)

        width = heads * channels
        source = (graph.num_src, heads, channels)
        destination = (graph.num_dst, heads, channels)
        weight = draw(width, edge_dim) * edge_dim**-0.5
        return cls(
            graph,
            draw(*destination),
            draw(*source),
            draw(*source),
            draw(graph.num_edges, edge_dim),
            weight,
            draw(width),
            draw(*destination),
        )

    def leaves(self) -> list[torch.Tensor]:
        """Return the operands that get gradients."""
        return [self.query, self.key, self.value, self.edge_attr, self.edge_weight, self.edge_bias]

    def run(self) -> dict[str, torch.Tensor]:
        """Return out, lse and the gradients, by name."""
        leaves = [leaf.requires_grad_() for leaf in self.leaves()]
        query, key, value, *edge_operands = leaves
        out, lse = edge_attention(query, key, value, self.graph, *edge_operands, config=TRITON)
        names = ("dquery", "dkey", "dvalue", "dedge_attr", "dedge_weight", "dedge_bias")
        gradients = torch.autograd.grad(out, leaves, self.grad_out)
        return {
            "out": out.detach(),
            "lse": lse.detach(),
            **dict(zip(names, gradients, strict=True)),
        }


def check_rows(
    large: Large, result: dict[str, torch.Tensor], destinations: list[int], sources: list[int]
) -> int:
    """Check the rows of some destinations and sources; return the number that the oracle computed.

    The gradients of a source sum over its out-edges, and depend on all in-edges of their
    destinations, so the oracle computes these destinations, too.
    """
    graph = large.graph
    if graph.perm is not None:
        raise AssertionError(
            "the edges must be sorted by destination: their rows are looked up by CSC position"
        )
    ends = [graph.col[graph.rowptr[j] : graph.rowptr[j + 1]].long().cpu() for j in sources]
    dst = torch.cat([torch.tensor(destinations), *ends]).unique()
    colptr = graph.colptr.cpu().long()
    edges = torch.cat([torch.arange(colptr[i], colptr[i + 1]) for i in dst.tolist()])
    local_dst = torch.arange(len(dst)).repeat_interleave(colptr[dst + 1] - colptr[dst])
    origin = graph.row[edges.to(DEVICE)].long().cpu()
    chosen = torch.tensor(sources)
    src = torch.cat([origin, chosen]).unique()  # a chosen source may have no edge

    def rows(tensor, index):
        return tensor.detach()[index.to(DEVICE)].cpu()

    problem = Problem(
        torch.stack([torch.searchsorted(src, origin), local_dst]),
        rows(large.query, dst),
        rows(large.key, src),
        rows(large.value, src),
        rows(large.edge_attr, edges),
        large.edge_weight.detach().cpu(),
        large.edge_bias.detach().cpu(),
        rows(large.grad_out, dst),
        torch.zeros(len(dst), large.query.shape[1]),
        large.query.shape[2] ** -0.5,
    )
    global_rows = {
        "out": dst,
        "lse": dst,
        "dquery": dst,
        "dedge_attr": edges,
        "dkey": chosen,
        "dvalue": chosen,
    }
    local_sources = torch.searchsorted(src, chosen)
    references = []
    for compute in (oracle, plain, magnitude):
        reference = compute(problem)
        reference["dkey"] = reference["dkey"][local_sources]
        reference["dvalue"] = reference["dvalue"][local_sources]
        references.append({name: reference[name] for name in global_rows})
    actual = {name: rows(result[name], index) for name, index in global_rows.items()}
    assert_within(actual, *references, large.query.dtype)
    return len(dst)


def beyond_32_bits() -> str:
    """Check sizes such as nodes x heads x channels beyond 2^31, where 32-bit offsets overflow."""
    num_dst, degree, heads, channels = (
        (2_200_000, 31, 16, 64) if DEVICE.type == "cuda" else (12, 3, 2, 8)
    )
    generator = torch.Generator(DEVICE).manual_seed(0)
    row = torch.randint(
        num_dst, (num_dst * degree,), generator=generator, device=DEVICE, dtype=torch.int32
    )
    colptr = torch.arange(0, num_dst * degree + 1, degree, device=DEVICE, dtype=torch.int32)
    graph = GraphStructure.from_csc(colptr, row, num_dst, validate=False)
    large = Large.random(graph, heads, channels, 3, torch.bfloat16)
    rows, pairs = num_dst * heads * channels, graph.num_edges * 2 * heads
    if DEVICE.type == "cuda" and min(rows, pairs) < LIMIT:
        raise AssertionError(
            f"the problem is too small: {rows} row elements, {pairs} pairs of edges and heads"
        )
    result = large.run()
    last = num_dst - 1
    destinations = [0, 1, num_dst // 2, last - 1, last]
    sources = [0, int(row[-1]), last]
    checked = check_rows(large, result, destinations, sources)
    _check_bias(large, result["dedge_bias"])
    memory = ""
    if DEVICE.type == "cuda":
        memory = f"{torch.cuda.max_memory_allocated() / 1e9:.0f} GB, "
    sizes = f"{rows / LIMIT:.2f} x 2^31 elements in rows, {pairs / LIMIT:.2f} in pairs"
    return f"{memory}{sizes}; {checked} destinations checked"


def _check_bias(large: Large, dedge_bias: torch.Tensor) -> None:
    """Check the sum over all nodes: if all have in-edges, weights sum to 1 and db to sum of do."""
    exact = torch.zeros_like(dedge_bias, dtype=torch.float64)
    for chunk in large.grad_out.flatten(1).split(100_000):
        exact += chunk.double().sum(0)
    error = ((dedge_bias - exact).square().mean() / exact.square().mean()).sqrt().item()
    if error > 16 * torch.finfo(dedge_bias.dtype).eps:
        raise AssertionError(f"the relative RMS error of dedge_bias is {error:.1e}")


def weather_graphs(names: list[str]) -> str:
    """Check encoder, processor and decoder of 16 x 64 with 11 attributes, bfloat16 and float32.

    Names combine `anemoi_gt.data.grids.grid` and the icosphere's refinement: "O32:3".
    """
    from anemoi_gt.data.graphs import icosphere_graph
    from anemoi_gt.data.grids import grid

    checked = []
    for name in names:
        points, refinement = name.split(":")
        graph = icosphere_graph(grid(points), refinement=int(refinement))
        for edge_type in EDGES:
            source, _, destination = edge_type
            sizes = (graph[source].num_nodes, graph[destination].num_nodes)
            structure = GraphStructure.from_edge_index(
                graph[edge_type].edge_index.to(DEVICE), sizes
            )
            for dtype in (torch.bfloat16, torch.float32):
                large = Large.random(structure, *SHAPE, dtype)
                sources, destinations = ([0, size // 3, size // 2, size - 1] for size in sizes)
                check_rows(large, large.run(), destinations, sources)
            checked.append(f"{name} {source} to {destination} {structure.num_edges} edges")
    return "; ".join(checked)


def norm_beyond_32_bits() -> str:
    """Check norms of more than 2^32 elements, which PyTorch may compute wrongly."""
    features = 1024
    rows = OVERFLOW_NUMEL // features + 1000 if DEVICE.type == "cuda" else 2000
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(rows, features, generator=generator, device=DEVICE, dtype=torch.bfloat16)
    norm = AutocastLayerNorm(features).to(DEVICE, torch.bfloat16)
    with torch.no_grad():
        # First, because it may leave memory unwritten where the correct rows would be.
        upstream = norm(x)[-1000:].clone()
        expected = norm(x[-1000:])
        torch.testing.assert_close(apply_norm(norm, x)[-1000:], expected, rtol=0, atol=0)
        wrong = int((upstream != expected).any(-1).sum())
    size = rows * features / OVERFLOW_NUMEL
    return f"{size:.4f} x 2^32 elements; PyTorch's norm is wrong in {wrong} of the last 1000 rows"
