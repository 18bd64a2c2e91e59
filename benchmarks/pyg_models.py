r"""Four PyG models with `TransformerConv`, untouched and swapped: time and memory of a step.

    python benchmarks/pyg_models.py --output benchmarks/results/pyg_models.json
    python benchmarks/pyg_models.py --models weather --output benchmarks/results/pyg_weather.json
    python benchmarks/pyg_models.py --models batches --repeats 50 --device cpu \
        --output benchmarks/results/cpu_batches.json
    python benchmarks/pyg_models.py --nodes 2000 --edges 20000 --hidden 8 --repeats 3 --device cpu \
        --refinement 2 --width 32 --blocks 2

The default graph has the size of ogbn-arxiv with edges in both directions (169,343 nodes, 2,315,598
edges) and similarly unequal degrees. The processor of a weather model, as in graph_weather, has 6
layers of 512 channels on an icosphere whose nodes are joined over up to two of its edges (10,242
nodes, 413,700 edges); it is measured in float32 and under bfloat16 autocast. Times are medians of
forward and backward in ms, with both models measured in turns. `one graph` passes a structure,
built once, to the swapped model; `new graph` passes an edge list that has to be sorted, as with
mini-batches. Outputs and gradients are compared before timing; results are written after each
model. `--models batches` is one layer of 4 heads of 16 channels on mini-batches with the sizes of
PyG's data sets.
"""

import copy
import statistics
from functools import partial

import numpy as np
import torch
from scipy.sparse import csr_array
from suite.command_line import make_parser
from suite.environment import describe
from suite.results import Results
from suite.timing import seconds_of
from support.pyg_models import DIM, MODELS, ConditionalProcessor
from torch import nn
from torch_geometric.nn import TransformerConv

from anemoi_gt import GraphStructure
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.integrations.pyg import swap_layers

# relative tolerance of output and gradients, for sums over thousands of edges
AGREE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
BATCHES = {  # graphs, nodes and edges of each, edge attributes
    "32 molecules": (32, 18, 36.25, 4),
    "128 molecules": (128, 18, 36.25, 4),
    "64 proteins": (64, 39, 145.6, None),
    "32 superpixel images": (32, 116, 927, 1),
}


class Layer(nn.Module):
    """A model of one layer with a skip connection."""

    def __init__(self, heads: int, channels: int, edge_dim: int | None):
        super().__init__()
        self.layer = TransformerConv(heads * channels, channels, heads, edge_dim=edge_dim)

    def forward(self, x, edges, edge_attr):
        """Return the output of the layer."""
        return self.layer(x, edges, edge_attr)


def draw_graph(options, device):
    """Return x, edge_index and edge_attr of a random graph in which a few nodes have most edges."""
    generator = torch.Generator().manual_seed(0)
    ends = (torch.rand(2, options.edges, generator=generator).square() * options.nodes).long()
    x = torch.randn(options.nodes, options.channels, generator=generator)
    edge_attr = torch.randn(options.edges, DIM, generator=generator)
    return x.to(device), ends.to(device), edge_attr.to(device)


def draw_mesh(options, device):
    """Return x, edge_index and edge_attr of an icosphere, joined over up to two of its edges."""
    generator = torch.Generator().manual_seed(0)
    mesh = icosphere(options.refinement)
    nodes = len(mesh.nodes.radians)
    ones = np.ones(mesh.edge_index.shape[1])
    adjacency = csr_array((ones, tuple(mesh.edge_index)), shape=(nodes, nodes))
    near = torch.from_numpy(np.stack((adjacency @ adjacency + adjacency).nonzero())).long()
    near = near[:, near[0] != near[1]]
    x = torch.randn(nodes, options.width, generator=generator)
    edge_attr = torch.randn(near.shape[1], DIM, generator=generator)
    return x.to(device), near.to(device), edge_attr.to(device)


def draw_batch(name, device):
    """Return x, edge_index and edge_attr of a mini-batch; gradients of both features are wanted."""
    generator = torch.Generator().manual_seed(0)
    graphs, nodes, edges, edge_dim = BATCHES[name]
    ends = [round(edges * i) for i in range(graphs + 1)]
    edge_index = [
        torch.randint(nodes, (2, ends[i + 1] - ends[i]), generator=generator) + i * nodes
        for i in range(graphs)
    ]
    x = torch.randn(graphs * nodes, 64, generator=generator).to(device).requires_grad_()
    edge_attr = None
    if edge_dim is not None:
        edge_attr = torch.randn(ends[-1], edge_dim, generator=generator).to(device)
        edge_attr.requires_grad_()
    return x, torch.cat(edge_index, 1).to(device), edge_attr


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


