"""Explanation of a model: frozen values that print as text and become JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of one attention.

    Parameters
    ----------
    name : {"forward", "backward"}
    operator : str
        As a profiler shows it, in eager and in compiled runs.
        `anemoi_gt::attention_sublayer_triton` is a fused sub-layer of a block; the kernels of its
        attention are listed.
    kernels : tuple of str
        Names of the kernels, as a profiler shows them, in the order of their launches; empty where
        PyTorch's own do the work.
    """

    name: str
    operator: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One attention.

    Parameters
    ----------
    name, module : str
        Of the module in the model that computed it, and of its class; "" without one.
    sizes : dict of str to int
        batch, sources, destinations, edges, heads, channels, attributes.
    features : {"none", "raw", "embedded"}
        Form of the edge features that the operator reads. The weight of raw attributes is factored
        out of the sums over edges; attributes are embedded before the operator where that moves
        fewer bytes, or a program cannot hold them.
    dtype, device : str
        Of query.
    backend : str
        That computed it.
    rejected : dict of str to str
        Reason why each of the other backends did not.
    passes : tuple of Pass
        Forward, and backward if gradients are recorded.
    """

    name: str
    module: str
    sizes: dict[str, int]
    features: str
    dtype: str
    device: str
    backend: str
    rejected: dict[str, str]
    passes: tuple[Pass, ...]


@dataclass(frozen=True)
class Explanation:
    """All attentions of a model, in the order in which it computes them."""

    layers: tuple[Layer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines: list[str] = []
        for _, alike in groupby(self.layers, lambda layer: replace(layer, name="")):
            lines.extend(_layer_lines(list(alike)))
        return "\n".join(lines)


def _layer_lines(layers: list[Layer]) -> Iterator[str]:
    """Yield the lines of layers that differ by name alone."""
    first, sizes = layers[0], layers[0].sizes
    edges = {
        "none": "no attributes",
        "raw": f"attributes {sizes['attributes']}",
        "embedded": "embedded edges",
    }
    yield _title(layers) or "attention"
    yield (
        f"  {sizes['edges']:,} edges, {sizes['sources']:,} to {sizes['destinations']:,} nodes, "
        f"batch {sizes['batch']}, "
        f"heads {sizes['heads']} x {sizes['channels']}, {edges[first.features]}, {first.dtype}, "
        f"{first.device}"
    )
    yield f"  backend {first.backend}" + "".join(
        f"; {name}: {why}" for name, why in first.rejected.items()
    )
    for pass_ in first.passes:
        yield f"  {pass_.name}: {pass_.operator}"
        for kernel in pass_.kernels:
            yield f"    {kernel}"


def _title(layers: list[Layer]) -> str:
    """Return names, number of layers if several, and class; a layer computed twice counts once."""
    names = " .. ".join(dict.fromkeys(filter(None, (layers[0].name, layers[-1].name))))
    number = "" if len(layers) == 1 else f"{len(layers)} alike"
    return " ".join(filter(None, (": ".join(filter(None, (names, number))), layers[0].module)))
