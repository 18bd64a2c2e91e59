"""Blocks of more features than backend `triton` fuses by default: fused beside their modules.

    python benchmarks/wide_blocks.py --channels 1024 1536 2048 --refinement 6

One processor block of this library on an icosphere, under autocast to bfloat16, 16 heads, forward
and backward with all gradients: by fused sub-layers; by its modules around the same attention; by
these modules compiled. The three compute the same: `difference` is the RMS difference of the result
and of the gradient of x from those of the modules, relative. Times are medians in ms of calls that
follow each other, as in training; memory is the peak of a call beyond its inputs.
"""

import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
from suite.command_line import make_parser
from suite.environment import describe
from suite.results import Results
from suite.timing import CLOCKS, measure
from torch import Tensor

from anemoi_gt import GraphStructure, KernelConfig
from anemoi_gt.data.meshes import icosphere
from anemoi_gt.nn import GraphTransformerProcessorBlock
from anemoi_gt.nn.fused_block import BlockModules
from anemoi_gt.nn.sublayers import Computation, read_attention, read_network
from anemoi_gt.ops.backends import BACKENDS
from anemoi_gt.ops.triton_backend.tiles import MAX_FEATURES
from anemoi_gt.refusal import not_faster

HEADS, EDGE_DIM = 16, 11
UNFUSED = BlockModules.by_modules(not_faster("this benchmark computes the modules too"))


def read_modules(block: GraphTransformerProcessorBlock) -> BlockModules:
    """Return the modules of both sub-layers for bfloat16, whatever the number of features."""
    backend = BACKENDS["triton"]._replace(max_features=MAX_FEATURES)
    call = Computation(torch.bfloat16, is_autocast=True, backend=backend)
    attention = read_attention(block, call)
    norm = ("layer_norm_mlp_dst", block.layer_norm_mlp_dst)
    feed_forward = read_network(block.node_dst_mlp, call, "node_dst_mlp", norm_in=norm)
    return BlockModules(attention, feed_forward, UNFUSED.source_feed_forward)


def step(
    update: Callable, modules: BlockModules, x: Tensor, graph: GraphStructure, edge_attr: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the result for x and the gradient of x, after forward and backward."""
    with torch.autocast(x.device.type, torch.bfloat16):
        y = update(modules, (x, x), graph, edge_attr, (None, None))
    y.backward(torch.ones_like(y))
    gradient, x.grad = x.grad, None
    return y.detach(), gradient


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the RMS difference over the RMS of `expected`."""
    return ((actual - expected).norm() / expected.norm()).item()


def measured(channels: int, refinement: int, device: str) -> dict[str, dict[str, float | None]]:
    """Return milliseconds, peak memory and difference of each way to compute a block."""
    torch.manual_seed(0)
    mesh = icosphere(refinement)
    num_nodes = len(mesh.nodes)
    graph = GraphStructure.from_edge_index(
        torch.from_numpy(mesh.edge_index).to(device), (num_nodes, num_nodes)
    ).with_reverse()
    block = GraphTransformerProcessorBlock(
        in_channels=channels,
        hidden_dim=4 * channels,
        out_channels=channels,
        num_heads=HEADS,
        edge_dim=EDGE_DIM,
        config=KernelConfig("triton"),
    ).to(device)
    x = torch.randn(num_nodes, channels, device=device, requires_grad=True)
    edge_attr = torch.randn(graph.num_edges, EDGE_DIM, device=device)
    update = block.update_destinations
    ways = {
        "modules": partial(step, update, UNFUSED),
        "modules compiled": partial(step, torch.compile(update), UNFUSED),
        "fused": partial(step, update, read_modules(block)),
    }
    clock = CLOCKS[device]
    expected = ways["modules"](x, graph, edge_attr)
    results = {}
    for name, way in ways.items():
        call = partial(way, x, graph, edge_attr)
        differences = [relative_difference(*pair) for pair in zip(call(), expected, strict=True)]
        block.zero_grad(set_to_none=True)
        call()  # gradients of weights exist from here on
        results[name] = {
            "ms": statistics.median(measure(clock, [call])),
            "peak_bytes": clock.peak_bytes(call),
            "difference": max(differences),
        }
        block.zero_grad(set_to_none=True)
    return results


def main(arguments: list[str] | None = None) -> dict:
    """Measure each number of channels, and write and return the report."""
    parser = make_parser(__doc__, seconds=300, refinement=6)
    parser.add_argument("--channels", type=int, nargs="+", default=[1024, 1536, 2048])
    options = parser.parse_args(arguments)
    report = {"environment": describe(options.device, {"triton"}, options.commit), "channels": {}}
    results = Results(report, options.output, options.seconds)
    for channels in options.channels:
        call = partial(measured, channels, options.refinement, options.device)
        report["channels"][channels] = results.run(f"{channels} channels", call)
        print(channels, json.dumps(report["channels"][channels]), flush=True)
    return results.end()


if __name__ == "__main__":
    main()
