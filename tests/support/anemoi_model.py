"""Small models of anemoi-models, their graphs, inputs and outputs, for tests and benchmarks."""

from pathlib import Path

import numpy as np
import torch
from anemoi.models.data_indices.collection import IndexCollection
from anemoi.models.distributed.shapes import BipartiteGraphShardInfo, GraphShardInfo
from anemoi.models.layers.block import GraphTransformerProcessorBlock
from anemoi.models.layers.utils import load_layer_kernels
from anemoi.models.triton.gt import graph_transformer_attention_conv
from anemoi.utils.config import DotDict
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from anemoi_gt.data.graphs import encoder_processor_decoder, icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.data.meshes import Mesh

CONFIG = Path(__file__).parent / "anemoi_model.yaml"
FAMILIES = CONFIG.with_name("anemoi_families.yaml")
VARIABLES = (
    "temperature",
    "wind",
    "humidity",
    "insolation",
)  # the last is a forcing, not predicted
NOISE = 4  # channels of the noise that conditions an ensemble


def graph_of(name, refinement):
    """Return the encoder, processor and decoder graph of a named grid and an icosphere."""
    return icosphere_graph(grid(name), refinement=refinement)


def graph_between(fine, coarse):
    """Return the encoder and decoder graph of two named grids; the hidden one has no edges."""
    mesh = Mesh(grid(coarse), np.zeros((2, 0), dtype=np.int64))
    graph = encoder_processor_decoder(grid(fine), mesh)
    del graph["hidden", "to", "hidden"]
    return graph


def options_of(config):
    """Return the `model` group of a config as plain values."""
    return OmegaConf.to_container(config, resolve=True)["model"]


def make_options(**changes):
    """Return the options of the small model, with changes to the first lines of the file."""
    return options_of(OmegaConf.merge(OmegaConf.load(CONFIG), changes))


def make_family_options(family, **changes):
    """Return the options of a small model of a family in the file: "ensemble", "transport" or "graph network"."""
    config = OmegaConf.merge(OmegaConf.load(CONFIG), OmegaConf.load(FAMILIES)[family], changes)
    return options_of(config)


def make_ensemble_options(**changes):
    """Return the options of an ensemble model whose processor norms are conditioned on noise."""
    options = make_options(**changes)
    norm = {
        "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
        "condition_shape": NOISE,
        "zero_init": False,
    }
    options["processor"]["layer_kernels"] = options["layer_kernels"] | {"LayerNorm": norm}
    injector = {
        "_target_": "anemoi.models.layers.ensemble.NoiseConditioning",
        "noise_std": 1,
        "layer_kernels": options["layer_kernels"],
        "noise_channels_dim": NOISE,
        "noise_mlp_hidden_dim": 8,
    }
    options |= {"noise_injector": injector, "condition_on_residual": False}
    options["model"]["_target_"] = "anemoi.models.models.AnemoiEnsModelEncProcDec"
    return options


def make_transformer_options(*, window, attention="scaled_dot_product_attention", **changes):
    """Return the options of a model like AIFS Single: mappers are graph transformers, the processor attends in a window."""
    options = make_options(**changes)
    processor = options["processor"]
    for name in ("sub_graph_edge_attributes", "trainable_size", "shard_strategy", "edge_pre_mlp"):
        del processor[name]
    del processor["graph_attention_backend"]
    processor |= {
        "_target_": "anemoi.models.layers.processor.TransformerProcessor",
        "window_size": window,
        "dropout_p": 0.0,
        "attention_implementation": attention,
        "softcap": 0.0,
        "use_alibi_slopes": False,
        "use_rotary_embeddings": False,
    }
    return options


def build(graph, options, variables=VARIABLES, seed=0, forcings=1):
    """Return a model with these options and seeded parameters; the last variables are forcings."""
    torch.manual_seed(seed)
    kinds = DictConfig({"forcing": list(variables[-forcings:]), "diagnostic": [], "target": []})
    indices = IndexCollection(kinds, {name: i for i, name in enumerate(variables)})
    ones = {name: np.ones(len(variables)) for name in ("mean", "stdev", "minimum", "maximum")}
    model = get_class(options["model"]["_target_"])
    data = {"data_indices": {"data": indices}, "statistics": {"data": ones}, "graph_data": graph}
    return model(model_config=DotDict({"model": options}), n_step_input=2, n_step_output=1, **data)


