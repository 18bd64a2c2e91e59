"""The benchmark of a training step measures what it says, on a small model here, and nothing that is not right."""

import importlib.util
import json
import shlex
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "anemoi_step.py"
SMALL = shlex.split(
    "--grid O4 --refinement 1 --channels 8 --heads 2 --layers 2 --variables 3 --rounds 2 --steps 2 --warmup 1 --device cpu"
)


@pytest.fixture(scope="module")
def anemoi_step():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("anemoi_step", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(anemoi_step, tmp_path_factory):
    """What a small run wrote."""
    file = tmp_path_factory.mktemp("benchmark") / "results" / "step.json"
    anemoi_step.main([*SMALL, "--precision", "bf16-mixed", "--output", str(file)])
    return json.loads(file.read_text())


def test_every_variant_is_timed_and_profiled(report):
    assert list(report["variants"]) == ["untouched", "install"]
    for found in report["variants"].values():
        assert found["median_ms"] > 0 and found["profile"]["total_ms"] > 0
        assert sum(found["profile"]["families_ms"].values()) == pytest.approx(found["profile"]["total_ms"])


def test_our_attention_is_in_the_profile_of_our_variants_alone(report):
    ours = {name: "attention, ours" in found["profile"]["families_ms"] for name, found in report["variants"].items()}
    assert ours == {"untouched": False, "install": True}


def test_every_round_takes_all_variants_in_an_order_drawn_anew(report):
    assert [sorted(order) for order in report["rounds"]] == [sorted(report["variants"])] * 2


def test_the_report_says_what_it_belongs_to(report):
    assert {"commit", "device", "versions"} <= set(report["environment"])
    assert report["options"]["grid"] == "O4" and report["sizes"]["data"] == 208


def test_a_variant_that_computes_something_else_is_not_timed_and_the_others_are(anemoi_step, monkeypatch, tmp_path):
    @contextmanager
    def wrong(model):
        hook = model.processor.proc[0].lin_value.register_forward_hook(lambda module, inputs, out: 2 * out)
        yield
        hook.remove()

    monkeypatch.setitem(anemoi_step.VARIANTS, "install", wrong)
    with pytest.raises(SystemExit, match="compare install: ValueError: nothing is timed that is not right"):
        anemoi_step.main([*SMALL, "--precision", "32", "--output", str(tmp_path / "step.json")])
    report = json.loads((tmp_path / "step.json").read_text())
    assert list(report["variants"]) == ["untouched"] and list(report["problems"]) == ["compare install"]


@pytest.fixture
def training(anemoi_step):
    """The small model with two samples, in float32."""
    options = anemoi_step.make_parser("").parse_args([*SMALL, "--precision", "32", "--batch", "2"])
    return anemoi_step.Training(options)


def test_compiled_variants_compute_what_the_untouched_model_does(anemoi_step, training, monkeypatch):
    compiled, original = [], torch.nn.Module.compile

    def compile_by_aot_eager(module, **options):
        compiled.append(type(module).__name__)
        original(module, backend="aot_eager", **options)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_aot_eager)
    variants = ["install, blocks compiled", "install, blocks compiled, no recomputation"]
    assert anemoi_step.compare(training, anemoi_step.Results({}, None, 100.0), variants) == variants
    assert set(compiled) == set(anemoi_step.BLOCKS)


def test_a_variant_leaves_the_model_as_it_was(anemoi_step, training):
    modules = list(training.model.modules())
    checkpointed = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    with anemoi_step.VARIANTS["install, compiled whole, no recomputation"](training.model):
        assert checkpointed and not any(module.gradient_checkpointing for module in checkpointed)
        assert {type(m).__name__ for m in modules if m._compiled_call_impl} == set(anemoi_step.WHOLE)
    assert all(module.gradient_checkpointing for module in checkpointed)
    assert not any(module._compiled_call_impl for module in modules)


@pytest.mark.parametrize(
    ("kernel", "family"),
    (
        ("edge_attention_bwd_dst_fp16_h16_c32_d12", "attention, ours"),
        ("_gt_bwd_src_pass", "attention, Anemoi's"),
        ("void cub::DeviceRadixSortOnesweepKernel", "sort, scan, unique"),
        ("sm90_xmma_gemm_f16f16_f16f32", "matrix products"),
        ("nvjet_hsh_128x256_64x4", "matrix products"),
        ("void at::native::vectorized_layer_norm_kernel", "layer norms"),
        ("void at::native::multi_tensor_apply_kernel", "optimiser"),
        ("void at::native::indexSelectLargeIndex", "gather, scatter, index"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies and casts"),
        ("void at::native::reduce_kernel<512, 1>", "sums"),
        ("triton_red_fused__to_copy_add_native_layer_norm_3", "fused by Inductor"),
        ("void at::native::vectorized_elementwise_kernel<4, GeluCUDAKernelImpl>", "elementwise"),
        ("ncclDevKernel", "other"),
    ),
)
def test_kernels_are_told_apart_by_name(anemoi_step, kernel, family):
    assert importlib.import_module("kernel_families").family_of(kernel) == family


def test_the_defaults_are_the_official_benchmark(anemoi_step):
    options = anemoi_step.make_parser("").parse_args([])
    assert (options.grid, options.refinement, options.channels, options.layers) == ("N320", 6, 512, 16)
    assert (options.mapper_chunks, options.precision, options.variants) == (2, "16-mixed", ["untouched", "install"])
    assert anemoi_step.make_options()["processor"]["gradient_checkpointing"]
