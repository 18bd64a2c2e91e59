"""A training step of an Anemoi model, untouched and under `install`: time, memory, kernels.

    python benchmarks/anemoi_step.py --output benchmarks/results/anemoi_step.json
    python benchmarks/anemoi_step.py --grid O32 --refinement 3 --channels 32 --layers 2 --rounds 2
    --device cpu

The defaults are the configuration of Anemoi's official benchmark: N320, icosphere 6, 512 channels,
16 processor layers, mappers in two chunks, activation checkpointing, 16-mixed, AdamW. All variants
share one model and one process; each round takes them in random order, and after each switch some
steps are left out. Before it is timed, a variant's loss and gradients are compared with those of
the untouched model; one that fails or differs is reported, and the others go on. Results are
written after each part.

Each variant is with or without `install`, of whole blocks or of their attention alone, eager, with
processor and mapper blocks compiled one by one or processor and mappers compiled whole, the latter
with Inductor's max-autotune too, with the activation checkpointing of the config or none; launched,
or replayed from a CUDA graph. Compilation is part of the warm-up. `--ensemble` takes Anemoi's
ensemble model with that number of members, whose processor's layer norms are conditioned on noise.
"""

import gc
import random
import statistics
from contextlib import contextmanager, nullcontext
from functools import cache, partial

import torch
from kernel_families import profile_of
from suite import command_line
from suite.environment import describe
from suite.results import Results
from suite.timing import CLOCKS, seconds_of
from support.anemoi_model import build, draw, graph_of, make_ensemble_options, make_options

from anemoi_gt.integrations import anemoi as integration

PACKAGES = {"torch", "triton", "torch-geometric", "anemoi-models", "anemoi-utils"}
PRECISIONS = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32": None}
BLOCKS = ("GraphTransformerProcessorBlock", "GraphTransformerMapperBlock")
cached_graph = cache(graph_of)
WHOLE = (
    "GraphTransformerProcessor",
    "GraphTransformerForwardMapper",
    "GraphTransformerBackwardMapper",
)


@contextmanager
def variant(model, *, installed, blocks=None, compiled=(), mode="default", recompute=True):
    """Compute a step one way.

    `compiled` names the classes whose modules torch.compile compiles, one by one, in a `mode`;
    `recompute=False` switches the model's activation checkpointing off, `blocks` is an option of
    `install`.
    """
    modules = [module for module in model.modules() if type(module).__name__ in compiled]
    checkpointed = [
        module for module in model.modules() if getattr(module, "gradient_checkpointing", False)
    ]
    with integration.install(blocks=blocks) if installed else nullcontext():
        for module in modules:
            module.compile(dynamic=False, mode=mode)
        for module in checkpointed:
            module.gradient_checkpointing = recompute
        try:
            yield
        finally:
            for module in modules:
                module._compiled_call_impl = None
            for module in checkpointed:
                module.gradient_checkpointing = True
            torch._dynamo.reset()


VARIANTS = {
    "untouched": partial(variant, installed=False),
    "install": partial(variant, installed=True),
}
VARIANTS["install, attention alone"] = partial(variant, installed=True, blocks=False)
for _name, _form in list(VARIANTS.items()):
    VARIANTS[f"{_name}, blocks compiled"] = partial(_form, compiled=BLOCKS)
    VARIANTS[f"{_name}, compiled whole"] = partial(_form, compiled=WHOLE)
    VARIANTS[f"{_name}, max-autotune"] = partial(
        _form, compiled=WHOLE, mode="max-autotune-no-cudagraphs"
    )
for _name, _form in list(VARIANTS.items()):
    VARIANTS[f"{_name}, no recomputation"] = partial(_form, recompute=False)
# ends the names of variants whose forward and backward are replayed from a CUDA graph
CAPTURED = ", captured"
for _name in [name for name in VARIANTS if name.startswith("install")]:
    VARIANTS[_name + CAPTURED] = VARIANTS[_name]
VARIANTS["install, edges embedded"] = lambda model: integration.install(
    fuse_edges=False, blocks=False
)


