"""Compiled kernels without a GPU: they compile for every GPU, fit its registers, and have offsets that are wide enough.

A kernel that is launched again goes past Triton's binder, and as Triton would have launched it.
"""

import re
from functools import cache
from pathlib import Path

import pytest
from support.compiling import lines_of
from support.ir import narrow_offsets, unordered_updates
from support.nightly import nightly

pytestmark = pytest.mark.process

ATTENTION = {"fwd", "bwd_dst", "bwd_src", "fixed_degree_fwd", "fixed_degree_bwd_dst", "bwd_dst_hub"}
GROUPING = {"group_edges_count", "group_edges_place"}
KERNELS = {
    "project",
    "embed",
    "attribute_bwd",
    "weight_bwd",
    "weight_sum",
    "join_segments",
} | GROUPING
KERNELS |= {f"edge_attention_{n}" for n in ATTENTION}
# of a forward and a backward pass over a graph without hubs and with unequal degrees
PLAIN = KERNELS - GROUPING - {"join_segments"}
PLAIN -= {name for name in KERNELS if "hub" in name or "fixed_degree" in name}
# of fused sub-layers
NODE_ROWS = {
    "norm_fwd",
    "norm_bwd",
    "head_norm_fwd",
    "head_norm_bwd",
    "activation_fwd",
    "activation_bwd",
}
# of graph networks
NETWORKS = {
    "edge_ends",
    "gather_activation",
    "residual_norm_fwd",
    "residual_norm_bwd",
    "segment_sum",
    "join_segment_sums",
    "gather_to_edges",
}
# norms and products
BETWEEN = {
    "pack",
    "add",
    "resize",
    "sum_columns",
    "sum_partial",
    "map_total",
    "add_outer",
}
GROWING = {  # arguments whose size grows with nodes x channels or edges x heads
    "query",
    "key",
    "value",
    "edge_attr",
    "projected",
    "projected_grad",
    "grad_out",
    "out",
    "exp_scores",
    "attr_sums",
    "dscore_sums",
    "dquery",
    "dkey",
    "dvalue",
    "dedge_attr",
    "p_ds",
    "dp",
    "rows",
    "sums",
    "scores",
    "attr_dp",
    "segment_rows",
    "segment_others",
    "segment_out",
    "segment_dquery",
    "segment_dkey",
    "segment_dvalue",
    "others",
}


@cache
def compile_kernels(what, *target):
    return lines_of(Path(__file__).with_name("compile_all.py"), what, *target)


# Bytes of shared memory that a program may have.
SHARED = {
    "cuda:80": 166912,
    "cuda:90": 232448,
    "cuda:100": 232448,
    "hip:gfx90a": 65536,
    "hip:gfx942": 65536,
}
# Every form for one of NVIDIA's GPUs, each kernel once for one of AMD's, and every form for the others
# nightly. Shared memory is what the layouts of a compiler need: a form must fit all of its GPUs.
OTHERS = nightly(*(target for target in SHARED if target != "cuda:90"))
TARGETS = [("every", "cuda:90"), ("each", "hip:gfx90a")]
TARGETS += nightly(*(("every", target) for target in SHARED if target != "cuda:90"))


@pytest.mark.parametrize(("launches", "target"), TARGETS)
def test_every_kernel_compiles(launches, target):
    compiled = compile_kernels(launches, target)
    assert {line["kernel"] for line in compiled} == KERNELS | NODE_ROWS | NETWORKS | BETWEEN
    assert all(
        line["binaries"] == [{"cuda": "cubin", "hip": "hsaco"}[target.split(":")[0]]]
        for line in compiled
    )
    compiler, _ = target.split(":")
    limit = min(size for other, size in SHARED.items() if other.startswith(compiler))
    assert max(line["shared"] for line in compiled) <= limit


