"""The structure of a graph, made once: the only room that sorts edges. It speaks of colptr and row, never of features."""

from anemoi_gt.graph.structure import GraphStructure

__all__ = ["GraphStructure"]
