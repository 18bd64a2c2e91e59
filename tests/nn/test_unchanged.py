"""Answers that are kept while modules are unchanged: whatever of them can change ends an answer."""

# ruff: noqa: B023  functions are called in the loop that makes them

import copy
import pickle
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from anemoi.models.triton import gt
from support.edits import (
    EDGES,
    NODES,
    OWNERS,
    attention_block,
    call_anemoi,
    network_block,
    pair_of,
)
from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from anemoi_gt import GraphTransformerProcessorBlock, InteractionBlock
from anemoi_gt.integrations.anemoi import install
from anemoi_gt.integrations.anemoi.upstream import recognise_modules
from anemoi_gt.nn import unchanged
from anemoi_gt.nn.plain import MODULE_HOOKS, modules_alone_decide
from anemoi_gt.nn.unchanged import NOT_READ, CannotKeepError, Snapshot, reading
from anemoi_gt.refusal import not_faster, permanent

SIZES = {"in_channels": 8, "hidden_dim": 8, "out_channels": 8, "num_heads": 2, "edge_dim": 3}


def network_parts(block):
    return block.conv, block.node_mlp


def block_of_a_gpu():
    """Return a block as Anemoi builds it where there is a GPU."""
    block = attention_block()
    del block.conv
    block.conv = gt.graph_transformer_attention_conv
    block.graph_attention_backend = "triton"
    return block


ROOTS = {
    "own block": lambda: (GraphTransformerProcessorBlock(**SIZES, qk_norm=True),),
    "own edge update": lambda: (InteractionBlock(8, edge_dim=8).conv,),
    "Anemoi's block": lambda: (attention_block(),),
    "Anemoi's block of a GPU": lambda: (block_of_a_gpu(),),
    "Anemoi's graph network": lambda: network_parts(network_block()),
}


@pytest.fixture(autouse=True, scope="module")
def anemoi_is_known():
    recognise_modules()


@pytest.fixture(params=ROOTS)
def roots(request):
    return ROOTS[request.param]()


def modules_of(roots):
    return [module for root in roots for module in root.modules()]


def assert_noticed(roots, change, undo):
    """Assert that a snapshot is of other modules after a change, and of these again after it is undone."""
    snapshot = Snapshot.of(roots)
    assert snapshot.is_of(roots)
    change()
    assert not snapshot.is_of(roots)
    undo()
    assert snapshot.is_of(roots)


def test_each_attribute_that_is_set_changed_or_deleted_is_noticed(roots):
    number = 0
    for module in modules_of(roots):
        attributes = vars(module)
        for name in [name for name in attributes if name not in NOT_READ]:
            before = dict(attributes)
            for change in (
                lambda: attributes.update({name: object()}),
                lambda: attributes.pop(name),
            ):
                assert_noticed(roots, change, lambda: attributes.update(before))
                attributes.clear()
                attributes.update(before)  # in the order of before
                number += 1
        assert_noticed(roots, lambda: attributes.update(new=1), lambda: attributes.pop("new"))
    assert number > 20


@pytest.mark.parametrize("value", [torch.ones(3), torch.ones(3).numpy()], ids=["tensor", "array"])
def test_an_attribute_that_becomes_an_array_is_noticed(value):
    (block,) = ROOTS["own block"]()
    norm = block.layer_norm_attention
    eps = norm.eps
    assert_noticed((block,), lambda: setattr(norm, "eps", value), lambda: setattr(norm, "eps", eps))


def test_each_container_of_a_layer_of_messages_that_is_filled_is_noticed(roots):
    for module in modules_of(roots):
        for name, value in vars(module).items():
            if name not in NOT_READ and isinstance(value, dict):
                assert_noticed(roots, lambda: value.update(a=print), value.clear)


@pytest.mark.parametrize("registry", MODULE_HOOKS)
def test_each_hook_is_noticed_and_keeps_no_answer(roots, registry):
    for module in modules_of(roots):
        hooks = getattr(module, registry)
        assert_noticed(roots, lambda: hooks.update({0: print}), hooks.clear)
        hooks[0] = print
        with pytest.raises(CannotKeepError):
            Snapshot.of(roots)
        hooks.clear()