def test_names_in_a_profile_contain_dtype_and_sizes():
    compiled = compile_kernels("standard", "cuda:90")
    named = [line for line in compiled if "c64" in line["name"] or "bwd_attributes" in line["name"]]
    names = {line["kernel"]: line["name"].removeprefix("edge_attention_") for line in named}
    assert all(line["name"].startswith("edge_attention_") for line in named)
    assert names == {
        "project": "project_bf16_h16_c64_d11",
        "embed": "embed_bf16_h16_c64_d11",
        "edge_attention_fwd": "fwd_bf16_h16_c64_d11",
        "edge_attention_bwd_dst": "bwd_dst_bf16_h16_c64_d11",
        "edge_attention_bwd_src": "bwd_src_bf16_h16_c64",
        "edge_attention_bwd_dst_hub": "bwd_dst_hub_bf16_h16_c64",
        "edge_attention_fixed_degree_fwd": "fixed_degree_fwd_bf16_h16_c64_d11",
        "edge_attention_fixed_degree_bwd_dst": "fixed_degree_bwd_dst_bf16_h16_c64_d11",
        "attribute_bwd": "bwd_attributes_bf16_h16_d11",
        "weight_bwd": "bwd_weight_bf16_h16_c64_d11",
        "weight_sum": "sum_weight_fp32_h16_c64_d11",
    }


WITHOUT_CHANNELS = {"attribute_bwd", "join_segments"}  # in their names
# Bytes on the stack, where a kernel of the default model has any; Triton 3.7.
STACK = {"cuda:100": 16}


@pytest.mark.parametrize("target", ["cuda:90", *OTHERS])
def test_standard_shapes_spill_nothing(target):
    compiled = compile_kernels("standard", target)
    assert {line["kernel"] for line in compiled} == KERNELS - GROUPING
    of_channels = {
        channels: {line["kernel"] for line in compiled if f"_c{channels}" in line["name"]}
        for channels in (32, 64)
    }
    assert of_channels[32] == of_channels[64] == KERNELS - GROUPING - WITHOUT_CHANNELS
    for line in compiled:
        assert line["local"] == 0, line
        assert line["stack"] <= STACK.get(target, 0), line


def test_offsets_are_64_bit_where_sizes_can_pass_2_to_31_and_32_bit_where_they_cannot():
    seen = {False: set(), True: set()}
    for line in compile_kernels("offsets", "cuda:90"):
        if line["kernel"] == "weight_sum":  # reads nothing that grows with the graph
            continue
        narrow = narrow_offsets(line["ir"]) & GROWING
        assert bool(narrow) != line["wide"], f"{line['kernel']}: {narrow}"
        if not line["wide"]:
            assert not re.search(r"\bi64\b", line["ir"]), (
                f"{line['kernel']} computes in 64 bits without need"
            )
        seen[line["wide"]].add(line["kernel"])
    assert seen[False] == seen[True] == KERNELS - GROUPING - {"weight_sum"}


def test_no_warp_overwrites_a_number_that_another_has_yet_to_read():
    compiled = compile_kernels("updates", "cuda:90")
    walking = {"edge_attention_fwd", "edge_attention_bwd_dst", "edge_attention_bwd_dst_hub"}
    assert walking <= {line["kernel"] for line in compiled}
    for line in compiled:
        assert not unordered_updates(line["ir"]), line["name"]


UPDATE = """
#rows = #ttg.blocked<{sizePerThread = [1, 8], threadsPerWarp = [1, 32], warpsPerCTA = [WARPS], order = [1, 0]}>
tt.func public @kernel(%numbers: !tt.ptr<f32>, %end: i32) {
  scf.for %e = %c0_i32 to %end step %c1_i32 : i32 {
    %at = tt.splat %numbers : !tt.ptr<f32> -> tensor<2x!tt.ptr<f32>, #ttg.slice<{dim = 1, parent = #rows}>>
    %old = tt.load %at : tensor<2x!tt.ptr<f32>, #ttg.slice<{dim = 1, parent = #rows}>>
    BETWEEN
    tt.store %at, %old : tensor<2x!tt.ptr<f32>, #ttg.slice<{dim = 1, parent = #rows}>>
  }
}
"""


