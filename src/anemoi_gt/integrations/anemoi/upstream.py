"""The installed anemoi-models: its modules, and replacements for its methods and functions.

A replacement is a function that takes the upstream method first, then what that takes:

    @replaces
    def get_qkve(upstream, self, x, edge_attr): ...

    setattr(owner, "get_qkve", get_qkve.of(owner.get_qkve))
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, ClassVar

from anemoi_gt.integrations.anemoi.versions import (
    NEWEST,
    RETURNS_ROWS_ONLY,
    SOURCES_TAKE_CONDITION_OF_DESTINATIONS,
    body_hash,
    unknown_body,
)
from anemoi_gt.nn import plain


class Upstream:
    """Modules and classes of anemoi-models for replacements, resolved by `resolve_upstream`."""

    mapper: ModuleType  # layers.mapper
    processor: ModuleType  # layers.processor
    # mappers of all kinds
    encoders: tuple[type, ...] = ()
    decoders: tuple[type, ...] = ()
    partition: ModuleType  # distributed.khop_edges, since 0.16
    block: type  # GraphTransformerBaseBlock
    # blocks of graph networks whose forward we know, of processors and of mappers
    graph_networks: tuple[type, ...] = ()
    network: type  # MLP
    # blocks of transformers whose forward we know, of processors and of mappers
    transformers: tuple[type, ...] = ()
    returns_rows_only: bool = False  # the processor block of transformers, not a tuple
    # for `triton`; before 0.18.0 the class with this `apply`; None before 0.11
    triton_conv: object = None
    block_module: ModuleType  # layers.block
    shapes: ModuleType  # distributed.shapes
    providers = "anemoi.models.layers.graph_provider"  # since 0.11.3
    sources_take_destination_condition: bool = False  # where a mapper updates its sources
    not_replaced: ClassVar[dict[type, str]] = {}  # classes of blocks, and why

    @staticmethod
    def why_not_replaced(kind: type) -> str | None:
        """Return why blocks of a class do not run our forward, or None if they do."""
        for base in kind.__mro__:
            if base in Upstream.not_replaced:
                return f"its forward is not replaced: {Upstream.not_replaced[base]}"
            forward = vars(base).get("forward")
            if forward is not None:
                is_ours = plain.original_of(forward) is not forward
                return None if is_ours else f"its forward is that of {plain.qualified_name(base)}"
        return None


def resolve_upstream() -> None:
    """Import what replacements read; classes whose bodies we do not know are left out."""
    Upstream.mapper, Upstream.processor = (
        import_module(f"anemoi.models.layers.{n}") for n in ("mapper", "processor")
    )
    Upstream.encoders, Upstream.decoders = (
        tuple(kind for name, kind in vars(Upstream.mapper).items() if name.endswith(ending))
        for ending in ("ForwardMapper", "BackwardMapper")
    )
    block = import_module("anemoi.models.layers.block")
    Upstream.block_module = block
    Upstream.shapes = import_module("anemoi.models.distributed.shapes")
    Upstream.block = block.GraphTransformerBaseBlock
    kinds = (block.TransformerProcessorBlock, block.TransformerMapperBlock)
    Upstream.transformers = tuple(kind for kind in kinds if unknown_body(kind.forward) is None)
    kinds = (block.GraphConvProcessorBlock, block.GraphConvMapperBlock)
    Upstream.graph_networks = tuple(kind for kind in kinds if unknown_body(kind.forward) is None)
    Upstream.network = find("anemoi.models.layers.mlp", "MLP")
    body = body_hash(block.TransformerProcessorBlock.forward)
    Upstream.returns_rows_only = body == RETURNS_ROWS_ONLY
    body = body_hash(block.GraphTransformerMapperBlock.forward)
    condition_of_destinations = body == SOURCES_TAKE_CONDITION_OF_DESTINATIONS
    Upstream.sources_take_destination_condition = condition_of_destinations
    with suppress(ImportError):  # an older version
        Upstream.partition = import_module("anemoi.models.distributed.khop_edges")
    with suppress(ImportError, ValueError):  # anemoi-models raises ValueError without Triton
        triton = import_module("anemoi.models.triton.gt")
        names = ("graph_transformer_attention_conv", "GraphTransformerFunction")
        attentions = [getattr(triton, name) for name in names if hasattr(triton, name)]
        known = [
            attention
            for attention in attentions
            if unknown_body(getattr(attention, "forward", attention)) is None
        ]
        Upstream.triton_conv = known[0] if known else None


def recognise_modules() -> None:
    """Recognise Anemoi's modules by the bodies of their methods, for `why_not_plain`."""
    for path in plain.TABLE:
        module, _, name = path.rpartition(".")
        if not module.startswith("anemoi."):
            continue
        with suppress(ImportError):  # older versions lack some
            plain.recognise(find(module, name), unknown_body)


def find(module: str, *name: str) -> Any:
    """Return a class by module and name, or a module."""
    try:
        thing: Any = import_module(module)  # a package without types
        for attribute in name:
            thing = getattr(thing, attribute)
        return thing
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}): pip install "
            f"anemoi-models=={NEWEST}"
        ) from error


@dataclass(frozen=True)
class Replacement:
    """A function that takes the place of a method or function of anemoi-models."""

    function: Callable  # takes the upstream method, and what that takes
    stands_in: bool = True  # False: it calls upstream whatever its body is

    def of(self, upstream: Callable) -> Callable:
        """Return the replacement of `upstream`."""
        function = self.function

        def method(*args: Any, **kwargs: Any) -> Any:
            return function(upstream, *args, **kwargs)

        # Not one code object for all methods, because torch.compile limits the recompilations of
        # each.
        method.__code__ = method.__code__.replace(co_name=upstream.__name__)
        replacement = wraps(upstream)(method)
        vars(replacement)["replaces"] = upstream
        return replacement


def replaces(function: Callable) -> Replacement:
    """Make a replacement of a method or function whose body is known, with its parameters."""
    return Replacement(function)


def wraps_any(function: Callable) -> Replacement:
    """Make a replacement that calls the upstream method with all arguments, whatever they are."""
    return Replacement(function, stands_in=False)
