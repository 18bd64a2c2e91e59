"""The interface of data sets: normalised samples, and forecasts in physical units."""

import pytest
import torch

from anemoi_gt.app.datasets.forecast_dataset import ForecastDataset
from anemoi_gt.data.nodes import Nodes

NODES = 5
SAMPLES = 3


class Random(ForecastDataset):
    """Two variables of very different size."""

    nodes = Nodes(range(NODES), range(NODES))
    weights = torch.ones(NODES)
    variables, units, lead_time = ("pressure", "humidity"), ("Pa", "kg/kg"), 6
    input_names = ("a", "b", "c")
    change_mean, change_std = torch.tensor([100.0, 1e-4]), torch.tensor([2000.0, 1e-3])

    def __len__(self):
        return SAMPLES

    def inputs(self, i):
        return draw(3, seed=i)

    def present(self, i):
        return draw(2, seed=10 + i) * self.change_std

    def truth(self, i):
        return draw(2, seed=20 + i) * self.change_std

    title = str


class FromYesterday(Random):
    def reference(self, i):
        return draw(2, seed=30 + i) * self.change_std


def draw(channels, seed):
    return torch.randn(NODES, channels, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[Random, FromYesterday])
def dataset(request):
    return request.param()


def test_forecast_from_the_target_is_the_truth(dataset):
    for i in range(SAMPLES):
        torch.testing.assert_close(dataset.forecast(i, dataset[i].target), dataset.truth(i))


def test_forecast_from_zeros_is_the_reference_plus_the_mean_change(dataset):
    torch.testing.assert_close(
        dataset.forecast(1, torch.zeros(NODES, 2)), dataset.reference(1) + dataset.change_mean
    )


def test_bfloat16_output_gives_a_float32_forecast(dataset):
    output = draw(2, seed=5).bfloat16()
    torch.testing.assert_close(
        dataset.forecast(0, output), dataset.forecast(0, output.float()), rtol=0, atol=0
    )


def test_samples_have_the_named_channels_and_end_after_the_last(dataset):
    assert (dataset.in_channels, dataset.out_channels) == (3, 2)
    assert [(x.shape, y.shape) for x, y in dataset] == [((NODES, 3), (NODES, 2))] * SAMPLES


def test_persistence_is_a_baseline(dataset):
    torch.testing.assert_close(dataset.baselines()["persistence"](2), dataset.present(2))


@pytest.mark.parametrize("i", [-1, SAMPLES])
def test_sample_index_out_of_range_raises(dataset, i):
    with pytest.raises(IndexError, match=rf"\[0, 3\), got {i}"):
        dataset[i]


@pytest.mark.parametrize("shape", [(NODES, 1), (1, NODES, 2), (NODES + 1, 2)])
def test_output_of_another_shape_raises(dataset, shape):
    with pytest.raises(ValueError, match=r"output must be a tensor \(5, 2\)"):
        dataset.forecast(0, torch.zeros(shape))
