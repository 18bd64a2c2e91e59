"""Hashes of bodies of functions, by which those of anemoi-models are recognised (`versions`).

The parameters of a method do not determine what it computes: `_assemble_output` has the same
parameters in 0.12.0 and 0.19.0, whose output has one dimension more. A body that is in no version
that was read is left to upstream.

The hash is of the syntax tree without docstring, annotations and comments, which change no result.
It is the same on all versions of Python that this library supports: `ast.dump` is not.
"""

import ast
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

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
