"""Training steps with compiled blocks: the numbers of others, what is compiled and what is not, and what is refused."""

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
from anemoi_gt.training.compilation import HIDE_MESSAGES, compile_blocks
from anemoi_gt.training.data_loading import TrainingBatches
from anemoi_gt.training.step import TrainingStep

CPU, STEPS = torch.device("cpu"), 4
MOVES = "reorder_for_compute_comm_overlap"  # an option of Inductor


@pytest.fixture(autouse=True, scope="module")
def in_seconds():
    """Forget what was compiled before, and let Inductor out."""
    torch.compiler.reset()
    with without_inductor():
        yield


@pytest.fixture
def compiled_graphs():
    """Say how many were compiled since this was called last, at first in this test."""
    counters.clear()

    def compiled_graphs():
        return counters.pop("stats", {}).get("unique_graphs", 0)

    return compiled_graphs


@pytest.fixture
def make_learner(splits, make_model):
    """Make a learner of a small model with dropout."""

    def make_learner(model=None, **numbers):
        config = TrainingConfig(steps=2 * STEPS, batch_size=2, warmup_steps=1, device="cpu", **numbers)
        return TrainingStep(make_model() if model is None else model, splits.train.weights, config, CPU)

    return make_learner


@pytest.fixture
def learnt(splits):
    """Take steps; returns their losses and the last weights."""

    def learnt(learner):
        torch.manual_seed(3)
        losses = [learner.training_step(batch) for batch in batches_of(splits)]
        return [torch.stack(losses), *(parameter.detach() for parameter in learner.model.parameters())]

    return learnt


@pytest.fixture
def deep_model(splits):
    """Make a model of so many layers."""
    graph = icosphere_graph(splits.train.nodes, refinement=1)
    fields = splits.train.in_channels, splits.train.out_channels
    return lambda layers: EncoderProcessorDecoder(graph, *fields, channels=8, heads=2, num_layers=layers)


def batches_of(splits):
    return TrainingBatches(splits.train, 2, STEPS, seed=0, device=CPU).since(0)


def compiled_parts(model):
    return [module for module in model.modules() if module._compiled_call_impl is not None]


def assert_same_bits(actual, expected):
    assert [torch.equal(a, b) for a, b in zip(actual, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_compiled_steps_give_the_numbers_of_others_to_rounding(make_learner, learnt, precision):
    compiled, plain = (learnt(make_learner(compile=compile_, precision=precision)) for compile_ in (True, False))
    torch.testing.assert_close(compiled, plain)


def test_every_block_is_compiled_and_nothing_else(make_learner):
    model = make_learner(compile=True).model
    assert compiled_parts(model) == [part for part in model.modules() if isinstance(part, GraphTransformerBaseBlock)]
    assert len(compiled_parts(model)) == 3 and not compiled_parts(make_learner().model)


def test_copies_are_not_compiled_and_names_stay(make_learner):
    plain, learner = make_learner(), make_learner(compile=True)
    assert not compiled_parts(learner.average) and not compiled_parts(copy.deepcopy(learner.model))
    ours, theirs = learner.state_dict(), plain.state_dict()
    for part in ("model", "average"):
        assert list(ours[part]) == list(theirs[part])


def test_validation_and_the_best_model_compute_as_ever(run, compiled_graphs):
    torch.compiler.reset()
    trainer, _ = run(compile=True)
    assert compiled_graphs() == 3  # each kind of block in training, none without gradients
    best = trainer.best_model()
    assert not compiled_parts(best) and compiled_parts(trainer.step.model)
    expected = load_checkpoint(trainer.folder / "best.pt")["average"]
    assert_same_bits(list(best.state_dict().values()), list(expected.values()))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_layers_that_are_computed_again_may_be_compiled(make_learner, learnt, splits, precision):
    graph = icosphere_graph(splits.train.nodes, refinement=1)
    fields = splits.train.in_channels, splits.train.out_channels

    def model():
        torch.manual_seed(0)
        return EncoderProcessorDecoder(graph, *fields, channels=8, heads=2, num_layers=2, checkpoint_groups=1)

    compiled, plain = (learnt(make_learner(model(), compile=c, precision=precision)) for c in (True, False))
    torch.testing.assert_close(compiled, plain)


def test_inductor_knows_what_is_asked_of_it():
    assert set(HIDE_MESSAGES) <= set(torch._inductor.list_options())
    assert all(hasattr(torch._inductor.comms, name) for name in HIDE_MESSAGES[f"{MOVES}_passes"])


def test_blocks_are_compiled_with_messages_moved(make_model, monkeypatch):
    asked = []
    monkeypatch.setattr(nn.Module, "compile", lambda module, **options: asked.append(options))
    compile_blocks(make_model())
    moved = {MOVES: True, f"{MOVES}_passes": ["sink_waits", "raise_comms"]}
    assert asked == [{"dynamic": False, "options": moved}] * 3


def test_a_state_goes_from_a_compiled_learner_to_another_and_back(make_learner, learnt):
    compiled, plain = make_learner(compile=True), make_learner()
    learnt(compiled)
    plain.load_state_dict(copy.deepcopy(compiled.state_dict()))
    again = make_learner(compile=True)
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert_same_bits(learnt(again), learnt(compiled))


def test_layers_of_a_kind_share_what_was_compiled(make_learner, deep_model, splits, compiled_graphs):
    torch.compiler.reset()
    make_learner(deep_model(3), compile=True).training_step(next(batches_of(splits)))
    assert compiled_graphs() == 3  # of the encoder, the processor and the decoder
    make_learner(deep_model(5), compile=True).training_step(next(batches_of(splits)))
    assert compiled_graphs() == 0


def test_a_model_may_be_compiled_twice(make_learner, learnt, compiled_graphs):
    once = learnt(make_learner(compile=True))
    compiled_graphs()
    first = make_learner(compile=True)
    second = make_learner(first.model, compile=True)  # as a model that is divided gets another learner
    assert_same_bits(learnt(second), once)
    assert compiled_graphs() == 0 and not compiled_parts(second.average)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_recorded_compiled_steps_give_the_bits_of_compiled_ones(make_learner, learnt, precision):
    launched, recorded = (make_learner(compile=True, precision=precision) for _ in range(2))
    recorded.capture(capture_in_place)
    assert_same_bits(learnt(recorded), learnt(launched))
    assert compiled_parts(recorded.model)


def test_a_model_without_blocks_is_refused_before_a_step(make_learner):
    with pytest.raises(ValueError, match="false for a model without graph-transformer blocks, got true and Linear"):
        make_learner(nn.Linear(2, 2), compile=True)
