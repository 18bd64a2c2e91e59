"""A rank reads or computes only its rows of a sample, and they equal the rows of the whole sample."""

import pytest
import torch
from support.weather import hourly_field

from anemoi_gt.app.datasets import sphere_advection as module
from anemoi_gt.app.datasets.era5_uk import split
from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset, share_of_batch
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
        before = dataset[0]
        part = dataset.select_nodes(ROWS)
        assert all(map(torch.equal, dataset[0], before))  # the whole is unchanged
        assert len(part) == len(dataset)
        assert torch.equal(part.weights, dataset.weights[ROWS])
        for i in (0, len(dataset) - 1):
            for local, whole in zip(part[i], dataset[i], strict=True):
                torch.testing.assert_close(local, whole[ROWS], rtol=1e-5, atol=1e-5)


def test_a_part_computes_only_its_points(splits, monkeypatch):
    numbers_of_points = []

    def counting(function):
        def count(self, xyz, t):
            numbers_of_points.append(len(xyz))
            return function(self, xyz, t)

        return count

    monkeypatch.setattr(module.Case, "tracer", counting(module.Case.tracer))
    monkeypatch.setattr(module.Flow, "wind", counting(module.Flow.wind))
    splits["sphere"].train.select_nodes(ROWS)[1]
    assert numbers_of_points
    assert set(numbers_of_points) == {len(ROWS)}


def test_other_data_sets_select_the_rows_of_whole_samples(splits):
    whole = splits["sphere"].valid
    part = ForecastDataset.select_nodes(whole, ROWS)
    for local, field in zip(part[1], whole[1], strict=True):
        assert torch.equal(local, field[ROWS])
    assert len(part) == len(whole)
    assert torch.equal(part.weights, whole.weights[ROWS])


def test_a_batch_that_ranks_cannot_share_is_refused():
    message = "^training.batch_size must be a multiple of the 2 ranks of the data axis, got 3$"
    with pytest.raises(ValueError, match=message):
        share_of_batch(3, 2)
