"""Run one version of anemoi-models, whatever is first on the path, without us and with us, and report what differs.

A model like AIFS: mappers are graph transformers in chunks, the processor is a transformer or a
graph transformer. From 0.19 on, whose configs differ, only blocks.
"""

import logging
import pickle
from importlib.metadata import version

import numpy as np
import torch
from anemoi.models.data_indices.collection import IndexCollection
from anemoi.models.layers import block as blocks
from anemoi.models.layers import mapper, processor
from anemoi.models.models import encoder_processor_decoder
from anemoi.utils.config import DotDict
from omegaconf import DictConfig

from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import blocks as attending
from support import anemoi_sublayers, anemoi_transformer_versions

VERSION = tuple(int(part) for part in version("anemoi-models").split(".")[:2])
GRAPH = icosphere_graph(grid("O4"), refinement=1)
VARIABLES = {name: i for i, name in enumerate(("temperature", "wind", "humidity", "insolation"))}
EDGES = {"sub_graph_edge_attributes": ["edge_length", "edge_dirs"], "trainable_size": 8}
SIZES = {
    "num_heads": 4,
    "mlp_hidden_ratio": 4,
    "num_channels": 32,
    "cpu_offload": False,
    "layer_kernels": {},
}


def build(kind="Transformer", chunks=4, **changes):
    """A model of 32 channels, 4 heads, D 11, as this version's configs describe it."""
    if VERSION >= (0, 19):
        from support import anemoi_model as small

        return small.build(GRAPH.clone(), small.make_options())
    torch.manual_seed(0)
    sizes = SIZES | ({} if VERSION < (0, 11) else {"graph_attention_backend": "pyg"}) | changes
    layers = {
        "_target_": f"anemoi.models.layers.processor.{kind}Processor",
        "num_layers": 2,
        "num_chunks": 2,
    }
    layers |= sizes | EDGES | {"attention_implementation": "scaled_dot_product_attention"}
    mappers = {
        name: {
            "_target_": f"anemoi.models.layers.mapper.GraphTransformer{which}Mapper",
            "num_chunks": chunks,
        }
        | EDGES
        | {
            key: value
            for key, value in sizes.items()
            if VERSION >= (0, 12) or key != "num_channels"
        }
        for name, which in (("encoder", "Forward"), ("decoder", "Backward"))
    }
    names = {"data": 8, "hidden": 8}
    config = {
        "graph": {"data": "data", "hidden": "hidden"},
        "training": {"multistep_input": 2},
        "model": {"num_channels": 32, "processor": layers, "bounding": [], **mappers}
        | {
            "trainable_parameters": names,
            "model": {"hidden_nodes_name": "hidden", "latent_skip": True},
        }
        | {"residual": {"_target_": "anemoi.models.layers.residual.SkipConnection"}},
    }
    kinds = {"forcing": ["insolation"], "diagnostic": [], "target": []}
    statistics = {name: np.ones(4) for name in ("mean", "stdev", "minimum", "maximum")}
    rest = {"truncation_data": {}} if VERSION < (0, 11) else {}
    graphs = GRAPH.clone()
    if VERSION < (0, 12):
        indices = IndexCollection(DictConfig({"data": kinds}), VARIABLES)
    else:
        indices, statistics = (
            {"data": IndexCollection(DictConfig(kinds), VARIABLES)},
            {"data": statistics},
        )
        if VERSION >= (0, 14):
            rest = {"n_step_input": 2, "n_step_output": 1}
        elif VERSION < (0, 13):
            graphs = {"data": graphs}
        config["training"]["multistep_output"] = 1
    rest |= {"data_indices": indices, "statistics": statistics, "graph_data": graphs}
    return encoder_processor_decoder.AnemoiModelEncProcDec(model_config=DotDict(config), **rest)


def differentiate(model, batch=2):
    """Output and gradients by name."""
    x = torch.randn(
        batch, 2, 1, GRAPH["data"].x.shape[0], 4, generator=torch.Generator().manual_seed(1)
    )
    model.zero_grad()
    out = model(x if VERSION < (0, 12) else {"data": x})
    out = out if VERSION < (0, 12) else out["data"]
    out.sin().mean().backward()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None
    }
    return {"out": out.detach()} | gradients


def errors(ours, theirs):
    """The largest distance of any tensor, in units of its largest value and of a hundredth of the largest of all."""
    assert ours.keys() == theirs.keys()
    largest = max(tensor.abs().max() for tensor in theirs.values())
    return max(
        ((ours[name] - tensor).abs().max() / tensor.abs().max().clamp(min=largest / 100)).item()
        for name, tensor in theirs.items()
    )


def compare(model):
    """Return the error of a model with us, whether edges that we attended to were raw, and whether it pickles as before."""
    theirs, raw, attend = differentiate(model), [], attending.edge_attention
    pickled, keys = pickle.dumps(model), list(model.state_dict())

    def record(query, key, value, graph, edges, *rest, **options):
        raw.append(bool(rest))  # with the weight of lin_edge
        return attend(query, key, value, graph, edges, *rest, **options)

    attending.edge_attention = record
    with integration.install():
        ours = differentiate(model)
        same = pickle.dumps(model) == pickled and list(model.state_dict()) == keys
    attending.edge_attention = attend
    again = differentiate(model)
    assert all(torch.equal(again[name], theirs[name]) for name in theirs), (
        "uninstalled, it computes something else"
    )
    return {"error": errors(ours, theirs), "raw": raw, "same": same}


