"""Maps of values on nodes: projection, and interpolation of scattered nodes to an image."""

import logging

import numpy as np

from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra

log = logging.getLogger(__name__)

COAST_STYLE = {"colors": "black", "linewidths": 0.6, "alpha": 0.7}
IMAGE_ROWS = 240
NEIGHBOURS = 3  # nodes interpolated to a pixel, with inverse squared distance weights


class MapImage:
    """Image of values on nodes: Mollweide projection for the globe, longitude-latitude for regions.

    Nodes over more than 90 degrees of latitude are drawn as a globe. `projection` is Matplotlib's
    name of the projection of the axes to draw on. Raises ImportError if scipy is missing.
    """

    def __init__(self, nodes: Nodes):
        self._is_global = np.ptp(nodes.lat) > 90
        self.projection = "mollweide" if self._is_global else "rectilinear"
        rows, columns = _pixels(nodes, self._is_global)
        lat, lon = np.meshgrid(rows, columns, indexing="ij")
        tree = import_extra("scipy.spatial", "train").cKDTree(nodes.xyz)
        distance, self._node = tree.query(Nodes(lat.ravel(), lon.ravel()).xyz, k=NEIGHBOURS)
        weight = 1 / (distance**2 + 1e-12)  # a pixel at a node has its value
        self._weight = weight / weight.sum(axis=1, keepdims=True)
        lines = coastlines("110m" if self._is_global else "50m")
        turns = (0,) if self._is_global else (-360, 0, 360)  # a region may lie beyond the date line
        unit = np.deg2rad if self._is_global else np.asarray  # of the axes
        self._lat, self._lon = unit(rows), unit(columns)
        self._coastlines = [unit(line + np.array([turn, 0])) for line in lines for turn in turns]

    def draw(self, axes, values: np.ndarray, **style):
        """Draw values [N] on axes of this projection by `pcolormesh(**style)`; return the mesh."""
        image = (
            (values[self._node] * self._weight).sum(axis=1).reshape(len(self._lat), len(self._lon))
        )
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
        axes.add_collection(line_collection(self._coastlines, **COAST_STYLE))
        return axes.pcolormesh(
            self._lon, self._lat, image, shading="nearest", rasterized=True, **style
        )


def coastlines(resolution: str) -> list[np.ndarray]:
    """Return Natural Earth coastlines as lines [P, 2] of longitude, latitude; none without cartopy.

    `resolution` is "110m", "50m" or "10m". Cartopy downloads them once; without a network there are
    none. A line ends where it crosses the date line.
    """
    try:
        from cartopy.io import shapereader

        path = shapereader.natural_earth(resolution, "physical", "coastline")
        shapes = [
            part
            for shape in shapereader.Reader(path).geometries()
            for part in getattr(shape, "geoms", [shape])
        ]
    except (ImportError, OSError) as error:
        log.debug("no coastlines: %s", error)
        return []
    lines = (np.array(shape.coords)[:, :2] for shape in shapes)
    return [
        part
        for line in lines
        for part in np.split(line, np.flatnonzero(abs(np.diff(line[:, 0])) > 180) + 1)
    ]


def _pixels(nodes: Nodes, is_global: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return latitudes and longitudes of the image's rows and columns, degrees."""
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
