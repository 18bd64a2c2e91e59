"""Weather as a user has it in files: a wave over a region, on pressure levels, with orography and rain."""

import numpy as np
import xarray

TIMES = np.datetime64("2020-01-01", "ns") + 6 * np.arange(40) * np.timedelta64(1, "h")


LAT, LON = np.linspace(58.0, 50.0, 9), np.linspace(-10.0, 2.0, 13)


def weather_file(lat=LAT, lon=LON, times=TIMES):
    """Return forty six-hourly states of t2m, z on two levels, tp and the static lsm, on the grid of two axes."""
    hours = (times - TIMES[0]) / np.timedelta64(1, "h")
    wave = np.sin(
        np.deg2rad(20 * lon)[None, None]
        - hours[:, None, None] / 20
        + np.deg2rad(15 * lat)[None, :, None]
    )
    t2m, tp = 280 + 5 * wave, wave.clip(min=0)
    z = np.stack([500 + wave, 850 + 2 * wave], axis=1)
    lsm = np.random.default_rng(0).random((len(lat), len(lon))).round()
    place, units = ("latitude", "longitude"), {"t2m": "K", "tp": "m", "z": "m", "lsm": "1"}
    arrays = {
        "t2m": (("time", *place), t2m),
        "z": (("time", "level", *place), z),
        "tp": (("time", *place), tp),
        "lsm": (place, lsm),
    }
    arrays = {
        name: (dims, values.astype("float32"), {"units": units[name]})
        for name, (dims, values) in arrays.items()
    }
    return xarray.Dataset(
        arrays, {"time": times, "level": [500, 850], "latitude": lat, "longitude": lon}
    )
