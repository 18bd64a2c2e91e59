"""Grids, hidden meshes, graphs between them, and example data sets.

`nodes` and `grids` make points on the sphere, `meshes` hidden meshes, `edges`, `edge_attributes` and `graphs` connect
them. `datasets` is the interface to training; `sphere` and `era5_uk` are data sets. Import names from these modules:
`sphere` and `era5_uk` are functions too.
"""
