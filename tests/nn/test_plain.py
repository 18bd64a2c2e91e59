"""The rule for modules that this library replaces: what their results depend on, read from their code, and each part of it."""

import ast
import copy
import importlib
from pathlib import Path

import pytest
import torch
from anemoi.models.layers.conv import GraphConv
from anemoi.models.layers.conv import GraphTransformerConv as AnemoiConv
from anemoi.models.layers.utils import load_layer_kernels
from support.reads import methods_of, reads_of
from support.upstream import OLD, OTHERS, PINNED, each, folder_of
from torch import nn
from torch.nn.modules import module as torch_module
from torch_geometric.nn import MeanAggregation, TransformerConv
from torch_geometric.nn.conv import MessagePassing

from anemoi_gt.integrations.anemoi.upstream import recognise_modules
from anemoi_gt.integrations.anemoi.versions import KNOWN
from anemoi_gt.nn import (
    AutocastLayerNorm,
    GraphTransformerConv,
    GraphTransformerProcessorBlock,
    InteractionConv,
)
from anemoi_gt.nn import plain as rule
from anemoi_gt.nn.plain import TABLE, why_not_plain
from anemoi_gt.refusal import RefusalKind

PERMANENT = RefusalKind.PERMANENT
TRANSIENT = RefusalKind.TRANSIENT
BLOCK_SIZES = {
    **{"in_channels": 8, "hidden_dim": 8, "out_channels": 8},
    **{"num_heads": 2, "edge_dim": 3},
}


@pytest.fixture(autouse=True, scope="module")
def anemoi_is_known():
    recognise_modules()
    yield
    rule.forget("anemoi")


# Attributes that code of these classes reads, and this library in its place, or that change no result.
OF_NORM = ("normalized_shape", "weight", "bias", "eps")
OF_MLP = ("mlp", "layer_norm")
OF_GATED_LINEAR = ("gate_proj", "value_proj", "gating")
OF_CONDITIONAL_NORM = ("norm", "scale", "bias")
PROJECTIONS = ("lin_query", "lin_key", "lin_value", "lin_self", "lin_edge", "projection")
OF_ATTENTION = ("heads", "out_channels", "dropout", "training", "flow")
OF_OWN_BLOCK = (
    *(*PROJECTIONS, "layer_norm_attention", "layer_norm_attention_src", "q_norm", "k_norm"),
    *("edge_pre_mlp", "num_heads", "config", "dropout", "training"),
    *("channels", "hidden_dim", "mlp_implementation", "layer_kernels"),  # of what it is built
)
OF_ANEMOI_BLOCK = (
    *(*PROJECTIONS, "q_norm", "k_norm", "qk_norm", "edge_pre_mlp", "conv"),
    *("layer_norm_mlp_dst", "node_dst_mlp", "layer_norm_mlp_src", "node_src_mlp"),
    *("num_heads", "out_channels_conv"),
    # the choice between two implementations of its attention, by `conv`
    *("graph_attention_backend", "_attention_backend_applied"),
    *("_cached_halo_info", "_cached_halo_cache_specs"),  # of Anemoi's exchange
)
READ = {
    "torch.nn.modules.linear.Linear": ("weight", "bias"),
    "torch.nn.modules.normalization.LayerNorm": OF_NORM,
    "torch.nn.modules.normalization.RMSNorm": ("normalized_shape", "weight", "eps"),
    "torch.nn.modules.activation.GELU": ("approximate",),
    "torch.nn.modules.container.Sequential": ("_modules",),
    "anemoi_gt.nn.norm.AutocastLayerNorm": OF_NORM,
    "anemoi_gt.nn.norm.ConditionalLayerNorm": OF_CONDITIONAL_NORM,
    "anemoi_gt.nn.mapper.FieldExtractor": ("_modules",),
    "anemoi_gt.nn.mlp.MLP": ("mlp",),
    "anemoi_gt.nn.mlp.NormedMLP": OF_MLP,
    "anemoi_gt.nn.mlp.GatedLinear": OF_GATED_LINEAR,
    "anemoi_gt.nn.block.GraphTransformerProcessorBlock": OF_OWN_BLOCK,
    "anemoi_gt.nn.block.GraphTransformerMapperBlock": OF_OWN_BLOCK,
    "anemoi_gt.nn.conv.GraphTransformerConv": ("lin_edge", *OF_ATTENTION),
    "anemoi_gt.nn.interaction_network.InteractionConv": ("edge_mlp", "sum_of"),
    "torch_geometric.nn.dense.linear.Linear": ("weight", "bias"),
    "torch_geometric.nn.aggr.basic.SumAggregation": ("_deterministic",),
    "torch_geometric.nn.conv.transformer_conv.TransformerConv": (
        *("lin_query", "lin_key", "lin_value", "lin_edge", "lin_skip", "lin_beta"),
        *("concat", "root_weight", *OF_ATTENTION),
    ),
    "anemoi.models.layers.normalization.AutocastLayerNorm": OF_NORM,
    # the dtype of its result, which a linear map under autocast casts
    "anemoi.models.layers.normalization.ConditionalLayerNorm": (*OF_CONDITIONAL_NORM, "autocast"),
    "anemoi.models.layers.mlp.MLP": OF_MLP,
    "anemoi.models.layers.mlp.GatedMLPLayer": OF_GATED_LINEAR,
    "anemoi.models.layers.conv.GraphTransformerConv": OF_ATTENTION,
    "anemoi.models.layers.conv.GraphConv": ("edge_mlp",),
    "anemoi.models.layers.block.GraphTransformerProcessorBlock": OF_ANEMOI_BLOCK,
    "anemoi.models.layers.block.GraphTransformerMapperBlock": OF_ANEMOI_BLOCK,
    "anemoi.models.layers.graph_provider.StaticGraphProvider": (
        *("edge_attr", "edge_inc", "edge_index_base", "trainable"),
    ),
    "anemoi.models.layers.attention.SDPAAttentionWrapper": ("create_mask", "mask"),
}
OF_MESSAGES = (
    *(*rule.PYG_HOOKS, rule.AGGREGATION, rule.EXPLAIN, "fuse", "node_dim", "_decomposed_layers"),
    # what its constructor derives from the methods, and what `message` writes
    *("inspector", "_user_args", "_fused_user_args", "_alpha"),
    "SUPPORTS_FUSED_EDGE_INDEX",  # only read where `fuse` is True
)


