"""The sphere data set: exact, repeatable, held out, and hard enough."""

import numpy as np
import pytest
import torch

from anemoi_gt.data.area import area_weights
from anemoi_gt.data.flows import Flow
from anemoi_gt.data.grids import octahedral
from anemoi_gt.data.nodes import EARTH_RADIUS
from anemoi_gt.data.sphere import Case, Hills, draw_case, sphere

SIZES = {"train_size": 24, "valid_size": 4, "test_size": 6}


@pytest.fixture(scope="module")
def splits():
    return sphere("O12", **SIZES)


def test_a_seed_makes_the_same_samples_again(splits):
    again = sphere("O12", **SIZES)
    for part, same in zip(splits, again, strict=True):
        for i in (len(part) - 1, 0):
            torch.testing.assert_close(part[i], same[i], rtol=0, atol=0)


def test_another_seed_makes_others(splits):
    other = sphere("O12", **SIZES, seed=1)
    assert not torch.allclose(splits.train[0].inputs, other.train[0].inputs, atol=0.1)


def test_samples_do_not_depend_on_how_many_there_are(splits):
    more = sphere("O12", train_size=30, valid_size=9, test_size=9)
    torch.testing.assert_close(more.test.truth(3), splits.test.truth(3), rtol=0, atol=0)


def test_no_two_samples_share_a_flow(splits):
    axes = np.stack([part.case(i).flow.axis for part in splits for i in range(len(part))])
    likeness = axes @ axes.T - np.eye(len(axes))
    assert likeness.max() < 1 - 1e-6


def test_both_flows_are_drawn_and_one_alone_when_asked(splits):
    def strengths(part):
        return {part.case(i).flow.deformation for i in range(len(part))}

    assert strengths(splits.train) == {0.0, 10.0}
    assert strengths(sphere("O8", flows=["rotation"], **SIZES).train) == {0.0}
    assert strengths(sphere("O8", flows=["deformation"], **SIZES).train) == {10.0}


def test_tracer_of_a_solid_body_is_the_turned_tracer():
    case = Case(
        Flow(np.array([0, 0, 1.0]), np.array([0, 1.0, 0]), 0.0), Hills(np.eye(3), np.ones(3), np.full(3, 5.0)), 7.0
    )
    nodes = octahedral(16)
    lat, lon = nodes.radians.T
    hours = 30.0
    lon = lon - 2 * np.pi * hours / 288
    back = np.stack([np.cos(lat) * np.cos(lon), np.cos(lat) * np.sin(lon), np.sin(lat)], axis=1)
    np.testing.assert_allclose(case.tracer(nodes.xyz, hours), case.hills(back), atol=1e-13)
    np.testing.assert_allclose(case.tracer(nodes.xyz, 288.0), case.hills(nodes.xyz), atol=1e-13)


def test_truth_stays_within_the_bounds_of_the_tracer_and_keeps_its_mass():
    nodes = octahedral(48)
    weights = area_weights(nodes)
    for seed in range(8):
        case = draw_case(np.random.default_rng(seed), ("rotation", "deformation"))
        before, after = case.tracer(nodes.xyz, 0), case.tracer(nodes.xyz, 24.0)
        assert after.min() >= 0 and after.max() <= case.hills.heights.sum()
        assert np.average(after, weights=weights) == pytest.approx(np.average(before, weights=weights), rel=5e-3)


def test_tracer_obeys_the_advection_equation():
    """dq/dt + wind . grad q = 0, by central differences in time and along the wind."""
    case, points, dt = draw_case(np.random.default_rng(5), ("deformation",)), octahedral(8).xyz, 1e-3
    hours = 20.0
    tendency = (case.tracer(points, hours + dt) - case.tracer(points, hours - dt)) / (2 * dt)
    step = case.flow.wind(points, case.start + hours) * 3600 / EARTH_RADIUS * dt
    ahead, behind = (p / np.linalg.norm(p, axis=1, keepdims=True) for p in (points + step, points - step))
    along = (case.tracer(ahead, hours) - case.tracer(behind, hours)) / (2 * dt)
    np.testing.assert_allclose(tendency, -along, atol=1e-6)
    assert np.abs(tendency).max() > 1e-3


def test_inputs_are_of_order_one_and_hold_what_their_names_say(splits):
    inputs = torch.stack([sample.inputs for sample in splits.train])
    assert inputs.shape == (24, len(octahedral(12)), 9) and inputs.dtype == torch.float32
    assert splits.train.in_channels == 9
    spread = inputs[..., :5].flatten(0, 1).std(dim=0)
    assert ((spread > 0.5) & (spread < 2)).all()
    np.testing.assert_allclose(inputs[3, :, 5:7].square().sum(-1), 1, rtol=1e-6)  # sine and cosine of latitude
    tracer = inputs[2, :, 0] * splits.train.statistics.tracer_std + splits.train.statistics.tracer_mean
    torch.testing.assert_close(tracer[:, None], splits.train.present(2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("channel", "hours"), [(1, 0.0), (3, 12.0)])
def test_wind_channels_are_the_wind_in_the_frame_of_the_edges(splits, channel, hours):
    train = splits.train
    i = next(i for i in range(len(train)) if train.case(i).flow.deformation)  # a wind that changes
    case = train.case(i)
    components = train.inputs(i)[:, channel : channel + 2].double().numpy() * train.statistics.wind_std
    wind = np.einsum("ni,nid->nd", components, train.nodes.frame)
    np.testing.assert_allclose(wind, case.flow.wind(train.nodes.xyz, case.start + hours), atol=1e-4)


def test_normalisation_comes_from_the_training_samples(splits):
    assert splits.train.statistics is splits.valid.statistics is splits.test.statistics
    change = torch.stack([splits.train[i].target for i in range(24)])
    assert change.square().mean().sqrt().item() == pytest.approx(1, rel=1e-3)


def test_persistence_is_a_poor_forecast(splits):
    test = splits.test
    error = torch.stack([test.baselines()["persistence"](i) - test.truth(i) for i in range(len(test))])
    truth = torch.stack([test.truth(i) for i in range(len(test))])
    assert error.square().mean().sqrt() > 0.5 * truth.std()


def test_weights_are_areas_of_mean_one(splits):
    np.testing.assert_allclose(splits.test.weights, area_weights(octahedral(12)), rtol=1e-6)


@pytest.mark.parametrize("flows", [["rotation"], ["deformation"]])
def test_title_names_the_flow_and_the_lead_time(flows):
    title = sphere("O8", flows=flows, lead_time=36, **SIZES).test.title(0)
    assert flows[0] in title.replace("deformational", "deformation") and title.endswith("36 h")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flows": ["vortex"]}, r"one or more of rotation, deformation, got \['vortex'\]"),
        ({"flows": []}, "one or more of"),
        ({"lead_time": 0.0}, "lead_time must be positive and finite, in hours, got 0"),
        ({"test_size": 0}, "test_size must be at least 1, got 0"),
        ({"grid_name": "F32"}, 'such as "O96"'),
    ],
)
def test_impossible_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        sphere(**{"grid_name": "O8", **SIZES, **options})
