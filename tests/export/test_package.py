"""Packages of layers: compiled once, loaded without this library, for graphs of any size."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.differentiate import randomise
from support.graphs import GRAPHS
from support.refusals import raises
from support.run import structure
from torch.export import Dim

from anemoi_gt import GraphTransformerConv, KernelConfig
from anemoi_gt.export import TensorGraphLayer, export_program, verify_package, write_package
from anemoi_gt.export import package as packages
from anemoi_gt.export.package import check_compiler, check_toolkit

pytestmark = [pytest.mark.compiled, pytest.mark.process]

LOAD = """
import sys, torch
import torch._inductor.codecache  # for torch 2.10, as in the example
try:
    import anemoi_gt
    raise SystemExit("this library is there")
except ImportError:
    pass
package = torch._inductor.aoti_load_package(sys.argv[1])
outputs = [package(*inputs) for inputs in torch.load(sys.argv[2])]
torch.save(outputs, sys.argv[3])
print(package.get_metadata()["note"])
"""


def problem(name, batch):
    """Features, a graph as tensors, and attributes."""
    graph, generator = structure(GRAPHS[name], reverse=False), torch.Generator().manual_seed(batch)
    state = graph.state_dict() | {"perm": graph.edge_order()}
    x = [
        torch.randn(batch, n, width, generator=generator)
        for n, width in ((graph.num_src, 4), (graph.num_dst, 5))
    ]
    return tuple(x), state, torch.randn(graph.num_edges, 3, generator=generator)


@pytest.fixture(scope="module")
def layer():
    conv = GraphTransformerConv(
        (4, 5), 8, heads=2, edge_dim=3, config=KernelConfig(backend="torch")
    )
    return TensorGraphLayer(randomise(conv)).eval()


@pytest.fixture(scope="module")
def package(layer, tmp_path_factory, unoptimised_packages):
    """A package of the layer with all sizes dynamic."""
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
    path = tmp_path_factory.mktemp("package") / "layer.pt2"
    write_package(export_program(layer, problem("shuffled", 2), shapes), path, {"note": "a layer"})
    return path


@pytest.mark.nightly
def test_package_agrees_with_the_layer_on_any_graph_without_this_library(
    package, layer, run_without_library, tmp_path
):
    sizes = {"shuffled": 2, "hub": 1, "few_to_many": 5, "isolated": 3, "one_edge": 2}
    problems = [problem(name, batch) for name, batch in sizes.items()]
    script, inputs, outputs = (tmp_path / name for name in ("load.py", "inputs.pt", "outputs.pt"))
    script.write_text(LOAD)
    torch.save(problems, inputs)
    assert run_without_library(script, package, inputs, outputs) == "a layer\n"
    with torch.no_grad():
        for operands, output in zip(problems, torch.load(outputs), strict=True):
            torch.testing.assert_close(output, layer(*operands))


class Doubles(torch.nn.Module):
    """A model whose fake package gives another result."""

    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize(
    ("package", "dtype", "error", "message"),
    [
        (lambda x: x, torch.float32, FloatingPointError, "within 1e-05, its relative error is 0.5"),
        (lambda x: x * torch.nan, torch.float32, FloatingPointError, "its relative error is nan"),
        (lambda x: 2 * x, torch.float64, KeyError, "torch.float64"),
    ],
)
def test_verification_fails_for_another_result_or_an_unknown_dtype(
    package, dtype, error, message, monkeypatch
):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: package)
    with pytest.raises(error, match=message):
        verify_package(__file__, Doubles(), [torch.ones(1, 3, 2)], dtype)
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: lambda x: x)
    # equal zeros
    assert verify_package(__file__, Doubles(), [torch.zeros(1, 3, 2)], torch.float32).error == 0


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("model.so", ValueError, "must end in .pt2"),
        (
            "nowhere/model.pt2",
            OSError,
            "could not write .*nowhere/model.pt2: No such file or directory",
        ),
        ("folder.pt2", ValueError, "a package must be a file, .*folder.pt2 is a folder"),
    ],
)
@pytest.mark.parametrize("kind", [Path, str])
def test_invalid_path_raises_before_anything_is_compiled(kind, name, error, message, tmp_path):
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(error, match=message):
        write_package(None, kind(tmp_path / name), {})


def test_metadata_must_be_text(tmp_path):
    with pytest.raises(ValueError, match="metadata must map str to str .*, got {'step': 12}"):
        write_package(None, tmp_path / "model.pt2", {"step": 12})


def test_missing_compiler_raises_and_says_what_to_install(monkeypatch):
    def missing():
        raise packages.InvalidCxxCompiler

    monkeypatch.setattr(packages, "get_cpp_compiler", missing)
    raises(check_compiler, "needs a C.. compiler, found none: install g")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ('exec {compiler} "$@"', None),  # links libstdc++ dynamically
        ('exec gcc "$@"', None),  # not at all
        # a copy, as g++ does if libstdc++.so is missing: its packages crash in PyTorch's loader
        (
            'exec {compiler} "$@" -static-libstdc++',
            "must share the C.. standard library with PyTorch, .* links a copy",
        ),
        ("echo no space left on device >&2; exit 4", "compiler fails: no space left on device"),
    ],
)
def test_compiler_must_work_and_share_the_standard_library(script, message, tmp_path, monkeypatch):
    compiler = tmp_path / "compiler"
    compiler.write_text(f"#!/bin/sh\n{script.format(compiler=packages.get_cpp_compiler())}\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(packages, "get_cpp_compiler", lambda: str(compiler))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        check_compiler()


def test_missing_cuda_toolkit_raises_for_a_gpu(monkeypatch):
    monkeypatch.setattr(packages.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_toolkit(torch.device("cpu"))
    with pytest.raises(
        ValueError, match="needs the CUDA toolkit, found none: install it, or set CUDA_HOME"
    ):
        check_toolkit(torch.device("cuda"))
