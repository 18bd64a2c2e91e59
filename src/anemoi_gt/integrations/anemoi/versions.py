"""Generations of anemoi-models: releases with the same code where it is replaced.

A record holds what is new in its first release: hashes of bodies by the name of a method or
function. A release with the bodies of the last record needs one line, `NEWEST`, and a test id.

The parameters of a method do not determine what it computes: `_assemble_output` has the same
parameters in 0.12.0 and 0.19.0, whose output has one dimension more. A body that is in no version
that was read is left to upstream. Its hash is of the syntax tree, parameters included, without
docstring, annotations and comments, which change no result. It is the same on all versions of
Python that this library supports: `ast.dump` is not.
"""

import ast
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

OLDEST = "0.9.2"  # release whose graph-transformer blocks are the first that we know
NEWEST = "0.19.0"


# bodies that do otherwise than the newest ones of their names
SOURCES_TAKE_CONDITION_OF_DESTINATIONS = "05102bf261b0"  # of a mapper block that updates them
RETURNS_ROWS_ONLY = "bbab4f483533"  # the processor block of transformers, not a tuple


# by the first release of a generation: hash by name; None: it has gone, or moved to another class
GENERATIONS: dict[str, dict[str, str | None]] = {
    "0.9.0": {
        "TransformerMapperBlock.forward": "1e9ed11d7858",
        "GraphTransformerBaseBlock.attention_block": "68a8a41b8e55",
        "GraphTransformerBaseBlock.get_qkve": "56fe896c8de2",
        "GraphTransformerMapperBlock.prepare_qkve_edge_sharding": "97770d974bf5",
        "GraphTransformerBaseBlock.run_node_dst_mlp": "d149c36471d0",
        "GraphTransformerMapperBlock.run_node_src_mlp": "c3507dfca1bd",
        "GraphTransformerBaseBlock.shard_qkve_heads": "f35826eb706e",
        "GraphTransformerBaseBlock.shard_output_seq": "3bf11187f487",
        "GraphTransformerConv.forward": "8cd77816c7f3",
        "GraphTransformerConv.message": "bf31becf5946",
        "GraphConvProcessorBlock.forward": "3550da909c8f",
        "GraphConvMapperBlock.forward": "01b6f419f915",
        "GraphConv.forward": "37145c392b55",
        "GraphConv.message": "5489a51e6955",
        "GraphConv.aggregate": "d2b5e8844c78",
        "MLP.forward": "e8a2b63923e4",
        "AutocastLayerNorm.forward": "445eb0e7afd6",
        "ConditionalLayerNorm.forward": "bf3964141119",
        "SDPAAttentionWrapper.forward": "7f0aea0e4fbb",
        "SDPAAttentionWrapper.update_mask": "ad2455e162de",
        "NamedNodesAttributes.forward": "ffca76074056",
        "AnemoiModelEncProcDec._assert_valid_sharding": "6a4999d2f176",
        "GraphTransformerBaseMapper.run_processor_chunk_edge_sharding": "5ba678e49980",
        "ForwardMapperPreProcessMixin.pre_process": "65fd33b10fa4",
        "GraphTransformerBackwardMapper.pre_process": "714d561494f5",
        "BackwardMapperPostProcessMixin.post_process": "a1a7b5297d90",
    },
    "0.9.2": {
        "GraphTransformerProcessorBlock.forward": "8810ad76f2be",
        "GraphTransformerMapperBlock.forward": SOURCES_TAKE_CONDITION_OF_DESTINATIONS,
        "TransformerProcessorBlock.forward": RETURNS_ROWS_ONLY,
    },
    "0.9.5": {
        "SDPAAttentionWrapper.forward": "2f8f89cf93fe",
    },
    "0.9.6": {
        "AnemoiModelEncProcDec._assert_valid_sharding": None,
    },
    "0.11.0": {
        "GraphConvProcessorBlock.forward": "247f12ff9040",
        "GraphTransformerProcessorBlock.forward": "c6899e101f50",
        "TransformerProcessorBlock.forward": "3f0de62983e5",
        "GraphTransformerBaseBlock.apply_gt": "9b1bff722dec",
        "GraphTransformerFunction.forward": "2d624ca0bc06",
        "GraphTransformerBaseBlock.attention_block": "7a5d2d0785f5",
    },
    "0.11.1": {
        "GraphTransformerBaseBlock.get_qkve": "946dfd4c6d47",
    },
    "0.11.3": {
        "GraphTransformerBaseBlock.shard_output_seq": "a26fb2ce399c",
        "StaticGraphProvider._expand_edges": "7c60082f885a",
        "StaticGraphProvider._get_edges_impl": "41772ef72c51",
    },
    "0.12.0": {
        "ForwardMapperPreProcessMixin.pre_process": None,
        "BackwardMapperPostProcessMixin.post_process": None,
        "GraphTransformerBaseMapper.run_processor_chunk_edge_sharding": "d069fbf559f1",
        "GraphTransformerForwardMapper.pre_process": "36f285e8c65f",
        "GraphTransformerBackwardMapper.pre_process": "965ac610d2f8",
        "GraphTransformerBackwardMapper.post_process": "a1a7b5297d90",
        "AnemoiModelEncProcDec._assert_valid_sharding": "6a4999d2f176",
    },
    "0.12.1": {
        "maybe_checkpoint": "9ddb1341e263",
        "AnemoiModelEncProcDec._assemble_output": "15b0ef613148",
        "AnemoiEnsModelEncProcDec._assemble_output": "7c57b3811972",
    },
    "0.13.0": {
        "SDPAAttentionWrapper.forward": "f7ee27ce90a5",
        "SDPAAttentionWrapper.update_mask": None,
        "SDPAAttentionWrapper.create_sliding_window_mask": "f5d2d85f5a5d",
    },
    "0.14.0": {
        "GraphTransformerMapperBlock.forward": "a683a185c29a",
        "TransformerMapperBlock.forward": "8e72fad5dd2f",
    },
    "0.15.0": {
        "GraphTransformerBaseMapper.run_processor_chunk_edge_sharding": "4ce742130478",
        "GraphTransformerForwardMapper.pre_process": "6fc1afbcba7c",
        "GraphTransformerBackwardMapper.pre_process": "05ec7d8318db",
        "GraphTransformerBackwardMapper.post_process": "18f7e49f6201",
        "GraphConvProcessorBlock.forward": "6295462cc375",
        "GraphConvMapperBlock.forward": "6e65a27da67e",
        "GraphTransformerProcessorBlock.forward": "235b62477ad0",
        "GraphTransformerMapperBlock.forward": "cdbf461630da",
        "TransformerProcessorBlock.forward": "49ab498464d0",
        "TransformerMapperBlock.forward": "46fe24944c59",
        "GraphTransformerBaseBlock.apply_gt": "3b6f5b6a32d3",
        "GraphTransformerBaseBlock.shard_qkve_heads": "b08dd3766498",
        "GraphTransformerBaseBlock.shard_output_seq": "33cd3f8387e5",
        "shard_tensor": "1cd9c1618691",
        "gather_tensor": "b38189d14ed8",
        "get_shard_sizes": "76f80d7e1f7f",
        "NoiseConditioning.forward": "cd3875e441e0",
    },
    "0.16.0": {
        "GraphTransformerBaseMapper.run_processor_chunk_edge_sharding": None,
        "GraphTransformerProcessorBlock.forward": "1402274f5596",
        "GraphTransformerMapperBlock.forward": "b3cb110f0b5b",
        "GraphTransformerBaseBlock.apply_gt": "771805a19916",
        "GraphTransformerBaseBlock.attention_block": "21e00a4bcb1f",
        "GatedMLPLayer.forward": "68d0851fa931",
        "StaticGraphProvider._get_edges_impl": "7da7746903c4",
        "GraphTransformerBaseMapper.prepare_edge_sharding_wrapper": "60e994f38b44",
        "GraphTransformerBaseMapper.mapper_forward_with_edge_sharding": "bd1ce243ae8e",
        "GraphTransformerProcessor.forward": "03e3131f2626",
        "GraphPartition.materialise": "bc1011cd21cb",
        "build_graph_partition": "9cbd7a0b78d0",
    },
    "0.17.0": {
        "GraphTransformerProcessorBlock.forward": "dd8936ad2720",
        "GraphTransformerMapperBlock.forward": "60b8e7bbb22e",
        "GraphTransformerBaseBlock.prepare_qkve_edge_sharding": "b6c831026842",
        "GraphTransformerMapperBlock.prepare_qkve_edge_sharding": None,
        "GraphTransformerBaseBlock._apply_qk_norm": "956b90f62bf2",
        "GraphTransformerBaseBlock._forward_edges_sharded_attention": "5ddffb2d1871",
        "GraphTransformerBaseBlock._forward_heads_sharded_attention": "837a5d16509d",
        "GraphTransformerProcessorBlock._forward_edges_shard_strategy": "a5117e85cf1d",
        "GraphTransformerProcessorBlock._forward_heads_shard_strategy": "e71a3d184c2b",
        "GraphTransformerProcessorBlock._get_or_build_cached_halo_info": "d87a58fe7e70",
        "GraphTransformerProcessor.forward": "63211e4158ac",
        "GraphTransformerFunction.forward": "3dad84a6c7cc",
    },
    "0.18.0": {
        "GraphTransformerFunction.forward": None,
        "graph_transformer_attention_conv": "a7498a0e507d",
    },
    "0.19.0": {
        "GraphTransformerBackwardMapper.pre_process": "6fc1afbcba7c",
        "AnemoiModelEncProcDec._assemble_output": "9098c5665a8b",
    },
}


