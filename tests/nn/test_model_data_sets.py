"""EncoderProcessorDecoder with several data sets: fields in and out of each, on grids of their own."""

import pytest
import torch
from support.differentiate import differentiate, randomise
from support.refusals import raises, refused
from support.weather import KINDS, NODES, weather_graph

from anemoi_gt import EncoderProcessorDecoder

SETS = {"global": 30, "region": 17, "stations": 8}
EDGES = {"global": 60, "region": 40, "stations": 20}
# one in only, one both, one out only
IN = {"global": 5, "region": 4}
OUT = {"region": 2, "stations": 3}
SAMPLES = 2


@pytest.fixture
def graph():
    kinds = {(name, "to", "hidden"): edges for name, edges in EDGES.items()}
    kinds |= {("hidden", "to", name): edges for name, edges in EDGES.items()} | {
        ("hidden", "to", "hidden"): 50
    }
    return weather_graph(SETS | {"hidden": 11}, kinds)


@pytest.fixture
def x():
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(SAMPLES, SETS[name], size, generator=generator)
        for name, size in IN.items()
    }


def make_model(graph, in_channels=IN, out_channels=OUT, **options):
    torch.manual_seed(2)
    return EncoderProcessorDecoder(
        graph, in_channels, out_channels, channels=16, heads=4, num_layers=1, **options
    )


def test_every_output_data_set_has_its_own_fields_on_its_own_nodes(graph, x):
    shapes = {name: tuple(out.shape) for name, out in make_model(graph)(x).items()}
    assert shapes == {"region": (SAMPLES, 17, 2), "stations": (SAMPLES, 8, 3)}


def test_every_output_field_depends_on_every_input_field(graph, x):
    model = randomise(make_model(graph).double())
    for target in OUT:
        inputs = {name: fields.double() for name, fields in x.items()}
        result = differentiate(model, inputs, lambda tensors, target=target: model(tensors)[target])
        for name in IN:
            assert bool((result[f"d{name}"].abs().amax(dim=(0, 1)) > 1e-9).all()), (name, target)


def test_gradient_reaches_every_parameter(graph, x):
    model = randomise(make_model(graph).double())
    inputs = {name: fields.double() for name, fields in x.items()}
    result = differentiate(model, inputs, lambda tensors: tuple(model(tensors).values()))
    for name, gradient in result.items():
        reached = gradient is not None and bool(gradient.abs().max() > 1e-6)
        # A constant on all keys changes no softmax, so that bias never learns.
        assert reached != name.endswith("lin_key.bias"), name


def test_the_processor_gets_the_sum_of_all_encoders(graph, x):
    model = make_model(graph)
    seen = []
    for encoder in model.encoder.values():
        encoder.register_forward_hook(lambda module, args, out: seen.append(out))
    model.processor.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(x)
    assert torch.equal(seen[2], seen[0] + seen[1])


def test_one_data_set_by_name_is_the_model_of_one_data_set():
    graph, x = weather_graph(), torch.randn(SAMPLES, NODES["data"], 5)
    one, named = make_model(graph, 5, 3), make_model(graph, {"data": 5}, {"data": 3})
    assert torch.equal(named({"data": x})["data"], one(x))


def test_order_of_the_data_sets_in_the_input_does_not_matter(graph, x):
    model = make_model(graph)
    torch.testing.assert_close(model(dict(reversed(x.items()))), model(x), rtol=0, atol=0)


def test_residual_is_specified_per_data_set(graph, x):
    expected = make_model(graph)(x)
    expected["region"][..., 1] += x["region"][..., 3]
    torch.testing.assert_close(make_model(graph, residual={"region": {1: 3}})(x), expected)


def test_mapper_chunks_apply_to_every_mapper(graph, x):
    torch.testing.assert_close(make_model(graph, mapper_chunks=4)(x), make_model(graph)(x))


@refused(
    (
        (5, {"data": 3}),
        "in_channels and out_channels must both be integers or both be mappings, got",
    ),
    (({}, {"region": 2}), r"in_channels must name at least one data set, .* got \[\]"),
    (
        ({"hidden": 5}, {"region": 2}),
        r"in_channels must name .* none of them 'hidden', got "
        r"\['hidden'\]",
    ),
    (({"region": 4}, {"region": 0}), r"out_channels\['region'\] must be at least 1, got 0"),
    (({"mars": 4}, {"region": 2}), "graph must have nodes 'mars' with positions x"),
)
def test_wrong_data_sets_are_refused(graph, wrong, message):
    raises(lambda: make_model(graph, *wrong), message)


def test_data_set_without_edges_to_the_mesh_is_refused():
    graph = weather_graph(NODES | {"region": 17}, KINDS)
    message = r"graph must have edges \('region', 'to', 'hidden'\), got edges"
    raises(lambda: make_model(graph, {"data": 5, "region": 4}, {"data": 3}), message)


@refused(
    ({"region": 3}, "residual must map output channels to input channels, both integers, .* got 3"),
)
def test_wrong_residual_is_refused(graph, wrong, message):
    raises(lambda: make_model(graph, residual=wrong), message)


def test_a_residual_of_a_data_set_that_is_input_only_raises(graph):
    with pytest.raises(KeyError, match="global"):
        make_model(graph, residual={"global": {0: 0}})


@refused(
    (
        lambda x: x["global"],
        r"x must map each of the data sets \['global', 'region'\] .* got Tensor",
    ),
    (lambda x: {"global": x["global"]}, r"x must map each of the data sets .* got \['global'\]"),
    (lambda x: x | {"stations": x["region"]}, r"got \['global', 'region', 'stations'\]"),
    (
        lambda x: x | {"region": x["region"][:, 1:]},
        r"x\['region'\] must have shape \[B, 17, 4\], got \(2, 16, 4\)",
    ),
    (
        lambda x: x | {"region": x["region"][:1]},
        r"x_src must be tensors of the same nodes .* got \[\(1, 17, 4\), \(2, 17, ",
    ),
)
def test_wrong_input_is_refused(graph, x, wrong, message):
    raises(lambda: make_model(graph)(wrong(x)), message)
