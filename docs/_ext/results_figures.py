"""Sphinx extension: figures of a file in benchmarks/results, drawn when the page is built, in the colours of the theme.

```{roofline} n320_h200.json
```

```{times} n320_h200.json
```

```{sharding} sharding_h200x4.json
```
"""

import json
import sys
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import sharding_report  # noqa: E402
from suite import picture  # noqa: E402


class ResultsFigure(SphinxDirective):
    """A figure of the results files named by the directive."""

    required_arguments = 1

    def run(self):
        """Replace the directive by the figure; the page depends on the files."""
        paths = [BENCHMARKS / "results" / name for name in self.arguments]
        for path in paths:
            self.env.note_dependency(str(path))
        return [nodes.raw("", self.html(*(json.loads(path.read_text()) for path in paths)), format="html")]


class Roofline(ResultsFigure):
    """`roofline`: a panel for each pass and number of channels."""

    def html(self, results: dict) -> str:
        """Return the panels and their legend."""
        panels = "".join(picture.roofline(results))
        return f'<div class="figure-svg results-figure">{panels}</div>{legend(results)}'


def legend(results: dict) -> str:
    """Return the legend of the roofline with complete names, as page text, which wraps on narrow screens."""
    marks = [f'<path class="peer{place}" d="{picture.MARKS[place]}"/>' for place in range(len(results["peers"]))]
    names = list(results["peers"].values())
    copy = max(results["environment"]["copy_bytes_per_second"]) / 1e12
    entries = zip([*marks, '<path class="line" d="M-8,0h16"/>'], [*names, f"copy, {copy:.3g} TB/s"], strict=True)
    items = "".join(
        f'<span><svg viewBox="-8 -8 16 16" role="img" aria-label="mark of {name}">{mark}</svg>{name}</span>'
        for mark, name in entries
    )
    return f'<div class="figure-svg legend-row">{items}</div>'


class Times(ResultsFigure):
    """`times`: bars of forward and backward times on the graphs of a model."""

    def html(self, results: dict) -> str:
        """Return the bars."""
        return f'<div class="figure-svg times-figure">{picture.bars(results)}</div>'


class Sharding(ResultsFigure):
    """`sharding`: bars of forward and backward times of one graph on one and several GPUs."""

    def html(self, *reports: dict) -> str:
        """Return the bars."""
        drawn = sharding_report.picture(sharding_report.merged(reports))
        return f'<div class="figure-svg times-figure">{drawn}</div>'


def setup(app):
    """Register the directives."""
    app.add_directive("roofline", Roofline)
    app.add_directive("times", Times)
    app.add_directive("sharding", Sharding)
    return {"parallel_read_safe": True}
