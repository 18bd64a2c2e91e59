"""Weather as in a user's files: a wave over a region, on pressure levels, with a land-sea mask and rain."""

import numpy as np
import xarray

TIMES = np.datetime64("2020-01-01", "ns") + 6 * np.arange(40) * np.timedelta64(1, "h")
LAT = np.linspace(58.0, 50.0, 9)
LON = np.linspace(-10.0, 2.0, 13)
# Options of the application for the smallest training run on `weather.nc`, in the current folder.
SMALL_RUN = [
    "data=xarray",
    "data.path=weather.nc",
    "model.channels=8",
    "model.num_layers=1",
    "training.steps=4",
    "training.batch_size=2",
    "training.valid_every=2",
    "training.device=cpu",
]


def weather_file(lat=LAT, lon=LON, times=TIMES):
    """Return forty six-hourly states of t2m, z on two levels, tp and the static lsm, on a regular grid."""
    hours = (times - TIMES[0]) / np.timedelta64(1, "h")
    lon_phase = np.deg2rad(20 * lon)[None, None]
    time_phase = hours[:, None, None] / 20
    lat_phase = np.deg2rad(15 * lat)[None, :, None]
    wave = np.sin(lon_phase - time_phase + lat_phase)
    t2m = 280 + 5 * wave
    tp = wave.clip(min=0)
    z = np.stack([500 + wave, 850 + 2 * wave], axis=1)
    lsm = np.random.default_rng(0).random((len(lat), len(lon))).round()
    horizontal = ("latitude", "longitude")
    arrays = {
        "t2m": (("time", *horizontal), t2m.astype("float32"), {"units": "K"}),
        "z": (("time", "level", *horizontal), z.astype("float32"), {"units": "m"}),
        "tp": (("time", *horizontal), tp.astype("float32"), {"units": "m"}),
        "lsm": (horizontal, lsm.astype("float32"), {"units": "1"}),
    }
    coordinates = {"time": times, "level": [500, 850], "latitude": lat, "longitude": lon}
    return xarray.Dataset(arrays, coordinates)
