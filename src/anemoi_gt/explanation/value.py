"""What `explain` returns: frozen values, plain numbers and words, that print as a table and become JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

from anemoi_gt.explanation.profile import Times, times_of

SHOWN = 2  # runners-up of a tile in the table; `to_dict` has them all


@dataclass(frozen=True)
class Alternative:
    """A tile that was not taken.

    Parameters
    ----------
    tile : dict of str to int
    predicted_ms : float or None
        What it would take, by `anemoi_gt.ops.triton_backend.tile_score`; None where it does not fit the device.
    """

    tile: dict[str, int]
    predicted_ms: float | None


@dataclass(frozen=True)
class Kernel:
    """A launch of a kernel.

    Parameters
    ----------
    name : str
        As a profiler shows it.
    tile : dict of str to int
        What a program holds on chip.
    predicted_ms : float or None
        The score of the tile, which chose it; None where there is one to choose from, or where it should not fit.
    runners_up : tuple of Alternative
        Best first.
    bytes : int
        Of all tensors that it reads or writes, each once.
    expected_ms : float
        These bytes over the bandwidth.
    achieved_ms : float or None
        The mean in a profile; None without one.
    """

    name: str
    tile: dict[str, int]
    predicted_ms: float | None
    runners_up: tuple[Alternative, ...]
    bytes: int
    expected_ms: float | None
    achieved_ms: float | None = None

    @property
    def achieved_bandwidth(self) -> float | None:
        """Bytes per second; None without a profile."""
        return None if self.achieved_ms is None else 1e3 * self.bytes / self.achieved_ms


@dataclass(frozen=True)
class Pass:
    """A forward or a backward pass of one attention.

    Parameters
    ----------
    name : {"forward", "backward"}
    operator : str
        As a profiler shows it, in eager and in compiled runs.
    bytes : int
        That no implementation can do without: operands, results and indices, each once.
    expected_ms : float or None
        These bytes over the bandwidth; None where no bandwidth is known.
    kernels : tuple of Kernel
        In the order of their launches; none where PyTorch's own do the work.
    achieved_ms : float or None
        Mean in a profile: of its kernels together, or of the operator where the work is the host's.
    """

    name: str
    operator: str
    bytes: int
    expected_ms: float | None
    kernels: tuple[Kernel, ...]
    achieved_ms: float | None = None

    @property
    def achieved_bandwidth(self) -> float | None:
        """Bytes per second; None without a profile."""
        return None if self.achieved_ms is None else 1e3 * self.bytes / self.achieved_ms


@dataclass(frozen=True)
class Layer:
    """One attention.

    Parameters
    ----------
    name : str
        Of the module in the model that computed it; "" where there is none.
    module : str
        Its class; "" where there is none.
    sizes : dict of str to int
        samples, sources, destinations, edges, heads, channels, attributes.
    features : {"none", "raw", "embedded"}
        What came of the edges.
    dtype, device : str
        Of the rows that are read.
    backend : str
        That computed it.
    rejected : dict of str to str
        Why each of the other backends did not.
    passes : tuple of Pass
        Forward, and backward where gradients are recorded.
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

    Parameters
    ----------
    layers : tuple of Layer
    bandwidth : float or None
        Bytes per second behind the expected times; None where none is known.
    """

    layers: tuple[Layer, ...]
    bandwidth: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return everything as dicts, lists, numbers and words, for JSON."""
        described = asdict(self)
        for layer, own in zip(described["layers"], self.layers, strict=True):
            for pass_, own_pass in zip(layer["passes"], own.passes, strict=True):
                pass_["achieved_bandwidth"] = own_pass.achieved_bandwidth
                for kernel, own_kernel in zip(pass_["kernels"], own_pass.kernels, strict=True):
                    kernel["achieved_bandwidth"] = own_kernel.achieved_bandwidth
        return described

    def with_profile(self, profile) -> "Explanation":
        """Return the same with the times and the bandwidths that a profile of the same calls has seen.

        Parameters
        ----------
        profile : torch.profiler.profile
            Of one step or several, recorded with `record_shapes=True`, which is how layers are told apart; those of equal
            sizes share their means.

        Raises
        ------
        ValueError
            If it has no shapes, or none of these layers.
        """
        seen = times_of(profile)
        layers = tuple(
            replace(layer, passes=tuple(_timed(layer, pass_, seen) for pass_ in layer.passes)) for layer in self.layers
        )
        if all(pass_.achieved_ms is None for layer in layers for pass_ in layer.passes):
            raise ValueError(
                f"profile must be of the calls that were explained, it holds others: {sorted(map(str, seen))}"
            )
        return replace(self, layers=layers)

    def __str__(self) -> str:
        lines = [line for _, alike in groupby(self.layers, _all_but_name) for line in _layer_lines(list(alike))]
        if self.bandwidth is not None:
            lines.append(f"expected: bytes over {_scaled(self.bandwidth, 'B/s')}")
        if any(kernel.runners_up for layer in self.layers for pass_ in layer.passes for kernel in pass_.kernels):
            lines.append("not taken: what is predicted of other tiles; the rule that sweeps on a GPU gave decides")
        return "\n".join(lines)


