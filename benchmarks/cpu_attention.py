r"""Layers on a CPU: GraphTransformerConv and PyG's TransformerConv, in turns in one process.

    python benchmarks/cpu_attention.py --output benchmarks/results/cpu_attention.json
    python benchmarks/cpu_attention.py --batches --repeats 50 --output \
        benchmarks/results/cpu_batches.json

The graph is the multi-scale icosphere of the processor. Both layers have an edge embedding of 11
attributes and no skip connection, so both compute the three node projections and the attention.
Times are medians of whole layer calls in ms. With --batches, the graphs are mini-batches with the
sizes of PyG's data sets, and layers have 4 heads of 16 channels and a skip connection: `new graph`
passes an edge_index, which is sorted in every call, `one graph` a structure.
"""

import statistics
from functools import partial

import torch
from suite import environment
from suite.command_line import make_parser
from suite.results import Results
from suite.timing import Cpu
from torch_geometric.nn import TransformerConv

from anemoi_gt import GraphStructure, GraphTransformerConv
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import octahedral

EDGE_DIM = 11
BATCHES = {  # graphs, nodes and edges of each, edge attributes
    "32 molecules": (32, 18, 36.25, 4),
    "128 molecules": (128, 18, 36.25, 4),
    "64 proteins": (64, 39, 145.6, None),
    "32 superpixel images": (32, 116, 927, 1),
}


def median_ms(functions, repeats):
    """Return the median time of each function, measured in turns on the same machine state."""
    rounds = [Cpu.times(list(functions.values())) for _ in range(repeats)]
    return {name: statistics.median(times) for name, *times in zip(functions, *rounds, strict=True)}


def layers(heads, channels, edge_dim, **options):
    """Return PyG's layer and anemoi_gt's layer with the same parameters."""
    sizes = {
        "in_channels": heads * channels,
        "out_channels": channels,
        "heads": heads,
        "edge_dim": edge_dim,
    }
    pyg = TransformerConv(**sizes, **options)
    anemoi_gt = GraphTransformerConv(**sizes, **options)
    anemoi_gt.load_state_dict(pyg.state_dict())
    return pyg, anemoi_gt


def times_of(calls, step, repeats):
    """Return the times of inference and training calls, and PyG's times relative to them."""

    @torch.no_grad()
    def infer(call):
        call()

    result = {}
    for kind, function in {"forward": infer, "forward_backward": step}.items():
        functions = {name: partial(function, call) for name, call in calls.items()}
        times = median_ms(functions, repeats)
        ratios = {f"pyg_over_{name}": times["pyg"] / times[name] for name in times if name != "pyg"}
        result[kind] = times | ratios
    return result


def compare(pyg, anemoi_gt, x, edge_index, edge_attr, edges, repeats):
    """Return the times of PyG's layer on an edge_index, and of anemoi_gt's on each of `edges`."""
    calls = {"pyg": partial(pyg, x, edge_index, edge_attr)}
    calls |= {name: partial(anemoi_gt, x, graph, edge_attr) for name, graph in edges.items()}
    expected, *outputs = (call() for call in calls.values())
    for out in outputs:
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)

    def step(call):
        for leaf in filter(torch.is_tensor, (x, edge_attr)):
            leaf.grad = None
        call.func.zero_grad(set_to_none=True)
        call().square().mean().backward()

    facts = {
        "nodes": x.shape[0],
        "edges": edge_index.shape[1],
        "heads": anemoi_gt.heads,
        "channels": anemoi_gt.out_channels,
    }
    return facts | times_of(calls, step, repeats)


def measure(refinement, heads, channels, repeats):
    """Time inference and training calls of both layers on one processor graph."""
    torch.manual_seed(0)
    graph = icosphere_graph(octahedral(16), refinement=refinement)
    edge_index = graph["hidden", "to", "hidden"].edge_index
    nodes = int(edge_index.max()) + 1
    x = torch.randn(nodes, heads * channels, requires_grad=True)
    edge_attr = torch.randn(edge_index.shape[1], EDGE_DIM, requires_grad=True)
    edges = {"anemoi_gt": GraphStructure.from_edge_index(edge_index, nodes)}
    both = layers(heads, channels, EDGE_DIM, root_weight=False)
    return {"edge_dim": EDGE_DIM} | compare(*both, x, edge_index, edge_attr, edges, repeats)


def measure_batch(name, repeats, heads=4, channels=16):
    """Time inference and training calls of both layers on one mini-batch of random graphs."""
    torch.manual_seed(0)
    graphs, nodes, edges, edge_dim = BATCHES[name]
    ends = [round(edges * i) for i in range(graphs + 1)]
    parts = [torch.randint(nodes, (2, ends[i + 1] - ends[i])) + i * nodes for i in range(graphs)]
    edge_index = torch.cat(parts, 1)
    edge_attr = None if edge_dim is None else torch.randn(ends[-1], edge_dim)
    x = torch.randn(graphs * nodes, heads * channels, requires_grad=True)
    edges = {
        "new graph": edge_index,
        "one graph": GraphStructure.from_edge_index(edge_index, graphs * nodes),
    }
    return {"batch": name} | compare(
        *layers(heads, channels, edge_dim), x, edge_index, edge_attr, edges, repeats
    )


def main(arguments=None):
    """Measure both layers, and write and return the report."""
    parser = make_parser(__doc__, seconds=600, refinement=5, heads=16, repeats=5)
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--batches", action="store_true", help="mini-batches of small graphs")
    options = parser.parse_args(arguments)
    facts = environment.describe("cpu", {"torch", "torch-geometric"}, options.commit)
    report = {"environment": facts | {"dtype": "float32"}, "results": []}
    results = Results(report, options.output, options.seconds)
    sizes = options.refinement, options.heads
    calls = {
        f"{number} channels": partial(measure, *sizes, number, options.repeats)
        for number in options.channels
    }
    if options.batches:
        calls = {name: partial(measure_batch, name, options.repeats) for name in BATCHES}
    for name, call in calls.items():
        record = results.run(name, call)
        if record is not None:
            report["results"].append(record)
            print(record, flush=True)
    return results.end()


if __name__ == "__main__":
    main()
