"""Results of `explain`: frozen values that print as text or convert to JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of a layer.

    Parameters
    ----------
    name : {"forward", "backward"}
    operator : str
        As a profiler shows it, in eager and compiled runs.
    kernels : tuple of str
        Names of this library's kernels, as a profiler shows them, in launch order, without GEMMs of
        PyTorch. Empty if PyTorch operators compute the pass.
    """

    name: str
    operator: str
    kernels: tuple[str, ...]


@dataclass(frozen=True)
class Layer:
    """One call of an operator of this library.

    Parameters
    ----------
    name, module : str
        Name and class of the module that called it; "" outside a module.
    sizes : dict of str to int
        Of an attention: batch, sources, destinations, edges, heads, channels, attributes; of an
        edge update: batch, sources, destinations, edges, hidden; of a network: rows, inputs,
        outputs.
    features : {"none", "raw", "embedded", ""}
        Form of the edge features that an attention reads, else "". The weight of raw attributes is
        factored out of the sums over edges. Attributes are embedded before the operator if that
        moves fewer bytes, or if they do not fit a kernel program.
    dtype, device : str
        Dtype of the operands of products, and device.
    backend : str
        The backend that ran.
    rejected : dict of str to str
        For each of the other backends, the reason why it did not run.
    passes : tuple of Pass
        Forward, and backward if any operand needs a gradient.
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
    """All layers of a model, in execution order."""

    layers: tuple[Layer, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        lines: list[str] = []
        for _, group in groupby(self.layers, lambda layer: replace(layer, name="")):
            lines.extend(_layer_lines(list(group)))
        return "\n".join(lines)


def _layer_lines(layers: list[Layer]) -> Iterator[str]:
    """Yield the lines for consecutive layers that differ only in their names."""
    first = layers[0]
    sizes = first.sizes
    yield _title(layers) or "attention"
    of_graph = ""
    if "edges" in sizes:
        sources = f"{sizes['sources']:,} " if "sources" in sizes else ""
        nodes = f"{sources}to {sizes['destinations']:,} nodes"
        of_graph = f"{sizes['edges']:,} edges, {nodes}, batch {sizes['batch']}, "
    if "heads" in sizes:
        features = {
            "none": "no attributes",
            "raw": f"attributes {sizes['attributes']}",
            "embedded": "embedded edges",
        }
        of_layer = f"heads {sizes['heads']} x {sizes['channels']}, {features[first.features]}"
    elif "rows" in sizes:
        of_layer = f"{sizes['rows']:,} rows, {sizes['inputs']} to {sizes['outputs']} features"
    elif "hidden" in sizes:
        of_layer = f"{sizes['hidden']} hidden features"
    else:
        of_layer = f"{sizes['features']} features"
    yield f"  {of_graph}{of_layer}, {first.dtype}, {first.device}"
    reasons = [f"{name}: {reason}" for name, reason in first.rejected.items()]
    yield "; ".join([f"  backend {first.backend}", *reasons])
    for pass_ in first.passes:
        yield f"  {pass_.name}: {pass_.operator}"
        for kernel in pass_.kernels:
            yield f"    {kernel}"


def _title(layers: list[Layer]) -> str:
    """Return the first and last name, the number of layers if several, and their class."""
    first_and_last = [layers[0].name, layers[-1].name]
    names = " .. ".join(dict.fromkeys(name for name in first_and_last if name))
    count = "" if len(layers) == 1 else f"{len(layers)} alike"
    label = ": ".join(text for text in (names, count) if text)
    return " ".join(text for text in (label, layers[0].module) if text)
