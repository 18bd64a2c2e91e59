"""Packages: what AOTInductor makes of models and layers with the Triton kernels, run where this library is not."""

import tempfile
from pathlib import Path

import export
import torch
from support.graphs import GRAPHS
from support.run import structure
from torch.export import Dim

from anemoi_gt import AttentionConfig, GraphTransformerConv
from anemoi_gt.export import TensorGraphLayer, export_program, write_package
from anemoi_gt.export.package import LIMITS, relative_error
from gpu_checks import DEVICE

SMALL = ["--grid=O32", "--refinement=3", "--heads=8", "--channels=32", "--layers=2", "--repeats=3"]
SMALL += ["--backend=triton", "--max-batch=3"]
HEADS, CHANNELS, EDGE_DIM = 4, 16, 3


def models_and_layers() -> str:
    """Both, one after the other."""
    return f"{models()}; {layers()}"


def models() -> str:
    """A small model in two precisions, one and three samples, in another process; raises where the numbers differ."""
    seen = []
    for precision in ("32-true", "bf16-mixed"):
        found = export.run(export.parse([*SMALL, "--precision", precision]), {})
        seen += [f"{precision} {name} error {found[name]['error']:.1e}" for name in ("batch_1", "batch_3")]
    return "; ".join(seen)


def layers() -> str:
    """A layer whose samples, nodes and edges are all open, on graphs of other sizes than it was exported with."""
    conv = GraphTransformerConv((4, 5), CHANNELS, HEADS, edge_dim=EDGE_DIM, config=AttentionConfig(backend="triton"))
    layer = TensorGraphLayer(conv).to(DEVICE).eval()
    samples, sources, nodes, edges = (Dim(name) for name in ("samples", "sources", "destinations", "edges"))
    sizes = {"colptr": {0: nodes + 1}, "row": {0: edges}, "sources": {0: sources}, "perm": {0: edges}}
    shapes = (({0: samples, 1: sources}, {0: samples, 1: nodes}), sizes, {0: edges})
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "layer.pt2"
        write_package(export_program(layer, _problem("shuffled", 2), shapes), path, {})
        package = torch._inductor.aoti_load_package(str(path))
        errors = []
        for name, batch in (("shuffled", 2), ("hub", 1), ("few_to_many", 5), ("isolated", 3), ("one_edge", 4)):
            inputs = _problem(name, batch)
            errors.append(relative_error(package(*inputs), layer(*inputs)))
    if not max(errors) <= LIMITS[torch.float32]:
        raise AssertionError(f"the package must give the numbers of the layer, its errors are {errors}")
    return f"{len(errors)} graphs of other sizes, largest error {max(errors):.1e}"


def _problem(name: str, batch: int) -> tuple:
    """Features, a graph as tensors, and attributes."""
    graph = structure(GRAPHS[name], DEVICE)
    state = graph.state_dict() | {"perm": graph.edge_order()}
    x = tuple(torch.randn(batch, n, width, device=DEVICE) for n, width in ((graph.num_src, 4), (graph.num_dst, 5)))
    return x, state, torch.randn(graph.num_edges, EDGE_DIM, device=DEVICE)
