"""Export of models to programs and packages that run without this library.

Programs come from torch.export, packages from AOTInductor.
"""

from anemoi_gt.export.package import PackageReport, verify_package, write_package
from anemoi_gt.export.program import Autocast, TensorGraphLayer, export_model, export_program

__all__ = [
    "Autocast",
    "PackageReport",
    "TensorGraphLayer",
    "export_model",
    "export_program",
    "verify_package",
    "write_package",
]
