"""Code of anemoi-models: what the installed version has, and replacements for its methods and functions.

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
from operator import attrgetter
from types import ModuleType

from anemoi_gt.nn import sublayers


class Upstream:
    """Modules and classes of anemoi-models that replacements read, resolved once by `resolve_upstream`."""

    mapper: ModuleType | None = None  # layers.mapper
    processor: ModuleType | None = None  # layers.processor
    partition: ModuleType | None = None  # distributed.khop_edges, since 0.16
    block: type | None = None  # GraphTransformerBaseBlock
    blocks: tuple[type, ...] = ()  # of processors and of mappers
    conv: type | None = None  # the attention of graph_attention_backend: pyg
    triton_conv: object = None  # that of `triton`; before 0.18.0 the class whose `apply` it is; None before 0.11
    replaced: tuple = ()  # our replacements of methods, wherever they are


def resolve_upstream(replaced: tuple) -> None:
    """Import what replacements read."""
    Upstream.replaced = replaced
    Upstream.mapper, Upstream.processor = (import_module(f"anemoi.models.layers.{n}") for n in ("mapper", "processor"))
    block = import_module("anemoi.models.layers.block")
    Upstream.block = block.GraphTransformerBaseBlock
    Upstream.blocks = (block.GraphTransformerProcessorBlock, block.GraphTransformerMapperBlock)
    Upstream.conv = import_module("anemoi.models.layers.conv").GraphTransformerConv
    normalization, mlp = (import_module(f"anemoi.models.layers.{name}") for name in ("normalization", "mlp"))
    sublayers.register(  # older versions lack some of them
        layer_norm=getattr(normalization, "AutocastLayerNorm", None),
        conditional_norm=getattr(normalization, "ConditionalLayerNorm", None),
        mlp=getattr(mlp, "MLP", None),
        gated_linear=getattr(mlp, "GatedMLPLayer", None),
    )
    with suppress(ImportError):  # an older version
        Upstream.partition = import_module("anemoi.models.distributed.khop_edges")
    with suppress(ImportError, ValueError):  # anemoi-models raises ValueError without Triton
        triton = import_module("anemoi.models.triton.gt")
        names = ("graph_transformer_attention_conv", "GraphTransformerFunction")
        Upstream.triton_conv = next((getattr(triton, name) for name in names if hasattr(triton, name)), None)


def find(module: str, *name: str) -> type | ModuleType:
    """Return a class by module and name, or a module."""
    try:
        return attrgetter(*name)(import_module(module)) if name else import_module(module)
    except (ImportError, AttributeError) as error:
        raise ImportError(
            f"{module} is needed here and could not be imported ({error}): pip install anemoi-models==0.19.0"
        ) from error


@dataclass(frozen=True)
class Replacement:
    """A function that takes the place of a method or function of anemoi-models."""

    function: Callable  # takes the upstream method, and what that takes
    known: tuple[str, ...]  # parameters of the upstream method by name, in each version that we know

    def of(self, upstream: Callable) -> Callable:
        """Return what is to be set in place of `upstream`."""
        function = self.function

        def method(*args, **kwargs):
            return function(upstream, *args, **kwargs)

        # Not one code object for all methods, because torch.compile limits the recompilations of each.
        method.__code__ = method.__code__.replace(co_name=upstream.__name__)
        return wraps(upstream)(method)

    def misfit(self, upstream: Callable) -> str | None:
        """Return why `upstream` cannot be replaced, or None if it has known parameters."""
        given = parameters_of(upstream)
        if given in map(str.split, self.known):
            return None
        expected = " or ".join(f"({', '.join(each.split())})" for each in self.known)
        return f"it takes ({', '.join(given)}), not {expected}"


def replaces(*known: str) -> Callable[[Callable], Replacement]:
    """Make a function the replacement of a method with these parameters; see `Replacement`."""
    return lambda function: Replacement(function, known)


def parameters_of(function: Callable) -> list[str]:
    """Return the names of the parameters of a function."""
    return list(signature(function, follow_wrapped=False).parameters)