def known_names(path):
    """Return the attributes that a class may read: what is looked at, and what changes no result."""
    row = TABLE[path]
    names = {"__call__", "__class__", "inplace", *rule.NOT_COMPUTING}
    names |= {*READ.get(path, ()), *(attribute for attribute, _ in row.messages)}
    return names | {*OF_MESSAGES} if row.messages else names


def functions_of(kind):
    """Return the functions that the rule compares of a class and its bases."""
    return dict.fromkeys(
        name for name, _, _ in rule._functions_of(kind, TABLE[rule.qualified_name(kind)])
    )


def import_class(path):
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("path", TABLE)
def test_every_attribute_that_the_code_of_a_class_reads_is_looked_at(path):
    kind = import_class(path)
    if issubclass(kind, MessagePassing):  # PyG generates `propagate` of the class of a layer
        sizes = {AnemoiConv: (3,), GraphConv: (3, 3, load_layer_kernels())}
        kind(*sizes.get(kind, (3, 3)))
    functions = functions_of(kind)
    start = [name for name in ("forward", "propagate", "attend", "apply_gt") if name in functions]
    unknown = reads_of(methods_of(kind), start) - known_names(path) - set(functions)
    assert not unknown, f"{path} depends on {sorted(unknown)}, which nn.plain does not look at"


@pytest.mark.parametrize("path", [path for path in TABLE if path.startswith("anemoi.")])
@pytest.mark.parametrize("version", each(*OLD, PINNED, *OTHERS))
def test_every_attribute_that_versions_of_anemoi_read_is_looked_at(version, path):
    module, _, name = path.rpartition(".")
    file = folder_of(version) / Path(*module.split(".")).with_suffix(".py")
    classes = {}
    if file.is_file():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                functions = {f.name: f for f in node.body if isinstance(f, ast.FunctionDef)}
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[node.name] = (functions, bases)
    if name not in classes:
        assert version < "0.16" or version.startswith("0.9"), f"{path} has gone"
        return
    resolved, left, functions = [], [name], set()
    while left:
        owner = left.pop(0)
        of_class, bases = classes.get(owner, ({}, []))
        resolved.append(of_class)
        # recognised by the hash of its body
        functions |= {function for function in of_class if f"{owner}.{function}" in KNOWN}
        left += bases
    of_pyg = functions_of(AnemoiConv) if TABLE[path].messages else ()
    start = functions
    if "forward" in TABLE[path].keeps:
        start = functions - {"forward"}
    unknown = reads_of(resolved, start) - known_names(path) - {*functions, *of_pyg, "forward"}
    assert not unknown, f"{version}: {sorted(unknown)}"


# layers of PyG's message passing that this library replaces, by role
LAYERS = {
    rule.ATTENTION: lambda: GraphTransformerConv(6, 4),
    rule.PYG_ATTENTION: lambda: TransformerConv(6, 4),
    rule.ANEMOI_ATTENTION: lambda: AnemoiConv(4),
    rule.INTERACTION: lambda: InteractionConv(6, 4),
}


MESSAGE_METHODS = [
    name
    for name in functions_of(TransformerConv)
    if name != "forward" and not isinstance(getattr(TransformerConv, name), property)
]
roles = pytest.mark.parametrize("role", LAYERS)


