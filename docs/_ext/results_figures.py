"""Sphinx extension: a plot of a results file, made at build time, in theme colours.

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

from suite import plot  # noqa: E402


class Times(SphinxDirective):
    """`times`: forward and backward of the parts of a model as bars."""

    required_arguments = 1

    def run(self):
        """Replace the directive by the plot; the page is built again when its file changes."""
        path = BENCHMARKS / "results" / self.arguments[0]
        self.env.note_dependency(str(path))
        return [nodes.raw("", self.html(json.loads(path.read_text())), format="html")]

    def html(self, results: dict) -> str:
        """The bars."""
        return f'<div class="figure-svg times-figure">{plot.bars(results)}</div>'


def setup(app):
    """Register the directive."""
    app.add_directive("times", Times)
    return {"parallel_read_safe": True}
