"""Checks on ranks: a graph network on a sharded graph equals the one on the whole graph."""

import torch
import torch.distributed as dist

from anemoi_gt import AttentionConfig, InteractionBlock
from anemoi_gt.distributed import shard_graph
from distributed.problems import GRAPHS, rows_of, structure
from distributed.ranks import on_ranks

FEATURES = 6
EDGE_DIM = 5


def differentiate(block, inputs, graph):
    """Return the results of two blocks in turn, and the gradients of inputs and parameters."""
    leaves = {name: rows.clone().requires_grad_() for name, rows in inputs.items()}
    block.zero_grad()
    x_src, edges = leaves["x_src"], leaves["edge_attr"]
    x = (x_src, leaves["x_dst"]) if "x_dst" in leaves else x_src
    out, edges = block(x, graph, edges)
    if "x_dst" not in leaves:
        out, edges = block(out, graph, edges)
    (out.square().sum() + edges.square().sum()).backward()
    results = {"out": out.detach(), "edges": edges.detach()}
    results |= {name: leaf.grad for name, leaf in leaves.items()}
    return results | {name: value.grad.clone() for name, value in block.named_parameters()}


def compare(verdict, group, name, backend="torch", dtype=torch.float64, batch=()):
    """Compare the results of a rank with one device."""
    torch.manual_seed(7)
    edge_index, (num_src, num_dst) = GRAPHS[name]
    block = InteractionBlock(FEATURES, EDGE_DIM, config=AttentionConfig(backend)).to(dtype)
    inputs = {
        "x_src": torch.randn(*batch, num_src, FEATURES, dtype=dtype),
        "edge_attr": torch.randn(edge_index.shape[1], EDGE_DIM, dtype=dtype),
    }
    if num_src != num_dst:
        inputs["x_dst"] = torch.randn(*batch, num_dst, FEATURES, dtype=dtype)
    whole = differentiate(block, inputs, structure(name))
    shard = shard_graph(structure(name), group)
    rows = rows_of(shard)
    rows["edges"] = rows["edge_attr"]
    own = {key: value[..., rows[key], :] for key, value in inputs.items()}
    sharded = differentiate(block, own, shard)
    for key, expected in whole.items():
        label = f"{name} {backend} {batch}: {key}"
        if key in rows:
            verdict.close(label, sharded[key], expected[..., rows[key], :], terms=expected)
        else:
            dist.all_reduce(sharded[key], group=group)
            verdict.close(label, sharded[key], expected)


@on_ranks(1, 2, 3, 4)
def output_and_gradients_match_one_device(group, verdict):
    for name in GRAPHS:
        compare(verdict, group, name)


@on_ranks(2)
def a_batch_and_the_kernels_agree_with_one_device(group, verdict):
    """Kernels are interpreted if there is no GPU."""
    for batch in ((), (2,)):
        compare(verdict, group, "encoder", batch=batch)
        compare(verdict, group, "twenty", "triton", torch.float32, batch)
