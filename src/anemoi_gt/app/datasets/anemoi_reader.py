"""Fields from zarrs of anemoi-datasets, whose metadata name variables, units and missing dates."""

from functools import lru_cache, partial

import numpy as np

from anemoi_gt.app.datasets.fields import Grid, Key, Series
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.extras import import_extra


def read_anemoi(path: str) -> tuple[list[Series], dict[str, str]]:
    """Return the fields of a zarr of anemoi-datasets; dates that are missing are left out.

    Raises ImportError if zarr is missing, ValueError if it is not a zarr of anemoi-datasets.
    """
    zarr = import_extra("zarr", "xarray")
    try:
        store = zarr.open(path, mode="r")
        data = store["data"]  # [T, V, members, N]
        variables = list(store.attrs["variables"])
        lat, lon, times = (
            np.asarray(store[key][:]) for key in ("latitudes", "longitudes", "dates")
        )
    except Exception as error:  # the type depends on the zarr version
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(
            f"{path} must be a zarr of anemoi-datasets, and cannot be read: {reason}"
        ) from error
    times = times.astype("datetime64[s]")
    missing = np.array(store.attrs.get("missing_dates", []), "datetime64[s]")
    available = np.flatnonzero(~np.isin(times, missing))
    metadata = dict(store.attrs.get("variables_metadata") or {})
    nodes = Nodes(lat, lon)
    grid = Grid(nodes, ("node",), (len(nodes),))

    @lru_cache(1)  # one chunk holds all variables of a date
    def read_state(t: int) -> np.ndarray:
        return np.asarray(data[int(available[t])])

    def read(v: int, member: int, t: int) -> np.ndarray:
        return read_state(t)[v, member].astype(np.float32)

    num_members = data.shape[2]
    series = []
    for v, variable in enumerate(variables):
        units = dict(metadata.get(variable) or {}).get("units") or ""
        for member in range(num_members):
            series.append(
                Series(
                    key=Key(variable),
                    units=str(units),
                    grid=grid,
                    times=times[available].astype("datetime64[ns]"),
                    read=partial(read, v, member),
                    source=path,
                    member=str(member) if num_members > 1 else "",
                )
            )
    left_out = {f"the date {time}": "it is missing in the data set" for time in missing.tolist()}
    return series, left_out
