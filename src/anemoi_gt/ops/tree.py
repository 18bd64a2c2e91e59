"""Trees of NamedTuples: related tensors, and all else that has one value for each of them.

A tree of a call's tensors, with other leaves, is what modules are read into, what a plan holds
(buffers), which gradients are needed (bools), and where the gradients are. PyTorch takes and
returns flat sequences of leaves, depth first; a tensor that is absent is the leaf None.

    class Linear(NamedTuple, Generic[T]):        leaf_types(Layer[Tensor])
        weight: T                                    x, map_weight, map_bias

    class Layer(NamedTuple, Generic[T]):         leaves(Layer(x, Linear(w, None)))
        x: T                                         [x, w, None]
        map: Linear[T]
"""

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar, get_origin, get_type_hints

Tree = TypeVar("Tree", bound=tuple)


def leaves(tree: tuple) -> list:
    """Return the leaves of a tree, which are no tuples."""
    flat: list = []
    for branch in tree:
        if isinstance(branch, tuple):
            flat += leaves(branch)
        else:
            flat.append(branch)
    return flat


def getter_of(kind: Any) -> Callable[[tuple], tuple]:
    """Return a function of a tree that returns its leaves; faster than `leaves`, but not traced."""
    paths = list(leaf_types(kind, separator="."))
    return attrgetter(*paths) if len(paths) > 1 else tuple


def tree_of(form: Tree, values: Iterable) -> Tree:
    """Return a tree like `form` whose leaves are `values`."""
    return _tree_of(form, iter(values))


def _tree_of(form: Tree, values: Iterator) -> Tree:
    branches = []
    for branch in form:
        branches.append(_tree_of(branch, values) if isinstance(branch, tuple) else next(values))
    return form._make(branches)  # type: ignore[attr-defined]  # of a NamedTuple


def form_of(kind: Any) -> Any:
    """Return the tree of a NamedTuple class with None for each leaf."""
    branches = []
    for annotation in _annotations(kind):
        branches.append(form_of(annotation) if _is_tree(annotation) else None)
    return (get_origin(kind) or kind)._make(branches)


def leaf_types(kind: Any, separator: str = "_", prefix: str = "") -> dict[str, Any]:
    """Return the annotations of the leaves of a NamedTuple class by name, such as "norm_scale"."""
    types: dict[str, Any] = {}
    fields = (get_origin(kind) or kind)._fields
    for field, annotation in zip(fields, _annotations(kind), strict=True):
        if _is_tree(annotation):
            types |= leaf_types(annotation, separator, f"{prefix}{field}{separator}")
        else:
            types[prefix + field] = annotation
    return types


def _annotations(kind: Any) -> list:
    return list(get_type_hints(get_origin(kind) or kind).values())


def _is_tree(annotation: Any) -> bool:
    return hasattr(get_origin(annotation) or annotation, "_fields")
