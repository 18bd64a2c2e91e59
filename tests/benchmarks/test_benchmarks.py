"""Each benchmark and each GPU check runs on small problems on a CPU; wrong results are not timed."""

import itertools
import json
import shlex
from contextlib import contextmanager
from dataclasses import replace

import anemoi_curves
import anemoi_forecasts
import anemoi_inference
import check_gpu
import families
import pyg_models
import pytest
import report
import run
import tiles
import torch
import train_9km
from gpu_checks import model, sublayers
from kernel_families import GROUPS, family_of
from suite import (
    anemoi_training,
    baselines,
    correctness,
    graphs,
    operands,
    plot,
    point_vortices,
    problems,
)
from support.forked import PROCESSES, forked_commands, start_server
from support.operators import Operators

pytestmark = pytest.mark.application


# The channels must match the config, because its conditional norms depend on them.
SMALL_MODEL = shlex.split(
    "--grid O4 --refinement 1 --channels 32 --layers 1 --variables 4 --device cpu --commit abc"
)
SHORT = shlex.split("--precision 32 --warmup 1 --variant-seconds 0")


def test_the_suite_measures_and_makes_tables_and_plots(tiny, tmp_path, monkeypatch, capsys):
    # its processes need no new imports
    monkeypatch.setattr("multiprocessing.get_context", lambda _: PROCESSES)
    start_server()
    out = tmp_path / "r.json"
    names = ["anemoi_gt", "pyg", "anemoi"]
    options = ["--device", "cpu", "--output", str(out), "--commit", "abc"]
    run.main(["--problems", "tiny", "--baselines", *names, *options])
    results = json.loads(out.read_text())
    timed = {(line["pass"], line["baseline"]) for line in results["results"] if "median_ms" in line}
    assert timed == set(itertools.product(tiny.passes, names[:2]))
    report.main([str(out)])
    plot.write(plot.bars(results), tmp_path / "bars.svg")
    assert results["environment"]["commit"] == "abc"
    assert "| `encoder-tiny-c8` |" in capsys.readouterr().out
    assert all((tmp_path / f"{name}.svg").stat().st_size > 500 for name in ("bars", "bars-dark"))


@pytest.mark.parametrize("batch", (1, 2))
@pytest.mark.parametrize("name", baselines.NAMES)
def test_every_baseline_is_correct(tiny, tmp_path, name, batch):
    if name == "anemoi":
        allow_interpreter()
    problem, baseline = replace(tiny, dtype="bfloat16", batch=batch), baselines.load(name)
    graphs.build([problem.graph], tmp_path)
    drawn = operands.draw(problem, graphs.load(problem.graph, tmp_path))
    correctness.check_attention(problem, drawn, baseline.attention)


def allow_interpreter():
    """Let anemoi-models' operators, registered for GPUs only, run on a CPU in Triton's interpreter."""
    from anemoi.models.triton import gt

    for operator in (gt.graph_transformer_attention, gt.graph_transformer_attention_backward):
        operator.register_kernel("cpu")(operator._init_fn)


def test_a_wrong_result_fails_the_correctness_check(tiny, tmp_path):
    graphs.build([tiny.graph], tmp_path)
    drawn = operands.draw(tiny, graphs.load(tiny.graph, tmp_path))
    attention = baselines.load("anemoi_gt").attention

    def wrong_attention(inputs):
        call = attention(inputs)
        return lambda: 1.01 * call()

    with pytest.raises(AssertionError, match="plain PyTorch"):
        correctness.check_attention(tiny, drawn, wrong_attention)


def test_tiles_are_searched(tiny, tmp_path, monkeypatch, capsys):
    out = tmp_path / "tiles.json"
    wide = replace(tiny, channels=128)
    monkeypatch.setitem(problems.PROBLEMS, tiny.name, wide)
    kernels = ["forward", "weight"]  # of two signatures of launches
    options = ["--problems", "tiny", "--kernels", *kernels, "--most", "2", "--output", str(out)]
    tiles.main(options)
    report = json.loads(out.read_text())
    searched = {line["kernel"]: (line["tiles"], line["failed"]) for line in report["results"]}
    assert searched == dict.fromkeys(kernels, (2, {}))
    assert report["verdict"] in capsys.readouterr().out


def replace_gelu(monkeypatch, gelu):
    """Let `install` replace nothing but the function GELU."""

    @contextmanager
    def install(*, fusion="auto", keep_hidden=True, replay=True):
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.GELU, "forward", gelu)
            yield

    monkeypatch.setattr(anemoi_training.integration, "install", install)


def operators_of(step, *_):
    """Return the families of the operators of a step, in place of a profile, which takes longer than the steps."""
    with Operators() as operators:
        step()
    names = {family_of(name.replace(".", "::", 1)) for name in operators.names}
    times = dict.fromkeys(GROUPS, 0.0)
    return {"total_ms": 0.0, "groups_ms": times, "families_ms": dict.fromkeys(names, 0.0)}