def draw(graph, batch=1, ensemble=1, seed=1, variables=VARIABLES):
    """Draw the input of a model: {data: [batch, time, ensemble, grid, variables]}."""
    shape = (batch, 2, ensemble, graph["data"].x.shape[0], len(variables))
    return {"data": torch.randn(shape, generator=torch.Generator().manual_seed(seed))}


def draw_conditions(model):
    """Draw the parameters that Anemoi initialises to zero, such as conditional norms, where zeros would hide errors."""
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def transport_arguments(graph, batch=1, ensemble=1):
    """Return the additional inputs of a transport model: a noised target, and a noise level per member."""
    generator = torch.Generator().manual_seed(6)
    nodes = graph["data"].x.shape[0]
    target = torch.randn(batch, 1, ensemble, nodes, len(VARIABLES) - 1, generator=generator)
    levels = torch.rand(batch, 1, ensemble, 1, 1, generator=generator) + 0.5
    return {"conditioned_target": {"data": target}, "condition": {"data": levels}}


def differentiate(model, x, **options):
    """Return the output and the gradient of every parameter by name, or None, for one random direction."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)  # for the noise of an ensemble
    out = model(x, **options)["data"]
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    (out.float() * direction).mean().backward()
    return out.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


# of the graph of a single block
NODES = 7
EDGES = 19


class OwnLinear(torch.nn.Linear):
    """A user-defined linear layer."""


class OwnConv(torch.nn.Module):
    """A user-defined attention with the signature of Anemoi's."""

    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, *operands):
        return self.conv(*operands)


def make_block(kind=GraphTransformerProcessorBlock, **options):
    """Return a block with 2 heads of 8 channels."""
    torch.manual_seed(0)
    sizes = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16, "num_heads": 2, "edge_dim": 5}
    options = {"layer_kernels": load_layer_kernels(), "graph_attention_backend": "pyg"} | options
    return kind(**(sizes | options))


def for_gpu(block):
    """Change a block to what `graph_attention_backend: triton` builds on a GPU."""
    del block.conv
    block.conv = graph_transformer_attention_conv
    block.graph_attention_backend = "triton"
    return block


def block_inputs(kind=GraphTransformerProcessorBlock):
    """Return the arguments of a block: nodes, edge_attr, the edge_index of unsorted edges, shards, batch and sizes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NODES, 16, generator=generator, requires_grad=True)
    edge_attr = torch.randn(EDGES, 5, generator=generator, requires_grad=True)
    edge_index = torch.randint(NODES, (2, EDGES), generator=generator)
    if kind is GraphTransformerProcessorBlock:
        return x, edge_attr, edge_index, GraphShardInfo(), 1, NODES
    return (x, x + 1), edge_attr, edge_index, BipartiteGraphShardInfo(), 1, (NODES, NODES)


def conditional_kernels(**options):
    """Return layer kernels whose norms take a condition of `NOISE` channels."""
    norm = {
        "_target_": "anemoi.models.layers.normalization.ConditionalLayerNorm",
        "condition_shape": NOISE,
        "zero_init": False,
    }
    return load_layer_kernels({"LayerNorm": norm | options})


def conditioned_inputs(kind=GraphTransformerProcessorBlock):
    """Return the arguments of a block with one condition per node; for a mapper, per source and destination."""
    generator = torch.Generator().manual_seed(7)
    sources, destinations = (
        torch.randn(NODES, NOISE, generator=generator, requires_grad=True) for _ in range(2)
    )
    conditions = (sources, destinations)
    if kind is GraphTransformerProcessorBlock:
        conditions = destinations
    return (*block_inputs(kind), None, conditions)


def differentiate_block(block, inputs, forward=None):
    """Return output and gradients of nodes, edge attributes, conditions and parameters; `forward` replaces the block.

    The output of a mapper holds its destinations; if the mapper updates its sources, they come first.
    """
    call = block if forward is None else forward
    out = call(*inputs)[0]
    if isinstance(out, tuple):
        out = torch.cat(out) if block.update_src_nodes else out[1]
    nodes = inputs[0][0] if isinstance(inputs[0], tuple) else inputs[0]
    leaves = {"x": nodes, "edge_attr": inputs[1], **dict(block.named_parameters())}
    conditions = inputs[7] if len(inputs) > 7 else ()
    if isinstance(conditions, torch.Tensor):
        conditions = (conditions,)
    leaves |= {f"condition {i}": condition for i, condition in enumerate(conditions)}
    gradients = torch.autograd.grad(out.sin().sum(), leaves.values(), allow_unused=True)
    return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))
