"""Parts of fused sub-layers: what is recognised in blocks of both libraries, and the reason for all else."""

import copy
from functools import partial

import pytest
import torch
from anemoi.models.layers import block as anemoi_block
from anemoi.models.layers.utils import load_layer_kernels
from torch import nn
from torch.nn import functional

from anemoi_gt import nn as anemoi_gt_nn
from anemoi_gt.integrations.anemoi.upstream import recognise_modules
from anemoi_gt.nn import AutocastLayerNorm, ConditionalLayerNorm, LayerKernels, plain, sublayers
from anemoi_gt.ops.activations import ACTIVATIONS
from anemoi_gt.ops.backends import BACKENDS
from anemoi_gt.ops.tensors import AttentionOptions, Norm, NormOptions
from anemoi_gt.ops.tree import leaves
from anemoi_gt.refusal import Refusal

pytestmark = pytest.mark.filterwarnings("ignore:mlp_implementation=")  # a gate needs no activation

CALL = sublayers.Computation(torch.float32, is_autocast=False, backend=BACKENDS["triton"])
CHANNELS = 24
HEADS = 2
HIDDEN = 40
DIM = 3
CONDITION = 4
KINDS = {"processor": "GraphTransformerProcessorBlock", "mapper": "GraphTransformerMapperBlock"}
LIBRARIES = ("anemoi_gt", "anemoi")
IMPLEMENTATIONS = ("mlp", "glu", "swiglu", "geglu", "reglu")
NODE_NORMS = "a LayerNorm or an RMSNorm or a ConditionalLayerNorm"
GATES = {"glu": "sigmoid", "swiglu": "silu", "geglu": "gelu", "reglu": "relu"}
FUNCTIONS = {name: known.module() for name, known in ACTIVATIONS.items()}
NORMS = {
    "plain": nn.LayerNorm,
    "autocast": AutocastLayerNorm,
    "no bias": partial(nn.LayerNorm, bias=False),
    "no parameters": partial(nn.LayerNorm, elementwise_affine=False),
    "rms": nn.RMSNorm,
    "conditional": partial(ConditionalLayerNorm, condition_shape=CONDITION),
}
THEIR_NORMS = {
    "plain": {"_target_": "torch.nn.LayerNorm"},
    "autocast": {"_target_": "anemoi.models.layers.normalization.AutocastLayerNorm"},
    "no bias": {"_target_": "torch.nn.LayerNorm", "bias": False},
    "no parameters": {"_target_": "torch.nn.LayerNorm", "elementwise_affine": False},
    "rms": {"_target_": "torch.nn.RMSNorm"},
    "conditional": {
        "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
        "condition_shape": CONDITION,
    },
}


@pytest.fixture(autouse=True, scope="module")
def anemoi_is_known():
    recognise_modules()
    yield
    plain.forget("anemoi")


def read_attention(block):
    """Return the parts of the attention, or the text of the refusal."""
    return text_or_parts(sublayers.read_attention(block, CALL))


def feed_forward_parts(norm, mlp, mlp_name="node_dst_mlp"):
    """Return the parts of a feed-forward network, or the text of the refusal."""
    norm_in = ("layer_norm_mlp_dst", norm)
    return text_or_parts(sublayers.read_network(mlp, CALL, mlp_name, norm_in=norm_in))


def text_or_parts(parts):
    return parts.text if isinstance(parts, Refusal) else parts


def make(kind="processor", library="anemoi_gt", norm="plain", **options):
    """A block with parameters that are not zero."""
    torch.manual_seed(0)
    sizes = {"in_channels": CHANNELS, "hidden_dim": HIDDEN, "out_channels": CHANNELS}
    options = sizes | {"num_heads": HEADS, "edge_dim": DIM} | options
    if library == "anemoi":
        kernels = load_layer_kernels({"LayerNorm": THEIR_NORMS[norm]})
        made = getattr(anemoi_block, KINDS[kind])(
            **options, layer_kernels=kernels, graph_attention_backend="pyg"
        )
    else:
        made = getattr(anemoi_gt_nn, KINDS[kind])(
            **options, layer_kernels=LayerKernels(LayerNorm=NORMS[norm])
        )
    for parameter in made.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return made


