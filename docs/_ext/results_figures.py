"""Sphinx extension: plots of results files, made at build time, in theme colours.

```{roofline} n320_h200.json
```

```{times} n320_h200.json
```

```{sharding} sharding_4253340_h200x4.json
```
"""

import json
import sys
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import sharding  # noqa: E402
from suite import plot  # noqa: E402


class ResultsFigure(SphinxDirective):
    """A plot of the results files that the directive names."""

    required_arguments = 1

    def run(self):
        """Replace the directive by the plot."""
        return [nodes.raw("", self.html(*self.results()), format="html")]

    def results(self) -> list[dict]:
        """The contents of the files; the page is built again when they change."""
        paths = [BENCHMARKS / "results" / name for name in self.arguments]
        for path in paths:
            self.env.note_dependency(str(path))
        return [json.loads(path.read_text()) for path in paths]


class Roofline(ResultsFigure):
    """`roofline`: a panel for each pass and number of channels."""

    def html(self, results: dict) -> str:
        """The panels and their legend."""
        panels = "".join(plot.roofline(results))
        return f'<div class="figure-svg results-figure">{panels}</div>{legend(results)}'


def legend(results: dict) -> str:
    """Return roofline marks with full baseline names, as page text, which wraps."""
    marks = [
        f'<path class="peer{place}" d="{plot.MARKS[place]}"/>'
        for place in range(len(results["baselines"]))
    ]
    names = list(results["baselines"].values())
    copy = max(results["environment"]["copy_bytes_per_second"]) / 1e12
    entries = zip(
        [*marks, '<path class="line" d="M-8,0h16"/>'],
        [*names, f"copy, {copy:.3g} TB/s"],
        strict=True,
    )
    items = "".join(
        '<span><svg viewBox="-8 -8 16 16" role="img" aria-label="mark of '
        f'{name}">{mark}</svg>{name}</span>'
        for mark, name in entries
    )
    return f'<div class="figure-svg legend-row">{items}</div>'


class Times(ResultsFigure):
    """`times`: forward and backward of the parts of a model as bars."""

    def html(self, results: dict) -> str:
        """The bars."""
        return f'<div class="figure-svg times-figure">{plot.bars(results)}</div>'


class Sharding(ResultsFigure):
    """`sharding`: forward and backward of one graph on one GPU and on several."""

    def html(self, results: dict) -> str:
        """The bars."""
        return f'<div class="figure-svg times-figure">{sharding.plot(results)}</div>'


def setup(app):
    """Register the directives."""
    app.add_directive("roofline", Roofline)
    app.add_directive("times", Times)
    app.add_directive("sharding", Sharding)
    return {"parallel_read_safe": True}
