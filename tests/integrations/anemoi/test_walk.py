"""The call path from an Anemoi block to the kernels: the number of functions of the package on it."""

import sys
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from anemoi.models.layers.block import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from support.anemoi_model import block_inputs, make_block
from triton.runtime.interpreter import GridExecutor

import anemoi_gt
from anemoi_gt.integrations import anemoi
from anemoi_gt.integrations.anemoi.decision import Call
from anemoi_gt.kernels.forward import edge_attention_fwd
from anemoi_gt.ops.tensors import AttentionTensors

PACKAGE = Path(anemoi_gt.__file__).parent
KERNELS = PACKAGE / "kernels"
LAUNCH = KERNELS / "launch.py"
TOOLCHAIN = PACKAGE / "toolchain.py"  # around the first launch of a kernel
PLAN = PACKAGE / "ops" / "triton_backend" / "plan.py"
MAX_FUNCTIONS = 12  # from the forward of a block to the launch of the kernel that reads edge_attr
MAX_CALLS = 100  # in one forward, without the calls of plans and launches
KINDS = {"processor": GraphTransformerProcessorBlock, "mapper": GraphTransformerMapperBlock}


def is_host_code(code) -> bool:
    """Return whether code is a host function of the package; comprehensions do not count."""
    path = Path(code.co_filename)
    is_kernel = (path.parent == KERNELS and path != LAUNCH) or path == TOOLCHAIN
    return path.is_relative_to(PACKAGE) and not is_kernel and not code.co_name.startswith("<")


@cache
def walk_of(kind):
    """Return the functions that the second forward of a fused block calls, and the call chain to the attention."""
    block, inputs = make_block(KINDS[kind], qk_norm=True), block_inputs(KINDS[kind])
    calls, chain = [], []

    def note(frame, event, argument):
        if event == "call" and is_host_code(frame.f_code):
            calls.append(frame.f_code)

    run = GridExecutor.__call__

    def run_unwatched(executor, *arguments, **options):
        """Run the programs of a kernel without counting the calls of the interpreter."""
        sys.setprofile(None)
        if executor.fn.__name__ == "edge_attention_fwd" and not chain:
            frame = sys._getframe()
            while frame is not None:
                if is_host_code(frame.f_code):
                    chain.append(frame.f_code.co_name)
                frame = frame.f_back
        run(executor, *arguments, **options)
        sys.setprofile(note)

    with (
        anemoi.install(backend="triton", fusion="sublayers"),
        torch.autocast("cpu", torch.bfloat16),
    ):
        block(*inputs)  # makes the structure of the graph and the plans
        with patch.object(GridExecutor, "__call__", run_unwatched):
            sys.setprofile(note)
            try:
                block(*inputs)
            finally:
                sys.setprofile(None)
    return calls, chain[::-1]


@pytest.mark.parametrize("kind", KINDS)
def test_few_functions_lie_between_a_block_and_the_kernel_that_reads_its_edges(kind):
    _, chain = walk_of(kind)
    assert f"{kind}_block" in chain, chain
    assert chain[-1] == "on", chain
    assert len(chain) <= MAX_FUNCTIONS, chain


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_of_a_fused_block_calls_few_functions(kind):
    calls, _ = walk_of(kind)
    # The interpreter takes a view of each argument of a kernel, where a GPU takes an address.
    counted = [code for code in calls if Path(code.co_filename) not in (PLAN, LAUNCH)]
    names = [f"{Path(code.co_filename).name}:{code.co_name}" for code in counted]
    assert f"{kind}_block" in {code.co_name for code in counted}
    assert len(counted) <= MAX_CALLS, (len(counted), sorted(names))


def test_edge_attr_has_one_name_from_the_block_to_the_kernel():
    for names in (Call._fields, AttentionTensors._fields, edge_attention_fwd.arg_names):
        assert "edge_attr" in names


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_of_a_fused_block_reads_autocast_and_chooses_its_backend_once(kind):
    calls, _ = walk_of(kind)
    names = [code.co_name for code in calls]
    assert names.count("dtypes_of") == names.count("choose_backend") == 1
