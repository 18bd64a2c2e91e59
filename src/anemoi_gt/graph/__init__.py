"""The structure of a graph, made once: all sorting and grouping of edges, without node or edge features."""

from anemoi_gt.graph.structure import GraphStructure

__all__ = ["GraphStructure"]
