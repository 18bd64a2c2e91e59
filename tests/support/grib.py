"""GRIB files of a few messages on a region, with the keys of a test."""

import eccodes
import numpy as np

from anemoi_gt.data.grids import regional

ROWS = np.array([58.0, 56.0, 54.0])
COLUMNS = np.array([350.0, 352.0, 354.0, 356.0])
UK = regional(ROWS, COLUMNS)
FIRST = (
    "sample",
    "typeOfLevel",
    "productDefinitionTemplateNumber",
    "shortName",
)  # set first, in this order
SCANNING = ("iScansNegatively", "jScansPositively", "jPointsAreConsecutive")


def message_values(lat, lon):
    """Return values that tell the points from each other."""
    return 100 * lat + lon


def write_messages(path, messages):
    """Write messages by their keys; `value` is a number, or a function of latitude and longitude."""
    with open(path, "wb") as file:
        for keys in messages:
            keys = dict(keys)
            message = eccodes.codes_grib_new_from_samples(
                keys.pop("sample", "regular_ll_sfc_grib2")
            )
            value = keys.pop("value", 0.0)
            lat, lon = _set_grid(message, *(keys.get(key, 0) for key in SCANNING))
            for key in sorted(keys, key=lambda key: FIRST.index(key) if key in FIRST else 9):
                eccodes.codes_set(message, key, keys[key])
            values = value(lat, lon) if callable(value) else np.full(len(lat), float(value))
            eccodes.codes_set(message, "bitsPerValue", 24)
            eccodes.codes_set_values(message, values)
            eccodes.codes_write(message, file)


def _set_grid(message, i_negative, j_positive, j_consecutive):
    """Set the grid `UK`; return latitudes and longitudes of the points as they are scanned."""
    rows = ROWS[::-1] if j_positive else ROWS
    columns = COLUMNS[::-1] if i_negative else COLUMNS
    keys = {"Ni": len(columns), "Nj": len(rows)}
    for which, end in (("First", 0), ("Last", -1)):
        keys[f"latitudeOf{which}GridPointInDegrees"] = rows[end]
        keys[f"longitudeOf{which}GridPointInDegrees"] = columns[end]
    keys |= {"iDirectionIncrementInDegrees": 2.0, "jDirectionIncrementInDegrees": 2.0}
    for key, value in keys.items():
        eccodes.codes_set(message, key, value)
    lat, lon = np.meshgrid(rows, columns, indexing="ij")
    if j_consecutive:
        lat, lon = lat.T, lon.T
    return lat.ravel(), lon.ravel()
