"""What a pass should cost on many GPUs: fitted to one of them and to messages between two, checked on 2 and more, carried on to grids that
nobody has measured here.

    python benchmarks/cost_model.py --results benchmarks/results/sharding_h200x4.json --halo benchmarks/results/halo_rows.json

The formulas are those of `pass_cost`. Beyond one host, the bandwidth is that of the command line: assumed, not measured.
"""

import argparse
import json
import sys
from dataclasses import replace
from math import log
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src")]

from pass_cost import FITTED, Cost, Model, Pass, fit, launches, pass_of, passes_of, replays  # noqa: E402
from sharding_records import LABELS, merged, replayed  # noqa: E402
from suite.table import put_into  # noqa: E402

CHECKED = (2, 4, 8)  # ranks
WHERE = {"encoder": "data", "processor": "hidden", "decoder": "hidden"}  # whose rows travel
GRIDS = {  # data nodes, hidden nodes
    "9 km (O1280, icosphere 8)": (6_599_680, 655_362),
    "4 km (O2560, icosphere 9)": (26_306_560, 2_621_442),
}
RANKS = (8, 16, 32, 64, 128, 256, 512)
HELD = 141  # GB of an H200
HOST_SIZE, NETWORK = 8, 50.0  # GPUs that the measured link joins; GB/s of a GPU to those beyond, assumed


def check(model: Model, report: dict) -> list[tuple[dict, float]]:
    """Measured passes on `CHECKED` ranks, with what the model says, in ms; it was not fitted to them."""
    says = {True: model.device, False: model.milliseconds}
    found = passes_of(report, ("strong", "sizes", "replay"), CHECKED)
    return [(record, says[replayed(record)](pass_of(record))) for record in found]


def left(cost: Cost, records: list[dict], name: str) -> float:
    """The largest relative error of a cost among records that it was fitted to."""
    return max(abs(cost.of(pass_of(record)) / record[name] - 1) for record in records)


def halo_of(nodes: tuple[int, int], ranks: int, found: list[dict]) -> dict[str, float]:
    """Rows that the busiest rank reads, by step: as real partitions along the Morton curve have them.

    Beyond the largest grid that was divided into so many parts, rows grow as they grew from the grid before it.

    Raises
    ------
    ValueError
        When less than two grids were divided into so many parts.
    """
    along = [record for record in found if (record["line"], record["ranks"]) == ("Morton", ranks)]
    *_, small, large = (None, None, *sorted(along, key=lambda record: record["nodes"]["data"]))
    if small is None:
        raise ValueError(
            f"halos must be known of two grids on {ranks} ranks, got {len(along)}: run benchmarks/halo_rows.py with --ranks {ranks}"
        )
    rows, size = {}, dict(zip(("data", "hidden"), nodes, strict=True))
    for step, kind in WHERE.items():
        power = log(large["rows"][step] / small["rows"][step]) / log(large["nodes"][kind] / small["nodes"][kind])
        rows[step] = large["rows"][step] * (size[kind] / large["nodes"][kind]) ** power
    return rows


def predicted(nodes: tuple[int, int], ranks: int, way: str, found: list[dict], like: Pass) -> Pass:
    """A pass on a grid of so many data and hidden nodes, with the layers and widths of another, edges and halos as in real graphs."""
    data, hidden = nodes
    largest = max(found, key=lambda record: record["nodes"]["data"])
    count = {"data": data / ranks, "hidden": hidden / ranks}
    per = {"encoder": "data", "processor": "hidden", "decoder": "data"}
    edges = {step: largest["edges"][step] / largest["nodes"][kind] * count[kind] for step, kind in per.items()}
    return replace(
        like,
        sources={step: count[kind] for step, kind in WHERE.items()},
        destinations={"encoder": count["hidden"], "processor": count["hidden"], "decoder": count["data"]},
        edges=edges,
        rows=halo_of(nodes, ranks, found),
        ranks=ranks,
        way=way,
    )


