"""Write the tables and plots of the documentation, or print the tables of a results file.

    make tables                                       write the pages and plots
    python benchmarks/report.py outputs/h200.json     print the tables of a run

Tables are made from benchmarks/results and put between the comments `<!-- table: NAME -->` and
`<!-- end of NAME -->` of README.md and docs; `suite/page_tables.py` has the names. The plot of the
README is written twice: for light backgrounds and, as speed-dark.svg, for dark backgrounds.
"""

import argparse
import json
from pathlib import Path

from suite import ROOT, page_tables, plot, table
from suite.results_files import load

PLOT = ROOT / "docs" / "_static" / "speed.svg"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="?", help="results file from run.py")
    return parser.parse_args(arguments)


def pages() -> list[Path]:
    """Return the pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main(arguments: list[str] | None = None) -> None:
    """Print the tables of a file, or write all pages and plots."""
    options = parse(arguments)
    if options.results:
        print(table.tables(json.loads(options.results.read_text())))
        return
    for page in pages():
        text = page.read_text()
        filled = page_tables.fill(text)
        if filled != text:
            page.write_text(filled)
            print(f"written: {page.relative_to(ROOT)}")
    plot.write(plot.bars(load("n320_h200.json")), PLOT)


if __name__ == "__main__":
    main()
