"""Results of benchmarks/sharding.py as a table and a picture.

python benchmarks/sharding_report.py benchmarks/results/sharding_h200x2.json --picture docs/_static/sharding.svg

efficiency   t(1) / (n t(n))                   of a graph, n ranks
share        n memory(n) / memory(1)           1 where memory falls as 1 / n
"""

import argparse
import json
from pathlib import Path

WANTED = {2: 0.95, 4: 0.90}  # efficiency
WANTED_SHARE = 1.15
LABELS = {
    "overlapped": "edges, overlapped",
    "after_exchange": "edges, after exchange",
    "heads": "heads",
}


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


def name_of(record: dict) -> str:
    """What a series is called."""
    if record["part"] == "anemoi":
        return f"anemoi-models, {record['way']}" + (", our attention" if record["who"] == "ours" else "")
    return LABELS[record["way"]] + (", replayed" if record["part"] == "replay" else "")


def same_model(left: dict[int, dict], right: dict[int, dict]) -> bool:
    """Whether two series are of one model with the same attention, so that one rank is the same in both."""
    return next(iter(left.values())).get("who") == next(iter(right.values())).get("who")


def summary(report: dict) -> str:
    """Times, efficiency and memory by way and number of ranks, whether they are what is wanted, and what failed."""
    lines = []
    for part in ("strong", "replay", "anemoi"):
        for name, records in series(report, part).items():
            lines += [f"{name:40} {row(records, n)}" for n in records]
    lines += [
        f"{record['grid']:8} on {record['ranks']}: {record['ms']:9.3f} ms, {1e6 * record['ms'] / record['work']:.3f} ns a unit of work"
        for record in report["results"]
        if record["part"] == "sizes"
    ]
    lines += [
        f"message of {record['message_bytes'] / 1e6:8.3f} MB on {record['ranks']}: {1e3 * record['ms']:8.1f} us"
        for record in report["results"]
        if record["part"] == "exchange"
    ]
    lines += [f"FAILED {job['name']}: {job['problem']}" for job in report["jobs"] if job["problem"]]
    return "\n".join(lines)


def row(records: dict[int, dict], n: int) -> str:
    """A line of the table."""
    here, alone = records[n], records.get(1)
    text = f"{n} ranks {here['ms']:10.3f} ms"
    if "peak_gb" in here:
        text += f" {here['peak_gb']:8.2f} GB"
    if "halo_bytes" in here:
        text += f" {here['halo_bytes'] / 1e6:9.2f} MB sent"
    if n == 1 or alone is None:
        return text
    efficiency = alone["ms"] / (n * here["ms"])
    text += f", efficiency {efficiency:.3f}"
    if n in WANTED:
        text += f" ({'holds' if efficiency >= WANTED[n] else 'missed'}: {WANTED[n]} wanted)"
    if alone.get("peak_gb"):
        share = n * here["peak_gb"] / alone["peak_gb"]
        text += f", memory x {n} {share:.3f} ({'holds' if share <= WANTED_SHARE else 'missed'}: {WANTED_SHARE} wanted)"
    return text


def draw(report: dict, path: Path) -> None:
    """Draw times and memory of all ways over the number of ranks, with what a perfect division would be."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(
            f"no picture: matplotlib is missing; later: python benchmarks/sharding_report.py RESULTS --picture {path}"
        )
        return
    figure = Figure(figsize=(9, 4), layout="constrained")
    for axes, key, label in zip(
        figure.subplots(1, 2), ("ms", "peak_gb"), ("ms a pass", "GB of the largest rank"), strict=True
    ):
        for part, line in (("strong", "-"), ("replay", "-."), ("anemoi", "--")):
            for name, records in series(report, part).items():
                known = {n: record[key] for n, record in records.items() if key in record}
                axes.plot(list(known), list(known.values()), line, marker="o", label=name)
        perfect = series(report, "strong").get(LABELS["overlapped"], {})
        if 1 in perfect:
            axes.plot(
                list(perfect), [perfect[1][key] / n for n in perfect], ":", color="grey", label="perfect division"
            )
        axes.set_xscale("log", base=2)
        axes.set_xlabel("ranks")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted(perfect), [str(n) for n in sorted(perfect)])
        axes.grid(alpha=0.3)
    if figure.axes[0].lines:
        figure.axes[0].legend(fontsize="small")
    figure.suptitle(
        f"{report['environment']['device']}, commit {report['environment']['commit'][:12]}", fontsize="small"
    )
    figure.savefig(path, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    """Print the table of a results file, and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    report = json.loads(options.results.read_text())
    print(summary(report))
    if options.picture:
        draw(report, options.picture)


if __name__ == "__main__":
    main()
