r"""Inference with Anemoi's models, untouched and under `install`: time and memory by chunks.

    python benchmarks/anemoi_inference.py --output benchmarks/results/anemoi_inference_h200.json
    PYTHONPATH=FOLDER python benchmarks/anemoi_inference.py --parts encoder decoder
    python benchmarks/anemoi_inference.py --grids O8 O4 --refinement 2 --channels 32 --heads 4 \
        --layers 1 --device cpu

`encoder` and `decoder` are the mappers of AIFS Single between N320 and O96 (22 and 3 nearest nodes,
1024 channels, 16 heads, D = 11) in anemoi-models 0.9.3, which must come first on the path, from a
FOLDER of `pip install --target`. `forecast` and `aifs` are one step of a model of the newest
version, which a runner of anemoi-inference computes at each step; mappers and processor are chunked
by `ANEMOI_INFERENCE_NUM_CHUNKS`. `forecast` has N320 and an icosphere; `aifs` has the architecture
of AIFS Single, whose processor attends within a window of O96, without flash-attn. Autocast to
float16. Results of both are compared first; then runs alternate.
"""

import gc
import statistics
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from suite.anemoi_masks import drop_masks
from suite.command_line import make_parser
from suite.environment import describe
from suite.results import Results
from suite.timing import seconds_of

from anemoi_gt.data.edges import nearest
from anemoi_gt.data.grids import grid
from anemoi_gt.integrations import anemoi as integration

PACKAGES = {"torch", "triton", "torch-geometric", "anemoi-models"}
FIELDS, VARIABLES, NEIGHBOURS = 200, 90, {"encoder": 22, "decoder": 3}
CHUNKS = (16, 4, 1)
CONTENDERS = {"untouched": nullcontext, "install": integration.install}


class Mapper:
    """Encoder or decoder of anemoi-models 0.9.3, with its input."""

    def __init__(self, part, options):
        from anemoi.models.layers import mapper
        from torch_geometric.data import HeteroData

        encodes = part == "encoder"
        fine, coarse = map(grid, options.grids)
        source, target = (fine, coarse) if encodes else (coarse, fine)
        self.sizes = len(source.lat), len(target.lat)
        edges = HeteroData()["source", "to", "target"]
        edges.edge_index = torch.as_tensor(nearest(source, target, NEIGHBOURS[part]))
        torch.manual_seed(0)
        edges.edge_attr = torch.randn(edges.edge_index.shape[1], 3)
        widths = (FIELDS, 12) if encodes else (options.channels, FIELDS)
        sizes = {
            "in_channels_src": widths[0],
            "in_channels_dst": widths[1],
            "hidden_dim": options.channels,
            "trainable_size": 8,
            "num_chunks": 1,
            "num_heads": options.heads,
            "mlp_hidden_ratio": 4,
            "sub_graph": edges,
            "layer_kernels": {},
            "sub_graph_edge_attributes": ["edge_attr"],
            "src_grid_size": self.sizes[0],
            "dst_grid_size": self.sizes[1],
        }
        if encodes:
            model = mapper.GraphTransformerForwardMapper(**sizes)
        else:
            model = mapper.GraphTransformerBackwardMapper(**sizes, out_channels_dst=VARIABLES)
        self.model = model.to(options.device).eval()
        self.x = tuple(
            torch.randn(*shape, device=options.device)
            for shape in zip(self.sizes, widths, strict=True)
        )

    def __call__(self, chunks):
        """Return the output at the destinations."""
        self.model.num_chunks = chunks
        shapes = tuple([list(x.shape)] for x in self.x)
        out = self.model(self.x, batch_size=1, shard_shapes=shapes)
        return out[1] if isinstance(out, tuple) else out


