"""Data sets of forecasts.

`forecast_dataset` is the interface to training; `sphere_advection`, `era5_uk` and `field_dataset`,
of files that `readers` opens, are data sets. Import names from these modules. Grids, meshes and
graphs are in `anemoi_gt.data`.
"""
