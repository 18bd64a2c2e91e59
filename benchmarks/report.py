"""Tables and pictures of a results file that benchmarks/run.py wrote.

python benchmarks/report.py benchmarks/results/h200.json                                     the tables
python benchmarks/report.py benchmarks/results/h200.json --page docs/performance.md          put into the page
python benchmarks/report.py benchmarks/results/h200.json --roofline outputs/roofline.svg
python benchmarks/report.py benchmarks/results/h200.json --bars docs/_static/speed.svg       those of the README

A picture comes twice, for light ground and, as NAME-dark.svg, for dark.
"""

import argparse
import json
from pathlib import Path

from suite import picture, table


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file that run.py wrote")
    parser.add_argument("--page", type=Path, help="Markdown page with comments that name the file")
    parser.add_argument("--roofline", type=Path, help="SVG file for the roofline")
    parser.add_argument("--bars", type=Path, help="SVG file for times of forward and backward as bars")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Make what the command line asks for."""
    options = parse(arguments)
    results = json.loads(options.results.read_text())
    if options.page:
        options.page.write_text(table.put_into(options.page.read_text(), options.results.name, table.tables(results)))
    if options.roofline:
        picture.write(picture.whole_roofline(results), options.roofline)
    if options.bars:
        picture.write(picture.bars(results), options.bars)
    if not (options.page or options.roofline or options.bars):
        print(table.tables(results))


if __name__ == "__main__":
    main()
