"""Programs and packages of models, which run where this library is not: torch.export and AOTInductor."""

from anemoi_gt.export.graphs import GraphAsInput, LayerOnTensors, graph_tensors
from anemoi_gt.export.model import Autocast, export_model
from anemoi_gt.export.package import write_package
from anemoi_gt.export.program import export_program
from anemoi_gt.export.trial import Trial, try_package

__all__ = [
    "Autocast",
    "GraphAsInput",
    "LayerOnTensors",
    "Trial",
    "export_model",
    "export_program",
    "graph_tensors",
    "try_package",
    "write_package",
]
