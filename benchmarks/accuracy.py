"""Accuracy of the attention against the float64 oracle, over the corpus of the tests, as a table.

    python benchmarks/accuracy.py --output benchmarks/results/accuracy_cpu.json
    on a GPU:        python benchmarks/accuracy.py --backend triton --output outputs/h200.json
    without a GPU:   TRITON_INTERPRET=1 python benchmarks/accuracy.py --backend triton --device cpu
    python benchmarks/accuracy.py --table benchmarks/results/accuracy_cpu.json --page
    docs/backends.md

For each result and dtype, the table has the RMS error relative to the RMS value, and relative to
the RMS error of plain PyTorch in the same dtype. Errors beyond the criterion of the tests raise an
error, and nothing is written.
"""

import argparse
import json
import os
from pathlib import Path

import torch
from suite import environment, table
from support.accuracy import Corpus
from support.corpus import DTYPES, corpus
from support.run import attend

TITLES = {
    "out": "`out`",
    "lse": "`lse`",
    "dquery": "gradient of query",
    "dkey": "gradient of key",
    "dvalue": "gradient of value",
    "dedge_attr": "gradient of attributes",
    "dedge_weight": "gradient of weight",
    "dedge_bias": "gradient of bias",
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("torch", "triton"), default="torch")
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--output", type=Path, help="JSON file for the errors")
    parser.add_argument(
        "--table", type=Path, help="make the table of a file from --output, without measuring"
    )
    parser.add_argument("--page", type=Path, help="Markdown page with comments that name the file")
    parser.add_argument("--commit", help="to record if git is not available")
    return parser.parse_args(arguments)


def measure(backend: str, device: str, commit: str | None) -> dict:
    """Measure the errors of a backend by dtype and result; return them with the environment.

    Raises
    ------
    AssertionError
        If a result does not meet the criterion.
    """
    errors = {}
    for dtype in DTYPES:
        checked = Corpus()
        for problem, graph in corpus(dtype, device):
            checked.add(attend(problem, graph, backend), problem)
        checked.assert_accurate()
        errors_of_dtype = {}
        for name in TITLES:
            errors_of_dtype[name] = {
                "relative": checked.relative_error(name),
                "over_plain": checked.over_plain(name),
            }
        errors[str(dtype).removeprefix("torch.")] = errors_of_dtype
    packages = {"torch", "triton"} if backend == "triton" else {"torch"}
    facts = environment.describe(device, packages, commit)
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    return {"environment": facts, "backend": backend, "interpreted": interpreted, "errors": errors}


def as_table(measured: dict) -> str:
    """Return the environment and the errors as a Markdown table."""
    facts = measured["environment"]
    dtypes = list(measured["errors"])
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    backend = f"`{measured['backend']}`"
    if measured["interpreted"]:
        backend += " in Triton's interpreter"
    rows = []
    for name, title in TITLES.items():
        row = [title]
        for dtype in dtypes:
            error = measured["errors"][dtype][name]
            row.append(f"{error['relative']:.1e} ({error['over_plain']:.2f})")
        rows.append(row)
    header = f"Backend {backend}, {facts['device']}, {facts['date'].split()[0]}; {versions}."
    return f"{header}\n\n{table.markdown(['', *dtypes], rows)}"


def main(arguments: list[str] | None = None) -> None:
    """Measure or read the errors, then write the outputs that the command line selects."""
    options = parse(arguments)
    if options.table:
        measured = json.loads(options.table.read_text())
    else:
        measured = measure(options.backend, options.device, options.commit)
    file = options.table or options.output
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(measured, indent=1) + "\n")
    if options.page and file:
        page = table.put_into(options.page.read_text(), file.name, as_table(measured))
        options.page.write_text(page)
    print(as_table(measured))


if __name__ == "__main__":
    main()