@pytest.mark.parametrize(
    ("warps", "between", "updated"),
    [("1, 2", "", {"numbers"}), ("1, 2", "ttg.barrier all", set()), ("2, 1", "", set())],
    ids=["row across warps", "with a barrier", "row within a warp"],
)
def test_an_update_that_races_is_detected(warps, between, updated):
    ttgir = UPDATE.replace("WARPS", warps).replace("BETWEEN", between)
    assert unordered_updates(ttgir) == updated


def test_a_profiler_gets_bytes_and_flops_of_a_launch():
    metadata = {}
    for line in compile_kernels("facts"):
        metadata[line["name"], line["form"]] = (line["bytes"], line["flops16"])
    row = 2 * 4 * 2  # bytes
    flops = 400 * (2 * 2 * 4) * 2  # two multiply-adds per element of an edge
    assert metadata == {
        ("edge_attention_fwd", "raw"): ((2 * 400 + 2 * 30) * row, flops),  # k, v of edges; q, out
        ("edge_attention_fwd", "embedded"): (
            (4 * 400 + 2 * 30) * row,
            flops,
        ),  # k, v and x of edges; q, out
        ("edge_attention_bwd_dst", "raw"): ((2 * 400 + 2 * 30) * row, flops),  # k, v; do, dq
        ("edge_attention_bwd_dst", "embedded"): ((4 * 400 + 2 * 30) * row, flops),
        ("edge_attention_bwd_src", "raw"): ((2 * 400 + 2 * 40) * row, flops),  # q, do; dk, dv
        ("edge_attention_bwd_src", "embedded"): ((2 * 400 + 2 * 40) * row, flops),
    }


@cache
def relaunch(what):
    return lines_of(Path(__file__).with_name("relaunch.py"), what, timeout=300)


@pytest.mark.parametrize(("what", "repeats"), [("repeated", True), ("public", False)])
def test_the_second_run_of_a_plan_passes_the_driver_tritons_arguments(what, repeats):
    first, second = relaunch(what)
    assert first["launches"]
    assert second["launches"] == first["launches"]
    if repeats:
        assert first["tensors"][0] > 0
        assert not any(second["tensors"])  # only addresses
    else:
        assert all(first["tensors"])
        assert second["tensors"] == first["tensors"]


def test_a_graph_without_destinations_runs_repeatedly():
    names = [line["name"] for line in relaunch("empty")]
    assert len(names) % 4 == 0
    assert names == 4 * names[: len(names) // 4]


def test_a_kernel_is_compiled_once_for_all_sizes_of_a_graph():
    (compilations,) = relaunch("sizes")
    assert compilations == dict.fromkeys(PLAIN, 1)


def test_unaligned_operands_go_to_a_kernel_compiled_for_them_which_is_then_repeated():
    lines = relaunch("unaligned")
    first = lines[: len(lines) // 2]
    second = lines[len(lines) // 2 :]
    assert [line["name"] for line in first] == [line["name"] for line in second]
    # a launch that reads no such operand repeats what was compiled for aligned ones
    assert all(line["odd"] > 0 or line["repeated"] for line in first), first
    compiled = {line["name"].split("_h2")[0] for line in first if line["odd"]}
    kernels = ("project", "fwd", "bwd_dst", "bwd_attributes", "bwd_src", "embed", "bwd_weight")
    dtypes = {f"edge_attention_{name}_bf16" for name in kernels}
    assert compiled == dtypes
    assert all(line["repeated"] for line in second)


def test_a_launch_hook_sees_every_launch_and_its_bytes():
    launched, *lines = relaunch("watched")
    assert [line["name"] for line in lines] == launched
    names = {line["name"] for line in lines if line.get("bytes")}
    expected = ("fwd_bf16_h2_c16_d3", "bwd_dst_bf16_h2_c16_d3", "bwd_src_bf16_h2_c16")
    assert names == {f"edge_attention_{name}" for name in expected}
