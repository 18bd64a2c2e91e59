"""The benchmark of compilation counts what is there, and times nothing that is wrong."""

import json
from pathlib import Path

import compile_step
import pytest
import torch

SMALL = ["--grid", "O4", "--refinement", "1", "--channels", "32", "--heads", "2", "--layers", "1"]
SMALL += ["--device", "cpu", "--precision", "32", "--repeats", "2", "--parts", "block"]
GENERATED = """
cpp_fused_add_1 = async_compile.cpp_pybinding(['float*'], r'''
''')
triton_poi_fused_gelu_2 = async_compile.triton('triton_poi_fused_gelu_2', ''' ... ''')

class Runner:
    def call(self, args):
        cpp_fused_add_1(buf12, buf11)
        triton_poi_fused_gelu_2.run(buf19, buf20, 576, stream=stream0)
        extern_kernels.addmm(primals_5, reinterpret_tensor(buf4, (9, 32), (32, 1), 0), out=buf5)
        extern_kernels.mm(buf4, primals_4, out=buf6)
        buf8 = torch.ops.anemoi_gt.edge_attention_triton.default(buf5, buf6)
        assert_size_stride(buf9, (1, 9, 2, 16), (288, 32, 16, 1), 'torch.ops.anemoi_gt.edge_attention_triton.default')
        buf10 = torch.ops.aten.sort.stable(buf9)
        return (buf10, )

def get_args():
    triton_poi_fused_gelu_2.run(again)
"""


def test_calls_are_counted_where_they_are_made():
    expected = {"attention": 1, "matrix product": 2, "fused kernel": 2, "everything else": 1}
    assert compile_step.calls_in(GENERATED) == expected


def options(*more):
    return compile_step.parse([*SMALL, *more])


def test_eager_operators_are_those_of_the_documentation():
    counted = compile_step.operators_of(compile_step.make_parts(options())["block"])
    assert counted["forward"] == {"attention": 1, "matrix product": 7, "everything else": 6}
    assert counted["backward"] == {"attention": 1, "matrix product": 14, "everything else": 15}


def test_the_whole_model_is_a_part():
    part = compile_step.make_parts(options("--parts", "model"))["model"]
    assert compile_step.operators_of(part)["forward"]["attention"] == 3  # encoder, one layer, decoder


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """What a run in small wrote, with Inductor."""
    file = tmp_path_factory.mktemp("benchmark") / "results" / "compile_step.json"
    compile_step.main([*SMALL, "--output", str(file), "--commit", "abc"])
    return json.loads(file.read_text())


def test_inductor_fuses_neighbours_and_leaves_attention_alone(report):
    eager, compiled = report["parts"]["block"]["eager"]["operators"], report["parts"]["block"]["default"]["calls"]
    assert compiled["forward"] == {"attention": 1, "matrix product": 7, "fused kernel": 5}
    for direction in ("forward", "backward"):
        assert compiled[direction]["attention"] == eager[direction]["attention"] == 1
        assert compiled[direction]["matrix product"] == eager[direction]["matrix product"]
        assert compiled[direction]["fused kernel"] < eager[direction]["everything else"]


def test_the_report_says_what_was_compiled_where(report):
    found = report["parts"]["block"]["default"]
    assert found["graphs"] == 2  # with gradients and without
    assert max(found["difference_from_eager"].values()) < 1e-4
    assert {"forward", "forward_backward"} == set(found["passes"]) and found["compile_seconds"] > 0
    assert report["environment"]["commit"] == "abc" and report["environment"]["device"]


def test_compiled_code_that_computes_something_else_is_not_timed():
    part = compile_step.make_parts(options())["block"]
    with pytest.raises(ValueError, match="nothing is timed that is not right"):
        compile_step.difference(part, lambda *inputs: 1.001 * part.module(*inputs))


@pytest.mark.parametrize("name", ["cpu_float32", "cpu_bfloat16", "h200"])
def test_the_documentation_has_the_counts_of_the_results(name):
    root = Path(compile_step.ROOT)
    found = json.loads((root / f"benchmarks/results/compile_step_{name}.json").read_text())["parts"]["block"]
    page = (root / "docs" / "compile.md").read_text()
    for direction in ("forward", "backward"):
        eager, compiled = found["eager"]["operators"][direction], found["default"]["calls"][direction]
        cells = []
        for counted, others in ((eager, "everything else"), (compiled, "fused kernel")):
            numbers = [counted["attention"], counted["matrix product"], counted[others]]
            assert sum(numbers) == sum(counted.values())
            cells.append(f"{' + '.join(map(str, numbers))} = {sum(numbers)}")
        assert f"{direction} | {' | '.join(cells)} |" in page


def test_the_documentation_has_the_times_of_a_gpu():
    root = Path(compile_step.ROOT)
    files = {"block": "compile_step_h200.json", "model": "compile_model_h200.json"}
    found = {
        part: json.loads((root / "benchmarks/results" / name).read_text())["parts"][part]
        for part, name in files.items()
    }
    page = (root / "docs" / "compile.md").read_text()
    for part, digits in (("block", 2), ("model", 1)):
        for direction in ("forward", "forward_backward"):
            ways = [way for way in ("eager", *compile_step.MODES) if way in found[part]]
            passes = [found[part][way]["passes"][direction] for way in ways]
            times = [f"{each['median_ms']:.{digits}f}" for each in passes]
            counts = [", ".join(str(each["launches"][kind]) for each in passes) for kind in ("kernels", "host_calls")]
            peaks = ", ".join(f"{each['peak_gb']:.1f}" for each in passes[:2])
            cells = [f"{part}, {direction.replace('_', ' and ')}", ", ".join(times), *counts, peaks]
            assert f"| {' | '.join(cells)} |" in page


def test_the_defaults_are_the_sizes_of_the_official_benchmark(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    asked = compile_step.parse([])
    assert (asked.grid, asked.refinement, asked.channels, asked.layers, asked.precision) == ("N320", 6, 512, 16, "bf16")
    assert asked.modes == ["default", "reduce-overhead"]
