"""Plots of a results file as SVG: times as bars, beside their lower bounds.

Text and bars have classes instead of colours; the documentation's theme defines them, and `as_file`
does for a file that stands alone.
"""

from pathlib import Path

from suite.problems import PARTS
from suite.table import figure, lower_bound_seconds

LIGHT, DARK = "light", "dark"
INK = {LIGHT: "#1a1a1a", DARK: "#e6e6e6"}
# Okabe and Ito; the same on both grounds
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#E69F00",
)
# Sizes of a bar plot in SVG units.
BAR = 18  # thickness of a bar
GAP = 20  # between groups of bars
NAMES = 86  # width of the names, left of the bars
ENDS = 104  # width of the figures, right of the bars
WIDE = 460  # width of the plot
TOP = 64  # of the first bar, below title and legend


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
    legend += _legend(results, 42)
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
    text = INK[theme]
    baselines = "".join(f".peer{i}{{fill:{colour}}}" for i, colour in enumerate((*COLOURS, text)))
    style = (
        f"<style>svg{{font-family:system-ui,-apple-system,'Segoe "
        f"UI',Arial,sans-serif}}text{{fill:{text}}}"
        f".floor{{stroke:{text};fill:none;stroke-width:1.6}}{baselines}</style>"
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


def _times(results: dict, problem: str, kind: str) -> dict[str, float]:
    """Return the median milliseconds of each baseline that was timed."""
    medians = {}
    for line in results["results"]:
        if (line["problem"], line["pass"]) == (problem, kind) and "median_ms" in line:
            medians[line["baseline"]] = line["median_ms"]
    return {baseline: medians[baseline] for baseline in results["baselines"] if baseline in medians}


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


def _legend(results: dict, y: float) -> str:
    """Return the names of the baselines in a line that begins where the bars do."""
    shapes = []
    x = NAMES
    for i, title in enumerate(results["baselines"].values()):
        name = title.split(",")[0]
        shapes.append(f'<rect class="peer{i}" x="{x}" y="{y - 11}" width="13" height="13"/>')
        shapes.append(words(x + 19, y, name, size=14))
        x += 40 + 8.2 * len(name)
    return "".join(shapes)


def words(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    """Return a line of text."""
    attributes = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"'
    return f"<text {attributes}>{text}</text>"


def canvas(width: float, height: float, label: str, shapes: str) -> str:
    """Return an SVG of `shapes` with `label` for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" '
        f'role="img" aria-label="{label}">{shapes}</svg>'
    )
