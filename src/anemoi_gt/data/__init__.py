"""Grids, hidden meshes, and graphs between them.

`nodes` and `grids` make points on the sphere, `meshes` hidden meshes, `edges`, `edge_attributes`
and `graphs` connect them. Import names from these modules. Data sets are in
`anemoi_gt.app.datasets`.
"""
