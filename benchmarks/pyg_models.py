"""Three PyG models with `TransformerConv`, untouched and swapped: time and memory of a step.

    python benchmarks/pyg_models.py --output benchmarks/results/pyg_models.json
    python benchmarks/pyg_models.py --nodes 2000 --edges 20000 --hidden 8 --repeats 3 --device cpu

The default graph has the size of ogbn-arxiv with edges in both directions (169,343 nodes, 2,315,598
edges) and similarly unequal degrees. Times are medians of forward and backward in ms, with both
models measured in turns. `one graph` passes a structure, built once, to the swapped model; `new
graph` passes an edge list that has to be sorted, as with mini-batches. Outputs and gradients are
compared before timing; results are written after each model.
"""

import copy
import statistics
from functools import partial

import torch
from suite.command_line import make_parser
from suite.environment import describe
from suite.results import Results
from suite.timing import seconds_of
from support.pyg_models import DIM, MODELS

from anemoi_gt import GraphStructure
from anemoi_gt.integrations.pyg import swap_layers

# relative tolerance of output and gradients, for float32 sums over thousands of edges
AGREE = 1e-3


def draw_graph(options, device):
    """Return x, edge_index and edge_attr of a random graph in which a few nodes have most edges."""
    generator = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, options.edges, generator=generator).square() * options.nodes).long()
    x = torch.randn(options.nodes, options.channels, generator=generator)
    edge_attr = torch.randn(options.edges, DIM, generator=generator)
    return x.to(device), ends.to(device), edge_attr.to(device)


def measure(calls, device, repeats):
    """Return the median ms and peak GB of each call; calls are measured in turns."""
    times = {name: [] for name in calls}
    peaks = {name: [] for name in calls}
    for i in range(repeats + 2):  # two rounds to warm up
        for name, call in calls.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            (seconds,) = seconds_of(call, 1, device.type)
            if device.type == "cuda":
                peaks[name].append(torch.cuda.max_memory_allocated() / 1e9)
            if i >= 2:
                times[name].append(1e3 * seconds)
    peaks = {name: max(values, default=None) for name, values in peaks.items()}
    return {
        name: {"median_ms": statistics.median(times[name]), "peak_gb": peaks[name]}
        for name in calls
    }


def compare(make, options, device):
    """Measure one model class."""
    torch.manual_seed(0)
    untouched = make(channels=options.channels, hidden=options.hidden, heads=options.heads)
    untouched.to(device).eval()
    swapped = swap_layers(copy.deepcopy(untouched))
    x, edge_index, edge_attr = draw_graph(options, device)
    graph = GraphStructure.from_edge_index(edge_index, options.nodes)

    def step(model, edges):
        model.zero_grad(set_to_none=True)
        out = model(x, edges, edge_attr)
        out.square().mean().backward()
        return out.detach()

    models = (untouched, swapped)
    outputs = [step(model, edge_index) for model in models]
    off = difference(outputs, models)

    calls = {
        "pyg": lambda: step(untouched, edge_index),
        "new graph": lambda: step(swapped, edge_index),
        "one graph": lambda: step(swapped, graph),
    }
    return {"difference": off} | measure(calls, device, options.repeats)


def difference(outputs, models):
    """Return the relative differences between two models in outputs and gradients."""
    names = [name for name, p in models[0].named_parameters() if p.grad is not None]
    vectors = []
    for model in models:
        gradients = [model.get_parameter(name).grad.flatten() for name in names]
        vectors.append(torch.cat(gradients))
    pairs = {"output": outputs, "gradients": vectors}
    differences = {name: ((b - a).norm() / a.norm()).item() for name, (a, b) in pairs.items()}
    if not all(off <= AGREE for off in differences.values()):
        raise ValueError(f"output and gradients must agree within {AGREE}, got {differences}")
    return differences


def main(arguments=None):
    """Measure all models, and write and return the report."""
    sizes = {
        "nodes": 169_343,
        "edges": 2_315_598,
        "channels": 128,
        "hidden": 64,
        "heads": 4,
        "repeats": 10,
    }
    options = make_parser(__doc__, seconds=300, **sizes).parse_args(arguments)
    device = torch.device(options.device)
    report = {
        "environment": describe(device.type, {"torch", "torch-geometric", "triton"}, options.commit)
    }
    report |= {"options": vars(options) | {"output": None}, "models": {}}
    results = Results(report, options.output, options.seconds)
    for make in MODELS:
        record = results.run(make.__name__, partial(compare, make, options, device))
        if record is not None:
            report["models"][make.__name__] = record
            print(
                make.__name__,
                *(f"{name}: {figures}" for name, figures in record.items()),
                sep="\n  ",
                flush=True,
            )
    return results.end()


if __name__ == "__main__":
    main()