@roles
def test_a_new_layer_is_plain(role):
    assert why_not_plain(("conv", LAYERS[role](), (role,))) is None


def test_the_table_has_every_registry_of_hooks_that_there_is():
    registries = {name for name in vars(AnemoiConv(4)) if name.endswith("_hooks")}
    in_state_dicts = {name for name in registries if "state_dict" in name}
    assert registries - in_state_dicts == {*rule.MODULE_HOOKS, *rule.PYG_HOOKS}
    of_all = {name for name in vars(torch_module) if name.endswith("_hooks")}
    of_registration = {name for name in of_all if "registration" in name}
    assert of_all - of_registration == {f"_global{name}" for name in rule.MODULE_HOOKS}


@roles
@pytest.mark.parametrize("registry", rule.PYG_HOOKS)
def test_a_message_hook_is_seen_while_it_is_there(role, registry):
    layer = LAYERS[role]()
    register = getattr(layer, f"register{registry}".removesuffix("s"))
    hook = register(lambda *_: None)
    assert why_not_plain(("conv", layer, (role,))).kind is TRANSIENT
    hook.remove()
    assert why_not_plain(("conv", layer, (role,))) is None


@roles
@pytest.mark.parametrize("name", MESSAGE_METHODS)
@pytest.mark.parametrize("where", ("instance", "class", "subclass"))
def test_another_method_of_message_passing_is_seen(role, name, where, monkeypatch):
    layer = LAYERS[role]()
    method = getattr(type(layer), name)
    other = lambda *args, **kwargs: method(*args, **kwargs)  # noqa: E731
    if where == "instance":
        monkeypatch.setattr(layer, name, other, raising=False)
    elif where == "class":
        monkeypatch.setattr(type(layer), name, other)
    else:
        layer.__class__ = type("Own", (type(layer),), {name: other})
    assert why_not_plain(("conv", layer, (role,))).kind is PERMANENT
    monkeypatch.undo()
    if where != "subclass":
        assert why_not_plain(("conv", layer, (role,))) is None


@roles
@pytest.mark.parametrize("name", rule.GENERATED)
@pytest.mark.parametrize("where", ("instance", "class", "subclass"))
def test_another_generated_method_is_seen_in_a_class_recognised_before_its_first_layer(
    role, name, where, monkeypatch
):
    layer = LAYERS[role]()
    kind = type(layer)
    method = getattr(kind, name)
    other = lambda *args, **kwargs: method(*args, **kwargs)  # noqa: E731
    with monkeypatch.context() as before:
        for generated in (*rule.GENERATED, "_orig_propagate", "_jinja_propagate"):
            before.delattr(kind, generated)
        rule.recognise(kind)
        if where == "subclass":
            own = type("Own", (kind,), {name: other})
            assert f"overrides {name}" == rule.why_overridden(own, kind)
    if where == "instance":
        monkeypatch.setattr(layer, name, other, raising=False)
    elif where == "class":
        monkeypatch.setattr(kind, name, other)
    else:
        layer.__class__ = own
    assert why_not_plain(("conv", layer, (role,))).kind is PERMANENT
    monkeypatch.undo()
    if where != "subclass":
        assert why_not_plain(("conv", layer, (role,))) is None


@roles
@pytest.mark.parametrize(
    "change",
    (
        lambda layer: setattr(layer, "aggr_module", MeanAggregation()),
        lambda layer: setattr(layer, "aggr_module", None),
        lambda layer: setattr(layer.aggr_module, "reduce", layer.aggr_module.reduce),
        lambda layer: setattr(layer, "node_dim", 1),
        lambda layer: setattr(layer, "fuse", True),
    ),
    ids=("another aggregation", "none", "method of the aggregation", "node_dim", "fuse"),
)
def test_another_aggregation_is_seen(role, change):
    layer = LAYERS[role]()
    change(layer)
    assert why_not_plain(("conv", layer, (role,))).kind is PERMANENT


REGISTER = {
    "forward": {"register_forward_hook": {}},
    "with keyword arguments": {"register_forward_hook": {"with_kwargs": True}},
    "always called": {"register_forward_hook": {"always_call": True}},
    "first": {"register_forward_hook": {"prepend": True}},
    "before": {"register_forward_pre_hook": {}},
    "before, with keyword arguments": {"register_forward_pre_hook": {"with_kwargs": True}},
    "backward": {"register_full_backward_hook": {}},
    "before backward": {"register_full_backward_pre_hook": {}},
    "legacy backward": {"register_backward_hook": {}},
}