def compare(make, inputs, dtype, repeats):
    """Measure the model that `make()` returns, under autocast unless `dtype` is float32."""
    torch.manual_seed(0)
    x, edge_index, edge_attr = inputs
    device = x.device
    untouched = make().to(device).eval()
    swapped = swap_layers(copy.deepcopy(untouched))
    graph = GraphStructure.from_edge_index(edge_index, x.shape[0])

    def step(model, edges):
        model.zero_grad(set_to_none=True)
        for leaf in filter(torch.is_tensor, (x, edge_attr)):
            leaf.grad = None
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            out = model(x, edges, edge_attr)
        out.float().square().mean().backward()
        return out.detach().float()

    models = (untouched, swapped)
    outputs = [step(model, edge_index) for model in models]
    off = difference(outputs, models, AGREE[dtype])

    calls = {
        "pyg": lambda: step(untouched, edge_index),
        "new graph": lambda: step(swapped, edge_index),
        "one graph": lambda: step(swapped, graph),
    }
    facts = {"edges": edge_index.shape[1], "difference": off}
    return facts | measure(calls, device, repeats)


def difference(outputs, models, limit):
    """Return the relative differences between two models in outputs and gradients."""
    names = [name for name, p in models[0].named_parameters() if p.grad is not None]
    vectors = []
    for model in models:
        gradients = [model.get_parameter(name).grad.flatten() for name in names]
        vectors.append(torch.cat(gradients))
    pairs = {"output": outputs, "gradients": vectors}
    differences = {name: ((b - a).norm() / a.norm()).item() for name, (a, b) in pairs.items()}
    if not all(off <= limit for off in differences.values()):
        raise ValueError(f"output and gradients must agree within {limit}, got {differences}")
    return differences


def cases(options, device):
    """Return the measurements by name: `--models` is all, weather, batches or a class name."""
    chosen = {}
    if options.models == "batches":
        for name, (*_, edge_dim) in BATCHES.items():
            model = partial(Layer, 4, 16, edge_dim)
            inputs = draw_batch(name, device)
            chosen[name] = partial(compare, model, inputs, torch.float32, options.repeats)
    sizes = {"channels": options.channels, "hidden": options.hidden, "heads": options.heads}
    for make in MODELS:
        if make is not ConditionalProcessor and options.models in ("all", make.__name__):
            inputs = draw_graph(options, device)
            model = partial(make, **sizes)
            chosen[make.__name__] = partial(compare, model, inputs, torch.float32, options.repeats)
    if options.models in ("all", "weather"):
        model = partial(
            ConditionalProcessor,
            channels=options.width,
            hidden=options.width // options.heads,
            heads=options.heads,
            blocks=options.blocks,
        )
        inputs = draw_mesh(options, device)
        for dtype in AGREE:
            name = f"ConditionalProcessor, {str(dtype).removeprefix('torch.')}"
            chosen[name] = partial(compare, model, inputs, dtype, options.repeats)
    return chosen


def main(arguments=None):
    """Measure all models, and write and return the report."""
    sizes = {
        "nodes": 169_343,
        "edges": 2_315_598,
        "channels": 128,
        "hidden": 64,
        "heads": 4,
        "refinement": 5,
        "width": 512,
        "blocks": 6,
        "repeats": 10,
        "models": "all",
    }
    options = make_parser(__doc__, seconds=300, **sizes).parse_args(arguments)
    device = torch.device(options.device)
    report = {
        "environment": describe(device.type, {"torch", "torch-geometric", "triton"}, options.commit)
    }
    report |= {"options": vars(options) | {"output": None}, "models": {}}
    results = Results(report, options.output, options.seconds)
    for name, case in cases(options, device).items():
        record = results.run(name, case)
        if record is not None:
            report["models"][name] = record
            print(
                name,
                *(f"{name}: {figures}" for name, figures in record.items()),
                sep="\n  ",
                flush=True,
            )
    return results.end()


if __name__ == "__main__":
    main()
