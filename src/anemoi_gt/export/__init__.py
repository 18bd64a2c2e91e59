"""Export of models to programs and packages that run without this library.

Programs come from torch.export, packages from AOTInductor.
"""

from anemoi_gt.export.graph_inputs import GraphInputModel, TensorGraphLayer, graph_tensors
from anemoi_gt.export.package import PackageReport, verify_package, write_package
from anemoi_gt.export.program import Autocast, export_model, export_program

__all__ = [
    "Autocast",
    "GraphInputModel",
    "PackageReport",
    "TensorGraphLayer",
    "export_model",
    "export_program",
    "graph_tensors",
    "verify_package",
    "write_package",
]
