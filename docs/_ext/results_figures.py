"""Sphinx extension: plots of results files, made at build time, in theme colours.

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
    app.add_directive("times", Times)
    app.add_directive("sharding", Sharding)
    return {"parallel_read_safe": True}
