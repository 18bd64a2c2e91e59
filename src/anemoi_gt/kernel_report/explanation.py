"""Explanation of a model: frozen values that print as a table, become JSON, and take achieved times from a profile."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, groupby
from statistics import fmean
from typing import Any

import torch

from anemoi_gt.custom_ops import NAMESPACE

ATTENTIONS = {f"{NAMESPACE}::edge_attention_{backend}": backend for backend in ("torch", "triton")}
BLOCK = f"{NAMESPACE}::transformer_block"  # a whole block, whose attention is that of backend triton
OPERATORS = ATTENTIONS | {BLOCK: "triton"}
BACKWARD = "_backward"
OPERANDS = ("query", "key", "value", "edge_attr", "edge_weight", "edge_bias", "colptr", "row")


@dataclass(frozen=True)
class Kernel:
    """A launch of a kernel.

    Parameters
    ----------
    name : str
        As a profiler shows it.
    tile : dict of str to int
        Part of the problem that one program holds on chip.
    bytes : int
        Of all tensors that it reads or writes, each once.
    lower_bound_ms : float or None
        These bytes over the bandwidth; None when the bandwidth is not known.
    achieved_ms : float or None
        Mean in a profile; None without one.
    achieved_bandwidth : float or None
        Bytes per second in a profile; None without one.
    """

    name: str
    tile: dict[str, int]
    bytes: int
    lower_bound_ms: float | None
    achieved_ms: float | None = None
    achieved_bandwidth: float | None = None


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of one attention.

    Parameters
    ----------
    name : {"forward", "backward"}
    operator : str
        As a profiler shows it, in eager and in compiled runs. `anemoi_gt::transformer_block` computes a whole block;
        bytes and kernels are those of the attention in it, the achieved time is that of the block.
    bytes : int
        That no implementation can avoid: operands, results and indices, each once.
    kernels : tuple of Kernel
        In the order of their launches; empty where PyTorch's own do the work.
    achieved_ms : float or None
        Mean in a profile: of its kernels together, or of the operator on a CPU.
    lower_bound_ms, achieved_bandwidth : float or None
        As for `Kernel`.
    """

    name: str
    operator: str
    bytes: int
    lower_bound_ms: float | None
    kernels: tuple[Kernel, ...]
    achieved_ms: float | None = None
    achieved_bandwidth: float | None = None


@dataclass(frozen=True)
class Layer:
    """One attention.

    Parameters
    ----------
    name, module : str
        Of the module in the model that computed it, and of its class; "" without one.
    sizes : dict of str to int
        batch, sources, destinations, edges, heads, channels, attributes.
    features : {"none", "raw", "embedded", "embedded first"}
        Form of the edge features. Of raw attributes the weight is factored out of the sums over edges; those that are
        "embedded first" would move more bytes so, or do not fit a program.
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
    """All attentions of a model, in the order in which it computes them.

    `bandwidth` is that behind the lower bounds, in bytes per second; None when not known.
    """

    layers: tuple[Layer, ...]
    bandwidth: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and strings, for JSON."""
        return asdict(self)

    def with_profile(self, profile) -> "Explanation":
        """Return the same with the achieved times and bandwidths of a profile.

        A `torch.profiler.profile` is of one step or several of the explained calls, ended, and recorded with
        `record_shapes=True`: layers are told apart by the sizes of their operands, and those of equal sizes share their
        means. Raises ValueError if it is not a profile, has no shapes, or none of these layers.
        """
        calls = _calls_in(profile)
        layers = tuple(
            replace(layer, passes=tuple(_timed(layer, pass_, calls) for pass_ in layer.passes)) for layer in self.layers
        )
        if all(pass_.achieved_ms is None for layer in layers for pass_ in layer.passes):
            raise ValueError(
                f"profile must contain the calls that were explained, it has others: {sorted(map(str, calls))}"
            )
        return replace(self, layers=layers)

    def __str__(self) -> str:
        groups = groupby(self.layers, lambda layer: replace(layer, name=""))
        lines = [line for _, alike in groups for line in _layer_lines(list(alike))]
        if self.bandwidth is not None:
            lines.append(f"lower bound: bytes over {_scaled(self.bandwidth, 'B/s')}")
        return "\n".join(lines)


def _calls_in(profile) -> dict[tuple[str, tuple[int, ...]], list]:
    """Events of all attentions in a profile, by operator and sizes as in `Layer.sizes`."""
    if not hasattr(profile, "events"):
        raise ValueError(f"profile must be a torch.profiler.profile that has ended, got {type(profile).__name__}")
    calls = defaultdict(list)
    for event in profile.events():
        if event.name.removesuffix(BACKWARD) in OPERATORS and event.input_shapes:
            schema = getattr(torch.ops.anemoi_gt, event.name.removeprefix(f"{NAMESPACE}::")).default._schema
            shapes = dict(zip([argument.name for argument in schema.arguments], event.input_shapes, strict=False))
            calls[event.name, _told_apart_by_shapes(shapes)].append(event)
    if not calls:
        raise ValueError(
            f"profile must hold calls of {' or '.join(OPERATORS)} with their shapes, got none; record it with "
            "profile(activities=[...], record_shapes=True) around the model, and end it first"
        )
    return calls


def sizes_of(shapes: Sequence) -> dict[str, int]:
    """Return the sizes of a call by the names of `Layer`, from the shapes of its `OPERANDS`, empty for None."""
    query, key, _, _, weight, _, _, row = shapes
    return {
        "batch": query[0] if len(query) == 4 else 1,
        "sources": key[-3],
        "destinations": query[-3],
        "edges": row[0],
        "heads": query[-2],
        "channels": query[-1],
        "attributes": weight[1] if weight else 0,
    }