def block(kind, triton=False):
    """A block and what it is called with."""
    torch.manual_seed(0)
    sizes = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16, "num_heads": 2, "edge_dim": 5}
    if VERSION < (0, 11) and kind == "Processor":
        sizes["num_chunks"] = 3
    kernels = (
        mapper.load_layer_kernels()
        if hasattr(mapper, "load_layer_kernels")
        else processor.load_layer_kernels()
    )
    options = {} if VERSION < (0, 11) else {"graph_attention_backend": "pyg"}
    made = getattr(blocks, f"GraphTransformer{kind}Block")(
        **sizes, layer_kernels=kernels, **options
    )
    x, edge_attr, edge_index = torch.randn(30, 16), torch.randn(150, 5), torch.randint(30, (2, 150))
    if VERSION >= (0, 15):
        from anemoi.models.distributed import shapes

        shards = getattr(
            shapes, "GraphShardInfo" if kind == "Processor" else "BipartiteGraphShardInfo"
        )()
    else:
        shards = (None, None, None)
    nodes, size = (x, 30) if kind == "Processor" else ((x, x + 1), (30, 30))
    return made, (nodes, edge_attr, edge_index, shards, 1, size)


def updated_sources():
    """A mapper's block that updates its sources, sources and destinations each under a condition of their own.

    Returns its error with us, and how it was computed where backend `triton` was asked for, or the
    refusal.
    """
    made = anemoi_sublayers.build(
        "GraphTransformerMapperBlock", {"LayerNorm": anemoi_sublayers.CONDITIONAL}
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3, generator=generator)
    width, attributes = made.lin_query.in_features, made.lin_edge.in_features
    rows = [torch.randn(30, columns, generator=generator) for columns in (width, width, 4, 4)]
    _, (_, _, _, shards, *sizes) = block("Mapper")
    edge_attr = torch.randn(90, attributes, generator=generator)
    edge_index = torch.randint(30, (2, 90), generator=generator)

    def call():
        sources, destinations = made(
            tuple(rows[:2]), edge_attr, edge_index, shards, *sizes, cond=tuple(rows[2:])
        )[0]
        return {"sources": sources, "destinations": destinations}

    with torch.no_grad():
        theirs = call()
        with integration.install():
            error = errors(call(), theirs)
        with integration.install(backend="triton", blocks=True):
            try:
                error = max(error, errors(call(), theirs))
                (computed,) = integration.installed().computed
                outcome = computed.outcome
            except ValueError as refusal:
                outcome = str(refusal)
    return {"error": error, "outcome": outcome}


def compiled(kind):
    """The error of a compiled block with us and the names of our operators in its graph; None if upstream fails."""
    made, inputs = block(kind)
    seen = []

    def record(graph, example):
        seen.extend(
            str(node.target) for node in graph.graph.nodes if "anemoi_gt" in str(node.target)
        )
        return graph

    def call(function):
        out = function(*inputs)[0]
        return {"out": out[-1] if isinstance(out, tuple) else out}

    theirs = call(made)
    with integration.install():
        ours = call(torch.compile(made, backend=record, dynamic=False))
    return {"error": errors(ours, theirs), "operators": seen}


def triton():
    """Return the error of a block that was built for a GPU, with us; None where this version has none."""
    made, inputs = block("Processor")
    theirs = made(*inputs)[0]
    try:
        from anemoi.models.triton import gt
    except ImportError:
        return None
    del made.conv
    function = getattr(gt, "graph_transformer_attention_conv", None)
    made.conv, made.graph_attention_backend = (
        function or gt.GraphTransformerFunction.apply,
        "triton",
    )
    with integration.install(backend="torch"):
        return errors({"out": made(*inputs)[0]}, {"out": theirs})


def listen():
    """Return a list that our messages are added to."""
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("anemoi_gt").addHandler(handler)
    return said


def report_all():
    """The report of a version that operational checkpoints need, or of the newest."""
    said = listen()
    with torch.no_grad():
        report = {
            "compiled": {kind: compiled(kind) for kind in ("Processor", "Mapper")},
            "triton": triton(),
        }
    report |= {"version": version("anemoi-models"), "said": list(dict.fromkeys(said))}
    report["updated sources"] = updated_sources()
    if VERSION < (0, 15):
        report["transformers"] = anemoi_transformer_versions.compare()
    if VERSION < (0, 19):
        report["AIFS"], report["one chunk"] = compare(build()), compare(build(chunks=1))
        report["heads"] = compare(build(shard_strategy="heads"))
        report["graph transformer"] = compare(build("GraphTransformer"))
    return report


def report_minor():
    """The report of another minor version: one model, and a block of each kind."""
    said = listen()
    report = compare(build("GraphTransformer"))
    report["updated sources"] = updated_sources()
    if VERSION < (0, 15):
        report["transformers"] = anemoi_transformer_versions.compare()
    return report | {"version": version("anemoi-models"), "said": said}
