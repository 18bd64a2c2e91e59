"""AOTInductor packages of models and layers with Triton kernels, run without this library."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from support.graphs import GRAPHS
from support.run import structure
from torch.export import Dim

from anemoi_gt import EncoderProcessorDecoder, GraphTransformerConv, KernelConfig
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.export import Autocast, TensorGraphLayer, export_model, export_program, write_package
from anemoi_gt.export.package import LIMITS, relative_error
from gpu_checks import DEVICE

LOADER = Path(__file__).with_name("load_package.py")
HEADS, CHANNELS, EDGE_DIM = 4, 16, 3
FIELDS, MAX_BATCH, LIMIT = 100, 3, 300.0  # s, for the other process


def models_and_layers() -> str:
    """Check packages of models and of layers."""
    return f"{models()}; {layers()}"


def models() -> str:
    """Check a small model in two precisions, batches of one and three, in another process."""
    checked = []
    for dtype in (torch.float32, torch.bfloat16):
        for batch, error in _errors_of_model(dtype).items():
            if not error <= LIMITS[dtype]:
                raise AssertionError(
                    f"the package must agree with the model within {LIMITS[dtype]}, got {error}"
                )
            checked.append(f"{dtype} batch {batch} error {error:.1e}")
    return "; ".join(checked)


def _errors_of_model(dtype: torch.dtype) -> dict[int, float]:
    """Return the relative error of the package of a model, by batch size."""
    torch.manual_seed(0)
    graph = icosphere_graph(grid("O32"), refinement=3)
    config = KernelConfig(backend="triton")
    model = EncoderProcessorDecoder(
        graph, FIELDS, FIELDS, channels=256, heads=8, num_layers=2, config=config
    )
    if dtype != torch.float32:
        model = Autocast(model, DEVICE.type, dtype)
    model = model.to(DEVICE).eval()
    errors = {}
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        batches = [
            torch.randn(size, graph["data"].num_nodes, FIELDS, device=DEVICE)
            for size in (1, MAX_BATCH)
        ]
        program = export_model(model, batches[0], MAX_BATCH)
        package = folder / "model.pt2"
        write_package(program, package, {"max_batch": str(MAX_BATCH)})
        for x in batches:
            torch.save(x.cpu(), folder / "x.pt")
            command = [sys.executable, "-I", LOADER, package, folder / "x.pt", folder / "out.pt"]
            subprocess.run(command, check=True, capture_output=True, timeout=LIMIT)
            errors[len(x)] = relative_error(torch.load(folder / "out.pt"), model(x).cpu())
    return errors


def layers() -> str:
    """Check a layer with dynamic batch, nodes and edges on graphs of other sizes."""
    conv = GraphTransformerConv(
        (4, 5), CHANNELS, HEADS, edge_dim=EDGE_DIM, config=KernelConfig(backend="triton")
    )
    layer = TensorGraphLayer(conv).to(DEVICE).eval()
    batch, sources, nodes, edges = (
        Dim(name) for name in ("batch", "sources", "destinations", "edges")
    )
    sizes = {
        "colptr": {0: nodes + 1},
        "row": {0: edges},
        "sources": {0: sources},
        "perm": {0: edges},
    }
    shapes = (({0: batch, 1: sources}, {0: batch, 1: nodes}), sizes, {0: edges})
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "layer.pt2"
        write_package(export_program(layer, _problem("shuffled", 2), shapes), path, {})
        package = torch._inductor.aoti_load_package(str(path))
        errors = []
        batch_by_graph = {"shuffled": 2, "hub": 1, "few_to_many": 5, "isolated": 3, "one_edge": 4}
        for name, batch_size in batch_by_graph.items():
            inputs = _problem(name, batch_size)
            errors.append(relative_error(package(*inputs), layer(*inputs)))
    if not max(errors) <= LIMITS[torch.float32]:
        raise AssertionError(f"the package must agree with the layer, its errors are {errors}")
    return f"{len(errors)} graphs of other sizes, largest error {max(errors):.1e}"


def _problem(name: str, batch: int) -> tuple:
    """Return node features, a graph as tensors, and edge attributes."""
    graph = structure(GRAPHS[name], DEVICE, reverse=False)
    state = graph.state_dict() | {"perm": graph.edge_order()}
    x_src = torch.randn(batch, graph.num_src, 4, device=DEVICE)
    x_dst = torch.randn(batch, graph.num_dst, 5, device=DEVICE)
    return (x_src, x_dst), state, torch.randn(graph.num_edges, EDGE_DIM, device=DEVICE)
