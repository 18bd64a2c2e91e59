"""Training steps with compiled blocks: the results of eager ones, what is compiled and what is not, and what is refused."""

import copy

import pytest
import torch
import torch._inductor.comms
from support.aot_eager import without_inductor
from support.capturing import capture_in_place
from torch import nn
from torch._dynamo.utils import counters

from anemoi_gt import EncoderProcessorDecoder
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.nn import GraphTransformerBaseBlock
from anemoi_gt.training import TrainingConfig
from anemoi_gt.training.checkpoint import load_checkpoint
from anemoi_gt.training.compilation import OVERLAP_MESSAGES, compile_blocks
from anemoi_gt.training.data_loading import TrainingBatches
from anemoi_gt.training.step import TrainingStep

CPU, STEPS = torch.device("cpu"), 4
MOVES = "reorder_for_compute_comm_overlap"  # an option of Inductor


@pytest.fixture(autouse=True, scope="module")
def in_seconds():
    """Clear what was compiled before, and leave out Inductor."""
    torch.compiler.reset()
    with without_inductor():
        yield


@pytest.fixture
def compiled_graphs():
    """Return how many were compiled since the last call, at first in this test."""
    counters.clear()

    def compiled_graphs():
        return counters.pop("stats", {}).get("unique_graphs", 0)

    return compiled_graphs


@pytest.fixture
def make_step(splits, make_model):
    """Make the step of a small model with dropout."""

    def make_step(model=None, **numbers):
        config = TrainingConfig(steps=2 * STEPS, batch_size=2, warmup_steps=1, device="cpu", **numbers)
        return TrainingStep(make_model() if model is None else model, splits.train.weights, config, CPU)

    return make_step


@pytest.fixture
def trained(splits):
    """Take steps; return their losses and the last weights."""

    def trained(step):
        torch.manual_seed(3)
        losses = [step.training_step(batch) for batch in batches_of(splits)]
        return [torch.stack(losses), *(parameter.detach() for parameter in step.model.parameters())]

    return trained


@pytest.fixture
def deep_model(splits):
    """Make a model of some layers."""
    graph = icosphere_graph(splits.train.nodes, refinement=1)
    fields = splits.train.in_channels, splits.train.out_channels

    def deep_model(layers, **options):
        torch.manual_seed(0)
        return EncoderProcessorDecoder(graph, *fields, channels=8, heads=2, num_layers=layers, **options)

    return deep_model


def batches_of(splits):
    return TrainingBatches(splits.train, 2, STEPS, seed=0, device=CPU).since(0)


def compiled_parts(model):
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def assert_same_bits(actual, expected):
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * len(expected)


def test_every_block_is_compiled_and_nothing_else(make_step):
    model = make_step(compile=True).model
    assert compiled_parts(model) == [part for part in model.modules() if isinstance(part, GraphTransformerBaseBlock)]
    assert len(compiled_parts(model)) == 3 and not compiled_parts(make_step().model)


def test_copies_are_not_compiled_and_names_stay(make_step):
    plain, step = make_step(), make_step(compile=True)
    assert not compiled_parts(step.average) and not compiled_parts(copy.deepcopy(step.model))
    ours, theirs = step.state_dict(), plain.state_dict()
    for part in ("model", "average"):
        assert list(ours[part]) == list(theirs[part])


def test_validation_and_the_best_model_are_not_compiled(run, compiled_graphs):
    torch.compiler.reset()
    trainer, _ = run(compile=True)
    assert compiled_graphs() == 3  # each kind of block in training, none without gradients
    best = trainer.best_model()
    assert not compiled_parts(best) and compiled_parts(trainer.step.model)
    expected = load_checkpoint(trainer.folder / "best.pt")["average"]
    assert_same_bits(list(best.state_dict().values()), list(expected.values()))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_steps_agree_with_eager_ones_to_rounding(make_step, trained, deep_model, precision, checkpointed):
    options = {"checkpoint_groups": 1} if checkpointed else {"dropout": 0.1}
    compiled, eager = (
        trained(make_step(deep_model(2, **options), compile=way, precision=precision)) for way in (True, False)
    )
    torch.testing.assert_close(compiled, eager)


def test_inductor_has_the_options_that_are_set():
    assert set(OVERLAP_MESSAGES) <= set(torch._inductor.list_options())
    assert all(hasattr(torch._inductor.comms, name) for name in OVERLAP_MESSAGES[f"{MOVES}_passes"])


def test_blocks_are_compiled_with_overlapped_messages(make_model, monkeypatch):
    calls = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: calls.append(options))
    compile_blocks(make_model())
    moved = {MOVES: True, f"{MOVES}_passes": ["sink_waits", "raise_comms"]}
    assert calls == [{"dynamic": False, "options": moved}] * 3


def test_a_state_goes_from_a_compiled_step_to_another_and_back(make_step, trained):
    compiled, plain = make_step(compile=True), make_step()
    trained(compiled)
    plain.load_state_dict(copy.deepcopy(compiled.state_dict()))
    again = make_step(compile=True)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same_bits(trained(again), trained(compiled))


def test_layers_of_a_kind_share_what_was_compiled(make_step, deep_model, splits, compiled_graphs):
    torch.compiler.reset()
    make_step(deep_model(3), compile=True).training_step(next(batches_of(splits)))
    assert compiled_graphs() == 3  # of the encoder, the processor and the decoder
    make_step(deep_model(5), compile=True).training_step(next(batches_of(splits)))
    assert compiled_graphs() == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_captured_compiled_steps_have_the_bits_of_compiled_ones(make_step, trained, precision):
    launched, captured = (make_step(compile=True, precision=precision) for _ in range(2))
    captured.capture(capture_in_place)
    assert_same_bits(trained(captured), trained(launched))
    assert compiled_parts(captured.model)


def test_a_model_without_blocks_is_refused_before_a_step(make_step):
    with pytest.raises(ValueError, match="false for a model without graph-transformer blocks, got true and Linear"):
        make_step(nn.Linear(2, 2), compile=True)
