"""Run the first version of anemoi-models on the path with and without anemoi_gt, and report the differences.

The model resembles AIFS: mappers are graph transformers in chunks, the processor is a transformer
or a graph transformer. From 0.19 on, whose configs differ, only blocks are compared.
"""

import logging
import pickle
import tempfile
from importlib.metadata import version

import numpy as np
import torch
from anemoi.models.data_indices.collection import IndexCollection
from anemoi.models.layers import block as blocks
from anemoi.models.layers import mapper, processor
from anemoi.models.models import encoder_processor_decoder
from anemoi.utils.checkpoints import save_metadata
from anemoi.utils.config import DotDict
from omegaconf import DictConfig

from anemoi_gt import GraphStructure
from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.integrations import anemoi as integration
from anemoi_gt.integrations.anemoi import blocks as attending
from support import (
    anemoi_network_versions,
    anemoi_sublayers,
    anemoi_transformer_versions,
    anemoi_window_versions,
)
from support.operators import LINEAR_LAYER, Operators

VERSION = tuple(int(part) for part in version("anemoi-models").split(".")[:2])
if VERSION >= (0, 15):
    from anemoi.models.distributed import shapes

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


def build(kind="Transformer", chunks=4, attention=None, **changes):
    """Return a model with 32 channels, 4 heads and D = 11, from a config for this version; `attention` of its processor."""
    if VERSION >= (0, 19):
        from support import anemoi_model as small

        return small.build(GRAPH.clone(), small.make_options())
    torch.manual_seed(0)
    sizes = dict(SIZES)
    if VERSION >= (0, 11):
        sizes["graph_attention_backend"] = "pyg"
    sizes |= changes
    processor_options = {
        "_target_": f"anemoi.models.layers.processor.{kind}Processor",
        "num_layers": 2,
        "num_chunks": 2,
        "attention_implementation": "scaled_dot_product_attention",
        **sizes,
        **EDGES,
        **(attention or {}),
    }
    mapper_options = {"num_chunks": chunks, **sizes, **EDGES}
    if VERSION < (0, 12):
        del mapper_options["num_channels"]
    mappers = "anemoi.models.layers.mapper"
    encoder = {"_target_": f"{mappers}.GraphTransformerForwardMapper", **mapper_options}
    decoder = {"_target_": f"{mappers}.GraphTransformerBackwardMapper", **mapper_options}
    config = {
        "graph": {"data": "data", "hidden": "hidden"},
        "training": {"multistep_input": 2},
        "model": {
            "num_channels": 32,
            "processor": processor_options,
            "encoder": encoder,
            "decoder": decoder,
            "bounding": [],
            "trainable_parameters": {"data": 8, "hidden": 8},
            "model": {"hidden_nodes_name": "hidden", "latent_skip": True},
            "residual": {"_target_": "anemoi.models.layers.residual.SkipConnection"},
        },
    }
    kinds = {"forcing": ["insolation"], "diagnostic": [], "target": []}
    statistics = {name: np.ones(4) for name in ("mean", "stdev", "minimum", "maximum")}
    arguments = {}
    graphs = GRAPH.clone()
    if VERSION < (0, 11):
        arguments["truncation_data"] = {}
    if VERSION < (0, 12):
        indices = IndexCollection(DictConfig({"data": kinds}), VARIABLES)
    else:
        indices = {"data": IndexCollection(DictConfig(kinds), VARIABLES)}
        statistics = {"data": statistics}
        config["training"]["multistep_output"] = 1
    if (0, 12) <= VERSION < (0, 13):
        graphs = {"data": graphs}
    if VERSION >= (0, 14):
        arguments |= {"n_step_input": 2, "n_step_output": 1}
    return encoder_processor_decoder.AnemoiModelEncProcDec(
        model_config=DotDict(config),
        data_indices=indices,
        statistics=statistics,
        graph_data=graphs,
        **arguments,
    )