def read_network(block):
    return feed_forward_parts(block.layer_norm_mlp_dst, block.node_dst_mlp)


def normed(x, norm, options):
    """Return a norm as `anemoi_gt.ops.tensors` describes it."""
    function = functional.layer_norm if options.is_centred else functional.rms_norm
    n = function(x, x.shape[-1:], eps=options.eps)
    if norm.condition is not None:
        scale = 1 + functional.linear(norm.condition, *norm.scale_map)
        return scale * n + functional.linear(norm.condition, *norm.shift_map)
    n = n if norm.scale is None else n * norm.scale
    return n if norm.shift is None else n + norm.shift


def feed_forward(t, options):
    """Return the output of a fused sub-layer for its tensors."""
    n = normed(t.x, t.norm_in, options.norm_in)
    activate = FUNCTIONS[options.activation]
    gate, value = t.network.first
    hidden = functional.linear(n, *value)
    if gate.weight is None:
        activated = activate(hidden)
    else:
        activated = activate(functional.linear(n, *gate)) * hidden
    return t.x + functional.linear(activated, *t.network.out)


def assert_parts_compute(parts, norm, mlp):
    """Assert that parts describe x + mlp(norm(x))."""
    assert not isinstance(parts, str), parts
    x = torch.randn(5, CHANNELS)
    condition = torch.randn(5, CONDITION) if parts.has_condition else None
    cond = {} if condition is None else {"cond": condition}
    out = feed_forward(parts.tensors(x, None, condition), parts.options(residual=True))
    torch.testing.assert_close(out, x + mlp(norm(x, **cond)))


# ----------------------------------------------------------------------------------------------
# what is recognised


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_parts_of_a_network_match_its_modules(library, norm, implementation):
    block = make("mapper", library, norm, mlp_implementation=implementation, update_src_nodes=True)
    parts = read_network(block)
    assert_parts_compute(parts, block.layer_norm_mlp_dst, block.node_dst_mlp)
    assert parts.has_condition == (norm == "conditional")
    assert parts.activation == GATES.get(implementation, "gelu")
    sources = feed_forward_parts(block.layer_norm_mlp_src, block.node_src_mlp)
    assert_parts_compute(sources, block.layer_norm_mlp_src, block.node_src_mlp)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_parts_of_a_sequential_as_old_versions_of_anemoi_have_it(name, bias):
    activation = ACTIVATIONS[name].module()
    mlp = nn.Sequential(
        nn.Linear(CHANNELS, 7, bias=bias), activation, nn.Linear(7, CHANNELS, bias=bias)
    )
    norm = nn.LayerNorm(CHANNELS, eps=0.1)
    parts = feed_forward_parts(norm, mlp)
    assert_parts_compute(parts, norm, mlp)
    assert parts.activation == name


def test_parts_of_networks_of_anemoi_transformer_blocks():
    options = {
        "num_channels": CHANNELS,
        "hidden_dim": HIDDEN,
        "num_heads": HEADS,
        "window_size": None,
    }
    options |= {
        "layer_kernels": load_layer_kernels({}),
        "attention_implementation": "scaled_dot_product_attention",
    }
    processor = anemoi_block.TransformerProcessorBlock(**options)
    mapper = anemoi_block.TransformerMapperBlock(**options, mlp_implementation="swiglu")
    for norm, mlp in (
        (processor.layer_norm_mlp, processor.mlp),
        (mapper.layer_norm_mpl, mapper.mlp),
    ):
        assert_parts_compute(feed_forward_parts(norm, mlp), norm, mlp)


