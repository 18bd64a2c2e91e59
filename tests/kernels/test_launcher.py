"""A kernel that is launched again: past Triton's binder, and as Triton would have launched it."""

from functools import cache
from pathlib import Path

import pytest
from support.compiling import lines_of

LAUNCHES, WITH_HUBS = 9, 15  # of a forward and a backward pass with raw attributes


@cache
def relaunch(what):
    """The lines that relaunch.py prints."""
    return lines_of(Path(__file__).with_name("relaunch.py"), what, timeout=300)


@pytest.mark.parametrize(("what", "repeats"), [("repeated", True), ("public", False)])
def test_a_second_launch_hands_the_driver_what_triton_hands_it(what, repeats):
    lines = relaunch(what)
    assert len(lines) == LAUNCHES + WITH_HUBS
    for line in lines:
        assert line["second"] == line["first"]
        assert line["tensors"][0] == line["tensors"][1] if not repeats else line["tensors"][1] == 0
    first_of_a_kernel = {line["first"][0]: line["tensors"][0] for line in reversed(lines)}
    assert all(first_of_a_kernel.values())  # what is met for the first time goes through Triton's binder


def test_a_kernel_is_compiled_once_for_all_sizes_of_a_graph():
    (compilations,) = relaunch("sizes")
    assert set(compilations.values()) == {1} and len(compilations) == 7, compilations


def test_unaligned_operands_go_to_a_kernel_compiled_for_them():
    lines = relaunch("unaligned")
    assert len(lines) == 2 * LAUNCHES
    assert all(line["odd"] for line in lines), lines


def test_a_profiler_hears_of_every_launch_and_is_told_its_bytes():
    lines = relaunch("watched")
    assert len(lines) == 2 * LAUNCHES
    told = {line["name"] for line in lines if line.get("bytes")}
    expected = ("fwd_bf16_h2_c16_d3", "bwd_dst_bf16_h2_c16_d3", "bwd_src_bf16_h2_c16")
    assert told == {f"edge_attention_{name}" for name in expected}
