"""Tables and plots of a results file from benchmarks/run.py.

python benchmarks/report.py benchmarks/results/h200.json                               print tables
python benchmarks/report.py benchmarks/results/h200.json --page docs/performance.md    update a page
python benchmarks/report.py benchmarks/results/h200.json --bars docs/_static/speed.svg plot the bars

A plot is written twice: for light backgrounds and, as NAME-dark.svg, for dark backgrounds.
"""

import argparse
import json
from pathlib import Path

from suite import plot, table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="results file from run.py")
    parser.add_argument("--page", type=Path, help="Markdown page with comments that name the file")
    parser.add_argument(
        "--bars", type=Path, help="SVG file for a bar plot of forward and backward times"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Print the tables, or write the outputs that the command line selects."""
    options = parse(arguments)
    results = json.loads(options.results.read_text())
    if options.page:
        text = options.page.read_text()
        text = table.put_into(text, options.results.name, table.summary(results))
        options.page.write_text(text)
    if options.bars:
        plot.write(plot.bars(results), options.bars)
    if not (options.page or options.bars):
        print(table.tables(results))


if __name__ == "__main__":
    main()