class Training:
    """A model with its optimiser and one batch; `seed` is that of the parameters."""

    def __init__(self, options, seed=0):
        self.device = torch.device(options.device)
        self.dtype = PRECISIONS[options.precision]
        names = tuple(f"field_{i}" for i in range(options.variables))
        graph = cached_graph(options.grid, options.refinement)
        changes = {"channels": options.channels, "heads": options.heads, "layers": options.layers}
        changes |= {"mapper_chunks": options.mapper_chunks, "layer_chunks": min(2, options.layers)}
        changes |= {"graph_attention_backend": "triton" if self.device.type == "cuda" else "pyg"}
        self.call = {"fcstep": 1} if options.ensemble else {}
        make = make_ensemble_options if options.ensemble else make_options
        self.model = build(graph, make(**changes), names, seed).to(self.device)
        sizes = {"batch": options.batch, "ensemble": options.ensemble or 1, "variables": names}
        self.x = {"data": draw(graph, **sizes)["data"].to(self.device)}
        self.target = draw(graph, seed=4, **sizes)["data"][:, :1, ..., :-1].to(self.device)
        self.sizes = {"graph": {str(kind): graph[kind].num_edges for kind in graph.edge_types}}
        self.sizes |= {name: graph[name].num_nodes for name in graph.node_types}
        self.sizes["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
        self.captured = False  # whether the variant replays
        # On the CPU, for it is no part of the memory of a step.
        self.start = {
            name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()
        }
        self.restart()

    def restart(self):
        """Parameters, optimiser and scaler as at the beginning."""
        self.model.load_state_dict(self.start)
        self.optimiser = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.95))
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.replayed = None

    @contextmanager
    def computing(self, name):
        """Compute as a variant does, from the start."""
        self.restart()
        self.captured = name.endswith(CAPTURED)
        try:
            with VARIANTS[name](self.model):
                yield
        finally:
            self.captured, self.replayed = False, None
            self.model.zero_grad(set_to_none=True)

    def loss(self, x, target):
        """Forward pass under autocast."""
        with torch.autocast(self.device.type, self.dtype) if self.dtype else nullcontext():
            return (self.model(x, **self.call)["data"] - target).square().mean()

    def forward_backward(self, scale):
        """Set the gradients of the scaled loss; return the loss without waiting for it."""

        def launched(batch):
            loss = self.loss(*batch)
            scale(loss).backward()
            return loss.detach()

        if self.captured and self.replayed is None:
            self.replayed = integration.capture_step(launched, self.model)
        return (self.replayed or launched)((self.x, self.target))

    def step(self):
        """One whole step; its loss, which has not been waited for."""
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.forward_backward(self.scaler.scale)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss

    def gradients(self):
        """Loss and gradient of every parameter, scaled into the range of float16."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)  # of the noise of an ensemble
        loss = self.forward_backward(lambda loss: 4096 * loss)
        return loss.item(), {
            name: p.grad.float() for name, p in self.model.named_parameters() if p.grad is not None
        }


def reference_of(training, name):
    """Loss and gradients of a variant at the first step."""
    with training.computing(name):
        return training.gradients()


def difference(training, name, expected):
    """Return the relative differences of a variant's loss and gradients from the reference."""
    (loss, gradients), (other_loss, others) = expected, reference_of(training, name)
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    off = torch.stack(
        [(others[key] - gradient).norm() for key, gradient in gradients.items()]
    ).norm()
    found = {"loss": abs(other_loss - loss) / abs(loss), "gradients": (off / norm).item()}
    limit = 1e-4 if training.dtype is None else 5e-2
    if not all(value < limit for value in found.values()):
        raise ValueError(f"nothing is timed that is not right; allowed {limit}, got {found}")
    return found


def compare(training, results, variants, reference="untouched"):
    """Return the correct variants; report the distance of each from the reference."""
    found = results.report["difference_from_untouched"] = {}
    expected = results.run(f"compare {reference}", partial(reference_of, training, reference))
    if expected is None:
        return []
    for name in variants:
        off = results.run(f"compare {name}", partial(difference, training, name, expected))
        if off is not None:
            found[name] = off
            print(f"{name}: off by {off}", flush=True)
    return list(found)


