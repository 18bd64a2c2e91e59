"""Layers on a CPU: GraphTransformerConv and PyG's TransformerConv, same work, same process, alternating.

    python benchmarks/cpu_attention.py --refinement 5 --heads 16 --channels 32 --output
    benchmarks/results/cpu_attention.json

The graph is the multi-scale icosphere of the processor; both layers have an edge embedding of 11 attributes and no
skip, so both do the three node projections and the attention. Times are medians of whole layer calls in ms.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from suite import environment
from suite.timing import Cpu
from torch_geometric.nn import TransformerConv

from anemoi_gt import AttentionConfig, GraphStructure, GraphTransformerConv
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import octahedral

EDGE_DIM = 11


def median_ms(functions, repeats):
    """Median time of each function, taken in turns so that all see the same machine."""
    rounds = [Cpu.times(list(functions.values())) for _ in range(repeats)]
    return {name: statistics.median(times) for name, *times in zip(functions, *rounds, strict=True)}


def layers(heads, channels):
    """Return PyG's layer and that of anemoi_gt with the same parameters."""
    width = heads * channels
    options = {"heads": heads, "edge_dim": EDGE_DIM, "root_weight": False}
    pyg = TransformerConv(width, channels, **options)
    own = GraphTransformerConv(width, channels, **options, config=AttentionConfig(backend="torch"))
    own.load_state_dict(pyg.state_dict())
    return pyg, own


def measure(refinement, heads, channels, repeats):
    """Forward, and forward and backward, of both layers on one processor graph."""
    torch.manual_seed(0)
    edge_index = icosphere_graph(octahedral(16), refinement=refinement)["hidden", "to", "hidden"].edge_index
    nodes = int(edge_index.max()) + 1
    graph = GraphStructure.from_edge_index(edge_index, nodes)
    pyg, own = layers(heads, channels)
    x = torch.randn(nodes, heads * channels, requires_grad=True)
    edge_attr = torch.randn(edge_index.shape[1], EDGE_DIM, requires_grad=True)
    calls = {"pyg": lambda: pyg(x, edge_index, edge_attr), "anemoi_gt": lambda: own(x, graph, edge_attr)}
    outputs = [call() for call in calls.values()]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)

    def forward(call):
        with torch.no_grad():
            return call()

    def step(call):
        call().sum().backward()
        x.grad = edge_attr.grad = None

    result = {"nodes": nodes, "edges": edge_index.shape[1], "heads": heads, "channels": channels, "edge_dim": EDGE_DIM}
    for kind, function in (("forward", forward), ("forward_backward", step)):
        bound = {name: (lambda call=call, function=function: function(call)) for name, call in calls.items()}
        times = median_ms(bound, repeats)
        result[kind] = {**times, "pyg_over_anemoi_gt": times["pyg"] / times["anemoi_gt"]}
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refinement", type=int, default=5)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results = [measure(options.refinement, options.heads, c, options.repeats) for c in options.channels]
    where = environment.describe("cpu", {"torch", "torch-geometric"}, None) | {"dtype": "float32"}
    report = json.dumps({"environment": where, "results": results}, indent=2)
    print(report)
    if options.output:
        options.output.write_text(report + "\n")


if __name__ == "__main__":
    main()
