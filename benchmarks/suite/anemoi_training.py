"""Training of Anemoi's model families: models from its own YAML, variants of a step, gradients.

A family is the name of a file in `config/model` of anemoi-training. A case is a family with sizes.
A variant is a form of a training step, named by what is done to the model:

    untouched | install | install, attention alone
    nothing | , blocks compiled | , compiled whole
    nothing | , hidden recomputed | , no recomputation      hidden: under install only
    nothing | , captured                                    under install only

"no recomputation" switches activation checkpointing off, and so does "hidden recomputed", which
computes the hidden layers of fused feed-forward sub-layers again (`install(keep_hidden=False)`);
"captured" replays forward and backward from a CUDA graph.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from support.anemoi_model import build, graph_between
from torch import nn
from torch_geometric.data import HeteroData

from anemoi_gt.data.graphs import icosphere_graph, stretched_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.data.nodes import Nodes
from anemoi_gt.integrations import anemoi as integration
from suite.anemoi_masks import drop_masks

PACKAGES = {"torch", "triton", "torch-geometric", "anemoi-models", "anemoi-utils"}
PRECISIONS = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16, "32": None}
BLOCKS = {
    "GraphTransformerProcessorBlock",
    "GraphTransformerMapperBlock",
    "TransformerProcessorBlock",
    "GraphConvProcessorBlock",
    "GraphConvMapperBlock",
}
WHOLE = {
    "GraphTransformerProcessor",
    "GraphTransformerForwardMapper",
    "GraphTransformerBackwardMapper",
    "TransformerProcessor",
    "GNNProcessor",
    "GNNForwardMapper",
    "GNNBackwardMapper",
}
EUROPE = (72.0, -25.0, 34.0, 45.0)  # north, west, south, east of the area of a stretched grid
FORCINGS = 8
LOSS_SCALE = 65536  # of the gradients that are compared: where GradScaler begins


class Case(NamedTuple):
    """A family with sizes."""

    family: str
    channels: int = 512
    layers: int = 16
    members: int = 1
    grid: str = "N320"
    refinement: int = 6
    area_grid: str | None = None  # finer points inside EUROPE; None: no stretched grid
    area_refinement: int | None = None
    hidden: str | None = None  # grid of hidden nodes without edges; None: the icosphere
    window: int | None = None  # of a transformer; None: as in the YAML


CASES = {
    "benchmark": Case("graphtransformer"),
    "O96": Case("graphtransformer", grid="O96", refinement=5),
    "O32": Case("graphtransformer", grid="O32", refinement=4),
    "stretched": Case(
        "graphtransformer", grid="O96", refinement=5, area_grid="N320", area_refinement=7
    ),
    "ensemble": Case("graphtransformer_ens", channels=1024, members=2),
    "ensemble of 4": Case("graphtransformer_ens", channels=1024, members=4),
    "diffusion": Case("graphtransformer_transport_edm", channels=1024),
    "transformer": Case("transformer", channels=1024),
    "aifs": Case("transformer", channels=1024, hidden="O96", window=1120),
    "gnn": Case("gnn"),
}


class Variant(NamedTuple):
    """A form of a training step."""

    installed: bool
    fusion: str = "auto"  # as for install
    compiled: frozenset[str] = frozenset()  # classes whose modules are compiled, one by one
    recompute: bool = True  # activation checkpointing as in the YAML
    keep_hidden: bool = True  # as for install
    replay: bool = True  # as for install
    captured: bool = False


def make_variants() -> dict[str, Variant]:
    """Return all variants by name."""
    bases = {
        "untouched": Variant(installed=False),
        "install": Variant(installed=True),
        "install, attention alone": Variant(installed=True, fusion="attention"),
    }
    forms = {"": frozenset(), ", blocks compiled": BLOCKS, ", compiled whole": WHOLE}
    recomputations = {  # recompute, keep_hidden
        "": (True, True),
        ", hidden recomputed": (False, False),
        ", no recomputation": (False, True),
    }
    # captured as a whole, runs of plans replayed
    captures = {"": (False, True), ", launched": (False, False), ", captured": (True, True)}
    variants = {}
    for base, form, recomputation, capture in itertools.product(
        bases, forms, recomputations, captures
    ):
        if capture and base == "untouched":
            continue  # Anemoi's own code waits for the device, which a capture refuses; no plans
        recompute, keep_hidden = recomputations[recomputation]
        if not keep_hidden and base != "install":
            continue  # only fused sub-layers keep a hidden layer or not
        variants[base + form + recomputation + capture] = bases[base]._replace(
            compiled=frozenset(forms[form]),
            recompute=recompute,
            keep_hidden=keep_hidden,
            captured=captures[capture][0],
            replay=captures[capture][1],
        )
    return variants


VARIANTS = make_variants()


def find_configs() -> Path:
    """Return the config folder of the installed anemoi-training.

    Raises
    ------
    ValueError
        If it is not installed.
    """
    spec = find_spec("anemoi.training")
    if spec is None:
        raise ValueError(
            "the configs of Anemoi's models are needed and anemoi-training is not installed: "
            "pass --configs FOLDER, where FOLDER/model has its files"
        )
    return Path(spec.submodule_search_locations[0]) / "config"


def options_of(case: Case, configs: Path, device: str, mapper_chunks: int | None = None) -> dict:
    """Return the `model` config that Anemoi has for a family, with the sizes of a case."""
    with initialize_config_dir(str(configs.resolve()), version_base="1.3"):
        config = compose(f"model/{case.family}")
    OmegaConf.set_struct(config, value=False)
    model = config.model
    model.num_channels = case.channels
    model.processor.num_layers = case.layers
    model.processor.num_chunks = min(model.processor.num_chunks, case.layers)
    mappers = [part.mapper for part in (*model.encoders.values(), *model.decoders.values())]
    if mapper_chunks is not None:
        for mapper in mappers:
            mapper.num_chunks = mapper_chunks
    for layers in (model.processor, *mappers):
        if "graph_attention_backend" in layers:
            layers.graph_attention_backend = "triton" if device == "cuda" else "pyg"
    if "attention_implementation" in model.processor:
        if find_spec("flash_attn") is None:
            model.processor.attention_implementation = "scaled_dot_product_attention"
        if case.window is not None:
            model.processor.window_size = case.window
    # transformer.yaml of anemoi-training 0.17.1 lacks options that anemoi-models 0.19.0 requires.
    for mapper in mappers:
        if "num_channels" not in mapper:
            mapper.num_channels = case.channels
    if "latent_aggregator" not in model:
        model.latent_aggregator = {"_target_": "anemoi.models.layers.aggregator.SumAggregator"}
    # They name variables of a data set, which the fields here do not have.
    model.bounding = {"datasets": {"data": []}}
    return OmegaConf.to_container(config, resolve=True)["model"]


@cache
def graph_of(case: Case) -> HeteroData:
    """Return encoder, processor and decoder graph of a case; transformers have no edges."""
    if case.hidden is not None:
        return graph_between(case.grid, case.hidden)
    nodes = grid(case.grid)
    if case.area_grid is None:
        graph = icosphere_graph(nodes, refinement=case.refinement)
    else:
        finer = grid(case.area_grid)
        outside, inside = nodes[~nodes.inside(EUROPE)], finer[finer.inside(EUROPE)]
        latitudes = np.concatenate([outside.lat, inside.lat])
        longitudes = np.concatenate([outside.lon, inside.lon])
        graph = stretched_graph(
            Nodes(latitudes, longitudes),
            refinement=case.refinement,
            area_refinement=case.area_refinement,
            area=EUROPE,
        )
    if case.family.startswith("transformer"):
        del graph["hidden", "to", "hidden"]
    return graph


class Training:
    """A model of a case with its optimiser and one batch; `seed` draws the parameters."""

    def __init__(
        self,
        case: Case,
        configs: Path,
        *,
        device: str,
        precision: str = "16-mixed",
        variables: int = 100,
        mapper_chunks: int | None = None,
        seed: int = 0,
    ):
        self.device, self.dtype = torch.device(device), PRECISIONS[precision]
        graph, names = graph_of(case), tuple(f"field_{i}" for i in range(variables))
        options = options_of(case, configs, device, mapper_chunks)
        forcings = min(FORCINGS, variables - 1)
        self.model = build(graph, options, names, seed, forcings).to(self.device)
        # Anemoi begins conditions at zero, which would hide errors.
        generator = torch.Generator(self.device).manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.requires_grad and not parameter.any():
                nn.init.normal_(parameter, std=0.02, generator=generator)

        self.shape = (1, 2, case.members, graph["data"].num_nodes, variables)
        self.forcings = forcings
        self.is_ensemble = "_ens" in case.family
        self.is_transport = "transport" in case.family
        self.draw(torch.Generator(self.device).manual_seed(1))

        self.sizes = {str(kind): graph[kind].num_edges for kind in graph.edge_types}
        self.sizes |= {name: graph[name].num_nodes for name in graph.node_types}
        self.sizes["parameters"] = sum(parameter.numel() for parameter in self.model.parameters())
        # On the CPU, because it is no part of the memory of a step.
        self.start = {
            name: tensor.to("cpu", copy=True) for name, tensor in self.model.state_dict().items()
        }
        self.captured = False  # whether the variant replays
        self.compile_mode: str | None = None  # of PyTorch, for compiled variants
        self.restart()

    def restart(self) -> None:
        """Set parameters, optimiser and scaler to their state at the beginning."""
        self.model.load_state_dict(self.start)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(),
            lr=1e-4,
            betas=(0.9, 0.95),
            fused=self.device.type == "cuda",
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        self.replayed = None

    @contextmanager
    def computing(self, name: str) -> Iterator[None]:
        """Compute as a variant does, from the start."""
        variant = VARIANTS[name]
        compiled, checkpointed = [], []
        for module in self.model.modules():
            if type(module).__name__ in variant.compiled:
                compiled.append(module)
            if getattr(module, "gradient_checkpointing", False):
                checkpointed.append(module)
        installed = nullcontext()
        if variant.installed:
            installed = integration.install(
                fusion=variant.fusion, keep_hidden=variant.keep_hidden, replay=variant.replay
            )
        torch._dynamo.reset()
        self.restart()
        self.captured = variant.captured
        with installed:
            for module in compiled:
                module.compile(dynamic=False, mode=self.compile_mode)
            for module in checkpointed:
                module.gradient_checkpointing = variant.recompute
            try:
                yield
            finally:
                for module in compiled:
                    module._compiled_call_impl = None
                for module in checkpointed:
                    module.gradient_checkpointing = True
                self.captured = False
                self.replayed = None
                drop_masks(self.model)
                self.model.zero_grad(set_to_none=True)

    def autocast(self):
        """Return the autocast of the precision."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    def draw(self, generator: torch.Generator) -> None:
        """Draw a batch: the fields to predict are a smooth function of the input.

        Of a transport model the batch has these fields with noise, and the level of the noise.
        """
        x = torch.randn(self.shape, device=self.device, generator=generator)
        last = x[:, -1:, ..., : -self.forcings]
        target = 0.5 * last + torch.tanh(last.roll(1, -1) * x[:, :1, ..., -1:])
        self.batch = {"x": x, "target": target}
        if self.is_transport:
            shape = (1, 1, self.shape[2], 1, 1)
            level = 0.5 + torch.rand(shape, device=self.device, generator=generator)
            noise = torch.randn(target.shape, device=self.device, generator=generator)
            self.batch |= {"noised": target + level * noise, "level": level}

    def loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss under autocast; of a transport model weighted as in EDM, sigma_data 1."""
        x = {"data": batch["x"]}
        weight = 1.0
        with self.autocast():
            if self.is_transport:
                level = batch["level"]
                out = self.model(x, {"data": batch["noised"]}, {"data": level})
                weight = (level.square() + 1) / level.square()
            elif self.is_ensemble:
                out = self.model(x, fcstep=1)
            else:
                out = self.model(x)
        return (weight * (out["data"].float() - batch["target"]).square()).mean()

    def forward_backward(self, scale) -> torch.Tensor:
        """Set the gradients of `scale(loss)`; return the loss without waiting for it."""

        def launched(batch):
            loss = self.loss(batch)
            scale(loss).backward()
            return loss.detach()

        if not self.captured:
            return launched(self.batch)
        if self.replayed is None:
            self.replayed = integration.capture_step(launched, self.model)
        return self.replayed(self.batch)

    def step(self) -> torch.Tensor:
        """Return the loss of a training step, which has not been waited for."""
        self.optimiser.zero_grad(set_to_none=True)
        loss = self.forward_backward(self.scaler.scale)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        return loss

    def gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        """Return loss and gradients on the CPU, which do not count as memory of a step."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(0)  # of the noise of an ensemble
        loss = self.forward_backward(lambda loss: LOSS_SCALE * loss)
        gradients = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                gradients[name] = parameter.grad.float().cpu()
        return loss.item(), gradients