def _timed(layer: Layer, pass_: Pass, seen: dict[tuple, Times]) -> Pass:
    """A pass with the times of the calls of its operator on the layer's sizes; as it is where there are none."""
    times = seen.get((pass_.operator, tuple(layer.sizes.values())))
    if times is None:
        return pass_
    achieved = times.host if times.device is None and layer.device.startswith("cpu") else times.device
    if achieved is None:
        return pass_  # a profile of the host alone does not know what the device does
    kernels = (
        replace(kernel, achieved_ms=times.kernels.get(kernel.name, kernel.achieved_ms)) for kernel in pass_.kernels
    )
    return replace(pass_, kernels=tuple(kernels), achieved_ms=achieved)


def _all_but_name(layer: Layer) -> tuple:
    return tuple(value for name, value in vars(layer).items() if name != "name")


def _layer_lines(layers: list[Layer]) -> Iterator[str]:
    """Lines of layers that differ by name alone."""
    first, sizes = layers[0], layers[0].sizes
    yield _title(layers) or "attention"
    yield (
        f"  {sizes['edges']:,} edges, {sizes['sources']:,} to {sizes['destinations']:,} nodes, samples {sizes['samples']}, "
        f"heads {sizes['heads']} x {sizes['channels']}, {_edge_words(first)}, {first.dtype}, {first.device}"
    )
    yield f"  backend {first.backend}" + "".join(f"; {name}: {why}" for name, why in first.rejected.items())
    rows = [("", "bytes", "expected", "predicted", "achieved", "")]
    for pass_ in first.passes:
        rows.append((f"{pass_.name}: {pass_.operator}", *_figures(pass_, None), ""))
        rows += [row for kernel in pass_.kernels for row in _kernel_rows(kernel)]
    yield from _aligned(rows)


def _title(layers: list[Layer]) -> str:
    """Names, a number where there are several, and the class; a layer that computes more than once is named once."""
    names = " .. ".join(dict.fromkeys(filter(None, (layers[0].name, layers[-1].name))))
    number = "" if len(layers) == 1 else f"{len(layers)} alike"
    return " ".join(filter(None, (": ".join(filter(None, (names, number))), layers[0].module)))


def _edge_words(layer: Layer) -> str:
    return {"none": "no attributes", "raw": f"attributes {layer.sizes['attributes']}", "embedded": "embedded edges"}[
        layer.features
    ]


def _kernel_rows(kernel: Kernel) -> Iterator[tuple[str, ...]]:
    yield f"  {kernel.name}", *_figures(kernel, kernel.predicted_ms), _words(kernel.tile)
    for other in kernel.runners_up[:SHOWN]:
        yield "    not taken", "", "", _change(kernel.predicted_ms, other.predicted_ms), "", _words(other.tile)


def _change(taken: float | None, other: float | None) -> str:
    """How much longer another tile would take; nothing where the one taken has no time, as on a graph without nodes."""
    if other is None:
        return "does not fit"
    return f"{other / taken - 1:+.1%}" if taken else ""


def _figures(of: Pass | Kernel, predicted: float | None) -> tuple[str, str, str, str]:
    achieved = _time(of.achieved_ms)
    if of.achieved_bandwidth is not None:
        achieved += f", {_scaled(of.achieved_bandwidth, 'B/s')}"
    return _scaled(of.bytes, "B"), _time(of.expected_ms), _time(predicted), achieved


def _words(tile: dict[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in tile.items())


def _time(milliseconds: float | None) -> str:
    return "" if milliseconds is None else _scaled(1e-3 * milliseconds, "s")


def _scaled(number: float, unit: str) -> str:
    """Three digits and a prefix: 1.2 GB, 30 us."""
    rounded = float(f"{number:.3g}")  # first, for 999.7 is 1 of the next prefix
    if rounded == 0:
        return f"0 {unit}"
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1), ("m", 1e-3), ("u", 1e-6)):
        if rounded >= size:
            return f"{rounded / size:.3g} {prefix}{unit}"
    return f"{rounded / 1e-9:.3g} n{unit}"


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Names to the left, figures to the right, words as they are; columns without figures are left out."""
    names, *figures, words = zip(*rows, strict=True)
    columns = [column for column in figures if any(column[1:])]
    columns = [[cell.rjust(max(map(len, column))) for cell in column] for column in columns]
    width = max(map(len, names))
    for name, *cells in zip(names, *columns, words, strict=True):
        yield f"  {'  '.join([name.ljust(width), *cells])}".rstrip()