@pytest.mark.parametrize(
    ("case", "expected_sizes"),
    [
        ("benchmark", {}),
        ("stretched", {"area_grid": "O8", "area_refinement": 2}),
        ("ensemble of 4", {"members": 4}),
        ("diffusion", {}),
        ("transformer", {}),
        ("aifs", {"hidden": "O4"}),
    ],
)
def test_a_step_of_each_family_is_compared_and_timed(
    tmp_path, monkeypatch, anemoi_configs, case, expected_sizes
):
    monkeypatch.setattr(families, "FEWEST", 1)
    rounds = 2
    if case != "benchmark":
        rounds = 1
        monkeypatch.setattr(families, "profile_of", operators_of)
    out = tmp_path / "families.json"
    variants = ["untouched", "install"]
    if case in ("benchmark", "transformer", "aifs"):  # one case per class of processors
        variants.append("install, no recomputation")
    sizes = []
    if case == "stretched":
        sizes = ["--area-grid", "O8", "--area-refinement", "2"]
    if case == "aifs":
        sizes = ["--hidden", "O4", "--window", "9"]
    options = ["--configs", str(anemoi_configs), "--output", str(out), "--variants"]
    sizes += ["--rounds", str(rounds)]
    families.main([case, *SMALL_MODEL, *SHORT, *sizes, *options, *variants])
    report = json.loads(out.read_text())
    record = report["cases"][0]
    assert report["environment"]["commit"] == "abc"
    assert record["reference"] == "untouched"
    assert record["case"].items() >= ({"channels": 32, "layers": 1} | expected_sizes).items()
    assert list(record["variants"]) == variants
    for name, variant in record["variants"].items():
        assert len(variant["rounds"]) == rounds
        assert variant["median_ms"] >= variant["host_ms"] > 0
        profile = variant["profile"]
        assert sum(profile["groups_ms"].values()) == pytest.approx(profile["total_ms"])
        assert ("attention, ours" in profile["families_ms"]) == (name != "untouched")


def test_a_variant_that_differs_is_not_timed(tmp_path, monkeypatch, anemoi_configs):
    replace_gelu(monkeypatch, lambda module, x: 2 * torch.nn.functional.gelu(x))
    out = tmp_path / "families.json"
    options = ["--configs", str(anemoi_configs), "--output", str(out), "--variants"]
    with pytest.raises(SystemExit, match="install: ValueError: nothing is timed that is not right"):
        families.main(["benchmark", *SMALL_MODEL, *SHORT, *options, "install", "untouched"])
    report = json.loads(out.read_text())
    assert list(report["cases"][0]["variants"]) == ["untouched"]
    assert list(report["problems"]) == ["benchmark, install"]