def constants(model: Model, report: dict) -> str:
    """What was fitted, and how well, in sentences."""
    python = "" if model.launch == model.link.shortest else f", {model.launch:.3f} ms where Python launches it"
    compute, memory = model.compute, model.memory
    errors = left(compute, replays(report), "ms"), left(memory, launches(report), "peak_gb")
    return (
        f"Compute: {compute.floor:.1f} ms, {1e6 * compute.data:.0f} ns a data node, {1e6 * compute.hidden:.0f} ns a hidden node and layer; "
        f"memory: {memory.floor:.2f} GB, {1e6 * memory.data:.1f} kB and {1e6 * memory.hidden:.1f} kB. They are off by {errors[0]:.1%} and "
        f"{errors[1]:.1%} at most where they were fitted, on one GPU. Lead {model.lead:.1f} ms, host {model.host:.1f} ms; a message at least "
        f"{model.link.shortest:.3f} ms{python}, {model.link.bandwidth / 1e6:.0f} GB/s."
    )


def checked(model: Model, report: dict) -> str:
    """A table of measured passes on several ranks beside what the model says."""
    lines = ["| graph and way | GPUs | ms, measured | ms, model | |", "|" + " --- |" * 5]
    for record, ms in check(model, report):
        name = f"{record['grid']}, {LABELS[record['way']]}" + ", replayed" * replayed(record)
        lines.append(f"| {name} | {record['ranks']} | {record['ms']:.1f} | {ms:.1f} | {ms / record['ms'] - 1:+.1%} |")
    return "\n".join(lines)


def table(model: Model, found: list[dict], like: dict, network: float, host_size: int) -> str:
    """A line for every grid and number of ranks: the faster strategy, its time, what bounds it, and memory."""
    heads, like = like["heads"], pass_of(like)
    far = replace(model, link=replace(model.link, bandwidth=1e6 * network))
    header = (
        "grid",
        "GPUs",
        "strategy",
        "ms a pass",
        "bound by",
        "replayed",
        "of it compute",
        "exchange",
        "GB of a GPU",
    )
    lines = [f"| {' | '.join(header)} |", "|" + " --- |" * len(header)]
    for name, nodes in GRIDS.items():
        for ranks in RANKS:
            here = model if ranks <= host_size else far
            ways = ["after_exchange"] + (["heads"] if ranks <= heads else [])
            best = min((predicted(nodes, ranks, way, found, like) for way in ways), key=here.milliseconds)
            compute, exchange, held = here.compute.of(best), here.exposed(best), here.memory.of(best)
            cells = [name, ranks, "heads" if best.way == "heads" else "edges"]
            cells += [f"{here.milliseconds(best):.0f}", here.bound(best), f"{here.device(best):.1f}", f"{compute:.1f}"]
            cells += [f"{exchange:.1f}", f"{held:.1f}" if held < HELD else f"{held:.0f}, does not fit"]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def text(report: dict, found: list[dict], network: float = NETWORK, host_size: int = HOST_SIZE) -> str:
    """Constants, check and table, as the page holds them."""
    model = fit(report)
    largest = max(passes_of(report, ("strong",), FITTED), key=lambda record: model.device(pass_of(record)))
    assumed = f"Assumed: {network:g} GB/s for each GPU beyond {host_size} of them."
    parts = constants(model, report), checked(model, report), table(model, found, largest, network, host_size), assumed
    return "\n\n".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Print the fit, the check, and the table, or put them into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="of benchmarks/sharding.py")
    parser.add_argument("--halo", type=Path, required=True, help="of benchmarks/halo_rows.py")
    parser.add_argument("--page", type=Path, help="Markdown page with comments that name cost_model.py")
    parser.add_argument("--host-size", type=int, default=HOST_SIZE, help="GPUs that the measured link joins")
    parser.add_argument("--network-gb-per-s", type=float, default=NETWORK, help="of a GPU, beyond one host; assumed")
    options = parser.parse_args(arguments)
    report = merged([json.loads(path.read_text()) for path in options.results])
    found = json.loads(options.halo.read_text())
    said = text(report, found, options.network_gb_per_s, options.host_size)
    if options.page:
        options.page.write_text(put_into(options.page.read_text(), "cost_model.py", said))
    else:
        print(said)


if __name__ == "__main__":
    main()
