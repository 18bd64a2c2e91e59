"""Results of benchmarks/sharding.py as tables and a picture.

python benchmarks/sharding_report.py benchmarks/results/sharding_h200x2.json benchmarks/results/sharding_replay_h200x2.json
python benchmarks/sharding_report.py RESULTS.json --page docs/distributed.md --picture outputs/sharding.svg

efficiency   t(1) / (n t(n))                   of a graph, n ranks
share        n memory(n) / memory(1)           1 where memory falls as 1 / n
"""

import argparse
import json
from pathlib import Path

from suite.picture import BAR, WIDE, canvas, words, write
from suite.table import EMPTY, put_into

WANTED = {2: 0.95, 4: 0.90}  # efficiency
WANTED_SHARE = 1.15
LABELS = {
    "overlapped": "edges, overlapped",
    "after_exchange": "edges, after exchange",
    "heads": "heads",
}
PARTS = ("strong", "replay", "anemoi", "sizes")  # one graph on one rank and on several
FIGURES = "sharding_h200x2.json"  # what the comments of the page name
RUN = ("commit", "date")  # what differs between two runs on one machine
ENDS = 130  # of the picture: room for figures behind bars


def merged(reports: list[dict]) -> dict:
    """Reports as one, of all commits and dates.

    Raises
    ------
    ValueError
        When they are not of one device, or of other versions.
    """
    made = [report["environment"] for report in reports]
    machines = [{name: value for name, value in one.items() if name not in RUN} for one in made]
    if any(machine != machines[0] for machine in machines):
        raise ValueError(f"results must be of one device with the same versions, got {machines}")
    facts = {name: ", ".join(dict.fromkeys(one[name] for one in made)) for name in RUN}
    lists = {name: [line for report in reports for line in report[name]] for name in ("jobs", "results")}
    return {"environment": machines[0] | facts} | lists


def series(report: dict, part: str) -> dict[str, dict[int, dict]]:
    """Records of a part by way, then by number of ranks; one rank belongs to every way."""
    found: dict[str, dict[int, dict]] = {}
    for record in report["results"]:
        if record["part"] == part and "way" in record:
            found.setdefault(name_of(record), {})[record["ranks"]] = record
    for ways in found.values():
        alone = next((records[1] for records in found.values() if 1 in records and same_model(records, ways)), None)
        if alone:
            ways.setdefault(1, alone)
    return {name: dict(sorted(ways.items())) for name, ways in found.items()}


def compared(report: dict) -> dict[str, dict[int, dict]]:
    """All series of one graph on one rank and on several."""
    return {name: records for part in PARTS for name, records in series(report, part).items()}


def drawn(report: dict) -> dict[str, dict[int, dict]]:
    """The series that the picture shows: of one rank and of several."""
    return {name: records for name, records in compared(report).items() if 1 in records and len(records) > 1}


def name_of(record: dict) -> str:
    """What a series is called."""
    if record["part"] == "anemoi":
        return f"anemoi-models, {record['way']}" + (", our attention" if record["who"] == "ours" else "")
    if record["part"] == "sizes":
        return f"{record['grid']}, icosphere {record['refinement']}"
    return LABELS[record["way"]] + (", replayed" if record["part"] == "replay" else "")


def same_model(left: dict[int, dict], right: dict[int, dict]) -> bool:
    """Whether two series are of one graph and one model with the same attention, so that one rank is the same in both."""
    facts = [[next(iter(records.values())).get(name) for name in ("grid", "who")] for records in (left, right)]
    return facts[0] == facts[1]


def efficiency(records: dict[int, dict], n: int) -> float | None:
    """Of n ranks; None where one rank was not measured."""
    return records[1]["ms"] / (n * records[n]["ms"]) if 1 in records else None


def share(records: dict[int, dict], n: int) -> float | None:
    """Memory of n ranks together over that of one; None where it is not known."""
    alone = records.get(1, {}).get("peak_gb")
    return n * records[n]["peak_gb"] / alone if alone and "peak_gb" in records[n] else None


def summary(report: dict) -> str:
    """Times, efficiency and memory by way and number of ranks, whether they are what is wanted, and what failed."""
    lines = [f"{name:40} {row(records, n)}" for name, records in compared(report).items() for n in records]
    lines += [
        f"message of {m['message_bytes'] / 1e6:8.3f} MB on {m['ranks']}: {1e3 * m['ms']:8.1f} us"
        for m in messages(report)
    ]
    lines += [f"FAILED {job['name']}: {job['problem']}" for job in report["jobs"] if job["problem"]]
    return "\n".join(lines)


def messages(report: dict) -> list[dict]:
    """Records of messages alone."""
    return [record for record in report["results"] if record["part"] == "exchange"]


