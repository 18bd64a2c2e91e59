"""Results of benchmarks/sharding.py as tables and a picture; `sharding_records` says what their numbers are.

python benchmarks/sharding_report.py benchmarks/results/sharding_h200x4.json
python benchmarks/sharding_report.py RESULTS.json --page docs/distributed.md --picture outputs/sharding.svg
"""

import argparse
import json
from pathlib import Path

from sharding_records import (
    compared,
    drawn,
    efficiency,
    graph_of,
    merged,
    messages,
    replayed,
    share,
    weak,
    weak_efficiency,
)
from suite.picture import BAR, WIDE, canvas, words, write
from suite.table import EMPTY, put_into

WANTED = {2: 0.95, 4: 0.90}  # efficiency
WANTED_SHARE = 1.15
ENDS = 130  # of the picture: room for figures behind bars


def summary(report: dict) -> str:
    """Times, efficiency and memory by way and number of ranks, whether they are what is wanted, and what failed."""
    lines = [f"{name:40} {row(records, n)}" for name, records in compared(report).items() for n in records]
    lines += [
        f"weak scaling, {graph_of(one)} on 1, {graph_of(several)} on {several['ranks']}: {weak_efficiency(one, several):.3f}"
        + ", replayed" * replayed(one)
        for one, several in weak(report)
    ]
    lines += [
        f"message of {m['message_bytes'] / 1e6:8.3f} MB on {m['ranks']}: {1e3 * m['ms']:8.1f} us"
        + ", replayed" * replayed(m)
        for m in messages(report)
    ]
    lines += [f"FAILED {job['name']}: {job['problem']}" for job in report["jobs"] if job["problem"]]
    return "\n".join(lines)


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
    """Where the figures were made; times and efficiency; memory and halo; weak scaling; messages. In Markdown."""
    parts = [_where(report), _times(report), _memory(report), _weak(report), _messages(report)]
    return "\n\n".join(part for part in parts if part)


def _where(report: dict) -> str:
    facts = report["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    return f"{facts['device']}, {facts['dtype']}, {facts['date']}, commit {facts['commit']}; {versions}, NCCL {facts['nccl']}."


def _times(report: dict) -> str:
    found = compared(report)
    ranks = _ranks(found)
    header = ["Forward and backward, ms"]
    for n in ranks:
        header += [f"{n} GPU{'s' * (n > 1)}"] + ["efficiency"] * (n > 1)
    lines = []
    for name, records in found.items():
        cells = [name]
        for n in ranks:
            cells += [_cell(records.get(n, {}).get("ms"), ".1f")]
            cells += [_cell(efficiency(records, n) if n in records else None, ".3f")] * (n > 1)
        lines.append(cells)
    return _markdown(header, lines)


def _memory(report: dict) -> str:
    """Memory with what it is of that of one GPU, and the bytes that halos are in a pass."""
    found = {
        name: records for name, records in compared(report).items() if any("peak_gb" in r for r in records.values())
    }
    ranks = _ranks(found)
    header = ["Memory, halo"]
    for n in ranks:
        header += [f"GB on {n}"] + ["share"] * (n > 1)
    header += [f"MB on {n}" for n in ranks if n > 1]
    lines = []
    for name, records in found.items():
        cells = [name]
        for n in ranks:
            cells += [_cell(records.get(n, {}).get("peak_gb"), ".1f")]
            cells += [_cell(share(records, n) if n in records else None, ".2f")] * (n > 1)
        sent = [records.get(n, {}).get("halo_bytes") for n in ranks if n > 1]
        lines.append(cells + [_cell(size / 1e6 if size else None, ".1f") for size in sent])
    return _markdown(header, lines) if lines else ""


def _weak(report: dict) -> str:
    lines = []
    for one, several in weak(report):
        names = [graph_of(one) + ", replayed" * replayed(one), graph_of(several), several["ranks"]]
        work = [f"{record['work'] / 1e6:.1f}" for record in (one, several)]
        times = [f"{record['ms']:.1f}" for record in (one, several)]
        lines.append([*names, *work, *times, f"{weak_efficiency(one, several):.3f}"])
    header = ["Weak scaling: on 1", "on n", "n", "10^6 edges on 1", "of each of n", "ms on 1", "ms on n", "efficiency"]
    return _markdown(header, lines) if lines else ""


def _messages(report: dict) -> str:
    """Launched beside replayed."""
    found = {}
    for m in messages(report):
        found.setdefault((m["message_bytes"], m["ranks"]), {})[replayed(m)] = m["ms"]
    lines = [
        [f"{size / 1e6:.3g}", ranks, _cell(ms.get(False), ".3f"), _cell(ms.get(True), ".3f")]
        for (size, ranks), ms in found.items()
    ]
    return _markdown(["A message, MB", "GPUs", "ms, launched", "replayed"], lines) if lines else ""


def _ranks(found: dict[str, dict[int, dict]]) -> list[int]:
    return sorted({n for records in found.values() for n in records})


def _cell(value: float | None, form: str) -> str:
    return EMPTY if value is None else format(value, form)


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
    ranks = _ranks(found)
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
    parser.add_argument("--page", type=Path, help="Markdown page with comments that name the first file")
    parser.add_argument("--picture", type=Path, help="SVG file; one for dark ground comes beside it")
    options = parser.parse_args(arguments)
    report = merged([json.loads(path.read_text()) for path in options.results])
    if options.page:
        options.page.write_text(put_into(options.page.read_text(), options.results[0].name, tables(report)))
    if options.picture:
        draw(report, options.picture)
    if not (options.page or options.picture):
        print(summary(report))


if __name__ == "__main__":
    main()
