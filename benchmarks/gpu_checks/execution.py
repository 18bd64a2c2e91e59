"""Execution of the kernels: bitwise reproducible, on any stream, without synchronisation."""

from dataclasses import dataclass

import torch

from anemoi_gt import GraphStructure, KernelConfig, edge_attention
from gpu_checks import DEVICE

TRITON = KernelConfig(backend="triton")
NAMES = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias")


@dataclass(frozen=True)
class Size:
    """Size of the problem of a check; the default is an encoder's, about N320 to icosphere 5."""

    num_src: int = 200_000
    num_dst: int = 10_242
    num_edges: int = 300_000
    heads: int = 16
    channels: int = 64
    edge_dim: int = 11
    runs: int = 100


# for the interpreter
SMALL = Size(num_src=12, num_dst=5, num_edges=20, heads=2, channels=8, edge_dim=3, runs=2)
HERE = Size() if DEVICE.type == "cuda" else SMALL


class Work:
    """Forward and backward of one problem, with gradients of everything."""

    def __init__(self, size: Size, seed: int = 0):
        generator = torch.Generator(DEVICE).manual_seed(seed)

        def draw(*shape):
            return torch.randn(
                *shape, generator=generator, device=DEVICE, dtype=torch.bfloat16
            ).requires_grad_()

        self.sizes = (size.num_src, size.num_dst)
        ends = [
            torch.randint(n, (size.num_edges,), generator=generator, device=DEVICE)
            for n in self.sizes
        ]
        self.edge_index = torch.stack(ends)
        self.graph = GraphStructure.from_edge_index(self.edge_index, self.sizes)
        width = size.heads * size.channels
        rows = [
            draw(nodes, size.heads, size.channels)
            for nodes in (size.num_dst, size.num_src, size.num_src)
        ]
        self.leaves = [
            *rows,
            draw(size.num_edges, size.edge_dim),
            draw(width, size.edge_dim),
            draw(width),
        ]
        self.grad_out = draw(size.num_dst, size.heads, size.channels).detach()
        self.grad_lse = torch.ones(size.num_dst, size.heads, device=DEVICE)

    def __call__(self, graph: GraphStructure | None = None) -> dict[str, torch.Tensor]:
        """Return out, lse and all gradients by name."""
        query, key, value, *edge_operands = self.leaves
        out, lse = edge_attention(
            query, key, value, graph or self.graph, *edge_operands, config=TRITON
        )
        gradients = torch.autograd.grad((out, lse), self.leaves, (self.grad_out, self.grad_lse))
        return {
            "out": out.detach(),
            "lse": lse.detach(),
            **dict(zip(NAMES, gradients, strict=True)),
        }


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    """Raise unless all tensors hold the same bits, NaN included."""
    for name, tensor in left.items():
        integers = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        if not torch.equal(tensor.view(integers), right[name].view(integers)):
            raise AssertionError(f"{name} differs")


def repeat() -> str:
    """Check that every run gives bitwise equal results."""
    work = Work(HERE)
    first = work()
    for _ in range(HERE.runs):
        assert_same_bits(work(), first)
    problem = f"{HERE.num_edges} edges, {HERE.heads} x {HERE.channels}"
    return f"{HERE.runs} runs gave the bits of the first: {problem}"


def stream() -> str:
    """Check that kernels run on a second stream while the first is busy, with the same results."""
    expected = Work(HERE)()
    torch.cuda.synchronize()
    side, busy = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        work = Work(HERE)
        work()  # allocates the memory of this stream
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # cycles, about a second
    busy.record()
    with torch.cuda.stream(side):
        result = work()
    side.synchronize()
    if busy.query():
        raise AssertionError(
            "the first stream was idle before the second had finished: work went to the first"
        )
    torch.cuda.synchronize()
    assert_same_bits(result, expected)
    return "same bits, while the first stream was busy with other work"


def no_synchronisation() -> str:
    """Check that neither attention nor building a structure synchronises with the device."""
    work = Work(HERE)
    build = {"stable": False, "validate": False}
    work(GraphStructure.from_edge_index(work.edge_index, work.sizes, **build))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = work()
        loose = work(GraphStructure.from_edge_index(work.edge_index, work.sizes, **build))
        work(GraphStructure.from_edge_index(work.edge_index, work.sizes, validate=False))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = (loose["out"].float() - result["out"].float()).abs().max().item()
    if not difference <= 0.02 * result["out"].float().abs().max().item():
        raise AssertionError(
            f"a structure built without sorting gave another result, off by {difference}"
        )
    return "forward, backward and building a structure never waited"
