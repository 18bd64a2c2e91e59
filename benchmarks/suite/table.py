"""Tables of a results file of benchmarks/run.py, in Markdown."""

from collections.abc import Sequence
from statistics import median

HEADINGS = {
    "forward_backward": "Forward and backward",
    "forward": "Forward, no gradients",
    "replay": "From a CUDA graph",
}
STEADY = 0.1  # interquartile range over the median
EMPTY = "–"  # noqa: RUF001  a dash, as printers set it


def tables(results: dict) -> str:
    """Return times by pass, memory, and reasons of empty cells, in Markdown."""
    lines = {}
    for line in results["results"]:
        lines[line["problem"], line["pass"], line["baseline"]] = line
    times = [_times(results, lines, kind) for kind in HEADINGS]
    parts = [*times, _memory(results, lines), _notes(results)]
    return "\n\n".join(part for part in parts if part)


def of_processes(times: Sequence[float]) -> str:
    """Return the median of the times of processes, and their range."""
    cell = f"{median(times):.0f}"
    return cell if len(times) == 1 else f"{cell} ({min(times):.0f} to {max(times):.0f})"


def lower_bound_seconds(results: dict, problem: str, kind: str) -> float:
    """Return the time to copy the bytes of a pass on the device, by the run's fastest copy."""
    return results["problems"][problem]["bytes"][kind] / max(
        results["environment"]["copy_bytes_per_second"]
    )


def _times(results: dict, lines: dict, kind: str) -> str:
    """Return median times, lower bounds, and multiples of the first baseline's time."""
    first, *others = results["baselines"]
    rows = []
    for name, problem in results["problems"].items():
        first_line = lines.get((name, kind, first), {})
        other_lines = [lines.get((name, kind, baseline), {}) for baseline in others]
        is_timed = any("median_ms" in line for line in (first_line, *other_lines))
        if kind not in problem["passes"] or not is_timed:
            continue
        bound = 1e3 * lower_bound_seconds(results, name, kind)
        first_ms = first_line.get("median_ms")
        share = f"{bound / first_ms:.0%}" if first_ms else EMPTY
        row = [f"`{name}`", figure(bound), _cell(first_line), share]
        row += [_cell(line, first_ms) for line in other_lines]
        rows.append(row)
    if not rows:
        return ""
    title, *other_titles = results["baselines"].values()
    header = [HEADINGS[kind], "lower bound", title, "of copy bandwidth", *other_titles]
    return _without_empty_columns(header, rows)


def _memory(results: dict, lines: dict) -> str:
    """Return the peak memory of forward and backward, beyond the memory in use before the call."""
    rows = []
    for name in results["problems"]:
        peaks = []
        for baseline in results["baselines"]:
            peaks.append(lines.get((name, "forward_backward", baseline), {}).get("peak_bytes"))
        if any(peaks):
            cells = [EMPTY if peak is None else f"{peak / 1e9:.2f}" for peak in peaks]
            rows.append([f"`{name}`", *cells])
    if not rows:
        return ""
    return _without_empty_columns(["Peak memory, GB", *results["baselines"].values()], rows)


def _notes(results: dict) -> str:
    """Return a note on units, spread and the reasons of empty cells."""
    copy = max(results["environment"]["copy_bytes_per_second"]) / 1e9
    text = "Medians in ms; in brackets, time relative to anemoi_gt. A copy in the same run moves "
    text += f"{copy:,.0f} GB/s. {_spread(results)}"
    problems_by_reason = {}
    for line in results["results"]:
        if "reason" in line:
            reason = line["reason"]
            if reason.startswith("wrong: "):
                reason = "fails the correctness check"
            key = results["baselines"][line["baseline"]], reason
            problems_by_reason.setdefault(key, []).append(line["problem"])
    for (baseline, reason), problems in problems_by_reason.items():
        unique_names = ", ".join(f"`{name}`" for name in dict.fromkeys(problems))
        text += f"\n- {baseline} {reason}: {unique_names}"
    return text.replace("\n-", "\n\n-", 1)


def _spread(results: dict) -> str:
    """Return a sentence on the interquartile ranges, with the problems where they are large."""
    spreads = {}
    for line in results["results"]:
        if "median_ms" in line:
            low, high = line["quartiles_ms"]
            spread = (high - low) / line["median_ms"]
            spreads[line["problem"]] = max(spread, spreads.get(line["problem"], 0.0))
    steady = [spread for spread in spreads.values() if spread <= STEADY]
    text = f"The interquartile range is at most {max(steady):.0%} of the median" if steady else ""
    unsteady = [f"`{name}` ({spread:.0%})" for name, spread in spreads.items() if spread > STEADY]
    if unsteady:
        text += f", except for {', '.join(unsteady)}"
    return f"{text}."


def _cell(line: dict, reference_ms: float | None = None) -> str:
    if "median_ms" not in line:
        return EMPTY
    ratio = f" ({line['median_ms'] / reference_ms:.1f})" if reference_ms else ""
    return figure(line["median_ms"]) + ratio


def figure(milliseconds: float) -> str:
    """Return three significant digits."""
    return f"{milliseconds:.3g}" if milliseconds < 100 else f"{milliseconds:.0f}"


def _without_empty_columns(header: list[str], rows: list[list[str]]) -> str:
    columns = [column for column in zip(header, *rows, strict=True) if set(column[1:]) != {EMPTY}]
    header, *rows = zip(*columns, strict=True)
    return markdown(header, rows)


def markdown(header: Sequence, rows: Sequence[Sequence]) -> str:
    """Return a Markdown table."""
    return "\n".join(
        f"| {' | '.join(map(str, line))} |" for line in (header, ["---"] * len(header), *rows)
    )
