"""Sharding of graph and model among ranks: partition, halo exchange, gradients, checkpoints."""

from anemoi_gt.distributed.consensus import (
    broadcast_from_rank0,
    check_finite,
    check_same,
    fingerprint,
    raise_on_all_ranks,
    run_on_rank0,
)
from anemoi_gt.distributed.gradients import (
    clip_gradients,
    optimizer_step,
    reduce_gradients,
    sum_loss,
)
from anemoi_gt.distributed.graph_shard import GraphShard, shard_edges, shard_graph
from anemoi_gt.distributed.halo import HaloExchange, PendingExchange
from anemoi_gt.distributed.model_shard import scatter_model, shard_model
from anemoi_gt.distributed.module_shard import ModuleShard, shard_module
from anemoi_gt.distributed.parameter_shard import shard_parameters
from anemoi_gt.distributed.partition import Partition, Ranges, destination_cost
from anemoi_gt.distributed.process_group import (
    ShardingConfig,
    init_distributed,
    is_launched,
    make_mesh,
)
from anemoi_gt.distributed.sharded_checkpoint import (
    ShardedTable,
    find_checkpoint,
    load_checkpoint,
    save_checkpoint,
)

__all__ = [
    "GraphShard",
    "HaloExchange",
    "ModuleShard",
    "Partition",
    "PendingExchange",
    "Ranges",
    "ShardedTable",
    "ShardingConfig",
    "broadcast_from_rank0",
    "check_finite",
    "check_same",
    "clip_gradients",
    "destination_cost",
    "find_checkpoint",
    "fingerprint",
    "init_distributed",
    "is_launched",
    "load_checkpoint",
    "make_mesh",
    "optimizer_step",
    "raise_on_all_ranks",
    "reduce_gradients",
    "run_on_rank0",
    "save_checkpoint",
    "scatter_model",
    "shard_edges",
    "shard_graph",
    "shard_model",
    "shard_module",
    "shard_parameters",
    "sum_loss",
]
