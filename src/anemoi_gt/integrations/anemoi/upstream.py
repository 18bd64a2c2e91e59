"""The installed anemoi-models: its modules, and replacements for its methods and functions.

A replacement is a function that takes the upstream method first, then what that takes:

    @replaces("self x edge_attr")
    def get_qkve(upstream, self, x, edge_attr): ...

    setattr(owner, "get_qkve", get_qkve.of(owner.get_qkve))
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, ClassVar

from anemoi_gt.integrations.anemoi.bodies import body_hash, unknown_body
from anemoi_gt.nn import sublayers


class Upstream:
    """Modules and classes of anemoi-models for replacements, resolved by `resolve_upstream`."""

    mapper: ModuleType  # layers.mapper
    processor: ModuleType  # layers.processor
    partition: ModuleType  # distributed.khop_edges, since 0.16
    block: type  # GraphTransformerBaseBlock
    blocks: tuple[type, ...] = ()  # of processors and of mappers
    # blocks of transformers whose forward we know, of processors and of mappers
    transformers: tuple[type, ...] = ()
    returns_rows_alone: bool = False  # the processor block of transformers, not a tuple
    conv: type | None = None  # the attention of graph_attention_backend: pyg
    triton_conv: object = (
        None  # for `triton`; before 0.18.0 the class with this `apply`; None before 0.11
    )
    block_module: ModuleType  # layers.block
    shapes: ModuleType  # distributed.shapes
    sources_take_destination_condition: bool = False  # where a mapper updates its sources
    # results of `decision.overridden_method_of`, by class of blocks, and of
    # `decision.overridden_network_of`, by class and method
    own_methods: ClassVar[dict[type, str | None]] = {}
    own_networks: ClassVar[dict[tuple[type, str], str | None]] = {}


def resolve_upstream() -> None:
    """Import what replacements read; classes whose bodies we do not know are left out."""
    Upstream.mapper, Upstream.processor = (
        import_module(f"anemoi.models.layers.{n}") for n in ("mapper", "processor")
    )
    block = import_module("anemoi.models.layers.block")
    Upstream.own_methods.clear()
    Upstream.own_networks.clear()
    Upstream.block_module, Upstream.shapes = (
        block,
        import_module("anemoi.models.distributed.shapes"),
    )
    Upstream.block = block.GraphTransformerBaseBlock
    Upstream.blocks = (block.GraphTransformerProcessorBlock, block.GraphTransformerMapperBlock)
    kinds = (block.TransformerProcessorBlock, block.TransformerMapperBlock)
    Upstream.transformers = tuple(kind for kind in kinds if unknown_body(kind.forward) is None)
    processor_forward = body_hash(block.TransformerProcessorBlock.forward)
    Upstream.returns_rows_alone = processor_forward == "bbab4f483533"  # 0.9.2 to 0.10.0
    conv = import_module("anemoi.models.layers.conv").GraphTransformerConv
    is_known = unknown_body(conv.forward) is None and unknown_body(conv.message) is None
    Upstream.conv = conv if is_known else None
    mapper_forward = body_hash(block.GraphTransformerMapperBlock.forward)
    # 0.9.2 to 0.13.1
    Upstream.sources_take_destination_condition = mapper_forward == "05102bf261b0"
    _register_sublayers()
    with suppress(ImportError):  # an older version
        Upstream.partition = import_module("anemoi.models.distributed.khop_edges")
    with suppress(ImportError, ValueError):  # anemoi-models raises ValueError without Triton
        triton = import_module("anemoi.models.triton.gt")
        names = ("graph_transformer_attention_conv", "GraphTransformerFunction")
        Upstream.triton_conv = next(
            (getattr(triton, name) for name in names if hasattr(triton, name)), None
        )


def _register_sublayers() -> None:
    """Allow fused sub-layers for Anemoi's norms and networks with known bodies."""
    kinds = {
        "layer_norm": ("normalization", "AutocastLayerNorm"),
        "conditional_norm": ("normalization", "ConditionalLayerNorm"),
        "mlp": ("mlp", "MLP"),
        "gated_linear": ("mlp", "GatedMLPLayer"),
    }
    known = {}
    for role, (module, name) in kinds.items():
        # older versions lack some
        kind = getattr(import_module(f"anemoi.models.layers.{module}"), name, None)
        if kind is not None and unknown_body(kind.forward) is None:
            known[role] = kind
    sublayers.register(**known)


def find(module: str, *name: str) -> Any:
    """Return a class by module and name, or a module."""
    try:
        thing: Any = import_module(module)  # a package without types
        for part in name:
            thing = getattr(thing, part)
        return thing
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}): pip install "
            "anemoi-models==0.19.0"
        ) from error


@dataclass(frozen=True)
class Replacement:
    """A function that takes the place of a method or function of anemoi-models."""

    function: Callable  # takes the upstream method, and what that takes
    # parameters of the upstream method by name, in each version that we know
    known: tuple[str, ...]
    stands_in: bool = True  # False: it calls upstream whatever its body is

    def of(self, upstream: Callable) -> Callable:
        """Return the replacement of `upstream`."""
        function = self.function

        def method(*args, **kwargs):
            return function(upstream, *args, **kwargs)

        # Not one code object for all methods, because torch.compile limits the recompilations of
        # each.
        method.__code__ = method.__code__.replace(co_name=upstream.__name__)
        return wraps(upstream)(method)

    def misfit(self, upstream: Callable) -> str | None:
        """Return why `upstream` cannot be replaced, or None if parameters and body are known."""
        parameters = parameters_of(upstream)
        if not self.known or parameters in map(str.split, self.known):
            return unknown_body(upstream) if self.stands_in else None
        expected = " or ".join(f"({', '.join(names.split())})" for names in self.known)
        return f"it takes ({', '.join(parameters)}), not {expected}"


def replaces(*known: str) -> Callable[[Callable], Replacement]:
    """Mark a function as the replacement of a method with these parameters; see `Replacement`."""
    return lambda function: Replacement(function, known)


def wraps_any(function: Callable) -> Replacement:
    """Make a replacement that calls the upstream method with all arguments, whatever they are."""
    return Replacement(function, (), stands_in=False)


def parameters_of(function: Callable) -> list[str]:
    """Return the names of the parameters of a function."""
    return list(signature(function, follow_wrapped=False).parameters)
