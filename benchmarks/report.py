"""Tables and a picture of a results file that benchmarks/run.py wrote.

python benchmarks/report.py benchmarks/results/h200.json                                     the tables
python benchmarks/report.py benchmarks/results/h200.json --page docs/performance.md          put into the page
python benchmarks/report.py benchmarks/results/h200.json --picture docs/_static/roofline.png
"""

import argparse
import json
from pathlib import Path

from suite import table


def main(arguments: list[str] | None = None) -> None:
    """Make what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="file that run.py wrote")
    parser.add_argument("--page", type=Path, help="Markdown page with comments that name the file")
    parser.add_argument("--picture", type=Path, help="where to draw the roofline")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    if options.page:
        options.page.write_text(table.put_into(options.page.read_text(), options.results.name, table.tables(results)))
    if options.picture:
        from suite import picture

        picture.draw(results, options.picture)
    if not (options.page or options.picture):
        print(table.tables(results))


if __name__ == "__main__":
    main()