def test_each_child_that_is_replaced_renamed_or_removed_is_noticed(roots):
    number = 0
    for module in modules_of(roots):
        children = module._modules
        for name, child in list(children.items()):
            before = dict(children)
            undo = lambda: (children.clear(), children.update(before))  # noqa: E731
            changes = [
                lambda: children.pop(name),
                lambda: children.update({"renamed": children.pop(name)}),
            ]
            if child is not None:
                changes.append(lambda: children.update({name: None}))
                changes.append(lambda: children.update({name: nn.Tanh()}))
            if any(True for _ in [*child.parameters()] if child is not None):
                changes.append(lambda: children.update({name: copy.deepcopy(child)}))
            for change in changes:
                assert_noticed(roots, change, undo)
                number += 1
    assert number > 20


class OwnParameter(nn.Parameter):
    pass


def test_each_parameter_that_is_replaced_cast_resized_swapped_or_removed_is_noticed(roots):
    number = 0
    for module in modules_of(roots):
        parameters = module._parameters
        for name, parameter in list(parameters.items()):
            before = dict(parameters)
            undo = lambda: (parameters.clear(), parameters.update(before))  # noqa: E731
            assert_noticed(
                roots, lambda: parameters.update({"renamed": parameters.pop(name)}), undo
            )
            if parameter is None:
                new = nn.Parameter(torch.ones(8))
                assert_noticed(roots, lambda: parameters.update({name: new}), undo)
                continue
            data = parameter.data
            for other in (data.double(), data.new_zeros(3)):
                assert_noticed(
                    roots,
                    lambda: setattr(parameter, "data", other),
                    lambda: setattr(parameter, "data", data),
                )
            for other in (None, nn.Parameter(data.clone()), data.clone()):
                assert_noticed(roots, lambda: parameters.update({name: other}), undo)
            swap = lambda: torch.utils.swap_tensors(parameter, own)  # noqa: E731
            own = OwnParameter(data.clone())
            assert_noticed(roots, swap, swap)
            number += 1
    assert number > 5


def test_each_function_of_a_class_and_each_that_it_looks_up_is_noticed(roots):
    snapshot = Snapshot.of(roots)
    for kind in dict.fromkeys(snapshot.kinds):
        for name in ("forward", "new", "__call__"):
            had = vars(kind).get(name)
            setattr(kind, name, lambda self: None)
            assert not snapshot.is_of(roots)
            setattr(kind, name, had) if had is not None else delattr(kind, name)
            # a namespace is compared as it was, also where it ends with the same names
            assert snapshot.is_of(roots)
    number = 0
    for namespace, names, _ in snapshot.namespaces.called:
        for name in names:
            with mock.patch.dict(namespace, {name: print}):
                assert not snapshot.is_of(roots)
            assert snapshot.is_of(roots)
            number += 1
    assert number > 2


def test_an_attribute_of_a_class_ends_all_answers_though_none_computes_with_it(roots):
    """Where `why_not_plain` finds that a change of a class does not count, older answers were not read with it."""
    root = roots[0]
    snapshot = Snapshot.of(roots)
    type(root).new_attribute = 1
    try:
        Snapshot.of(roots)  # asks, and records the class as it is
        assert not snapshot.is_of(roots)
    finally:
        del type(root).new_attribute


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def globally(registry):
    with mock.patch.dict(getattr(torch_module, registry), {0: print}):
        yield