def test_a_variant_that_runs_out_of_memory_is_reported_and_the_others_continue(
    monkeypatch, anemoi_configs, capsys
):
    def without_memory(module, x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    replace_gelu(monkeypatch, without_memory)
    options = ["--configs", str(anemoi_configs), "--variants", "untouched", "install"]
    report = families.main(["benchmark", *SMALL_MODEL, *SHORT, *options])
    variants = report["cases"][0]["variants"]
    assert variants["install"] == {"outcome": "out of memory"}
    assert variants["untouched"]["median_ms"] > 0
    assert "| install | out of memory |" in capsys.readouterr().out


def test_without_the_configs_of_anemoi_the_error_names_the_option(monkeypatch):
    monkeypatch.setattr(anemoi_training, "find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="pass --configs FOLDER"):
        families.main(["benchmark", *SMALL_MODEL, *SHORT])


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="variants must match names of untouched, "):
        families.main(["benchmark", "--variants", "untouched", "replayed"])


@pytest.mark.parametrize("case", ("benchmark", "ensemble", "diffusion"))
def test_loss_curves_of_anemoi_models_are_compared(tmp_path, anemoi_configs, case):
    options = ["--configs", str(anemoi_configs), "--precisions", "32", "--training-steps", "2"]
    report = anemoi_curves.main(
        [case, *SMALL_MODEL, *options, "--output", str(tmp_path / "c.json")]
    )
    curves = report[case]["32"]
    assert curves["spread_of_seeds"] > 0
    assert len(curves["losses"]) == 4
    assert set(curves["apart"]["install"]) == {0, 1}
    assert curves["within"] == {"install": True}


def test_forecasts_of_an_anemoi_model_are_compared(tmp_path, anemoi_configs):
    few = "--training-steps 2 --training-flows 2 --flows 1 --days 1 --variants untouched install"
    sizes = "--grid O4 --refinement 1 --channels 32 --layers 2 --device cpu --commit abc"
    options = ["--configs", str(anemoi_configs), "--output", str(tmp_path / "f.json")]
    report = anemoi_forecasts.main([*sizes.split(), *few.split(), *options])
    curves = report["curves"]
    assert report["hours"] == [6, 12, 18, 24]
    assert all(0 < value < 1e-2 for value in curves["apart, install and untouched"])
    assert curves["apart, install and install again"] == [0.0] * 4


def test_point_vortices_move_with_the_flow_of_their_stream_function():
    flow = point_vortices.draw(1, 6, torch.Generator().manual_seed(0))
    points = torch.randn(20, 3, generator=torch.Generator().manual_seed(1)).double()
    points = (points / points.norm(dim=-1, keepdim=True)).requires_grad_()
    values = point_vortices.fields(flow, points / points.norm(dim=-1, keepdim=True))[0]
    (slope,) = torch.autograd.grad(values[:, 2].sum(), points)
    torch.testing.assert_close(torch.linalg.cross(points, slope), values[:, 4:7])
    # the Laplacian on a sphere: second derivatives by the angles of three rotations, summed
    points, values = points.detach(), values.detach()
    laplacian = 0
    for axis in torch.eye(3, dtype=torch.float64):
        turn = torch.linalg.cross(axis.expand(3, 3), torch.eye(3, dtype=torch.float64))
        for angle in (1e-3, -1e-3):
            turned = points @ torch.linalg.matrix_exp(angle * turn)
            near = point_vortices.fields(flow, turned)[0]
            laplacian = laplacian + (near[:, 2] - values[:, 2]) / angle**2
    torch.testing.assert_close(laplacian, values[:, 3], rtol=1e-3, atol=1e-6)


def test_inference_of_an_anemoi_model_is_timed(tmp_path):
    small = shlex.split(
        "--grids O4 O4 --refinement 1 --channels 16 --heads 2 --layers 1 --device cpu --repeats 1"
    )
    report = anemoi_inference.main([*small, "--output", str(tmp_path / "inference.json")])
    timed = {(line["chunks"], line["contender"]) for line in report["results"]}
    assert timed == {*itertools.product((1, 4, 16), ("untouched", "install"))}


@pytest.mark.parametrize(("models", "number"), [("all", 5), ("batches", 4)])
def test_pyg_models_are_timed(tmp_path, models, number):
    small = "--nodes 50 --edges 200 --channels 8 --hidden 4 --repeats 1 --device cpu"
    small += f" --refinement 1 --width 16 --blocks 2 --models {models}"
    report = pyg_models.main([*small.split(), "--output", str(tmp_path / "pyg.json")])
    models = report["models"]
    assert len(models) == number, report["problems"]
    assert all(model["one graph"]["median_ms"] > 0 for model in models.values())


@pytest.mark.nightly
def test_training_at_9_km_checks_and_times_steps(tmp_path):
    sizes = "--grid O4 --refinement 1 --check-grid O4 --check-refinement 1 --channels 32 --heads 2 --layers 2"
    options = (
        "--fields 6 2 --device cpu --compiled 0 --steps 1 --chunks 1 3 --anemoi-chunks 1 2 --output"
    )
    parts = "--parts check_model check_mappers ours anemoi install sharded"
    with forked_commands():
        train_9km.main(shlex.split(f"{sizes} {parts} {options} {tmp_path / 'r.json'}"))
    runs = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert [run["outcome"] for run in runs if "check" in run] == ["right"] * 8
    timed = [(run["contender"], run["num_chunks"]) for run in runs if run["outcome"] == "done"]
    anemoi = list(itertools.product(("anemoi-models", "anemoi-models, install"), (2, 1)))
    ours = [("anemoi_gt", 1), ("anemoi_gt", 3)]
    assert timed == [*ours, *anemoi, *ours]
    assert [run.get("ranks") for run in runs][-3:] == [2, 2, 2]


def test_gpu_checks_run_on_small_problems(tmp_path):
    log = tmp_path / "check.log"
    arguments = shlex.split("--repeat --big --norms --random 1 --processes 1")
    assert check_gpu.main([*arguments, "--log", str(log)]) == 0, log.read_text()
    assert log.read_text().count("PASS") == 4


@pytest.mark.parametrize("name", sublayers.NAMES)
def test_checks_of_sublayers_draw_every_case_in_their_dtype(name):
    for number, case in enumerate(sublayers.CASES[name]):
        problem = sublayers._draw(name, number, case, sublayers.SMALL, torch.bfloat16)
        assert problem.options.gemm_dtype == torch.bfloat16


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(model, "HERE", model.TINY)
    monkeypatch.setattr(model, "STEPS", 2)


def stale(call):
    """Stand in for a capture whose graph does not read new fields."""
    result = call().clone()
    return lambda: result


def test_checks_of_captured_models_pass_and_fail(small):
    assert "2 replays on new fields" in model.forward_in_graph(capture=lambda call: call)
    assert "2 replays of forward, backward and AdamW" in model.step_in_graph(
        capture=lambda call: call
    )
    with pytest.raises(AssertionError, match="output: 1 of 2 tensors differ"):
        model.forward_in_graph(capture=stale)
    with pytest.raises(
        AssertionError, match=r"losses and parameters with \{\}: \d+ of \d+ tensors differ"
    ):
        model.step_in_graph(capture=stale)


@pytest.mark.nightly
def test_the_check_of_a_compiled_model_passes(small):
    assert model.compiled(("traced",), backend="aot_eager").endswith("traced")
