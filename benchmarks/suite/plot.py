"""Plots of a results file as SVG: the roofline, and times as bars.

In the roofline a point is a pass of a baseline on a problem: floating-point operations over
compulsory bytes, and operations over run time. On the line, time is the lower bound: compulsory
bytes over the speed of a copy in the same run.

Text and marks have classes instead of colours; the documentation's theme defines them, and
`as_file` does for a file that stands alone. Baselines differ by colour and by shape.
"""

from dataclasses import dataclass
from itertools import product
from math import log10
from pathlib import Path

from suite.problems import ATTENTION, PARTS, PASSES
from suite.table import figure, lower_bound_seconds

LIGHT, DARK = "light", "dark"
# text, axes, grid
INK = {
    LIGHT: ("#1a1a1a", "#5a5a5a", "#c4c4c4"),
    DARK: ("#e6e6e6", "#a8a8a8", "#505050"),
}
# Okabe and Ito; the same on both grounds
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
)
MARKS = (  # around 0, one for each baseline
    "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0z",
    "M0,-6.5L6.5,0L0,6.5L-6.5,0z",
    "M-5,-5H5V5H-5z",
    "M0,-6L6,5H-6z",
    "M0,6L6,-5H-6z",
    "M-2,-6H2V-2H6V2H2V6H-2V2H-6V-2H-2z",
    "M-6,-4L-4,-6L0,-2L4,-6L6,-4L2,0L6,4L4,6L0,2L-4,6L-6,4L-2,0z",
)
PANEL = (340, 270)  # of the roofline, in SVG units
MARGIN = {"left": 46, "right": 10, "top": 30, "bottom": 42}
# Sizes of a bar plot in SVG units.
BAR = 18  # thickness of a bar
GAP = 20  # between groups of bars
NAMES = 86  # width of the names, left of the bars
ENDS = 104  # width of the figures, right of the bars
WIDE = 460  # width of the plot
TOP = 64  # of the first bar, below title and legend


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis: `low` lies at `start`, `high` at `end`, in SVG units."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        """Return the position of a value."""
        fraction = log10(value / self.low) / log10(self.high / self.low)
        return self.start + (self.end - self.start) * fraction

    def ticks(self) -> list[float]:
        """1, 2 and 5 times the powers of ten in range."""
        candidates = [step * 10.0**power for power in range(-6, 7) for step in (1, 2, 5)]
        return [value for value in candidates if self.low <= value <= self.high]


def roofline(results: dict) -> list[str]:
    """Return a panel per pass and number of channels; raise ValueError like `drawn`."""
    problems = drawn(results)
    widths = sorted({facts["channels"] for facts in problems.values()}, reverse=True)
    panels = []
    for kind, width in product(ATTENTION, widths):
        shown = {name: facts for name, facts in problems.items() if facts["channels"] == width}
        panels.append(_roofline_panel(results, shown, kind))
    return panels


def bars(results: dict) -> str:
    """Return the forward and backward times of the widest model as bars, with lower bounds.

    The first two baselines are drawn: bars of others, up to 40 times as long, would leave no room.
    Raises as `drawn`.
    """
    kind = "forward_backward"
    results = results | {"baselines": dict(list(results["baselines"].items())[:2])}
    facts = drawn(results)
    widest = max(problem["channels"] for problem in facts.values())
    problems = [name for name, problem in facts.items() if problem["channels"] == widest]
    times = {name: _times(results, name, kind) for name in problems}
    longest = max(ms for by_baseline in times.values() for ms in by_baseline.values())
    scale = (WIDE - NAMES - ENDS) / longest
    group = BAR * len(results["baselines"]) + GAP
    shapes = []
    for row, name in enumerate(problems):
        top = TOP + row * group
        shapes.append(
            words(NAMES - 8, top + (group - GAP) / 2 + 5, name.split("-")[0], "end", size=15)
        )
        for n, baseline in enumerate(times[name]):
            shapes.append(_bar(results, baseline, top + n * BAR, scale, times[name]))
        bound_ms = 1e3 * lower_bound_seconds(results, name, kind)
        x = NAMES + scale * bound_ms
        about = f"lower bound of {name}: {figure(bound_ms)} ms"
        shapes.append(
            f'<path class="floor" d="M{x:.1f},{top - 4}V{top + group - GAP + 2}">'
            f"<title>{about}</title></path>"
        )
    height = TOP + group * len(problems) + 20
    legend = words(NAMES, 16, "Attention, forward and backward, time in ms", size=15)
    legend += _legend(results, WIDE, 42)
    legend += words(NAMES, height - 8, "line: lower bound (memory bandwidth)", size=14)
    labels = []
    for name, by_baseline in times.items():
        figures = [f"{results['baselines'][b]} {figure(ms)} ms" for b, ms in by_baseline.items()]
        labels.append(f"{name.split('-')[0]}: {', '.join(figures)}")
    label = f"Time of forward and backward. {'; '.join(labels)}"
    return canvas(WIDE, height, label, legend + "".join(shapes))


def write(svg: str, path: Path) -> None:
    """Write a plot as a separate file, and `name-dark.svg` for dark backgrounds next to it."""
    path.write_text(as_file(svg, LIGHT))
    path.with_stem(f"{path.stem}-dark").write_text(as_file(svg, DARK))


def as_file(svg: str, theme: str) -> str:
    """Return a plot with the colours of a theme, as a separate file."""
    text, dim, grid = INK[theme]
    baselines = "".join(f".peer{i}{{fill:{colour}}}" for i, colour in enumerate((*COLOURS, text)))
    style = (
        f"<style>svg{{font-family:system-ui,-apple-system,'Segoe "
        f"UI',Arial,sans-serif}}text{{fill:{text}}}"
        f".dim{{fill:{dim}}}.grid{{stroke:{grid};fill:none}}"
        f".line,.floor{{stroke:{text};fill:none;stroke-width:1.6}}{baselines}</style>"
    )
    head, end, rest = svg.partition(">")
    return f"{head}{end}{style}{rest}\n"


def drawn(results: dict) -> dict[str, dict]:
    """Return the timed parts of whole models, which plots show; raise ValueError if none."""
    timed = {line["problem"] for line in results["results"] if "median_ms" in line}
    problems = {}
    for name, facts in results["problems"].items():
        is_part = facts["name"].split("-")[0] in PARTS
        if name in timed and is_part and not facts["group"].endswith("variants"):
            problems[name] = facts
    if not problems:
        raise ValueError(
            "the results must hold times of encoders, processors or decoders, got none of a whole "
            "model"
        )
    return problems


def points(results: dict, problems: dict, kind: str) -> list[tuple[str, str, float, float]]:
    """Return baseline, problem, operations per byte and Tflop/s of every measurement."""
    measured = []
    for name, facts in problems.items():
        flops = facts["flops"][kind]
        intensity = flops / facts["bytes"][kind]
        for baseline, ms in _times(results, name, kind).items():
            measured.append((baseline, name, intensity, flops / (1e9 * ms)))
    return measured


def _times(results: dict, problem: str, kind: str) -> dict[str, float]:
    """Return the median milliseconds of each baseline that was timed."""
    medians = {}
    for line in results["results"]:
        if (line["problem"], line["pass"]) == (problem, kind) and "median_ms" in line:
            medians[line["baseline"]] = line["median_ms"]
    return {baseline: medians[baseline] for baseline in results["baselines"] if baseline in medians}


def _roofline_panel(results: dict, problems: dict, kind: str) -> str:
    measured = points(results, problems, kind)
    copy = max(results["environment"]["copy_bytes_per_second"]) / 1e12
    intensity = {
        name: facts["flops"][kind] / facts["bytes"][kind] for name, facts in problems.items()
    }
    width, height = PANEL
    x = LogAxis(
        min(intensity.values()) / 1.8,
        max(intensity.values()) * 1.5,
        MARGIN["left"],
        width - MARGIN["right"],
    )
    lowest = min((speed for *_, speed in measured), default=copy * x.low)
    y = LogAxis(
        min(lowest, copy * x.low) / 1.5,
        copy * x.high * 1.2,
        height - MARGIN["bottom"],
        MARGIN["top"],
    )
    shapes = [_axes(x, y)]
    shapes.append(
        f'<path class="line" d="M{x.start},{y(copy * x.low):.1f}L{x.end},{y(copy * x.high):.1f}"/>'
    )
    for name, value in intensity.items():
        across, roof = x(value), y(copy * value)
        shapes.append(
            f'<path class="grid" d="M{across:.1f},{roof:.1f}V{y.start}" stroke-dasharray="3 3"/>'
        )
        shapes.append(words(across - 5, roof - 5, name.split("-")[0], "end", size=12))
    for baseline, name, value, speed in measured:
        share = speed / (copy * value)
        about = f"{results['baselines'][baseline]}, {name}: {share:.0%} of copy bandwidth"
        shapes.append(_mark(results, baseline, x(value), y(speed), about))
    title = f"{PASSES[kind]}, {next(iter(problems.values()))['channels']} channels"
    shapes.append(words(MARGIN["left"], 16, title, size=13))
    label = f"Roofline, {title}. " + "; ".join(
        f"{results['baselines'][baseline]} on {name}: {speed:.2g} TFLOP/s"
        for baseline, name, _, speed in measured
    )
    return canvas(*PANEL, f"{label}; line: {copy:.3g} TB/s", "".join(shapes))


def _axes(x: LogAxis, y: LogAxis) -> str:
    shapes = [f'<path class="grid" d="M{x.start},{y.end}V{y.start}H{x.end}"/>']
    shapes += [
        words(x(value), y.start + 16, f"{value:g}", "middle", "dim", 12) for value in x.ticks()
    ]
    shapes += [
        words(x.start - 6, y(value) + 4, f"{value:g}", "end", "dim", 12) for value in y.ticks()
    ]
    shapes.append(
        words(
            (x.start + x.end) / 2,
            y.start + 34,
            "operations per compulsory byte",
            "middle",
            "dim",
            12,
        )
    )
    middle = (y.start + y.end) / 2
    label = words(12, middle, "TFLOP/s", "middle", "dim", 12)
    return "".join(shapes) + f'<g transform="rotate(-90 12 {middle})">{label}</g>'


def _bar(results: dict, baseline: str, top: float, scale: float, times: dict) -> str:
    baselines = list(results["baselines"])
    first = baselines[0]
    ratio = ""
    if first in times and baseline != first:
        ratio = f" ({times[baseline] / times[first]:.1f}×)"  # noqa: RUF001  the sign
    length = scale * times[baseline]
    bar = f'<rect class="peer{baselines.index(baseline)}" x="{NAMES}" y="{top}" '
    bar += f'width="{length:.1f}" height="{BAR - 2}"/>'
    return bar + words(NAMES + length + 7, top + BAR - 5, figure(times[baseline]) + ratio, size=14)


def _legend(results: dict, width: float, y: float) -> str:
    """Return the names of the baselines in a line that begins where the bars do."""
    shapes = []
    x = NAMES
    for i, title in enumerate(results["baselines"].values()):
        name = title.split(",")[0]
        shapes.append(f'<rect class="peer{i}" x="{x}" y="{y - 11}" width="13" height="13"/>')
        shapes.append(words(x + 19, y, name, size=14))
        x += 40 + 8.2 * len(name)
    return "".join(shapes)


def _mark(results: dict, baseline: str, x: float, y: float, about: str) -> str:
    i = list(results["baselines"]).index(baseline)
    attributes = f'class="peer{i}" transform="translate({x:.1f},{y:.1f})" d="{MARKS[i]}"'
    return f"<path {attributes}><title>{about}</title></path>"


def words(
    x: float, y: float, text: str, anchor: str = "start", kind: str = "", size: int = 12
) -> str:
    """Return a line of text, of the class `kind`."""
    name = f' class="{kind}"' if kind else ""
    attributes = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text{name} {attributes}>{text}</text>"


def canvas(width: float, height: float, label: str, shapes: str) -> str:
    """Return an SVG of `shapes` with `label` for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
        f'role="img" aria-label="{label}">{shapes}</svg>'
    )