def _told_apart_by_shapes(shapes: dict[str, Sequence]) -> tuple[int, ...]:
    """Return the sizes by which a profile tells calls of an operator apart, from shapes of operands by name."""
    if "x_dst" not in shapes:
        return tuple(sizes_of([shapes[name] for name in OPERANDS]).values())
    sources, destinations = (shapes["x_src"] or shapes["x_dst"])[0], shapes["x_dst"][0]
    return sources, destinations, shapes["row"][0], shapes["query_weight"][0], shapes["edge_weight"][1]


def _told_apart_by(layer: Layer, operator: str) -> tuple[int, ...]:
    """Return these sizes of a layer; the number of heads is no size of a tensor of a whole block."""
    batch, sources, destinations, edges, heads, channels, attributes = layer.sizes.values()
    if operator.startswith(BLOCK):
        return batch * sources, batch * destinations, edges, heads * channels, attributes
    return tuple(layer.sizes.values())


def _launched(event) -> list:
    """Kernels of an event and of its children: autograd's node, and the operators inside."""
    return [*event.kernels, *(kernel for child in event.cpu_children for kernel in _launched(child))]


def _timed(layer: Layer, pass_: Pass, calls: dict[tuple, list]) -> Pass:
    """A pass with the mean times of its operator's calls on the layer's sizes; unchanged without any."""
    events = calls.get((pass_.operator, _told_apart_by(layer, pass_.operator)), [])
    launched, durations = [_launched(event) for event in events], defaultdict(list)
    for kernel in chain.from_iterable(launched):
        durations[kernel.name].append(kernel.duration)
    if all(launched):
        microseconds = [sum(kernel.duration for kernel in each) for each in launched]
    elif layer.device.startswith("cpu"):
        microseconds = [event.cpu_time_total for event in events]
    else:
        return pass_  # a profile of the CPU alone has no times of a GPU
    kernels = tuple(_measured(kernel, durations[kernel.name]) for kernel in pass_.kernels)
    return _measured(replace(pass_, kernels=kernels), microseconds)


def _measured(of: Pass | Kernel, microseconds: list[float]) -> Pass | Kernel:
    if not microseconds:
        return of
    mean = 1e-3 * fmean(microseconds)
    return replace(of, achieved_ms=mean, achieved_bandwidth=1e3 * of.bytes / mean)


def _layer_lines(layers: list[Layer]) -> Iterator[str]:
    """Lines of layers that differ by name alone."""
    first, sizes = layers[0], layers[0].sizes
    edges = {"none": "no attributes", "raw": f"attributes {sizes['attributes']}", "embedded": "embedded edges"}
    edges["embedded first"] = "attributes embedded first"
    yield _title(layers) or "attention"
    yield (
        f"  {sizes['edges']:,} edges, {sizes['sources']:,} to {sizes['destinations']:,} nodes, batch {sizes['batch']}, "
        f"heads {sizes['heads']} x {sizes['channels']}, {edges[first.features]}, {first.dtype}, {first.device}"
    )
    yield f"  backend {first.backend}" + "".join(f"; {name}: {why}" for name, why in first.rejected.items())
    rows = [("", "bytes", "lower bound", "achieved", "")]
    for pass_ in first.passes:
        rows.append((f"{pass_.name}: {pass_.operator}", *_figures(pass_), ""))
        for kernel in pass_.kernels:
            tile = ", ".join(f"{name} {number}" for name, number in kernel.tile.items())
            rows.append((f"  {kernel.name}", *_figures(kernel), tile))
    yield from _aligned(rows)


def _title(layers: list[Layer]) -> str:
    """Names, the number of layers if several, and the class; a layer that computes more than once is named once."""
    names = " .. ".join(dict.fromkeys(filter(None, (layers[0].name, layers[-1].name))))
    number = "" if len(layers) == 1 else f"{len(layers)} alike"
    return " ".join(filter(None, (": ".join(filter(None, (names, number))), layers[0].module)))


def _figures(of: Pass | Kernel) -> tuple[str, str, str]:
    achieved = _time(of.achieved_ms)
    if of.achieved_bandwidth is not None:
        achieved += f", {_scaled(of.achieved_bandwidth, 'B/s')}"
    return _scaled(of.bytes, "B"), _time(of.lower_bound_ms), achieved


def _time(milliseconds: float | None) -> str:
    return "" if milliseconds is None else _scaled(1e-3 * milliseconds, "s")


def _scaled(number: float, unit: str) -> str:
    """Three digits and a prefix: 1.2 GB, 30 us."""
    rounded = float(f"{number:.3g}")  # first, because 999.7 is 1 of the next prefix
    if rounded == 0:
        return f"0 {unit}"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3), ("u", 1e-6)):
        if rounded >= size:
            return f"{rounded / size:.3g} {prefix}{unit}"
    return f"{rounded / 1e-9:.3g} n{unit}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Names to the left, figures to the right, tiles as they are; columns without figures are left out."""
    names, *figures, tiles = zip(*rows, strict=True)
    columns = [column for column in figures if any(column[1:])]
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    width = max(map(len, names))
    for name, *cells in zip(names, *columns, tiles, strict=True):
        yield f"  {'  '.join([name.ljust(width), *cells])}".rstrip()