ELSEWHERE = {
    "mode": Mode,
    "call of modules": lambda: mock.patch.object(nn.Module, "__call__", print),
    "implementation of calls": lambda: mock.patch.object(nn.Module, "_call_impl", print),
    **{
        f"hook of all modules: {registry}": lambda registry=registry: globally(registry)
        for registry in vars(torch_module)
        if registry.endswith(("ward_hooks", "ward_pre_hooks"))
    },
    "trace": lambda: mock.patch("torch.jit.is_tracing", return_value=True),
    "compiler": lambda: mock.patch("torch.compiler.is_compiling", return_value=True),
    "export": lambda: mock.patch("torch.compiler.is_exporting", return_value=True),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_where_more_than_modules_decides_nothing_is_kept(name):
    (root,) = ROOTS["own block"]()
    assert modules_alone_decide()
    answers = iter(range(9))
    read = lambda: next(answers)  # noqa: E731
    kept = lambda answer: True  # noqa: E731
    assert [reading((root,), (), read, kept) for _ in range(2)] == [0, 0]
    with ELSEWHERE[name]():
        assert not modules_alone_decide()
        assert [reading((root,), (), read, kept) for _ in range(2)] == [1, 2]


def test_an_answer_is_read_again_for_another_key_and_after_a_change():
    (root,) = ROOTS["own block"]()
    answers = iter(range(9))

    def ask(key, *, kept=True):
        return reading((root,), key, lambda: next(answers), lambda answer: kept)

    assert [ask(("a",)), ask(("a",)), ask(("b",)), ask(("a",))] == [0, 0, 1, 2]
    root.eval()
    assert [ask(("a",)), ask(("a",))] == [3, 3]
    assert [ask(("b",), kept=False), ask(("b",), kept=False)] == [4, 5]
    assert root not in unchanged._READINGS


def hold(root, value):
    root.something = value


CANNOT_KEEP = {
    "list": lambda root: hold(root, [1]),
    "function that holds something": lambda root: hold(root, lambda: root),
    "object": lambda root: hold(root, object()),
    "tuple of lists": lambda root: hold(root, ([1],)),
    "module of a user": lambda root: hold(root, type("Mine", (nn.Module,), {})()),
    "subclass of a plain one": lambda root: hold(root, type("Mine", (nn.Linear,), {})(2, 2)),
    "itself below it": lambda root: hold(root.node_dst_mlp, root),
    "tensor": lambda root: hold(root, torch.ones(3)),
    "buffer": lambda root: root.lin_key.register_buffer("something", torch.ones(3)),
    "attribute of a parameter": lambda root: setattr(root.lin_key.weight, "owner", root),
    "hook of a parameter": lambda root: root.lin_key.weight.register_hook(print),
    "hook after accumulation": lambda root: root.lin_key.weight.register_post_accumulate_grad_hook(
        print
    ),
}


@pytest.mark.parametrize("name", CANNOT_KEEP)
def test_modules_that_hold_what_can_change_in_place_keep_no_answer(name):
    (root,) = ROOTS["own block"]()
    Snapshot.of((root,))
    CANNOT_KEEP[name](root)
    with pytest.raises(CannotKeepError):
        Snapshot.of((root,))


def test_a_module_below_itself_ends_a_comparison():
    (root,) = ROOTS["own block"]()
    snapshot = Snapshot.of((root,))
    root.node_dst_mlp.parent = root
    assert not snapshot.is_of((root,))


def test_a_block_of_a_gpu_is_read_once():
    block, (x, edges) = block_of_a_gpu(), (torch.randn(NODES, 8), torch.randn(EDGES, 8))
    index = torch.randint(NODES, (2, EDGES))
    with install("triton", fusion="sublayers"), torch.no_grad():
        call_anemoi(block, x, edges, index)
        with mock.patch("anemoi_gt.integrations.anemoi.decision._decide") as decides:
            call_anemoi(block, x, edges, index)
    decides.assert_not_called()


@pytest.mark.parametrize("owner", [owner for owner in OWNERS if "swapped" not in owner])
def test_what_blocks_compute_with_is_kept_and_modules_are_freed_copied_and_pickled_as_before(owner):
    _, (block, call) = pair_of(owner)
    before = [set(vars(module)) for module in block.modules()]
    with mock.patch.object(unchanged, "_READINGS", weakref.WeakKeyDictionary()) as kept:
        arguments = torch.randn(NODES, 8), torch.randn(EDGES, 8), torch.randint(NODES, (2, EDGES))
        with torch.autocast("cpu", torch.bfloat16):
            call(*arguments)
        first = {id(module): kept[module].answer for module in kept}
        assert first
        with torch.autocast("cpu", torch.bfloat16):
            call(*arguments)
        assert {id(module): kept[module].answer for module in kept} == first
        assert [set(vars(module)) for module in block.modules()] == before
        copied = pickle.loads(pickle.dumps(copy.deepcopy(block)))
        assert not any(module in kept for module in copied.modules())
        alive = weakref.ref(block)
        gone = weakref.ref(next(block.parameters()))
        del block, call, first
        assert alive() is None  # by counts of references: a model frees its memory at once
        assert gone() is None


@pytest.mark.parametrize(
    ("answer", "is_kept"),
    [
        ((1, not_faster("")), True),
        ((1, permanent("")), False),
        (not_faster(""), True),
        (permanent(""), False),
    ],
)
def test_only_refusals_of_what_is_not_faster_are_kept(answer, is_kept):
    assert unchanged.none_refused(answer) is is_kept
