"""What the methods of a class read from `self`, from their source: a module's result depends on no more."""

import ast
import inspect
import textwrap


def attributes_of_self(function):
    """Return the names that a function reads from its first argument, and methods of `super()` that it calls."""
    name = function.args.args[0].arg if function.args.args else None
    read, inherited = set(), set()
    for node in ast.walk(function):
        if not isinstance(node, ast.Attribute) or not isinstance(node.ctx, ast.Load):
            continue
        owner = node.value
        if isinstance(owner, ast.Name) and owner.id == name:
            read.add(node.attr)
        elif isinstance(owner, ast.Call) and getattr(owner.func, "id", None) == "super":
            inherited.add(node.attr)
    return read, inherited


def reads_of(methods_by_class, start):
    """Return all that methods read from `self`, with what the methods read that they call.

    `methods_by_class` are the functions of a class and its bases, each {name: ast.FunctionDef}, in
    the order of resolution.
    """
    read, left, seen = set(start), [(name, 0) for name in start], set()
    while left:
        name, first = left.pop()
        for depth in range(first, len(methods_by_class)):
            function = methods_by_class[depth].get(name)
            if function is None:
                continue
            if (name, depth) not in seen:
                seen.add((name, depth))
                names, inherited = attributes_of_self(function)
                read |= names
                left += [(name, 0) for name in names]
                left += [(name, depth + 1) for name in inherited]
            break
    return read


def methods_of(kind):
    """Return the functions of an imported class and its bases below torch.nn.Module, as `reads_of` takes them."""
    result = []
    for base in kind.__mro__:
        if base.__module__.startswith("torch.nn.modules.module") or base is object:
            break
        functions = {}
        for name, function in vars(base).items():
            function = getattr(function, "fget", function)
            if inspect.isfunction(function):
                source = textwrap.dedent(inspect.getsource(function))
                functions[name] = ast.parse(source).body[0]
        result.append(functions)
    return result