def _all_bodies() -> dict[str, set[str]]:
    known: dict[str, set[str]] = {}
    for bodies in GENERATIONS.values():
        for name, digest in bodies.items():
            if digest is not None:
                known.setdefault(name, set()).add(digest)
    return known


KNOWN = _all_bodies()  # {name: hashes of reviewed bodies}


def unknown_body(function: Callable) -> str | None:
    """Return why the body does not match a reviewed version, or None if it is in `KNOWN`."""
    digest = body_hash(function)
    if digest is None:
        return "its source cannot be read"
    if digest in KNOWN.get(function.__qualname__, ()):
        return None
    return f"its body matches no reviewed version of anemoi-models (hash {digest})"


_IGNORED = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


def body_hash(function: Callable) -> str | None:
    """Return the hash of the body of a function, None without its source."""
    code = getattr(function, "__code__", None)  # of a wrapper, not of what it wraps
    if code is None:
        return None
    definition = _definitions(code.co_filename).get((code.co_name, code.co_firstlineno))
    return None if definition is None else hash_of_definition(definition)


@cache
def hash_of_definition(definition: ast.FunctionDef) -> str:
    """Return the hash of a definition of a function."""
    return sha256(_plain(definition).encode()).hexdigest()[:12]


@cache
def _definitions(file: str) -> dict[tuple[str, int], ast.FunctionDef]:
    """Return the functions of a file by name and first line, decorators included."""
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    first_lines = [
        min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        for node in functions
    ]
    return {(node.name, line): node for node, line in zip(functions, first_lines, strict=True)}


def _plain(node: object) -> str:
    """Return a syntax tree as text, without fields that do not affect results."""
    if isinstance(node, list):
        return f"[{', '.join(map(_plain, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        is_absent = value == [] or (value is None and not isinstance(node, ast.Constant))
        if name in _IGNORED or is_absent:
            continue
        if name == "body" and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        fields.append(f"{name}={_plain(value)}")
    return f"{type(node).__name__}({', '.join(fields)})"
