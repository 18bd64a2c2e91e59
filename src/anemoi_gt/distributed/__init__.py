"""Sharding of graph and model among ranks: partition, halo exchange, gradients, checkpoints."""

import warnings
from typing import Any

from anemoi_gt.distributed import consensus
from anemoi_gt.distributed.consensus import check_same
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
    "check_same",
    "clip_gradients",
    "destination_cost",
    "find_checkpoint",
    "init_distributed",
    "is_launched",
    "load_checkpoint",
    "make_mesh",
    "optimizer_step",
    "reduce_gradients",
    "save_checkpoint",
    "scatter_model",
    "shard_edges",
    "shard_graph",
    "shard_model",
    "shard_module",
    "shard_parameters",
    "sum_loss",
]

_DEPRECATED = {  # of `consensus`; removed in 0.6.0
    "broadcast_from_rank0": "torch.distributed.broadcast_object_list",
    "check_finite": "torch.isfinite(sum_loss(loss, mesh)), which is the same on all ranks",
    "fingerprint": "a hash of your own, such as hashlib's",
    "raise_on_all_ranks": "check_same, or torch.distributed.all_gather_object",
    "run_on_rank0": "torch.distributed.broadcast_object_list",
}


def __getattr__(name: str) -> Any:
    if name not in _DEPRECATED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"{__name__}.{name} will be removed in 0.6.0: use {_DEPRECATED[name]}"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return getattr(consensus, name)