class Forecast:
    """A model of the newest anemoi-models, with its input."""

    def __init__(self, part, options):
        from support.anemoi_model import (
            build,
            draw,
            graph_between,
            graph_of,
            make_options,
            make_transformer_options,
        )

        names = tuple(f"field_{i}" for i in range(VARIABLES))
        changes = {
            "channels": options.channels,
            "heads": options.heads,
            "layers": options.layers,
            "layer_chunks": 1,
            "mapper_chunks": 1,
            "graph_attention_backend": "triton" if options.device == "cuda" else "pyg",
        }
        if part == "aifs":
            graph = graph_between(*options.grids)
            model_options = make_transformer_options(window=options.window, **changes)
        else:
            graph = graph_of(options.grids[0], options.refinement)
            model_options = make_options(**changes)
        self.model = build(graph, model_options, names).to(options.device).eval()
        self.x = {"data": draw(graph, variables=names)["data"].to(options.device)}

    def __call__(self, chunks):
        """Return the state after one step."""
        from anemoi.models.layers import block, mapper

        block.NUM_CHUNKS_INFERENCE_PROCESSOR = chunks
        mapper.NUM_CHUNKS_INFERENCE_MAPPER = chunks
        return self.model(self.x)["data"]


PARTS = {"encoder": Mapper, "decoder": Mapper, "forecast": Forecast, "aifs": Forecast}


@contextmanager
def contender(name, device):
    """Run without gradients, under autocast, untouched or under `install`."""
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    with torch.inference_mode(), torch.autocast(device, dtype), CONTENDERS[name]():
        yield


def difference(problem, device):
    """Return the relative difference between the outputs of the contenders."""
    outputs = []
    for name in CONTENDERS:
        with contender(name, device):
            outputs.append(problem(max(CHUNKS)).double())
    off = ((outputs[1] - outputs[0]).norm() / outputs[0].norm()).item()
    if not off < 1e-2:
        raise ValueError(f"nothing is timed that is not right; allowed 1e-2, got {off}")
    return off


def measure(problem, name, chunks, options):
    """Return the milliseconds of each pass, and its memory in GiB beyond model and input.

    Memory includes what the first pass leaves behind, such as Anemoi's masks.
    """
    on_gpu = options.device == "cuda"
    drop_masks(problem.model)
    gc.collect()
    if on_gpu:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
    with contender(name, options.device):
        problem(chunks)
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        seconds = seconds_of(partial(problem, chunks), options.repeats, options.device)
        times = [1e3 * value for value in seconds]
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_gpu else None
        return times, peak


def main(arguments=None):
    """Compare the results, measure both in turns, and write and return the report."""
    sizes = {"refinement": 6, "channels": 1024, "heads": 16, "layers": 16, "window": 1120}
    parser = make_parser(__doc__, seconds=300, repeats=3, **sizes)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["forecast"])
    parser.add_argument(
        "--grids", nargs=2, default=["N320", "O96"], help="of fields, and of the processor of AIFS"
    )
    options = parser.parse_args(arguments)
    report = {"environment": describe(options.device, PACKAGES, options.commit)}
    report |= {"options": vars(options) | {"output": None}, "difference": {}, "results": []}
    results = Results(report, options.output, options.seconds)
    for part in options.parts:
        problem = results.run(f"build {part}", partial(PARTS[part], part, options))
        if problem is None:
            continue
        off = results.run(f"compare {part}", partial(difference, problem, options.device))
        if off is None:
            continue
        report["difference"][part] = off
        for chunks in CHUNKS:
            runs_by_name = {name: [] for name in CONTENDERS}
            for name in [*CONTENDERS, *reversed(CONTENDERS)]:
                call = partial(measure, problem, name, chunks, options)
                runs_by_name[name].append(results.run(f"{part} in {chunks} chunks, {name}", call))
            for name, runs in runs_by_name.items():
                if None in runs:
                    continue
                _, peak = runs[-1]
                line = {
                    "part": part,
                    "chunks": chunks,
                    "contender": name,
                    "median_ms": statistics.median(ms for times, _ in runs for ms in times),
                    "peak_gib": peak,
                }
                report["results"].append(line)
                print(*line.values(), flush=True)
        del problem
    return results.end()


if __name__ == "__main__":
    main()
