"""Compiled code takes tensors as they lie in memory: slices, transposes, samples that share rows."""

import pytest
import torch
from support.compiled import DIM, LAYERS, SIZES, assert_same, make_layer, sample_for


def with_margins(rows):
    """Rows inside a larger buffer, padded on every side."""
    shape = [size + 3 for size in rows.shape]
    buffer = rows.new_full(shape, float("nan"))
    inner = tuple(slice(1, 1 + size) for size in rows.shape)
    buffer[inner] = rows
    return buffer[inner]


LAYOUTS = {
    "padded": with_margins,
    "transposed": lambda rows: rows.transpose(0, -1).contiguous().transpose(0, -1),
    "every_other_row": lambda rows: rows.repeat_interleave(2, -2)[..., ::2, :],
    "at_an_odd_address": lambda rows: torch.cat([rows.new_zeros(1), rows.flatten()])[1:].view(rows.shape),
    "one_row_for_all": lambda rows: rows[..., :1, :].expand(rows.shape),
}


@pytest.fixture(scope="module")
def compiled():
    """A layer and the layer compiled."""
    torch.compiler.reset()
    layer = make_layer("conv")
    return layer, torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_change_neither_output_nor_gradients(compiled, layout):
    sample = sample_for("conv", SIZES[0])
    results = []
    for function in compiled:
        # Leaves of that layout: what arrives at the compiled code lies in memory as it says.
        leaves = {name: LAYOUTS[layout](tensor).detach().requires_grad_() for name, tensor in sample.tensors.items()}
        out = LAYERS["conv"][1](function, sample.graph, leaves)
        weights = torch.linspace(-1, 2, out.numel()).view(out.shape).transpose(0, 1).contiguous().transpose(0, 1)
        gradients = torch.autograd.grad(out, list(leaves.values()), weights)  # a gradient with strides arrives
        results.append({"out": out.detach(), **dict(zip(leaves, gradients, strict=True))})
    assert_same(*results)


def test_attributes_may_come_for_each_sample():
    torch.compiler.reset()
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    tensors = sample.tensors | {"attr": torch.randn(SIZES[0][3], SIZES[0][2], DIM)}
    with torch.no_grad():
        actual, expected = (LAYERS["conv"][1](function, sample.graph, tensors) for function in (compiled, layer))
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize(
    ("name", "message"), [("attr", "edge_attr must have shape"), ("src", "x_src must have 9 rows")]
)
def test_rows_that_are_not_there_raise_while_compiling(name, message):
    torch.compiler.reset()
    layer, sample = make_layer("conv"), sample_for("conv", SIZES[0])
    sample.tensors[name] = sample.tensors[name][..., :-1, :]
    with pytest.raises(Exception, match=message):
        LAYERS["conv"][1](torch.compile(layer, fullgraph=True, backend="eager"), sample.graph, sample.tensors)