def differentiate(model, batch=2):
    """Return output and gradients by name."""
    shape = (batch, 2, 1, GRAPH["data"].x.shape[0], 4)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    out = model(x) if VERSION < (0, 12) else model({"data": x})["data"]
    out.sin().mean().backward()
    results = {"out": out.detach()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    return results


def max_error(ours, theirs):
    """Return the largest error of any tensor, relative to its largest value.

    Tensors with values below a hundredth of the largest of all are compared with that hundredth.
    """
    assert ours.keys() == theirs.keys()
    largest = max(tensor.abs().max() for tensor in theirs.values())
    errors = []
    for name, tensor in theirs.items():
        scale = tensor.abs().max().clamp(min=largest / 100)
        errors.append(((ours[name] - tensor).abs().max() / scale).item())
    return max(errors)


def compare(model):
    """Return the error of a model under `install`, whether its edges were raw, and whether it pickles as before."""
    theirs = differentiate(model)
    raw = []
    attend = attending.edge_attention
    pickled = pickle.dumps(model)
    keys = list(model.state_dict())

    def record(query, key, value, graph, edges, *rest, **options):
        raw.append(bool(rest))  # with the weight of lin_edge
        return attend(query, key, value, graph, edges, *rest, **options)

    attending.edge_attention = record
    with integration.install():
        ours = differentiate(model)
        same = pickle.dumps(model) == pickled and list(model.state_dict()) == keys
        sorted_lists = []
        build_structure = GraphStructure.from_edge_index
        GraphStructure.from_edge_index = lambda *args, **options: (
            sorted_lists.append(args[0].shape[1]) or build_structure(*args, **options)
        )
        again = differentiate(model)
        GraphStructure.from_edge_index = build_structure
    attending.edge_attention = attend
    for name in ours:
        assert torch.equal(again[name], ours[name]), f"{name} differs in a second pass"
    return {
        "error": max_error(ours, theirs),
        "raw": raw,
        "same": same,
        "sorted again": len(sorted_lists),
    }


def without_flash_attn():
    """Return the error of AIFS with a window, whose checkpoint was written as anemoi-training does and names flash-attn.

    The window is computed by the mask of this version first.
    """
    window = {"window_size": 5}
    theirs = differentiate(build(attention=window))
    with tempfile.NamedTemporaryFile(suffix=".ckpt") as file:
        with integration.install():
            model = build(attention=window | {"attention_implementation": "flash_attention"})
            torch.save(model, file.name)
        save_metadata(file.name, {"version": version("anemoi-models")})
        try:
            torch.load(file.name, weights_only=False)
            is_named = False
        except ModuleNotFoundError as error:
            is_named = error.name == "flash_attn"
        with integration.flash_attn_stand_in():
            model = torch.load(file.name, weights_only=False)
    with integration.install():
        return {"named": is_named, "error": max_error(differentiate(model), theirs)}


def make_block(kind):
    """Return a block and its arguments."""
    torch.manual_seed(0)
    sizes = {"in_channels": 16, "hidden_dim": 32, "out_channels": 16, "num_heads": 2, "edge_dim": 5}
    if VERSION < (0, 11) and kind == "Processor":
        sizes["num_chunks"] = 3
    if hasattr(mapper, "load_layer_kernels"):
        kernels = mapper.load_layer_kernels()
    else:
        kernels = processor.load_layer_kernels()
    options = {} if VERSION < (0, 11) else {"graph_attention_backend": "pyg"}
    block_class = getattr(blocks, f"GraphTransformer{kind}Block")
    block = block_class(**sizes, layer_kernels=kernels, **options)
    x = torch.randn(30, 16)
    edge_attr = torch.randn(150, 5)
    edge_index = torch.randint(30, (2, 150))
    shards = (None, None, None)
    if kind == "Processor":
        if VERSION >= (0, 15):
            shards = shapes.GraphShardInfo()
        return block, (x, edge_attr, edge_index, shards, 1, 30)
    if VERSION >= (0, 15):
        shards = shapes.BipartiteGraphShardInfo()
    return block, ((x, x + 1), edge_attr, edge_index, shards, 1, (30, 30))


def updated_sources():
    """Compare a mapper block that updates its sources, with separate conditions for sources and destinations.

    Returns its error under `install`, and with backend `triton` the outcome or the message of the
    error.
    """
    kernels = {"LayerNorm": anemoi_sublayers.CONDITIONAL}
    block = anemoi_sublayers.build("GraphTransformerMapperBlock", kernels)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3, generator=generator)
    width = block.lin_query.in_features
    attributes = block.lin_edge.in_features
    rows = [torch.randn(30, columns, generator=generator) for columns in (width, width, 4, 4)]
    x = tuple(rows[:2])
    cond = tuple(rows[2:])
    _, (_, _, _, shards, *sizes) = make_block("Mapper")
    edge_attr = torch.randn(90, attributes, generator=generator)
    edge_index = torch.randint(30, (2, 90), generator=generator)

    def call():
        (sources, destinations), *_ = block(x, edge_attr, edge_index, shards, *sizes, cond=cond)
        return {"sources": sources, "destinations": destinations}

    with torch.no_grad():
        theirs = call()
        with integration.install():
            error = max_error(call(), theirs)
        with integration.install(backend="triton", fusion="sublayers"):
            try:
                error = max(error, max_error(call(), theirs))
                (computed,) = integration.installed().computed
                outcome = computed.outcome
            except ValueError as refusal:
                outcome = str(refusal)
    return {"error": error, "outcome": outcome}


