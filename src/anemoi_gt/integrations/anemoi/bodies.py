"""Bodies of anemoi-models that replacements stand in for, recognised by a hash of their source.

The parameters of a method do not determine what it computes: `_assemble_output` has the same
parameters in 0.12.0 and 0.19.0, whose output has one dimension more. A body that is in no version
that was read is left to upstream.

The hash is of the syntax tree without docstring, annotations and comments, which change no result.
It is the same on all versions of Python that this library supports: `ast.dump` is not.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

# name of a method or function of anemoi-models: hashes of its bodies that we stand in for, their
# versions
KNOWN = {
    "GraphTransformerProcessorBlock.forward": {
        "8810ad76f2be": "0.9.2 to 0.10.0",
        "c6899e101f50": "0.11.0 to 0.14.1",
        "235b62477ad0": "0.15.0 to 0.15.1",
        "1402274f5596": "0.16.0",
        "dd8936ad2720": "0.17.0 to 0.19.0",
    },
    "GraphTransformerMapperBlock.forward": {
        "05102bf261b0": "0.9.2 to 0.13.1",
        "a683a185c29a": "0.14.0 to 0.14.1",
        "cdbf461630da": "0.15.0 to 0.15.1",
        "b3cb110f0b5b": "0.16.0",
        "60b8e7bbb22e": "0.17.0 to 0.19.0",
    },
    "TransformerProcessorBlock.forward": {
        "bbab4f483533": "0.9.2 to 0.10.0",
        "3f0de62983e5": "0.11.0 to 0.14.1",
        "49ab498464d0": "0.15.0 to 0.19.0",
    },
    "TransformerMapperBlock.forward": {
        "1e9ed11d7858": "0.9.0 to 0.13.1",
        "8e72fad5dd2f": "0.14.0 to 0.14.1",
        "46fe24944c59": "0.15.0 to 0.19.0",
    },
    "GraphTransformerBaseBlock.apply_gt": {
        "9b1bff722dec": "0.11.0 to 0.14.1",
        "3b6f5b6a32d3": "0.15.0 to 0.15.1",
        "771805a19916": "0.16.0 to 0.19.0",
    },
    "GraphTransformerBaseBlock.attention_block": {
        "68a8a41b8e55": "0.9.0 to 0.10.0",
        "7a5d2d0785f5": "0.11.0 to 0.15.1",
        "21e00a4bcb1f": "0.16.0 to 0.19.0",
    },
    "GraphTransformerBaseBlock.get_qkve": {
        "56fe896c8de2": "0.9.0 to 0.11.0",
        "946dfd4c6d47": "0.11.1 to 0.19.0",
    },
    "GraphTransformerBaseBlock.prepare_qkve_edge_sharding": {"b6c831026842": "0.17.0 to 0.19.0"},
    "GraphTransformerMapperBlock.prepare_qkve_edge_sharding": {"97770d974bf5": "0.9.0 to 0.16.0"},
    "GraphTransformerBaseBlock._apply_qk_norm": {"956b90f62bf2": "0.17.0 to 0.19.0"},
    "GraphTransformerBaseBlock._forward_edges_sharded_attention": {
        "5ddffb2d1871": "0.17.0 to 0.19.0"
    },
    "GraphTransformerBaseBlock._forward_heads_sharded_attention": {
        "837a5d16509d": "0.17.0 to 0.19.0"
    },
    "GraphTransformerProcessorBlock._forward_edges_shard_strategy": {
        "a5117e85cf1d": "0.17.0 to 0.19.0"
    },
    "GraphTransformerProcessorBlock._forward_heads_shard_strategy": {
        "e71a3d184c2b": "0.17.0 to 0.19.0"
    },
    "GraphTransformerProcessorBlock._get_or_build_cached_halo_info": {
        "d87a58fe7e70": "0.17.0 to 0.19.0"
    },
    "GraphTransformerBaseBlock.run_node_dst_mlp": {"d149c36471d0": "0.9.0 to 0.19.0"},
    "GraphTransformerMapperBlock.run_node_src_mlp": {"c3507dfca1bd": "0.9.0 to 0.19.0"},
    "GraphTransformerBaseBlock.shard_qkve_heads": {
        "f35826eb706e": "0.9.0 to 0.14.1",
        "b08dd3766498": "0.15.0 to 0.19.0",
    },
    "GraphTransformerBaseBlock.shard_output_seq": {
        "3bf11187f487": "0.9.0 to 0.11.2",
        "a26fb2ce399c": "0.11.3 to 0.14.1",
        "33cd3f8387e5": "0.15.0 to 0.19.0",
    },
    "GraphTransformerConv.forward": {"8cd77816c7f3": "0.9.0 to 0.19.0"},
    "GraphTransformerConv.message": {"bf31becf5946": "0.9.0 to 0.19.0"},
    "MLP.forward": {"e8a2b63923e4": "0.9.0 to 0.19.0"},
    "AutocastLayerNorm.forward": {"445eb0e7afd6": "0.9.0 to 0.19.0"},
    "ConditionalLayerNorm.forward": {"bf3964141119": "0.9.0 to 0.19.0"},
    "GatedMLPLayer.forward": {"68d0851fa931": "0.16.0 to 0.19.0"},
    "StaticGraphProvider._expand_edges": {"7c60082f885a": "0.11.3 to 0.19.0"},
    "StaticGraphProvider._get_edges_impl": {
        "41772ef72c51": "0.11.3 to 0.15.1",
        "7da7746903c4": "0.16.0 to 0.19.0",
    },
    "GraphTransformerBaseMapper.prepare_edge_sharding_wrapper": {
        "60e994f38b44": "0.16.0 to 0.19.0"
    },
    "GraphTransformerBaseMapper.mapper_forward_with_edge_sharding": {
        "bd1ce243ae8e": "0.16.0 to 0.19.0"
    },
    "GraphTransformerProcessor.forward": {
        "03e3131f2626": "0.16.0",
        "63211e4158ac": "0.17.0 to 0.19.0",
    },
    "maybe_checkpoint": {"9ddb1341e263": "0.12.1 to 0.19.0"},
    "GraphPartition.materialise": {"bc1011cd21cb": "0.16.0 to 0.19.0"},
    "build_graph_partition": {"9cbd7a0b78d0": "0.16.0 to 0.19.0"},
    "shard_tensor": {"1cd9c1618691": "0.15.0 to 0.19.0"},
    "gather_tensor": {"b38189d14ed8": "0.15.0 to 0.19.0"},
    "get_shard_sizes": {"76f80d7e1f7f": "0.15.0 to 0.19.0"},
    "NamedNodesAttributes.forward": {"ffca76074056": "0.9.0 to 0.19.0"},
    "NoiseConditioning.forward": {"cd3875e441e0": "0.15.0 to 0.19.0"},
    "AnemoiModelEncProcDec._assemble_output": {
        "15b0ef613148": "0.12.1 to 0.18.0",
        "9098c5665a8b": "0.19.0",
    },
    "AnemoiEnsModelEncProcDec._assemble_output": {"7c57b3811972": "0.12.1 to 0.19.0"},
    "AnemoiModelEncProcDec._assert_valid_sharding": {
        "6a4999d2f176": "0.9.0 to 0.9.5, 0.12.0 to 0.19.0"
    },
}
_IGNORED = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}


def unknown_body(function: Callable) -> str | None:
    """Return why a function is none that we stand in for, or None if its body is in `KNOWN`."""
    digest = body_hash(function)
    if digest is None:
        return "its source cannot be read"
    if digest in KNOWN.get(function.__qualname__, ()):
        return None
    return f"its body is in no version that we know (hash {digest})"


def body_hash(function: Callable) -> str | None:
    """Return the hash of the body of a function, None without its source."""
    code = inspect.unwrap(function).__code__
    definition = _definitions(code.co_filename).get((code.co_name, code.co_firstlineno))
    return None if definition is None else hash_of_definition(definition)


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
    """Return a syntax tree as text, without parts that do not affect results."""
    if isinstance(node, list):
        return f"[{', '.join(map(_plain, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        is_absent = value == [] or (value is None and not isinstance(node, ast.Constant))
        if name in _IGNORED or is_absent:
            continue
        if name == "body" and isinstance(node, ast.FunctionDef | ast.ClassDef):
            value = value[1:] if ast.get_docstring(node, clean=False) is not None else value
        parts.append(f"{name}={_plain(value)}")
    return f"{type(node).__name__}({', '.join(parts)})"
