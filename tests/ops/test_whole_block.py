"""Whole blocks as one operator: against blocks of separate operators, and as PyTorch sees it."""

from functools import partial

import pytest
import torch
from anemoi_gt.nn.whole_block import run_block, unsupported_reason
from support.accuracy import assert_within
from support.differentiate import differentiate
from support.run import with_hubs
from support.same_numbers import assert_same_numbers

from anemoi_gt import AttentionConfig, GraphStructure
from anemoi_gt.nn import GraphTransformerMapperBlock, GraphTransformerProcessorBlock
from anemoi_gt.ops.triton_backend import whole_block as whole

pytestmark = [
    pytest.mark.usefixtures("few_programs"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of the interpreter
]
SIZES = {"in_channels": 24, "hidden_dim": 40, "out_channels": 24, "num_heads": 2, "edge_dim": 3}


def make(kind, device, *, num_src=7, num_dst=9, edges=31, batch=1):
    """A block with parameters of all sizes, nodes of a batch one after another, edges, and a structure."""
    torch.manual_seed(0)
    block = (GraphTransformerProcessorBlock if kind == "processor" else GraphTransformerMapperBlock)(**SIZES)
    for parameter in block.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    num_src = num_dst if kind == "processor" else num_src
    ends = (num_src, max(num_dst - 1, 1))  # one destination is isolated
    edge_index = torch.stack([torch.randint(nodes, (edges,)) for nodes in ends])
    graph = GraphStructure.from_edge_index(edge_index, (num_src, num_dst)).with_reverse()
    sizes = ((num_dst, 24), (num_src, 24), (edges, 3))
    x_dst, x_src, attr = (torch.randn(batch * number, width) for number, width in sizes)
    nodes = (None if kind == "processor" else x_src.to(device), x_dst.to(device))
    return block.to(device), *nodes, attr.to(device), graph.to(device)


def separate(block, x_src, x_dst, attr, graph, batch):
    """The destinations after a block of separate operators, in float64."""
    split = partial(torch.unflatten, dim=0, sizes=(batch, -1))
    if x_src is None:
        return block(split(x_dst), graph, split(attr)).flatten(0, 1)
    return block((split(x_src), split(x_dst)), graph, split(attr))[1].flatten(0, 1)


def differentiated(forward, block, x_src, x_dst, attr, graph, batch, dtype):
    """Output and gradients by name, of operands in a dtype."""
    inputs = {"x_dst": x_dst.to(dtype), "attr": attr.to(dtype)} | ({} if x_src is None else {"x_src": x_src.to(dtype)})
    call = lambda given: forward(block, given.get("x_src"), given["x_dst"], given["attr"], graph, batch)  # noqa: E731
    return differentiate(block, inputs, call)


def by_operator(block, x_src, x_dst, attr, graph, batch):
    """The same by one operator."""
    assert unsupported_reason(block, x_dst, AttentionConfig(backend="triton")) is None
    attr = attr if batch == 1 else attr.unflatten(0, (batch, -1))
    return run_block(block, x_src, x_dst, attr, graph, batch)


@pytest.mark.parametrize("kind", ("processor", "mapper"))
@pytest.mark.parametrize(("batch", "segment", "num_dst"), ((1, None, 9), (2, None, 9), (2, 2, 9), (2, None, 1)))
def test_float32_is_as_accurate_as_separate_operators(kind, batch, segment, num_dst, kernel_device):
    *problem, graph = make(kind, kernel_device, batch=batch, num_dst=num_dst)
    graph = with_hubs(graph, segment)
    problem.append(graph)
    ours = differentiated(by_operator, *problem, batch, torch.float32)
    plain = differentiated(separate, *problem, batch, torch.float32)
    exact = differentiated(separate, problem[0].double(), *problem[1:], batch, torch.float64)
    vanishes = {"dlin_key.weight": exact["dlin_value.weight"]} if (kind, num_dst) == ("processor", 1) else {}
    assert_within(ours, exact, plain, exact | vanishes, torch.float32)


@pytest.mark.parametrize(("batch", "halo"), ((1, 3), (2, 3), (1, 0)))
@pytest.mark.parametrize("kind", ("processor", "mapper"))
def test_normed_rows_of_a_halo_are_sources_after_the_own_ones(kind, batch, halo, kernel_device):
    block, _, x_dst, attr, graph = make("mapper", kernel_device, num_src=9 + halo, batch=batch)
    block = make(kind, kernel_device)[0]
    more = torch.randn(batch * halo, 24, device=kernel_device)

    def apart(block, more, own, attr, graph, batch):
        sources, attr = None if kind == "processor" else own, attr.unflatten(0, (batch, -1))
        return run_block(block, sources, own, attr, graph, batch, block.source_norm(more))

    def together(block, *rows):
        *rows, graph, batch = rows
        more, own, attr = (each.unflatten(0, (batch, -1)) for each in rows)
        return block.update_destinations((torch.cat([own, more], 1), own), graph, attr, (None, None)).flatten(0, 1)

    problem = more, x_dst, attr, graph, batch
    ours = differentiated(apart, block, *problem, torch.float32)
    plain, exact = (differentiated(together, block.to(t), *problem, t) for t in (torch.float32, torch.float64))
    assert_within(ours, exact, plain, exact, torch.float32)


def test_sides_of_a_mapper_that_share_nodes_and_norm_give_what_they_give_apart(kernel_device):
    block, *problem = make("mapper", kernel_device, num_src=9)
    block.layer_norm_attention_src = block.layer_norm_attention
    ways = [lambda block, _, x, *given, one=one: run_block(block, None if one else x, x, *given) for one in (0, 1)]
    results = [differentiated(way, block, None, *problem[1:], 1, torch.float32) for way in ways]
    assert_same_numbers(*results)


def test_chunks_of_the_feed_forward_network_change_rounding_alone(kernel_device, monkeypatch):
    problem = make("mapper", kernel_device)
    results = []
    for chunk in (100, 4):
        monkeypatch.setattr(whole, "CHUNK", chunk)
        results.append(differentiated(by_operator, *problem, 1, torch.float32))
    assert_same_numbers(*results)


def test_results_repeat_bit_by_bit(kernel_device):
    problem = make("processor", kernel_device)
    first, second = (differentiated(by_operator, *problem, 1, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(("kind", "halo"), (("processor", None), ("mapper", None), ("mapper", 1)))
def test_forward_and_backward_operators_pass_opcheck(kind, halo, kernel_device, monkeypatch):
    block, x_src, *operands = make(kind, kernel_device, num_src=3, num_dst=4, edges=7)
    x_src, halo = (x_src, None) if halo is None else (x_src[halo:], x_src[:halo].requires_grad_())
    calls, call = [], whole.transformer_block
    monkeypatch.setattr(whole, "_transform", lambda *a: calls.append(a) or call(*a))
    out = run_block(block, x_src, *operands, 1, halo)
    (arguments,) = calls
    torch.library.opcheck(call, arguments)
    detached = [argument.detach() if torch.is_tensor(argument) else argument for argument in arguments[:-1]]
    _, *kept = call(*detached, True)
    torch.library.opcheck(whole.transformer_block_backward, [torch.ones_like(out), *detached, *kept, True])


def test_gradients_that_are_not_needed_are_not_returned(kernel_device):
    block, _, x, attr, graph = make("processor", kernel_device)
    block.requires_grad_(False)
    x.requires_grad_()
    out = by_operator(block, None, x, attr, graph, 1)
    out.sum().backward()
    assert x.grad is not None and attr.grad is None and block.lin_query.weight.grad is None


def test_a_second_derivative_is_refused(kernel_device):
    block, _, x, attr, graph = make("processor", kernel_device)
    out = by_operator(block, None, x.requires_grad_(), attr, graph, 1)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        gradient.sum().backward()
