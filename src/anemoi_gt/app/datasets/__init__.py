"""Data sets of forecasts.

`forecast_dataset` is the interface to training. The data sets are `sphere_advection`, `era5_uk` and
`field_dataset`, which samples the states of `fields` that `readers` read. Import names from these
modules. Grids, meshes and graphs are in `anemoi_gt.data`.
"""
