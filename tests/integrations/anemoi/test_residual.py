"""The residual of Anemoi's models by `index_add`: bitwise equal results, and gradients by a gather."""

import pytest
import torch
from anemoi.models.models import AnemoiModelEncProcDec
from anemoi.models.models.ens_encoder_processor_decoder import AnemoiEnsModelEncProcDec

from anemoi_gt.integrations import anemoi as integration

BATCH = 2
TIME = 2
ENSEMBLE = 3
GRID = 5
# prognostic variables of output and input
INDICES = {"global": ([0, 3, 1], [2, 4, 0]), "regional": ([1], [0])}


def clamp(x):
    """A bounding that writes into its input, as Anemoi's do."""
    x[..., [1]] = x[..., [1]].relu()
    return x


class Model(torch.nn.Module):
    """The attributes that Anemoi's models read when they assemble their output."""

    def __init__(self):
        super().__init__()
        self.n_step_output = TIME
        self._internal_output_idx = {
            name: torch.tensor(out, dtype=torch.int32) for name, (out, _) in INDICES.items()
        }
        self._internal_input_idx = {
            name: torch.tensor(skip, dtype=torch.int32) for name, (_, skip) in INDICES.items()
        }
        self.boundings = {"global": [clamp, lambda x: x * 2], "regional": []}


MODEL = Model()


def assemble(kind, dataset, dtype, with_skip):
    """Output, and gradients of decoder output and residual."""
    generator = torch.Generator().manual_seed(0)
    x_out = (
        torch.randn(BATCH * ENSEMBLE * GRID, TIME * 4, generator=generator)
        .to(dtype)
        .requires_grad_()
    )
    skip = torch.randn(BATCH, TIME, ENSEMBLE, GRID, 6, generator=generator, requires_grad=True)
    size = BATCH * ENSEMBLE if kind is AnemoiEnsModelEncProcDec else ENSEMBLE
    out = kind._assemble_output(
        MODEL, x_out, skip if with_skip else None, BATCH, size, torch.float32, dataset
    )
    return out, *torch.autograd.grad(out.sin().sum(), (x_out, skip) if with_skip else (x_out,))


@pytest.mark.parametrize("dataset", INDICES)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize(
    ("kind", "with_skip"),  # without residual the output is a copy that boundings may write into
    (
        (AnemoiModelEncProcDec, True),
        (AnemoiModelEncProcDec, False),
        (AnemoiEnsModelEncProcDec, True),
    ),
)
def test_the_output_is_upstreams_bit_for_bit(kind, dataset, dtype, with_skip):
    expected = assemble(kind, dataset, dtype, with_skip)
    with integration.install():
        actual = assemble(kind, dataset, dtype, with_skip)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_gradient_of_the_residual_accumulates_nothing():
    def operators():
        with torch.autograd.profiler.profile() as profile:
            assemble(AnemoiModelEncProcDec, "regional", torch.float32, with_skip=True)
        return {event.key for event in profile.key_averages()}

    assert "aten::_index_put_impl_" in operators()
    with integration.install():
        assert "aten::_index_put_impl_" not in operators()


def test_a_residual_of_another_number_of_steps_is_refused():
    x_out, skip = torch.zeros(GRID, TIME * 4), torch.zeros(1, TIME + 1, 1, GRID, 6)
    with integration.install(), pytest.raises(AssertionError, match="with 2 output steps, got"):
        AnemoiModelEncProcDec._assemble_output(MODEL, x_out, skip, 1, 1, torch.float32, "global")
