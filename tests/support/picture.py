"""The colours of a picture, which tests count."""

import numpy as np
from matplotlib.image import imread


def colours(path):
    """A number for the colour of each pixel [height, width]."""
    return (imread(path)[..., :3] * 255).astype(int) @ np.array([1 << 16, 1 << 8, 1])
