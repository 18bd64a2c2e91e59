"""Errors of anemoi_gt in the blocks of graph networks of an anemoi-models, on one rank and as Anemoi shards them.

The second of two ranks never responds: what is gathered is this rank's, twice, and reduced gradients
are its own, with both codes.
"""

from inspect import signature

import torch
import torch.distributed as dist
from anemoi.models.layers import block as blocks
from anemoi.models.layers.utils import load_layer_kernels
from torch.testing._internal.distributed.fake_pg import FakeStore

from anemoi_gt.integrations import anemoi as integration
from support.plans import new_plans

FEATURES = 16
NODES = 7  # of each rank
EDGES = 40
KINDS = (blocks.GraphConvProcessorBlock, blocks.GraphConvMapperBlock)
TAKES_SHAPES = "shapes" in signature(blocks.GraphConvMapperBlock.forward).parameters


def build(kind):
    """Return a block with random parameters."""
    torch.manual_seed(0)
    sizes = {"in_channels": FEATURES, "out_channels": FEATURES, "num_chunks": 2}
    block = kind(layer_kernels=load_layer_kernels(), **sizes)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return block


def is_trainable(group):
    """Return whether Anemoi's blocks can be differentiated on a group."""
    if group is None:
        return True
    rows = torch.ones(group.size() * NODES, FEATURES, requires_grad=True)
    shard = [NODES, FEATURES] if TAKES_SHAPES else NODES
    shards = group.size() * [shard]
    local = blocks.shard_tensor(rows, 0, shards, group, gather_in_backward=False)
    try:
        local.sum().backward()
    except RuntimeError:  # the gradient has the rows of one rank
        return False
    return True


def shards_of(block, ranks):
    """Return the shards of a block's nodes in the form of this version."""
    if TAKES_SHAPES:
        of_nodes = ranks * [[NODES, FEATURES]]
        return (of_nodes, of_nodes)
    from anemoi.models.distributed import shapes

    nodes = None if ranks == 1 else ranks * [NODES]
    if isinstance(block, blocks.GraphConvProcessorBlock):
        return shapes.GraphShardInfo(nodes)
    return shapes.BipartiteGraphShardInfo(nodes, nodes)


def run(block, group, num_edges=EDGES):
    """Return outputs, and gradients where Anemoi has them, of a block on the first rank's nodes and the edges into them."""
    generator = torch.Generator().manual_seed(0)
    ranks = 1 if group is None else group.size()
    rows = [torch.randn(NODES, FEATURES, generator=generator) for _ in range(2)]
    rows.append(torch.randn(num_edges, FEATURES, generator=generator))
    x_src, x_dst, edges = (x.requires_grad_() for x in rows)
    ends = [torch.randint(n, (num_edges,), generator=generator) for n in (ranks * NODES, NODES)]
    is_processor = isinstance(block, blocks.GraphConvProcessorBlock)
    x = x_dst if is_processor else (x_src, x_dst)
    nodes, out = block(x, edges, torch.stack(ends), shards_of(block, ranks), group)
    outputs = [nodes, out] if is_processor else [*nodes, out]
    if not (torch.is_grad_enabled() and is_trainable(group)):
        return dict(enumerate([y.detach() for y in outputs]))
    loss = sum((y.float().sin() * (i + 1)).sum() for i, y in enumerate(outputs))
    leaves = [x_dst, edges, *block.parameters()] + ([] if is_processor else [x_src])
    gradients = torch.autograd.grad(loss, leaves)
    return dict(enumerate([y.detach() for y in outputs] + list(gradients)))


def outcome():
    """Return how the last block was computed, and why not fused."""
    (computed,) = integration.installed().computed
    return [computed.outcome, computed.reason]


@new_plans(programs=3)  # few, for the interpreter
def compare(max_error):
    """Return a report per block class and number of ranks; Triton must interpret kernels."""
    report = {}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for kind in KINDS:
        for ranks, group in ((1, None), (2, dist.group.WORLD)):
            block = build(kind)
            expected = run(block, group)
            with integration.install(backend="triton", fusion="sublayers"):
                error = max_error(run(block, group), expected)
                outcomes = {"error": error, "outcome": outcome(), "trainable": is_trainable(group)}
            autocast = torch.autocast("cpu", torch.bfloat16)
            with integration.install(backend="triton"), autocast, torch.no_grad():
                for name, num_edges in (("many edges", EDGES), ("few edges", NODES)):
                    run(block, group, num_edges)
                    outcomes[name] = outcome()
            report[f"{kind.__name__} on {ranks}"] = outcomes
    dist.destroy_process_group()
    return report
