"""The roofline picture: how close each peer comes to the speed at which the device moves bytes.

A point is a pass of a peer on a problem: floating-point operations over compulsory bytes, and operations over run time. On the
line, time is the floor: compulsory bytes over the speed of a copy in the same run.
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from suite.problems import ATTENTION, PARTS, PASSES

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")  # Okabe and Ito
MARKERS = "oDs^vPX"


def draw(results: dict, path: Path) -> None:
    """Draw the attention problems of whole models, a column of panels for each number of channels, a row for each pass.

    Raises
    ------
    ValueError
        If the file has no measurement of such a problem.
    """
    problems = {name: facts for name, facts in results["problems"].items() if _is_drawn(name, facts, results)}
    if not problems:
        raise ValueError("the results must hold times of encoders, processors or decoders, got none of a whole model")
    widths = sorted({facts["channels"] for facts in problems.values()}, reverse=True)
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(1 + 3.6 * len(widths), 7), layout="constrained")
        panels = figure.subplots(len(ATTENTION), len(widths), squeeze=False, sharex=True, sharey="row")
        for kind, row in zip(ATTENTION, panels, strict=True):
            for width, panel in zip(widths, row, strict=True):
                chosen = {name: facts for name, facts in problems.items() if facts["channels"] == width}
                _panel(panel, results, chosen, kind)
                panel.set_title(f"{PASSES[kind]}, {width} channels", fontsize=9)
            row[0].set_ylabel("TFLOP/s")
        for panel in panels[-1]:
            panel.set_xlabel("operations per compulsory byte")
        handles, labels = panels[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.savefig(path, dpi=150)


def _is_drawn(name: str, facts: dict, results: dict) -> bool:
    timed = any(line["problem"] == name and "median_ms" in line for line in results["results"])
    return timed and facts["name"].split("-")[0] in PARTS and not facts["group"].endswith("variants")


def _panel(panel: Axes, results: dict, problems: dict, kind: str) -> None:
    """The line of the copy, and a column of points for each problem."""
    intensity = {name: facts["flops"][kind] / facts["bytes"][kind] for name, facts in problems.items()}
    copy = max(results["environment"]["copy_bytes_per_second"])
    ends = np.array([min(intensity.values()) / 1.6, max(intensity.values()) * 1.6])
    panel.loglog(ends, ends * copy / 1e12, color="0.35", label=f"copy, {copy / 1e12:.3g} TB/s")
    for (peer, title), colour, marker in zip(results["peers"].items(), COLOURS, MARKERS, strict=False):
        lines = [
            line
            for line in results["results"]
            if line["peer"] == peer and line["pass"] == kind and line["problem"] in problems and "median_ms" in line
        ]
        x = [intensity[line["problem"]] for line in lines]
        y = [problems[line["problem"]]["flops"][kind] / (1e9 * line["median_ms"]) for line in lines]
        if lines:
            panel.plot(x, y, linestyle="none", marker=marker, color=colour, markersize=7, label=title)
    for name, x in intensity.items():
        panel.plot([x, x], [0, x * copy / 1e12], color="0.85", linewidth=1, zorder=0)
        place = {"xytext": (-3, 3), "textcoords": "offset points", "ha": "right", "va": "bottom"}
        panel.annotate(name.split("-")[0], (x, x * copy / 1e12), **place)
    panel.set_xticks([1, 2, 5, 10, 20, 50], labels=["1", "2", "5", "10", "20", "50"], minor=False)
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(ends[0] / 1.3, ends[1])
    panel.yaxis.set_major_formatter("{x:g}")