def test_a_pointwise_block_of_anemoi_has_no_residual_network_to_fuse():
    block = anemoi_block.PointWiseMLPProcessorBlock(
        num_channels=CHANNELS, hidden_dim=HIDDEN, layer_kernels=load_layer_kernels({})
    )
    reason = feed_forward_parts(nn.LayerNorm(CHANNELS), block.mlp, mlp_name="mlp")
    assert reason.startswith("its mlp.1 is a torch.nn.modules.normalization.LayerNorm, and a ")


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_the_attention_are_the_parameters_of_its_modules(library, kind, norm):
    block = make(kind, library, norm)
    block.layer_norm_attention.eps = 0.5
    parts = read_attention(block)
    assert not isinstance(parts, str), parts
    x_src, x_dst = (torch.empty(5, CHANNELS) for _ in range(2))
    attr, halo, cond_src, cond_dst = (torch.empty(0) for _ in range(4))
    t = parts.tensors((x_src, x_dst), attr, (cond_src, cond_dst), halo)
    assert t.x_src is x_src
    assert t.halo is halo
    assert t.x_dst is x_dst
    assert t.edge_attr is attr
    assert t.norm.condition is cond_dst
    assert t.norm_src.condition is cond_src
    for name in ("query", "self_term", "key", "value", "edge"):
        module = getattr(block, f"lin_{name.removesuffix('_term')}")
        assert getattr(t, name).weight is module.weight
        assert getattr(t, name).bias is module.bias
    assert t.projection.weight is block.projection.weight
    assert t.projection.bias is block.projection.bias

    dst = block.layer_norm_attention
    src = block.layer_norm_attention_src if kind == "mapper" else dst
    for read, module in ((t.norm, dst), (t.norm_src, src)):
        if norm == "conditional":
            assert read.scale_map.weight is module.scale.weight
            assert read.shift_map.weight is module.bias.weight
            assert read.scale_map.bias is module.scale.bias
            assert read.shift_map.bias is module.bias.bias
            assert read.scale is read.shift is None
        else:
            assert read.scale is module.weight
            assert read.shift is getattr(module, "bias", None)
            assert read.scale_map.weight is read.shift_map.weight is None
    assert parts.has_condition == (norm == "conditional")
    assert (parts.parameters.norm_src is parts.parameters.norm) == (kind == "processor")


@pytest.mark.parametrize("library", LIBRARIES)
def test_options_of_the_attention_match_its_modules(library):
    block = make("mapper", library, qk_norm=True, bias=False)
    block.layer_norm_attention.eps, block.layer_norm_attention_src.eps = 0.5, 0.25
    block.q_norm.eps, block.k_norm.eps = 0.125, 0.0625
    computation = CALL._replace(gemm_dtype=torch.bfloat16)
    parts = sublayers.read_attention(block, computation)
    norms = [NormOptions(eps) for eps in (0.5, 0.25, 0.125, 0.0625)]
    assert parts.options == AttentionOptions(HEADS, 1, *norms, torch.bfloat16)
    assert parts.parameters.query_scale is block.q_norm.weight
    assert parts.parameters.key_scale is block.k_norm.weight
    assert parts.parameters.self_term.bias is None