def row(records: dict[int, dict], n: int) -> str:
    """A line of the summary."""
    here = records[n]
    text = f"{n} ranks {here['ms']:10.3f} ms"
    if "peak_gb" in here:
        text += f" {here['peak_gb']:8.2f} GB"
    if "halo_bytes" in here:
        text += f" {here['halo_bytes'] / 1e6:9.2f} MB sent"
    reached, held = efficiency(records, n), share(records, n)
    if n == 1 or reached is None:
        return text
    text += f", efficiency {reached:.3f}"
    if n in WANTED:
        text += f" ({'holds' if reached >= WANTED[n] else 'missed'}: {WANTED[n]} wanted)"
    if held is not None:
        text += f", memory x {n} {held:.3f} ({'holds' if held <= WANTED_SHARE else 'missed'}: {WANTED_SHARE} wanted)"
    return text


def tables(report: dict) -> str:
    """Where the figures were made; times, efficiency and memory; messages. In Markdown."""
    sent = [[f"{m['message_bytes'] / 1e6:.3g}", m["ranks"], f"{m['ms']:.2f}"] for m in messages(report)]
    parts = [_where(report), _times(report), _markdown(["A message, MB", "GPUs", "ms"], sent)]
    return "\n\n".join(parts)


def _where(report: dict) -> str:
    facts = report["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    return f"{facts['device']}, {facts['dtype']}, {facts['date']}, commit {facts['commit']}; {versions}, NCCL {facts['nccl']}."


def _times(report: dict) -> str:
    found = compared(report)
    ranks = sorted({n for records in found.values() for n in records})
    header = ["Forward and backward, ms"]
    for n in ranks:
        header += [f"{n} GPU{'s' * (n > 1)}"] + ["efficiency"] * (n > 1)
    header += [f"GB on {n}" for n in ranks]
    lines = []
    for name, records in found.items():
        cells = [name]
        for n in ranks:
            reached = efficiency(records, n) if n in records else None
            cells += [f"{records[n]['ms']:.1f}" if n in records else EMPTY]
            cells += [EMPTY if reached is None else f"{reached:.3f}"] * (n > 1)
        peaks = [records.get(n, {}).get("peak_gb") for n in ranks]
        lines.append(cells + [EMPTY if peak is None else f"{peak:.1f}" for peak in peaks])
    return _markdown(header, lines)


def _markdown(header: list[str], lines: list[list]) -> str:
    rows = (header, ["---"] * len(header), *lines)
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in rows)


def picture(report: dict) -> str:
    """Times of all ways as bars, one for each number of ranks, with a line where a perfect division of one rank's time would end.

    Raises
    ------
    ValueError
        If nothing was measured on one rank and on several.
    """
    found = drawn(report)
    if not found:
        raise ValueError(
            "the results must hold times of one graph on one rank and on several, got none: run the part strong"
        )
    ranks = sorted({n for records in found.values() for n in records})
    scale = (WIDE - ENDS) / max(record["ms"] for records in found.values() for record in records.values())
    shapes, y = [_ranks_named(ranks)], 40
    for name, records in found.items():
        shapes.append(words(0, y + 12, name, size=14))
        y += 20
        for n in records:
            shapes.append(_bar(records, n, ranks.index(n), y, scale))
            y += BAR
        y += 12
    label = "; ".join(
        f"{name}: " + ", ".join(f"{record['ms']:.1f} ms on {n}" for n, record in records.items())
        for name, records in found.items()
    )
    foot = words(0, y + 8, "ms; in brackets efficiency; line: a perfect division", size=14)
    return canvas(WIDE, y + 16, f"Time of forward and backward. {label}", "".join([*shapes, foot]))


def _bar(records: dict[int, dict], n: int, place: int, y: float, scale: float) -> str:
    ms, end = records[n]["ms"], scale * records[1]["ms"] / n
    told = f"{ms:.1f}" + (f" ({efficiency(records, n):.3f})" if n > 1 else "")
    length = scale * ms
    shapes = f'<rect class="peer{place}" x="0" y="{y}" width="{length:.1f}" height="{BAR - 2}"/>'
    shapes += words(length + 7, y + BAR - 5, told, size=14)
    return shapes + (f'<path class="floor" d="M{end:.1f},{y - 2}V{y + BAR}"/>' if n > 1 else "")


def _ranks_named(ranks: list[int]) -> str:
    """Which bar is how many ranks."""
    return "".join(
        f'<rect class="peer{place}" x="{110 * place}" y="7" width="13" height="13"/>'
        + words(110 * place + 19, 18, f"{n} rank{'s' * (n > 1)}", size=14)
        for place, n in enumerate(ranks)
    )


def draw(report: dict, path: Path) -> None:
    """Write the picture for light ground and, beside it, for dark."""
    write(picture(report), path)


def main(arguments: list[str] | None = None) -> None:
    """Print what results files of one machine hold, put it into a page, or draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--page", type=Path, help=f"Markdown page with comments that name {FIGURES}")
    parser.add_argument("--picture", type=Path, help="SVG file; one for dark ground comes beside it")
    options = parser.parse_args(arguments)
    report = merged([json.loads(path.read_text()) for path in options.results])
    if options.page:
        options.page.write_text(put_into(options.page.read_text(), FIGURES, tables(report)))
    if options.picture:
        draw(report, options.picture)
    if not (options.page or options.picture):
        print(summary(report))


if __name__ == "__main__":
    main()
