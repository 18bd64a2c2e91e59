"""Rows of a sample that one rank computes or reads equal the rows of the whole sample, and no others are read."""

import pytest
import torch
from support.weather import hourly_field

from anemoi_gt.app.datasets import sphere_advection as module
from anemoi_gt.app.datasets.era5_uk import split
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.app.datasets.sphere_advection import sphere

ROWS = torch.tensor([5, 0, 3])


@pytest.fixture(scope="module")
def splits():
    return {
        "sphere": sphere("O4", train_size=3, valid_size=2, test_size=1),
        "era5_uk": split(hourly_field(), 6),
    }


@pytest.mark.parametrize("name", ["sphere", "era5_uk"])
def test_a_part_of_the_nodes_has_the_rows_of_the_whole_sample(splits, name):
    for dataset in splits[name]:
        before, part = dataset[0], dataset.select_nodes(ROWS)
        assert all(map(torch.equal, dataset[0], before))  # the whole is unchanged
        assert len(part) == len(dataset) and torch.equal(part.weights, dataset.weights[ROWS])
        for i in (0, len(dataset) - 1):
            for own, whole in zip(part[i], dataset[i], strict=True):
                torch.testing.assert_close(own, whole[ROWS], rtol=1e-5, atol=1e-5)


def test_a_part_computes_its_own_points_only(splits, monkeypatch):
    seen, tracer, wind = [], module.Case.tracer, module.Flow.wind
    monkeypatch.setattr(
        module.Case, "tracer", lambda case, xyz, t: seen.append(len(xyz)) or tracer(case, xyz, t)
    )
    monkeypatch.setattr(
        module.Flow, "wind", lambda flow, xyz, t: seen.append(len(xyz)) or wind(flow, xyz, t)
    )
    splits["sphere"].train.select_nodes(ROWS)[1]
    assert seen and set(seen) == {len(ROWS)}


def test_other_data_sets_select_the_rows_of_whole_samples(splits):
    whole = splits["sphere"].valid
    part = ForecastDataset.select_nodes(whole, ROWS)
    assert all(torch.equal(own, all_[ROWS]) for own, all_ in zip(part[1], whole[1], strict=True))
    assert len(part) == len(whole) and torch.equal(part.weights, whole.weights[ROWS])