@pytest.mark.parametrize("library", LIBRARIES)
def test_an_rms_norm_without_eps_has_that_of_float32_in_nodes_and_heads(library):
    block = make("mapper", library, "rms", qk_norm=True)
    block.q_norm = nn.RMSNorm(CHANNELS // HEADS)
    options = read_attention(block).options
    rows = torch.randn(3, CHANNELS // HEADS, dtype=torch.bfloat16) * 1e-3
    expected = functional.rms_norm(rows, rows.shape[-1:])
    for norm in (options.norm, options.norm_src, options.query_norm):
        assert not norm.is_centred
        assert torch.equal(functional.rms_norm(rows, rows.shape[-1:], eps=norm.eps), expected)
    assert options.key_norm.is_centred


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_norms_of_heads_their_eps_is_zero(library):
    parts = read_attention(make(library=library))
    assert parts.parameters.query_scale is parts.parameters.key_scale is None
    assert parts.options.query_norm == parts.options.key_norm == NormOptions()


def test_one_set_of_nodes_has_no_source_norm_in_its_tensors():
    parts = read_attention(make())
    x = torch.empty(5, CHANNELS)
    t = parts.tensors((None, x), torch.empty(0), (None, None), None)
    assert t.x_src is None
    assert t.norm_src == Norm()
    assert t.norm.scale is not None


# ----------------------------------------------------------------------------------------------
# what is not

ATTENTION_MODULES = (
    "lin_query",
    "lin_key",
    "lin_value",
    "lin_self",
    "lin_edge",
    "projection",
    "layer_norm_attention",
)
ATTENTION_MODULES += ("layer_norm_attention_src", "q_norm", "k_norm")
NETWORK_MODULES = (
    "layer_norm_mlp_dst",
    "node_dst_mlp",
    "node_dst_mlp.mlp",
    "node_dst_mlp.mlp.0",
    "node_dst_mlp.mlp.1",
)
NETWORK_MODULES += ("node_dst_mlp.mlp.2",)
GATE_MODULES = tuple(f"node_dst_mlp.mlp.0.{name}" for name in ("gating", "gate_proj", "value_proj"))
CONDITION_MODULES = ("norm", "scale", "bias")


def assert_one_reason(block, which, reason):
    """Assert that one sub-layer cannot be fused, and why, and that the other can."""
    parts = {"attention": read_attention(block), "feed_forward": read_network(block)}
    assert parts.pop(which) == reason
    (other,) = parts.values()
    assert not isinstance(other, str), other


def assert_fused(block):
    parts = (read_attention(block), read_network(block))
    assert not any(isinstance(part, str) for part in parts), parts


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", [*ATTENTION_MODULES, *NETWORK_MODULES])
def test_a_hook_costs_its_own_sub_layer_while_it_is_there(library, name):
    """Here of one kind; test_plain.py has each."""
    block = make("mapper", library, qk_norm=True)
    which = "attention" if name in ATTENTION_MODULES else "feed_forward"
    handle = block.get_submodule(name).register_forward_hook(lambda *_: None)
    assert_one_reason(block, which, f"its {name} has hooks, which would be skipped")
    handle.remove()
    assert_fused(block)


@pytest.mark.parametrize("library", LIBRARIES)
def test_hooks_within_gates_norms_with_a_condition_and_identities(library):
    block = make("mapper", library, "conditional", mlp_implementation="swiglu")
    names = [f"layer_norm_attention_src.{name}" for name in CONDITION_MODULES]
    names += [f"layer_norm_attention.{name}" for name in CONDITION_MODULES]
    names += [] if library == "anemoi" else ["q_norm", "k_norm"]
    network = [*GATE_MODULES, *(f"layer_norm_mlp_dst.{name}" for name in CONDITION_MODULES)]
    for name in [*names, *network]:
        handle = block.get_submodule(name).register_forward_hook(lambda *_: None)
        which = "feed_forward" if name in network else "attention"
        assert_one_reason(block, which, f"its {name} has hooks, which would be skipped")
        handle.remove()
    assert_fused(block)


class Adapter(nn.Linear):
    """A linear map with more than a weight and a bias, as of LoRA."""


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("name", "module", "needed"),
    [
        ("lin_query", Adapter(CHANNELS, CHANNELS), "a torch.nn.Linear"),
        ("projection", nn.Sequential(nn.Linear(CHANNELS, CHANNELS)), "a torch.nn.Linear"),
        ("layer_norm_attention_src", nn.GroupNorm(1, CHANNELS), NODE_NORMS),
        (
            "q_norm",
            nn.GroupNorm(1, CHANNELS // HEADS),
            "a LayerNorm or an RMSNorm or a torch.nn.Identity",
        ),
        ("layer_norm_mlp_dst", nn.GroupNorm(1, CHANNELS), NODE_NORMS),
        ("node_dst_mlp", nn.Identity(), "an MLP or a torch.nn.Sequential"),
        ("node_dst_mlp.mlp", nn.ModuleList(), "a torch.nn.Sequential"),
        ("node_dst_mlp.mlp.0", Adapter(CHANNELS, HIDDEN), "a torch.nn.Linear"),
        ("node_dst_mlp.mlp.1", nn.Tanh(), "one of GELU, SiLU, ReLU, Sigmoid, Mish of torch.nn"),
        ("node_dst_mlp.mlp.2", Adapter(HIDDEN, CHANNELS), "a torch.nn.Linear"),
    ],
)
def test_a_module_of_another_class_costs_its_own_sub_layer(library, name, module, needed):
    block = make("mapper", library, qk_norm=True)
    parent, _, attribute = name.rpartition(".")
    block.get_submodule(parent).add_module(attribute, module)
    which = "feed_forward" if name in NETWORK_MODULES else "attention"
    kind = type(module)
    reason = f"its {name} is a {kind.__module__}.{kind.__qualname__}, and {needed} is needed"
    assert_one_reason(block, which, reason)


def test_a_module_that_is_missing():
    block = make()
    block.lin_key = None
    assert_one_reason(block, "attention", "it has no lin_key, and a torch.nn.Linear is needed")


class Quantised(torch.Tensor):
    """A tensor subclass with data of its own, as of torchao."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __tensor_flatten__(self):
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(func)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("lin_query", "weight"),
        ("lin_edge", "bias"),
        ("layer_norm_attention", "weight"),
        ("node_dst_mlp.mlp.2", "weight"),
    ],
)
def test_weights_of_a_tensor_subclass(name, parameter):
    block = make()
    module = block.get_submodule(name)
    wrapped = Quantised(getattr(module, parameter).detach())
    setattr(module, parameter, nn.Parameter(wrapped, requires_grad=False))
    which = "feed_forward" if name in NETWORK_MODULES else "attention"
    reason = f"its {name} has a {parameter} of the tensor subclass {Quantised.__module__}.Quantised"
    assert_one_reason(block, which, reason)


def replaced(name, module):
    def change(block):
        parent, _, attribute = name.rpartition(".")
        block.get_submodule(parent).add_module(attribute, module())

    return change


def drop_in_training(block):
    block.dropout = 0.5


@pytest.mark.parametrize(
    ("change", "which", "reason"),
    [
        (drop_in_training, "attention", "its attention drops weights in training"),
        (
            replaced("layer_norm_attention_src", lambda: nn.LayerNorm((2, CHANNELS))),
            "attention",
            "its layer_norm_attention_src is over 2 dimensions, and one is needed",
        ),
        (
            replaced("layer_norm_mlp_dst", lambda: nn.LayerNorm((2, CHANNELS))),
            "feed_forward",
            "its layer_norm_mlp_dst is over 2 dimensions, and one is needed",
        ),
        (
            replaced("layer_norm_attention_dest", lambda: nn.LayerNorm(CHANNELS)),
            "attention",
            "its layer_norm_attention_dest is not its layer_norm_attention",
        ),
        (
            replaced("layer_norm_attention_src", lambda: nn.LayerNorm(CHANNELS + 1)),
            "attention",
            "its norms of sources and destinations have different features",
        ),
        (
            replaced("layer_norm_attention_src", lambda: ConditionalLayerNorm(CHANNELS)),
            "attention",
            "one of its norms of sources and destinations takes a condition",
        ),
        (
            replaced("q_norm", lambda: nn.LayerNorm(CHANNELS // HEADS)),
            "attention",
            "its q_norm has a bias",
        ),
        (
            replaced("k_norm", lambda: nn.LayerNorm(CHANNELS, bias=False)),
            "attention",
            "its k_norm is over 24 channels, and its heads have 12",
        ),
        (
            replaced("k_norm", lambda: nn.LayerNorm(CHANNELS // HEADS, bias=False, eps=0.0)),
            "attention",
            "its k_norm has eps 0.0, and a positive number is needed",
        ),
        (
            replaced("projection", lambda: nn.Linear(CHANNELS, 7)),
            "attention",
            "its projection has a parameter (7, 24), and (24, 24) is needed",
        ),
        (
            replaced("lin_edge", lambda: nn.Linear(256, CHANNELS)),
            "attention",
            "its edges have 256 attributes, and at most 255 are possible",
        ),
        (
            replaced("node_dst_mlp.mlp.2", lambda: nn.Linear(HIDDEN, 7)),
            "feed_forward",
            "its node_dst_mlp.mlp has a parameter (7, 40), and (24, 40) is needed",
        ),
        (
            replaced("node_dst_mlp.mlp.3", lambda: nn.GELU()),
            "feed_forward",
            "its node_dst_mlp.mlp has 4 layers, and one hidden layer (a linear map and an "
            "activation, or a gated linear map) and a linear map are needed",
        ),
        (
            replaced("node_dst_mlp.layer_norm", lambda: nn.LayerNorm(CHANNELS)),
            "feed_forward",
            "its node_dst_mlp ends with a norm",
        ),
    ],
)
def test_other_reasons_cost_their_own_sub_layer(change, which, reason):
    block = make("mapper", qk_norm=True)
    assert_fused(block)
    change(block)
    assert_one_reason(block, which, reason)


@pytest.mark.parametrize(("library", "channels"), [("anemoi_gt", 4), ("anemoi", 12)])
def test_heads_that_do_not_fit_their_queries(library, channels):
    block = make(library=library)
    block.num_heads = 5
    reason = f"its queries have 24 features, and its 5 heads have {channels} channels"
    assert_one_reason(block, "attention", reason)


def test_norms_of_heads_that_are_missing():
    block = make(library="anemoi")
    block.qk_norm = True
    reason = "it has no q_norm, and a LayerNorm or an RMSNorm or a torch.nn.Identity is needed"
    assert_one_reason(block, "attention", reason)


def test_dropout_costs_nothing_in_evaluation():
    block = make(dropout=0.5)
    assert read_attention(block) == "its attention drops weights in training"
    assert_fused(block.eval())
    block = make(library="anemoi")
    block.conv.dropout = 0.5
    assert read_attention(block) == "its attention drops weights in training"
    assert_fused(block.eval())


def test_a_norm_with_a_condition_and_parameters_of_its_own():
    block = make(norm="conditional")
    block.layer_norm_mlp_dst.norm = nn.LayerNorm(CHANNELS)
    reason = "its layer_norm_mlp_dst.norm has its own affine parameters"
    assert_one_reason(block, "feed_forward", reason)


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_a_norm_with_a_condition_whose_map_has_no_bias(name):
    block = make(norm="conditional")
    setattr(block.layer_norm_mlp_dst, name, nn.Linear(CONDITION, CHANNELS, bias=False))
    assert_one_reason(
        block, "feed_forward", "its layer_norm_mlp_dst has linear maps without a bias"
    )


@pytest.mark.parametrize("name", ["layer_norm_attention", "q_norm"])
def test_a_norm_with_a_weight_of_another_shape(name):
    block = make(qk_norm=True)
    norm = block.get_submodule(name)
    norm.weight = nn.Parameter(torch.ones(3))
    reason = f"its {name} has a parameter (3,), and {norm.normalized_shape} is needed"
    assert_one_reason(block, "attention", reason)


def test_a_norm_with_two_conditions():
    block = make(norm="conditional")
    block.layer_norm_mlp_dst.bias = nn.Linear(CONDITION + 1, CHANNELS)
    reason = "its layer_norm_mlp_dst has a parameter (24, 5), and (24, 4) is needed"
    assert_one_reason(block, "feed_forward", reason)


@pytest.mark.parametrize("library", LIBRARIES)
def test_more_features_than_are_measured(library):
    wide = {"in_channels": 2050, "out_channels": 2050}
    block = make(library=library, **wide)
    assert (
        read_attention(block)
        == "its layer_norm_attention has 2050 features, and at most 2048 are possible"
    )
    assert (
        read_network(block)
        == "its layer_norm_mlp_dst has 2050 features, and at most 2048 are possible"
    )
    block = make(library=library, attn_channels=2050)
    assert_one_reason(
        block, "attention", "its queries have 2050 features, and at most 2048 are possible"
    )


def test_a_class_whose_code_was_not_recognised_is_named():
    plain.forget("anemoi")
    block = make(library="anemoi")
    reason = (
        "its node_dst_mlp is a anemoi.models.layers.mlp.MLP, and an MLP or a torch.nn.Sequential "
        "is needed"
    )
    assert_one_reason(block, "feed_forward", reason)
    recognise_modules()
    assert_fused(block)


# ----------------------------------------------------------------------------------------------
# asked again


def test_a_replaced_parameter_is_read_by_the_next_call():
    block = make()
    read_attention(block)
    block.lin_query.weight = nn.Parameter(torch.zeros(CHANNELS, CHANNELS))
    assert read_attention(block).parameters.query.weight is block.lin_query.weight
    block.layer_norm_mlp_dst.eps = 0.5
    assert read_network(block).options(residual=True).norm_in.eps == 0.5


def test_parameters_of_functional_call_are_read():
    block = make()
    parameters = {name: torch.zeros_like(value) for name, value in block.named_parameters()}
    answers = []
    block.forward = lambda: answers.append(read_attention(block))
    torch.func.functional_call(block, parameters, ())
    assert answers[0].parameters.query.weight is parameters["lin_query.weight"]


def as_buffer(module, name, tensor):
    delattr(module, name)
    module.register_buffer(name, tensor)


def as_replicas_of_data_parallel(module, name, tensor):
    delattr(module, name)
    setattr(module, name, tensor)


def before_the_parameter(module, name, tensor):
    vars(module)[name] = tensor


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("norm", ("plain", "conditional"))
@pytest.mark.parametrize("hold", (as_buffer, as_replicas_of_data_parallel, before_the_parameter))
def test_each_parameter_is_what_its_module_computes_with(library, norm, hold):
    block = make("mapper", library, norm, qk_norm=True)
    names = [name for name, _ in block.named_parameters()]
    for name in names:
        path, _, parameter = name.rpartition(".")
        hold(block.get_submodule(path), parameter, block.get_parameter(name).detach())
    feed_forward = read_network(block)
    read = leaves((read_attention(block).parameters, feed_forward.norm_in, feed_forward.network))
    for name in names:
        path, _, parameter = name.rpartition(".")
        tensor = getattr(block.get_submodule(path), parameter)
        assert type(tensor) is torch.Tensor
        assert any(tensor is other for other in read), name


def test_an_answer_leaves_nothing_on_the_block():
    block = make(library="anemoi")
    before = {name: set(module.__dict__) for name, module in block.named_modules()}
    assert_fused(block)
    assert {name: set(module.__dict__) for name, module in block.named_modules()} == before
    assert_fused(copy.deepcopy(block))


class UsesParts(nn.Module):
    """Computes with the parts of a block; the output depends on the reason if a sub-layer has none."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        attention, network = read_attention(self.block), read_network(self.block)
        if isinstance(attention, str):
            return x + len(attention)
        if isinstance(network, str):
            return x - len(network)
        tensors, options = network.tensors(x), network.options(residual=True)
        heads = attention.options.heads
        query = attention.tensors((None, x), x, (None, None), None).query.weight
        return (
            functional.linear(x, query) * heads
            + functional.linear(tensors.x, tensors.network.first.value.weight).sum()
            * options.norm_in.eps
        )


@pytest.mark.compiled
def test_parts_are_traced_without_graph_breaks():
    torch.compiler.reset()
    module = UsesParts(make("mapper", qk_norm=True))
    x = torch.randn(5, CHANNELS)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))
    module.block.node_dst_mlp.mlp[1] = nn.Tanh()
    torch.testing.assert_close(compiled(x), x - len(read_network(module.block)))
