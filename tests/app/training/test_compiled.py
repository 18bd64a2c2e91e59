"""Training steps with compiled blocks: the results of eager ones, what is compiled, and what is refused."""

import copy

import pytest
import torch
import torch._inductor.comms
from support.capturing import capture_in_place, without_inductor
from support.releases import TORCH
from torch import nn
from torch._dynamo.utils import counters

from anemoi_gt.app.datasets.forecast_dataset import TrainingBatches
from anemoi_gt.app.training import TrainingConfig
from anemoi_gt.app.training.run_files import load_checkpoint
from anemoi_gt.app.training.step import OVERLAP_MESSAGES, TrainingStep, compile_blocks
from anemoi_gt.nn import GraphTransformerBaseBlock

from ..conftest import assert_same

pytestmark = pytest.mark.compiled

CPU = torch.device("cpu")
STEPS = 2
MOVES = "reorder_for_compute_comm_overlap"  # an option of Inductor


@pytest.fixture(autouse=True, scope="module")
def in_seconds():
    """Clear what was compiled before, and leave out Inductor."""
    torch.compiler.reset()
    with without_inductor():
        yield


@pytest.fixture
def compiled_graphs():
    """Return how many were traced since the last call, at first in this test; AOT would double the time."""
    torch.compiler.reset()
    counters.clear()
    with without_inductor("eager"):
        yield lambda: counters.pop("stats", {}).get("unique_graphs", 0)


@pytest.fixture
def make_step(splits, make_model):
    """Make the step of a small model with dropout."""

    def make_step(model=None, *, compile=False, precision="32-true", **options):
        numbers = {"steps": 2 * STEPS, "batch_size": 2, "warmup_steps": 1, "device": "cpu"}
        config = TrainingConfig(**numbers, compile=compile, precision=precision)
        return TrainingStep(model or make_model(**options), splits.train.weights, config, CPU)

    return make_step


@pytest.fixture
def trained(splits):
    """Take steps; return their losses and the last weights."""

    def trained(step):
        torch.manual_seed(3)
        losses = [step.training_step(batch) for batch in batches_of(splits)]
        return [torch.stack(losses), *(parameter.detach() for parameter in step.model.parameters())]

    return trained


def batches_of(splits):
    return TrainingBatches(splits.train, 2, STEPS, seed=0, device=CPU).since(0)


def compiled_parts(model):
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def test_every_block_and_the_end_of_the_decoder_are_compiled_and_nothing_else(make_step):
    model = make_step(compile=True).model
    blocks = [part for part in model.modules() if isinstance(part, GraphTransformerBaseBlock)]
    assert compiled_parts(model) == [*blocks, model.decoder["data"].node_data_extractor]
    assert len(compiled_parts(model)) == 4
    assert not compiled_parts(make_step().model)


def test_copies_are_not_compiled_and_names_stay(make_step):
    plain, step = make_step(), make_step(compile=True)
    assert not compiled_parts(step.average)
    assert not compiled_parts(copy.deepcopy(step.model))
    ours, theirs = step.state_dict(), plain.state_dict()
    for part in ("model", "average"):
        assert list(ours[part]) == list(theirs[part])


def test_validation_and_the_best_model_are_not_compiled(run, compiled_graphs):
    trainer, _ = run(compile=True)
    # each kind of block and the decoder's end in training, none without gradients
    assert compiled_graphs() == 4
    best = trainer.best_model()
    assert not compiled_parts(best)
    assert compiled_parts(trainer.step.model)
    assert_same(best.state_dict(), load_checkpoint(trainer.folder / "best.pt")["average"])


@pytest.mark.parametrize(("precision", "checkpointed"), [("32-true", False), ("bf16-mixed", True)])
def test_compiled_steps_agree_with_eager_ones_to_rounding_and_captured_ones_have_their_bits(
    make_step, trained, precision, checkpointed
):
    options = {"num_layers": 2, "precision": precision}
    if checkpointed:
        options |= {"checkpoint_groups": 1, "dropout": 0.0}
    compiled = trained(make_step(compile=True, **options))
    eager = trained(make_step(compile=False, **options))
    torch.testing.assert_close(compiled, eager)
    captured = make_step(compile=True, **options)
    captured.capture(capture_in_place)
    assert_same(trained(captured), compiled)
    assert compiled_parts(captured.model)


@pytest.mark.parametrize("has_messages", [False, True])
def test_blocks_are_compiled_with_overlapped_messages_by_options_that_inductor_has(
    make_model, monkeypatch, has_messages
):
    assert set(OVERLAP_MESSAGES) <= set(torch._inductor.list_options())
    assert all(hasattr(torch._inductor.comms, name) for name in OVERLAP_MESSAGES[f"{MOVES}_passes"])
    calls = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: calls.append(options))
    compile_blocks(make_model(), has_messages=has_messages)
    moved = None
    if has_messages:
        moved = {MOVES: True, f"{MOVES}_passes": ["sink_waits", "raise_comms"]}
    assert calls == [{"dynamic": False, "options": moved}] * 4


def test_a_state_goes_from_a_compiled_step_to_another_and_back(make_step, trained):
    compiled, plain = make_step(compile=True), make_step()
    trained(compiled)
    plain.load_state_dict(copy.deepcopy(compiled.state_dict()))
    again = make_step(compile=True)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same(trained(again), trained(compiled))


def test_layers_of_a_kind_share_compiled_code(make_step, splits, compiled_graphs):
    # first the encoder, the processor, the decoder and its end, then none
    for layers, graphs in ((3, 4), (5, 0)):
        step = make_step(compile=True, num_layers=layers, dropout=0.0)
        step.training_step(next(batches_of(splits)))
        assert compiled_graphs() == graphs


def test_chunks_of_a_mapper_share_compiled_code(make_step, splits, compiled_graphs):
    options = {"mapper_chunks": 2, "checkpoint_groups": 1, "dropout": 0.0}
    compiled = make_step(compile=True, **options)
    eager = make_step(compile=False, **options)
    loss = compiled.training_step(next(batches_of(splits)))
    expected = eager.training_step(next(batches_of(splits)))
    # processor, end of the decoder, and encoder and decoder, which share code since PyTorch 2.15
    assert compiled_graphs() == (3 if TORCH >= (2, 15) else 4)
    torch.testing.assert_close(loss, expected)


def test_a_model_without_blocks_is_refused_before_a_step(make_step):
    blocks = "blocks of graph transformers or graph networks"
    message = f"false for a model without {blocks}, got true and Linear"
    with pytest.raises(ValueError, match=message):
        make_step(nn.Linear(2, 2), compile=True)
