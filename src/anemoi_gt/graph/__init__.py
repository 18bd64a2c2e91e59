"""Graph structure, built once: all sorting and grouping of edges, without node or edge features."""

from anemoi_gt.graph.sharded_graph import ShardedGraph
from anemoi_gt.graph.structure import GraphStructure

__all__ = ["GraphStructure", "ShardedGraph"]
