"""Plans that replay themselves: the bits of launched plans, whatever happens beside them.

Every circumstance is a training loop, run twice: with plans that are launched, and with plans that
are replayed. Losses and gradients must have the same bits.
"""

import gc
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from support.weather import weather_graph
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from anemoi_gt import EncoderProcessorDecoder, KernelConfig
from anemoi_gt.nn import GNNMapper, GNNProcessor
from anemoi_gt.ops.triton_backend import replays
from anemoi_gt.ops.triton_backend.replays import Replays
from anemoi_gt.replay.cuda_graph import CUDAGraphedStep, capture_cuda_graph
from gpu_checks import DEVICE

NODES = {"data": 3000, "hidden": 1000}
EDGES = {
    ("data", "to", "hidden"): 4000,
    ("hidden", "to", "hidden"): 7000,
    ("hidden", "to", "data"): 9000,
}
FIELDS, CHANNELS, LAYERS = 8, 64, 3
STEPS = 8


def on_host(result: Tensor) -> Tensor:
    """Return a copy in pinned memory; it is complete once the device is synchronised.

    What a loop kept on the device would take the addresses that recur otherwise.
    """
    copy = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
    return copy.copy_(result.detach(), non_blocking=True)


class Loop:
    """Training steps of a model on random fields; bitwise fixed by its seed."""

    def __init__(self, *, replay: bool, is_network: bool = False, **options):
        torch.manual_seed(0)
        self.autocast = options.pop("autocast", True)
        if is_network:
            options |= {"processor": GNNProcessor, "mapper": GNNMapper}
        else:
            options |= {"heads": 4}
        config = KernelConfig(backend="triton", replay=replay)
        self.model = EncoderProcessorDecoder(
            weather_graph(NODES, EDGES),
            FIELDS,
            FIELDS,
            channels=CHANNELS,
            num_layers=LAYERS,
            config=config,
            **options,
        ).to(DEVICE)
        self.generator = torch.Generator(DEVICE).manual_seed(1)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.results: list[Tensor] = []

    def draw(self) -> tuple[Tensor, Tensor]:
        """Return fields and target."""
        shape = (1, NODES["data"], FIELDS)
        return tuple(torch.randn(shape, device=DEVICE, generator=self.generator) for _ in range(2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss, under autocast."""
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=self.autocast):
            return (self.model(x).float() - y).square().mean()

    def keep(self, loss: Tensor) -> None:
        """Keep a loss and the gradients, and take a step."""
        gradients = [p.grad.flatten() for p in self.model.parameters() if p.grad is not None]
        self.results += [on_host(loss), on_host(torch.cat(gradients))]
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Run one plain step."""
        loss = self.loss(*self.draw())
        loss.backward()
        self.keep(loss)

    def run(self, steps: int = STEPS) -> None:
        """Run plain steps."""
        for _ in range(steps):
            self.step()


def plain(loop: Loop) -> None:
    """Nothing beside it."""
    loop.run()


def hooks(loop: Loop) -> None:
    """Hooks that come and go, and allocate."""
    blocks = [module for module in loop.model.modules() if type(module).__name__.endswith("Block")]
    for number in range(STEPS):
        handles = []
        if number % 2:
            handles.append(blocks[0].register_forward_hook(_allocate))
            handles.append(blocks[1].register_full_backward_hook(_allocate))
        loop.step()
        for handle in handles:
            handle.remove()


def _allocate(*_: object) -> None:
    torch.zeros(999, device=DEVICE)


def retained(loop: Loop) -> None:
    """Two backward passes through one graph."""
    for _ in range(STEPS):
        loss = loop.loss(*loop.draw())
        loss.backward(retain_graph=True)
        loss.backward()
        loop.keep(loss)


def validated(loop: Loop) -> None:
    """Passes without gradients between the steps and inside them."""
    for _ in range(STEPS):
        x, y = loop.draw()
        with torch.no_grad():
            loop.results.append(on_host(loop.loss(x, y)))
        loss = loop.loss(x, y)
        with torch.inference_mode():
            loop.results.append(on_host(loop.loss(x, y)))
        loss.backward()
        loop.keep(loss)


def checkpointed(loop: Loop) -> None:
    """Checkpoints of PyTorch around the model, of both kinds."""
    for number in range(STEPS):
        x, y = loop.draw()
        reentrant = number % 2 == 1
        loss = checkpoint(loop.loss, x.requires_grad_(), y, use_reentrant=reentrant)
        loss.backward()
        loop.keep(loss)


def on_streams(loop: Loop) -> None:
    """Steps on the default stream and on others, in turn."""
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    for number in range(STEPS):
        stream = streams[number % 3]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loop.step()
        torch.cuda.current_stream().wait_stream(stream)


def in_threads(loop: Loop) -> None:
    """Passes in several threads at once, on the default stream, between steps."""
    x, y = loop.draw()
    for _ in range(STEPS // 2):
        loop.step()
        results = [torch.zeros(())] * 4
        failures = []

        def evaluate(number, results=results, failures=failures):
            try:
                with torch.no_grad():
                    for _ in range(6):
                        results[number] = loop.loss(x, y)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=evaluate, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        loop.results += map(on_host, results)


def captured_around(loop: Loop) -> None:
    """The whole step captured in a CUDA graph between launched steps."""
    loop.run(4)

    def forward_backward(batch):
        loss = loop.loss(*batch)
        loss.backward()
        return loss.detach()

    step = CUDAGraphedStep(forward_backward, loop.model, DEVICE, capture_cuda_graph, "run without")
    for _ in range(3):
        loop.keep(step(loop.draw()))
    step.reset()
    loop.run(4)


def compiled_beside(loop: Loop) -> None:
    """A network under torch.compile that PyTorch captures, beside the model."""
    network = nn.Sequential(nn.Linear(FIELDS, 64), nn.GELU(), nn.Linear(64, FIELDS)).to(DEVICE)
    function = torch.compile(network, mode="reduce-overhead")
    for _ in range(STEPS):
        x, y = loop.draw()
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            extra = function(x).clone()
        loss = loop.loss(x, y + extra)
        loss.backward()
        loop.keep(loss)


def compiled_blocks(loop: Loop) -> None:
    """Blocks that are compiled one by one."""
    for module in loop.model.modules():
        if type(module).__name__.endswith("Block"):
            module.compile()
    loop.run()


def emptied(loop: Loop) -> None:
    """Cached memory, and cuBLAS's workspaces, released between steps; others write there."""
    for number in range(2 * STEPS):
        loop.step()
        if number % 2:
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()
        junk = [torch.full((2**22,), float("nan"), device=DEVICE) for _ in range(number % 3)]
        del junk


def out_of_memory(loop: Loop) -> None:
    """Allocations that fail between steps and inside them."""
    for _ in range(STEPS):
        loss = loop.loss(*loop.draw())
        with suppress(torch.OutOfMemoryError):
            torch.empty(2**50, device=DEVICE)
        loss.backward()
        loop.keep(loss)


def settings(loop: Loop) -> None:
    """Settings of cuBLAS that change between steps."""
    matmul = torch.backends.cuda.matmul
    for number in range(4 * STEPS):
        matmul.allow_bf16_reduced_precision_reduction = number % 4 < 2
        matmul.allow_tf32 = number % 2 == 1
        torch.use_deterministic_algorithms(mode=number % 8 > 3, warn_only=True)
        loop.step()
    matmul.allow_bf16_reduced_precision_reduction, matmul.allow_tf32 = True, False
    torch.use_deterministic_algorithms(mode=False)


def random_allocations(loop: Loop) -> None:
    """Allocations of random sizes that stay for some steps, so that few addresses recur."""
    generator = torch.Generator().manual_seed(0)
    held = []
    for _ in range(4 * STEPS):
        for size in torch.randint(2**8, 2**22, (5,), generator=generator).tolist():
            held.append(torch.empty(size, device=DEVICE))
        del held[:-7]
        loop.step()


def profiled(loop: Loop) -> None:
    """A profiler that comes after captures; it sees the names of our kernels."""
    loop.run(4)
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        loop.run(2)
        torch.cuda.synchronize()
    names = {event.name for event in trace.events()}
    if not any(name.startswith(("edge_attention", "anemoi_gt_")) for name in names):
        raise AssertionError(f"no kernel of ours in {sorted(names)[:40]}")


def other_grads(loop: Loop) -> None:
    """Gradients that accumulate over steps, and parameters that are frozen in some."""
    parameters = list(loop.model.parameters())
    for number in range(STEPS):
        for index, parameter in enumerate(parameters):
            parameter.requires_grad_(number % 3 != 2 or index % 2 == 0)
        for _ in range(2):
            loss = loop.loss(*loop.draw())
            loss.backward()
        loop.keep(loss)
    for parameter in parameters:
        parameter.requires_grad_()


def data_parallel(loop: Loop) -> None:
    """DistributedDataParallel, whose hooks reduce buckets of gradients on a stream of NCCL."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        loop.model = DistributedDataParallel(loop.model, bucket_cap_mb=0.1)
        loop.run(2 * STEPS)
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


CIRCUMSTANCES: dict[str, Callable[[Loop], None]] = {
    function.__name__: function
    for function in (
        plain,
        hooks,
        retained,
        validated,
        checkpointed,
        on_streams,
        in_threads,
        captured_around,
        compiled_beside,
        compiled_blocks,
        emptied,
        out_of_memory,
        settings,
        random_allocations,
        profiled,
        other_grads,
        data_parallel,
    )
}
MODELS = {
    "graph transformer": {},
    "in float32": {"autocast": False},
    "with dropout": {"dropout": 0.1},
    "checkpointed, in chunks": {"checkpoint_groups": 1, "mapper_chunks": 2},
    "graph network": {"is_network": True},
}

# the models of each circumstance, besides `plain`, which has all
USUAL = {
    "in_threads": ("graph transformer", "with dropout"),
    "compiled_beside": ("graph transformer",),
    "compiled_blocks": ("graph transformer",),
    "settings": ("in float32", "graph transformer"),
    "others": ("graph transformer", "graph network"),
}


@contextmanager
def counted():
    """Count replayed and launched runs; capture in short loops, and where few runs recur, too."""
    counts = {"replayed": 0, "launched": 0, "captured": 0}
    run, capture, fewest = Replays.run, Replays._capture, replays.FEWEST_RECUR

    def counting_run(self, key, launch):
        before = self.num_replayed
        run(self, key, launch)
        counts["replayed" if self.num_replayed > before else "launched"] += 1

    def counting_capture(self, *arguments):
        counts["captured"] += 1
        capture(self, *arguments)

    Replays.run, Replays._capture = counting_run, counting_capture
    replays.FEWEST_RECUR = 0.0
    try:
        yield counts
    finally:
        Replays.run, Replays._capture, replays.FEWEST_RECUR = run, capture, fewest


def results_of(circumstance: Callable, *, replay: bool, options: dict) -> list[Tensor]:
    """Return losses and gradients of a loop."""
    torch.compiler.reset()
    loop = Loop(replay=replay, **options)
    circumstance(loop)
    torch.cuda.synchronize()
    return loop.results


def check() -> str:
    """Compare all circumstances, of two models, and all models with nothing beside them."""
    problems = []
    number = 0
    for name, circumstance in CIRCUMSTANCES.items():
        for kind, options in MODELS.items():
            if circumstance is not plain and kind not in USUAL.get(name, USUAL["others"]):
                continue
            try:
                found = compare(circumstance, options)
            except Exception as error:  # the others still run
                found = f"{type(error).__name__}: {str(error)[:300]}"
            number += 1
            if found is not None:
                problems.append(f"{name}, {kind}: {found}")
                print(problems[-1], flush=True)
    if problems:
        raise AssertionError("; ".join(problems))
    return f"{number} loops have the bits of launched plans"


def compare(circumstance: Callable, options: dict) -> str | None:
    """Return what is wrong in a circumstance with one model, None if nothing is."""
    start = time.perf_counter()
    expected = results_of(circumstance, replay=False, options=options)
    between = time.perf_counter()
    with counted() as counts:
        actual = results_of(circumstance, replay=True, options=options)
    end = time.perf_counter()
    print(
        f"     {circumstance.__name__}: {counts}, launched {between - start:.1f} s, "
        f"replayed {end - between:.1f} s",
        flush=True,
    )
    wrong = sum(not torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    if wrong and not (circumstance is in_threads and "dropout" in options):  # drawn in any order
        return f"{wrong} of {len(actual)} results differ"
    if not counts["replayed"]:
        return "nothing was replayed"
    return None
