"""Grids, hidden meshes, graphs between them, and example data sets.

`nodes` and `grids` make points on the sphere, `meshes` hidden meshes, `edges`, `edge_attributes` and `graphs` connect
them. `forecast_dataset` is the interface to training; `sphere_advection`, `era5_uk` and `field_dataset`, of files that
`readers` opens, are data sets. Import names from these modules.
"""
