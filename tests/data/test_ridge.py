"""Ridge regression per point against least squares on an augmented system."""

import numpy as np
import torch

from anemoi_gt.data.ridge import Ridge

EXAMPLES, POINTS, FEATURES = 40, 6, 3


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_prediction_minimises_squared_error_plus_penalty():
    x, y = draw(EXAMPLES, POINTS, FEATURES, seed=0) + 5, draw(EXAMPLES, POINTS, seed=1) - 3
    penalty = 7.0
    prediction = Ridge.fit(x, y, penalty)(x)
    for n in range(POINTS):
        a, b = x[:, n].double().numpy(), y[:, n].double().numpy()
        rows = np.concatenate([a - a.mean(0), np.sqrt(penalty) * np.eye(FEATURES)])
        slope, *_ = np.linalg.lstsq(rows, np.concatenate([b - b.mean(), np.zeros(FEATURES)]), rcond=None)
        np.testing.assert_allclose(prediction[:, n], b.mean() + (a - a.mean(0)) @ slope, atol=1e-5)


def test_points_do_not_know_each_other():
    x, y = draw(EXAMPLES, POINTS, FEATURES, seed=2), draw(EXAMPLES, POINTS, seed=3)
    alone = Ridge.fit(x[:, 2:3], y[:, 2:3])(x[:, 2:3])
    torch.testing.assert_close(Ridge.fit(x, y)(x)[:, 2:3], alone)


def test_linear_truth_is_found_without_penalty():
    x, slope = draw(EXAMPLES, POINTS, FEATURES, seed=4), draw(POINTS, FEATURES, seed=5)
    y = (x * slope).sum(-1) + 280
    torch.testing.assert_close(Ridge.fit(x, y, penalty=0.0)(x), y, rtol=1e-6, atol=1e-4)


def test_heavy_penalty_leaves_the_mean():
    x, y = draw(EXAMPLES, POINTS, FEATURES, seed=6), draw(EXAMPLES, POINTS, seed=7)
    torch.testing.assert_close(Ridge.fit(x, y, penalty=1e9)(x), y.mean(0).expand_as(y), atol=1e-5, rtol=0)
