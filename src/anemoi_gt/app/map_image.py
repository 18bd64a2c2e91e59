"""Maps of node values: projection, and interpolation of scattered nodes to an image."""

from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

COAST_STYLE = {"colors": "black", "linewidths": 0.6, "alpha": 0.7}
IMAGE_ROWS = 240
NEIGHBOURS = 3  # nodes interpolated to a pixel, weighted by inverse squared distance


class MapImage:
    """Image of node values: Mollweide projection for the globe, longitude-latitude for regions.

    Nodes that span more than 90 degrees of latitude are drawn as a globe. `projection` is
    Matplotlib's name for the projection of the axes. Raises ImportError if scipy is missing.
    """

    def __init__(self, nodes: Nodes):
        self._is_global = np.ptp(nodes.lat) > 90
        self.projection = "mollweide" if self._is_global else "rectilinear"
        rows, columns = _pixels(nodes, is_global=self._is_global)
        lat, lon = np.meshgrid(rows, columns, indexing="ij")
        tree = import_extra("scipy.spatial", "train").cKDTree(nodes.xyz)
        distance, self._node = tree.query(Nodes(lat.ravel(), lon.ravel()).xyz, k=NEIGHBOURS)
        weight = 1 / (distance**2 + 1e-12)  # a pixel at a node gets the value of that node
        self._weight = weight / weight.sum(axis=1, keepdims=True)
        # Beyond the nodes, as around a rotated domain, the image is transparent.
        size = min(NEIGHBOURS + 1, len(nodes))
        spacing = tree.query(nodes.xyz, k=[size])[0].max()
        # Near a pole, the neighbours of a row are closer than its next row.
        row_gap = np.diff(np.unique(nodes.lat.round(4)), append=nodes.lat.max()).max()
        self._is_beyond = distance[:, 0] > max(spacing, np.deg2rad(row_gap))
        to_axes = np.deg2rad if self._is_global else np.asarray  # units of the axes
        self._lat, self._lon = to_axes(rows), to_axes(columns)
        self._coastlines = []
        shifts = (0,) if self._is_global else (-360, 0, 360)  # a region may cross the date line
        low, high = np.array([columns[0], rows[0]]), np.array([columns[-1], rows[-1]])
        for line in coastlines("110m" if self._is_global else "50m"):
            for shift in shifts:
                shifted = line + np.array([shift, 0])
                if (shifted.max(axis=0) >= low).all() and (shifted.min(axis=0) <= high).all():
                    self._coastlines.append(to_axes(shifted))

    def draw(self, axes: "Axes", values: np.ndarray, **style: Any) -> "QuadMesh":
        """Draw values [N] on axes of this projection by `pcolormesh(**style)`; return the mesh.

        Pixels are transparent where the nearest value is NaN.
        """
        is_finite = np.isfinite(values)[self._node]
        weight = np.where(is_finite, self._weight, 0.0)
        nearest = np.where(is_finite[:, 0], weight.sum(axis=1), np.nan)
        pixels = (np.nan_to_num(values)[self._node] * weight).sum(axis=1) / nearest
        pixels[self._is_beyond] = np.nan
        image = pixels.reshape(len(self._lat), len(self._lon))
        if self._is_global:
            axes.grid(color="white", alpha=0.35, linewidth=0.5)
            axes.set_xticklabels([])
            axes.set_yticklabels([])
        else:
            axes.set_aspect(1 / np.cos(np.deg2rad(self._lat.mean())))
            axes.set_xlabel("longitude [degrees east]")
            axes.set_ylabel("latitude [degrees north]")
            axes.set(xlim=self._lon[[0, -1]], ylim=self._lat[[0, -1]])
        line_collection = import_extra("matplotlib.collections", "train").LineCollection
        coastlines, transform = self._coastlines, axes.transData
        if self._is_global:
            # projected here: Matplotlib would interpolate 75 points in each of 5,000 segments
            geo: Any = axes
            coastlines = [geo.transProjection.transform_non_affine(line) for line in coastlines]
            transform = geo.transAffine + geo.transAxes
        lines = line_collection(coastlines, transform=transform, **COAST_STYLE)
        axes.add_collection(lines, autolim=False)
        return axes.pcolormesh(
            self._lon, self._lat, image, shading="nearest", rasterized=True, **style
        )


def coastlines(resolution: str) -> list[np.ndarray]:
    """Return the coastlines of Natural Earth as lines [P, 2] of longitude and latitude.

    `resolution` is "110m" or "50m", of 1:110 and 1:50 million. Lines end at the date line.
    """
    path = files("anemoi_gt.app").joinpath("coastlines.npz")
    with path.open("rb") as file, np.load(file) as stored:
        steps, lengths = stored[f"steps_{resolution}"], stored[f"lengths_{resolution}"]
    points = steps.cumsum(axis=1).T / 100  # stored as steps of 0.01 degrees
    return np.split(points, np.cumsum(lengths)[:-1])


def _pixels(nodes: Nodes, *, is_global: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the latitudes of the image rows and the longitudes of its columns, in degrees."""
    if is_global:
        step = 180 / IMAGE_ROWS
        return np.arange(-90 + step / 2, 90, step), np.arange(-180 + step / 2, 180, step)
    step = np.ptp(nodes.lat) / IMAGE_ROWS
    lon = np.unique(nodes.lon % 360)
    west = lon[np.argmax(np.diff(lon, prepend=lon[-1] - 360))]  # east of the widest gap
    lon = (nodes.lon - west) % 360 + (west if west <= 180 else west - 360)

    def centres(axis: np.ndarray) -> np.ndarray:
        return np.arange(axis.min(), axis.max() + step / 2, step)

    return centres(nodes.lat), centres(lon)
