"""Sphinx extension: pictures of a file in benchmarks/results, drawn when the page is built, in the colours of the theme.

```{roofline} n320_h200.json
```

```{times} n320_h200.json
```
"""

import json
import sys
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from suite import picture  # noqa: E402


class ResultsFigure(SphinxDirective):
    """A picture of the results file that the directive names."""

    required_arguments = 1

    def run(self):
        """Put the picture in place of the directive; the page is built again when the file changes."""
        path = BENCHMARKS / "results" / self.arguments[0]
        self.env.note_dependency(str(path))
        return [nodes.raw("", self.html(json.loads(path.read_text())), format="html")]


class Roofline(ResultsFigure):
    """`roofline`: a panel for each pass and number of channels."""

    def html(self, results: dict) -> str:
        """The panels and their legend."""
        panels = "".join(picture.roofline(results))
        return f'<div class="figure-svg results-figure">{panels}</div><div class="figure-svg legend-svg">{picture.legend(results)}</div>'


class Times(ResultsFigure):
    """`times`: forward and backward of the parts of a model as bars."""

    def html(self, results: dict) -> str:
        """The bars."""
        return f'<div class="figure-svg times-figure">{picture.bars(results)}</div>'


def setup(app):
    """Register the directives."""
    app.add_directive("roofline", Roofline)
    app.add_directive("times", Times)
    return {"parallel_read_safe": True}
