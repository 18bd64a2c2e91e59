"""Operators on trees: flat arguments, schemas, and second derivatives of all of them."""

import importlib
import pkgutil
from typing import Generic, NamedTuple, TypeVar

import pytest
import torch
from support import networks, sublayers
from torch import Tensor

import anemoi_gt.ops.triton_backend
from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from anemoi_gt.ops.operator import Operator
from anemoi_gt.ops.tensors import (
    AttentionTensors,
    InteractionTensors,
    NetworkTensors,
)
from anemoi_gt.ops.torch_backend.edge_attention_torch import edge_attention_torch
from anemoi_gt.ops.tree import form_of, leaf_types, leaves, tree_of
from anemoi_gt.ops.triton_backend.edge_attention_triton import edge_attention_triton
from anemoi_gt.ops.triton_backend.formulas import (
    attention_sublayer,
    attention_triton,
    interaction_sublayer,
    interaction_triton,
    network_sublayer,
    network_triton,
)

pytestmark = [
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of the interpreter
]
T = TypeVar("T")


class Map(NamedTuple, Generic[T]):
    """Two leaves."""

    weight: T
    bias: T | None = None


class Layer(NamedTuple, Generic[T]):
    """Four leaves, two of them in branches of their own kind."""

    x: T
    first: Map[T]
    scale: T | None


class Options(NamedTuple):
    """A branch without type parameters."""

    power: float
    names: Map[str]


def test_leaves_are_depth_first_and_give_the_tree_again():
    tree = Layer(1, Map(2, None), 4)
    assert leaves(tree) == [1, 2, None, 4]
    form = form_of(Layer[Tensor])
    assert form == Layer(None, Map(None, None), None)
    assert tree_of(form, leaves(tree)) == tree


def test_leaves_have_the_names_of_their_paths_and_the_types_of_their_fields():
    names = ["x", "first_weight", "first_bias", "scale"]
    assert list(leaf_types(Layer[Tensor])) == names
    assert leaf_types(Options)["power"] is float


def test_a_schema_has_a_parameter_for_each_leaf_and_a_list_for_numbers_of_a_type():
    schema = str(torch.ops.anemoi_gt.network_triton.default._schema)
    assert "Tensor? x, Tensor? more, Tensor? norm_in_scale, " in schema
    assert "Tensor? network_out_weight, Tensor? network_out_bias, " in schema
    assert "float[] floats, bool[] bools, str activation, ScalarType" in schema
    assert schema.endswith("ScalarType out_dtype, bool save) -> (Tensor, Tensor)")


def second_derivative(compute, x):
    x = x.requires_grad_()
    (gradient,) = torch.autograd.grad(compute(x).square().sum(), x, create_graph=True)
    gradient.sum().backward()


def forward_mode(compute, x):
    torch.func.jvp(compute, (x,), (x,))


def torch_func(compute, x):
    torch.func.grad(lambda x: compute(x).sum())(x)


# Graphs are made outside of transforms, in which PyTorch 2.9 cannot read their indices.
GRAPH = GraphStructure.from_edge_index(torch.tensor([[0, 1, 1], [0, 0, 1]]), (2, 2))
ATTENTION = sublayers.draw_attention("cpu")
INTERACTION = networks.draw_interaction("cpu")


def attend_sublayer(x):
    named, _, graph, _, options = ATTENTION
    tensors = {name: tensor.to(x.device) for name, tensor in named.items()} | {"x_dst": x}
    graph = graph.to(x.device)
    return attention_sublayer(sublayers.fill(AttentionTensors, tensors), graph, options)


def update_of_edges(x):
    named, _, graph, _, options = INTERACTION
    tensors = {name: tensor.to(x.device) for name, tensor in named.items()} | {"x_dst": x}
    graph = graph.to(x.device)
    return interaction_sublayer(sublayers.fill(InteractionTensors, tensors), graph, options)


def network(x):
    named, _, options = networks.draw_network(x.device)
    return network_sublayer(sublayers.fill(NetworkTensors, named | {"x": x}), options)


# an operator: a call that it serves, and the shape of an operand
CALLS = {
    edge_attention_torch: (lambda x: attend(x, "torch"), (2, 3, 4)),
    edge_attention_triton: (lambda x: attend(x, "triton"), (2, 3, 4)),
    attention_triton: (
        attend_sublayer,
        (sublayers.SMALL.num_dst, sublayers.SMALL.features),
    ),
    interaction_triton: (update_of_edges, (networks.SIZES.num_dst, networks.SIZES.dst)),
    network_triton: (network, (networks.SIZES.rows, networks.SIZES.features)),
}
REFUSALS = {
    second_derivative: "double backward is not supported by",
    forward_mode: "forward-mode derivatives are not supported by",
    torch_func: "torch.func.grad, vjp and jacrev are not supported by",
}


def test_every_operator_has_a_call():
    packages = anemoi_gt.ops.torch_backend, anemoi_gt.ops.triton_backend
    found = set()
    for package in packages:
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            members = vars(importlib.import_module(module.name)).values()
            found |= {member for member in members if isinstance(member, Operator)}
    assert found == set(CALLS)


@pytest.mark.interpreted
@pytest.mark.parametrize("refusal", REFUSALS.items(), ids=lambda pair: pair[0].__name__)
@pytest.mark.parametrize(
    "operator", CALLS, ids=lambda operator: f"{operator.name}_{operator.backend}"
)
def test_a_refusal_names_the_operator_that_raised_it(operator, refusal, kernel_device):
    compute, shape = CALLS[operator]
    differentiate, text = refusal
    x = torch.randn(shape, device=kernel_device)
    with pytest.raises(RuntimeError, match=f"^{text} {operator.name}, got "):
        differentiate(compute, x)


def strided(*shape):
    """Return a leaf that is not contiguous."""
    return torch.randn(*shape[:-2], shape[-1], shape[-2]).transpose(-1, -2).requires_grad_()


def attend(query, backend):
    graph = GRAPH.to(query.device)
    rows = torch.randn(2, 3, 4, device=query.device)
    return edge_attention(query, rows, rows, graph, config=KernelConfig(backend))[0]


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("compute", "shape", "name"),
    [
        (lambda x: attend(x, "triton"), (2, 3, 4), "edge_attention"),
        (lambda x: attend(x, "torch"), (2, 3, 4), "edge_attention"),
        (network, (networks.SIZES.rows, networks.SIZES.features), "network"),
    ],
)
def test_the_second_derivative_of_a_strided_input_is_refused_and_not_dropped(
    compute, shape, name, kernel_device
):
    """A gradient that depends on a copy of an input would lose that dependence."""
    x = strided(*shape).detach().to(kernel_device).requires_grad_()
    assert not x.is_contiguous()
    (gradient,) = torch.autograd.grad(compute(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"double backward is not supported by {name}, got"):
        gradient.square().sum().backward()
    out = compute(x).sum()  # whose incoming gradient needs none
    (gradient,) = torch.autograd.grad(out, x, create_graph=True)
    assert gradient.requires_grad