def changed_edges():
    """Return the error of an encoder whose edges are written between two passes under `install`, before 0.12, and of a chunk that is no range."""
    encoder = next(
        m for m in build().modules() if isinstance(m, mapper.GraphTransformerForwardMapper)
    )
    nodes = [GRAPH[name].num_nodes for name in ("data", "hidden")]
    columns = (encoder.in_channels_src, encoder.in_channels_dst)
    x = tuple(map(torch.randn, nodes, columns))
    shapes = tuple([[number, width]] for number, width in zip(nodes, columns, strict=True))

    def call():
        return {"out": encoder(x, 1, shapes)[1]}

    def reversed_chunk():
        chunk = torch.arange(4).flip(0)  # which begins where an earlier one did
        edge_attr = encoder.trainable(encoder.edge_attr, 1)
        arguments = (chunk, edge_attr, encoder.edge_index_base, shapes, 1, tuple(nodes))
        return {"reversed": encoder.run_processor_chunk_edge_sharding(x, *arguments)}

    with torch.no_grad():
        with integration.install():
            call()
            encoder.edge_index_base[0] = encoder.edge_index_base[0].flip(0)
            ours = call() | reversed_chunk()
        return max_error(ours, call() | reversed_chunk())


def mapper_layers():
    """Compare what the mappers embed and extract in float32, fused and by Anemoi, and the shapes that they return.

    Returns the error, and the number of fused layers.
    """
    if VERSION >= (0, 19):
        return None
    model = build()
    error = 0.0
    names = []
    for kind in ("Forward", "Backward"):
        mapper_class = getattr(mapper, f"GraphTransformer{kind}Mapper")
        of_kind = next(module for module in model.modules() if isinstance(module, mapper_class))
        columns = (of_kind.in_channels_src, of_kind.in_channels_dst)
        x = tuple(torch.randn(6, number) for number in columns)
        sharding = () if VERSION >= (0, 15) else (tuple([[6, number]] for number in columns),)

        def call(of_kind=of_kind, x=x, sharding=sharding):
            x_src, x_dst, *shapes = of_kind.pre_process(x, *sharding)
            rows = {"sources": x_src, "destinations": x_dst}
            if of_kind.out_channels_dst is not None:
                rows["fields"] = of_kind.post_process(x_dst, *shapes[1:])
            return rows, shapes

        with torch.no_grad():
            theirs, shapes = call()
            with (
                integration.install(backend="triton", fusion="sublayers"),
                Operators() as operators,
            ):
                ours, ours_shapes = call()
        assert shapes == ours_shapes
        error = max(error, max_error(ours, theirs))
        names += operators.names
    return {"error": error, "fused": names.count(LINEAR_LAYER)}


def compiled(kind):
    """Return the error of a compiled block under `install`, and the anemoi_gt operators in its graph."""
    block, inputs = make_block(kind)
    operators = []

    def record(graph, example):
        names = [str(node.target) for node in graph.graph.nodes]
        operators.extend(name for name in names if "anemoi_gt" in name)
        return graph

    def call(function):
        out = function(*inputs)[0]
        return {"out": out[-1] if isinstance(out, tuple) else out}

    theirs = call(block)
    with integration.install():
        ours = call(torch.compile(block, backend=record, dynamic=False))
    return {"error": max_error(ours, theirs), "operators": operators}


def triton():
    """Return the error under `install` of a block built for a GPU, or None if this version has no such block."""
    block, inputs = make_block("Processor")
    theirs = block(*inputs)[0]
    try:
        from anemoi.models.triton import gt
    except ImportError:
        return None
    del block.conv
    function = getattr(gt, "graph_transformer_attention_conv", None)
    block.conv = function or gt.GraphTransformerFunction.apply
    block.graph_attention_backend = "triton"
    with integration.install(backend="torch"):
        return max_error({"out": block(*inputs)[0]}, {"out": theirs})


def collect_messages():
    """Return a list to which log messages of anemoi_gt are added."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("anemoi_gt").addHandler(handler)
    return messages


def report_all():
    """Return the report of a version that operational checkpoints need, or of the newest."""
    messages = collect_messages()
    with torch.no_grad():
        report = {
            "compiled": {kind: compiled(kind) for kind in ("Processor", "Mapper")},
            "triton": triton(),
        }
    report["version"] = version("anemoi-models")
    report["messages"] = list(dict.fromkeys(messages))
    report["updated sources"] = updated_sources()
    report["mapper layers"] = mapper_layers()
    report["sub-layers"] = anemoi_sublayers.report_sublayers()
    report["graph networks"] = anemoi_network_versions.compare(max_error)
    report["window"] = anemoi_window_versions.compare()
    if VERSION < (0, 15):
        report["transformers"] = anemoi_transformer_versions.compare()
    if VERSION < (0, 12):
        report["changed edges"] = changed_edges()
    if VERSION < (0, 19):
        report["AIFS"] = compare(build())
        report["without flash-attn"] = without_flash_attn()
        heads = build("GraphTransformer", chunks=1, shard_strategy="heads")
        report["graph transformer"] = compare(heads)
    return report


def report_minor():
    """Return the report of another minor version: one model, and a block of each kind."""
    messages = collect_messages()
    report = compare(build("GraphTransformer"))
    report["updated sources"] = updated_sources()
    report["mapper layers"] = mapper_layers()
    report["graph networks"] = anemoi_network_versions.compare(max_error)
    report["window"] = anemoi_window_versions.compare()
    if VERSION < (0, 15):
        report["transformers"] = anemoi_transformer_versions.compare()
    return report | {"version": version("anemoi-models"), "messages": messages}
