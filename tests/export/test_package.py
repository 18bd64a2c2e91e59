"""Packages of layers: compiled once, loaded where this library is not, for graphs of any size."""

from pathlib import Path

import pytest
import torch
from support.differentiate import randomise
from support.graphs import GRAPHS
from support.run import structure
from torch.export import Dim

from anemoi_gt import AttentionConfig, GraphTransformerConv
from anemoi_gt.export import LayerOnTensors, export_program, try_package, write_package
from anemoi_gt.export import package as packages
from anemoi_gt.export.package import check_compiler, check_place, check_toolkit

LOAD = """
import sys, torch
package = torch._inductor.aoti_load_package(sys.argv[1])
outputs = [package(*inputs) for inputs in torch.load(sys.argv[2])]
torch.save(outputs, sys.argv[3])
print(package.get_metadata()["note"])
"""


def problem(name, samples):
    """Features, a graph as tensors, and attributes."""
    graph, generator = structure(GRAPHS[name]), torch.Generator().manual_seed(samples)
    state = graph.state_dict() | {"perm": graph.edge_order()}
    x = [torch.randn(samples, n, width, generator=generator) for n, width in ((graph.num_src, 4), (graph.num_dst, 5))]
    return tuple(x), state, torch.randn(graph.num_edges, 3, generator=generator)


@pytest.fixture(scope="module")
def layer():
    conv = GraphTransformerConv((4, 5), 8, heads=2, edge_dim=3, config=AttentionConfig(backend="torch"))
    return LayerOnTensors(randomise(conv)).eval()


@pytest.fixture(scope="module")
def package(layer, tmp_path_factory):
    """A package of the layer, all of whose sizes are open."""
    samples, sources, nodes, edges = (Dim(name) for name in ("samples", "sources", "destinations", "edges"))
    sizes = {"colptr": {0: nodes + 1}, "row": {0: edges}, "sources": {0: sources}, "perm": {0: edges}}
    shapes = (({0: samples, 1: sources}, {0: samples, 1: nodes}), sizes, {0: edges})
    path = tmp_path_factory.mktemp("package") / "layer.pt2"
    write_package(export_program(layer, problem("shuffled", 2), shapes), path, {"note": "a layer"})
    return path


def test_it_gives_the_layers_numbers_for_any_graph_where_our_code_is_not(package, layer, without_our_code, tmp_path):
    problems = [problem("shuffled", 2), problem("hub", 1), problem("few_to_many", 5), problem("isolated", 3)]
    problems.append(problem("one_edge", 2))
    script, inputs, outputs = (tmp_path / name for name in ("load.py", "inputs.pt", "outputs.pt"))
    script.write_text(LOAD)
    torch.save(problems, inputs)
    assert without_our_code(script, package, inputs, outputs) == "a layer\n"
    with torch.no_grad():
        for given, found in zip(problems, torch.load(outputs), strict=True):
            torch.testing.assert_close(found, layer(*given))


def test_a_process_without_our_code_has_none(without_our_code, tmp_path):
    script = tmp_path / "none.py"
    script.write_text("try:\n    import anemoi_gt\nexcept ImportError:\n    print('none')")
    assert without_our_code(script) == "none\n"


class Doubles(torch.nn.Module):
    """Stands for a model whose package gives other numbers."""

    def forward(self, x):
        return 2 * x


def test_other_numbers_than_the_models_are_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: torch.nn.Identity())
    with pytest.raises(FloatingPointError, match="must give the numbers of the model within 1e-05, its error is 0.5"):
        try_package(tmp_path / "any.pt2", Doubles(), [torch.ones(1, 3, 2)], torch.float32)


def test_zeros_that_are_the_models_are_no_error(tmp_path, monkeypatch):
    (tmp_path / "any.pt2").write_bytes(b"whatever")
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: torch.nn.Identity())
    assert try_package(str(tmp_path / "any.pt2"), Doubles(), [torch.zeros(1, 3, 2)], torch.float32).error == 0


def test_a_dtype_without_a_limit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="dtype must be one of torch.float32, .*, got torch.float64"):
        try_package(tmp_path / "any.pt2", Doubles(), [torch.ones(1, 3, 2)], torch.float64)


def test_a_number_that_is_none_is_found_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: lambda x: x * torch.nan)
    with pytest.raises(FloatingPointError, match="its error is nan"):
        try_package(tmp_path / "any.pt2", Doubles(), [torch.ones(1, 3, 2)], torch.float32)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("model.so", ValueError, "must have a name that ends in .pt2"),
        ("nowhere/model.pt2", OSError, "could not write .*nowhere/model.pt2: No such file or directory"),
        ("folder.pt2", ValueError, "a package is a file, .*folder.pt2 is a folder"),
    ],
)
def test_a_place_where_no_package_can_be_is_refused(name, error, message, tmp_path):
    (tmp_path / "folder.pt2").mkdir()
    with pytest.raises(error, match=message):
        check_place(tmp_path / Path(name))


def test_metadata_is_text(tmp_path):
    with pytest.raises(ValueError, match="metadata must be text by names, JSON where it is more, got {'step': 12}"):
        write_package(None, tmp_path / "model.pt2", {"step": 12})


def test_a_place_may_be_a_word(tmp_path):
    with pytest.raises(ValueError, match="must have a name that ends in .pt2"):
        write_package(None, str(tmp_path / "model.so"), {})


def test_a_missing_compiler_is_named(monkeypatch):
    def missing():
        raise packages.InvalidCxxCompiler

    monkeypatch.setattr(packages, "get_cpp_compiler", missing)
    with pytest.raises(ValueError, match="compiled by a C.. compiler, none is found: install g"):
        check_compiler()


@pytest.fixture
def compile_by(tmp_path, monkeypatch):
    """Let packages be compiled by a script."""

    def use(script):
        compiler = tmp_path / "compiler"
        compiler.write_text(f"#!/bin/sh\n{script}\n")
        compiler.chmod(0o755)
        monkeypatch.setattr(packages, "get_cpp_compiler", lambda: str(compiler))

    return use


def test_a_compiler_that_links_its_standard_library_in_is_refused(compile_by):
    """As g++ does where libstdc++.so is missing: what it makes crashes in PyTorch's loader."""
    compiler = packages.get_cpp_compiler()
    compile_by(f'exec {compiler} "$@"')
    check_compiler()
    compile_by(f'exec {compiler} "$@" -static-libstdc++')
    with pytest.raises(ValueError, match="must share the C.. standard library with PyTorch, .*compiler links a copy"):
        check_compiler()


def test_a_driver_of_c_that_compiles_c_plus_plus_will_do(compile_by):
    """It names no standard library: the package finds that of PyTorch."""
    compile_by('exec gcc "$@"')
    check_compiler()


def test_what_a_broken_compiler_says_is_passed_on(compile_by):
    compile_by("echo no space left on device >&2; exit 4")
    with pytest.raises(ValueError, match="compiler fails: no space left on device"):
        check_compiler()


def test_a_missing_toolkit_is_named_where_a_gpu_needs_it(monkeypatch):
    monkeypatch.setattr(packages.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_toolkit(torch.device("cpu"))
    with pytest.raises(ValueError, match="needs the CUDA toolkit, none is found: install it, or name it in CUDA_HOME"):
        check_toolkit(torch.device("cuda"))
