"""Grids, hidden meshes, graphs between them, and example data sets: the only room that knows latitudes and weather.

`nodes`, `grids`, `icosphere` make points; `edges`, `attributes`, `graphs` connect them; `datasets` is what training
sees; `sphere` and `era5_uk` are data sets. Names are imported from these modules: two functions share their module's.
"""
