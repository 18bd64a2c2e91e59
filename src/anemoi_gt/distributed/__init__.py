"""One graph across many ranks: who owns what, what travels, and how results come together. It speaks of ranks and halos."""

from anemoi_gt.distributed.consensus import (
    broadcast_from_rank0,
    check_finite,
    check_same,
    fingerprint,
    raise_on_all_ranks,
    run_on_rank0,
)
from anemoi_gt.distributed.grad_sync import clip_gradients, make_mesh, reduce_gradients, sum_loss
from anemoi_gt.distributed.graph_shard import EdgeShard, GraphShard, HeadShard, shard_edges, shard_graph
from anemoi_gt.distributed.halo import HaloExchange, PendingExchange
from anemoi_gt.distributed.halo_attention import (
    attend_after_exchange,
    attend_by_heads,
    attend_overlapped,
    start_exchange,
)
from anemoi_gt.distributed.mesh import ShardingConfig, init_distributed, is_launched
from anemoi_gt.distributed.partition import Partition, Ranges, destination_cost
from anemoi_gt.distributed.sharded_checkpoint import ShardedTable, load_checkpoint, save_checkpoint

__all__ = [
    "EdgeShard",
    "GraphShard",
    "HeadShard",
    "Partition",
    "PendingExchange",
    "Ranges",
    "HaloExchange",
    "ShardedTable",
    "ShardingConfig",
    "attend_after_exchange",
    "attend_by_heads",
    "attend_overlapped",
    "run_on_rank0",
    "check_finite",
    "check_same",
    "clip_gradients",
    "destination_cost",
    "fingerprint",
    "init_distributed",
    "is_launched",
    "load_checkpoint",
    "make_mesh",
    "broadcast_from_rank0",
    "raise_on_all_ranks",
    "reduce_gradients",
    "save_checkpoint",
    "shard_edges",
    "shard_graph",
    "start_exchange",
    "sum_loss",
]