def measure(training, name, options, with_profile):
    """Return step times in ms, peak GB, last loss scale and profile of a variant in one round.

    The profile has milliseconds a step by family of kernels, and the longest kernels.
    """
    gc.collect()
    on_gpu = training.device.type == "cuda"
    with training.computing(name):
        for number in range(options.warmup):
            if on_gpu and number == (0 if training.captured else options.warmup - 1):
                # a replay allocates nothing: its peak is that of the capture
                torch.cuda.reset_peak_memory_stats()
            training.step()
        times = [
            1e3 * each for each in seconds_of(training.step, options.steps, training.device.type)
        ]
        peak = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None
        scale = training.scaler.get_scale()  # one that fell tells of steps that were left out
        wait = CLOCKS[training.device.type].synchronize
        profiled = (training.step, 3 if on_gpu else 1, wait, training.device.type)
        return times, peak, scale, profile_of(*profiled) if with_profile else None


def make_parser(description):
    """Return the command line of a benchmark of this model."""
    sizes = {
        "grid": "N320",
        "refinement": 6,
        "channels": 512,
        "heads": 16,
        "layers": 16,
        "mapper_chunks": 2,
    }
    sizes |= {"variables": 100, "batch": 1, "rounds": 5}
    parser = command_line.make_parser(description, seconds=540, **sizes)
    parser.add_argument(
        "--ensemble", type=int, help="members of an ensemble; default: the deterministic model"
    )
    parser.add_argument("--precision", choices=PRECISIONS, default="16-mixed")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        metavar="NAME",
        default=["untouched", "install"],
        help="such as 'install, compiled whole, no recomputation, captured'; a wrong one lists all",
    )
    parser.add_argument(
        "--steps", type=int, default=10, help="measured steps of a variant in a round"
    )
    parser.add_argument("--warmup", type=int, default=4, help="steps left out after each switch")
    parser.add_argument("--seed", type=int, default=0, help="of the order of variants")
    return parser


def start_report(options):
    """Return the beginning of every report of this model."""
    facts = describe(options.device, PACKAGES, options.commit)
    return {"environment": facts, "options": vars(options) | {"output": None}}


def main(arguments=None):
    """Compare, measure in random order, profile; write and return the report."""
    options = make_parser(__doc__).parse_args(arguments)
    results = Results(start_report(options), options.output, options.seconds)
    training, shuffle = Training(options), random.Random(options.seed)
    results.report["sizes"] = training.sizes
    left = compare(training, results, options.variants)
    rounds, variants = [], {}
    results.report |= {"rounds": rounds, "variants": variants}
    for number in range(options.rounds):
        order = shuffle.sample(left, len(left))
        rounds.append(order)
        for name in order:
            call = partial(measure, training, name, options, with_profile=number == 0)
            measured = results.run(f"round {number} of {name}", call)
            if measured is None:
                left.remove(name)
            else:
                record(variants.setdefault(name, {"rounds": [], "profile": None}), *measured)
    results.report["variants"] = {
        name: variants[name] for name in options.variants if name in variants
    }
    for name, found in results.report["variants"].items():
        show(name, found)
    return results.end()


def record(found, times, peak, scale, profile):
    """Add the figures of a round to those of a variant."""
    found["profile"] = found["profile"] or profile
    found["rounds"].append({"ms": times, "peak_gb": peak, "scale": scale})
    every = [ms for each in found["rounds"] for ms in each["ms"]]
    peaks = [each["peak_gb"] for each in found["rounds"]]
    found["median_ms"] = statistics.median(every)
    found["quartiles_ms"] = statistics.quantiles(every, n=4) if len(every) > 1 else every
    found["peak_gb"] = None if None in peaks else max(peaks)


def show(name, found):
    """Print the figures of a variant."""
    peak = "" if found["peak_gb"] is None else f", {found['peak_gb']:.2f} GB"
    print(f"{name}: {found['median_ms']:.1f} ms a step{peak}")
    if found["profile"]:
        print(f"    {found['profile']['total_ms']:9.2f} ms  kernels")
        for family, ms in found["profile"]["families_ms"].items():
            print(f"    {ms:9.2f} ms  {family}", flush=True)


if __name__ == "__main__":
    main()
