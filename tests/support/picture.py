"""The colours of a plot, whole and in panels."""

import numpy as np
from matplotlib.image import imread


def colours(path):
    """Return an integer for the colour of each pixel [height, width]."""
    return (imread(path)[..., :3] * 255).astype(int) @ np.array([1 << 16, 1 << 8, 1])


def fewest_colours(pixels, rows, columns, across):
    """Return the smallest number of colours in any panel of the first `columns` of a grid, rows x across."""
    height, width = pixels.shape
    numbers = []
    for row, column in np.ndindex(rows, columns):
        top, bottom = row * height // rows, (row + 1) * height // rows
        left, right = column * width // across, (column + 1) * width // across
        numbers.append(len(np.unique(pixels[top:bottom, left:right])))
    return min(numbers)


def assert_every_map_has_content(path):
    """Assert that the plot of a rollout of four steps or more has a size to read, and three rows of four maps."""
    pixels = colours(path)
    height, width = pixels.shape
    assert 1600 <= width <= 3000
    assert 800 <= height <= 1600
    assert fewest_colours(pixels, 3, 4, across=6) > 30