@pytest.mark.parametrize("register", REGISTER.values(), ids=REGISTER)
@pytest.mark.parametrize("of_aggregation", (False, True), ids=("linear map", "aggregation"))
def test_a_hook_of_a_module_is_seen_while_it_is_there(register, of_aggregation):
    ((method, options),) = register.items()
    watched, question = nn.Linear(2, 2), rule.LINEAR
    asked = watched
    if of_aggregation:
        asked, question = AnemoiConv(4), rule.ANEMOI_ATTENTION
        watched = asked.aggr_module
    hook = getattr(watched, method)(lambda *_: None, **options)
    assert why_not_plain(("x", asked, (question,))).kind is TRANSIENT
    hook.remove()
    assert why_not_plain(("x", asked, (question,))) is None


@pytest.mark.parametrize("registry", ("forward_hook", "forward_pre_hook", "full_backward_hook"))
def test_hooks_of_all_modules_are_seen_while_they_are_there(registry):
    register = getattr(torch_module, f"register_module_{registry}")
    hook = register(lambda *_: None)
    refusal = why_not_plain(("lin", nn.Linear(2, 2), (rule.LINEAR,)))
    hook.remove()
    assert refusal.kind is TRANSIENT
    assert why_not_plain(("lin", nn.Linear(2, 2), (rule.LINEAR,))) is None


@pytest.mark.parametrize("kind", (nn.Linear, nn.LayerNorm, AutocastLayerNorm), ids=str)
@pytest.mark.parametrize("name", ("forward", "__call__", "_call_impl"))
def test_a_patched_class_is_seen_while_it_is_patched(kind, name, monkeypatch):
    module, roles = kind(*[2] * (2 if kind is nn.Linear else 1)), (rule.LINEAR, rule.LAYER_NORM)
    assert why_not_plain(("x", module, roles)) is None
    method = getattr(kind, name)
    monkeypatch.setattr(kind, name, lambda *args, **kwargs: method(*args, **kwargs))
    assert why_not_plain(("x", module, roles)).kind is PERMANENT
    monkeypatch.undo()
    assert why_not_plain(("x", module, roles)) is None


def test_a_norm_depends_on_the_norm_that_it_inherits_from(monkeypatch):
    norm, forward = AutocastLayerNorm(4), nn.LayerNorm.forward
    assert why_not_plain(("norm", norm, (rule.LAYER_NORM,))) is None
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: forward(self, x))
    assert why_not_plain(("norm", norm, (rule.LAYER_NORM,))).kind is PERMANENT


@pytest.mark.parametrize("name", functions_of(GraphTransformerProcessorBlock))
@pytest.mark.parametrize("where", ("class", "subclass"))
def test_another_method_of_an_own_block_is_seen(name, where, monkeypatch):
    block, method = GraphTransformerProcessorBlock(**BLOCK_SIZES), None
    assert why_not_plain(("", block, (rule.BLOCK,))) is None
    kind = type(block)
    method = getattr(kind, name)

    def other(*args, **kwargs):
        return method(*args, **kwargs)

    if where == "class":
        monkeypatch.setattr(kind, name, other)
    else:
        block.__class__ = type("Own", (kind,), {name: other})
    assert why_not_plain(("", block, (rule.BLOCK,))).kind is PERMANENT


@pytest.mark.parametrize("path", ("", "node_dst_mlp"))
def test_an_attribute_that_hides_a_child_is_seen(path):
    block = GraphTransformerProcessorBlock(**BLOCK_SIZES)
    module, role = block.get_submodule(path), rule.MLP if path else rule.BLOCK
    for name, child in module.named_children():
        object.__setattr__(module, name, copy.deepcopy(child))
        refusal = why_not_plain((path, module, (role,)))
        assert refusal.kind is PERMANENT
        assert f"has a {name} set on it" in refusal.text
        object.__delattr__(module, name)
        assert why_not_plain((path, module, (role,))) is None


def test_a_subclass_of_a_block_that_overrides_nothing_is_plain():
    block = GraphTransformerProcessorBlock(**BLOCK_SIZES)
    block.__class__ = type("Own", (type(block),), {"helper": lambda self: None})
    assert why_not_plain(("", block, (rule.BLOCK,))) is None


@pytest.mark.compiled
def test_the_rule_is_traced_without_graph_breaks():
    torch.compiler.reset()
    linear, conv = nn.Linear(2, 2), AnemoiConv(4)

    def compute(x):
        refusal = why_not_plain(("lin", linear, (rule.LINEAR,)))
        refusal = refusal or why_not_plain(("conv", conv, (rule.ANEMOI_ATTENTION,)))
        if refusal is None:
            return x
        return x + len(refusal.text) + (refusal.kind is TRANSIENT)

    x = torch.zeros(1)
    for change in (lambda: None, lambda: conv.register_message_forward_hook(lambda *_: None)):
        change()
        torch.compiler.reset()
        compiled = torch.compile(compute, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), compute(x))
