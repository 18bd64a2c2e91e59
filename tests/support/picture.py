"""The colours of a plot, whole and in panels."""

import numpy as np
from matplotlib.image import imread


def colours(path):
    """Return an integer for the colour of each pixel [height, width]."""
    return (imread(path)[..., :3] * 255).astype(int) @ np.array([1 << 16, 1 << 8, 1])


def fewest_colours(pixels, rows, columns, across):
    """Return the smallest number of colours of a panel in these rows and the first columns of `across`."""
    height, width = pixels.shape
    panels = (
        pixels[
            row * height // rows : (row + 1) * height // rows,
            at * width // across : (at + 1) * width // across,
        ]
        for row, at in np.ndindex(rows, columns)
    )
    return min(len(np.unique(panel)) for panel in panels)
