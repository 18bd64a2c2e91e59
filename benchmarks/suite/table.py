"""Tables of a results file, in Markdown, and the page that holds them."""

import re
from collections.abc import Sequence

from suite.problems import PASSES, STRUCTURE

HEADINGS = {
    "forward": "Forward, no gradients",
    "forward_backward": "Forward and backward",
    "replay": "From a CUDA graph",
    "structure": "Building the structure",
}
EMPTY = "–"  # noqa: RUF001  a dash, as printers set it


def tables(results: dict) -> str:
    """Return all tables in Markdown."""
    return f"{summary(results)}\n\n{details(results)}"


def summary(results: dict) -> str:
    """Return environment, forward and backward times, memory, and reasons of empty cells."""
    found = _lines(results)
    times = _times(results, found, ("forward_backward",), HEADINGS["forward_backward"])
    return _joined(_where(results), times, _memory(results, found), _notes(results))


def details(results: dict) -> str:
    """Return times of forward alone, from a CUDA graph, and of structures."""
    found = _lines(results)
    times = [_times(results, found, (kind,), HEADINGS[kind]) for kind in ("forward", "replay")]
    return _joined(*times, _times(results, found, STRUCTURE, HEADINGS["structure"]))


def _lines(results: dict) -> dict:
    return {(line["problem"], line["pass"], line["baseline"]): line for line in results["results"]}


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def put_into(page: str, name: str, text: str) -> str:
    """Return the page with `text` between the comments that name a results file.

    Raises
    ------
    ValueError
        If the page has no such comments.
    """
    begin, end = f"<!-- figures of {name} -->", f"<!-- end of {name} -->"
    found = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.DOTALL)
    if not found:
        raise ValueError(
            f"the page must hold the lines {begin!r} and {end!r}: add them where figures belong"
        )
    return f"{page[: found.start()]}{begin}\n\n{text}\n\n{end}{page[found.end() :]}"


def lower_bound_seconds(results: dict, problem: str, kind: str) -> float:
    """Return the time to copy the bytes of a pass on the device, by the run's fastest copy."""
    return results["problems"][problem]["bytes"][kind] / max(
        results["environment"]["copy_bytes_per_second"]
    )


def _where(results: dict) -> str:
    facts = results["environment"]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items() if number)
    copy = max(facts["copy_bytes_per_second"]) / 1e9
    where = f"{facts['device']}, {facts['date'].split()[0]}; {versions}."
    return f"{where} Copy bandwidth in the same run: {copy:,.0f} GB/s."


def _times(results: dict, found: dict, kinds: tuple[str, ...], heading: str) -> str:
    """Return median times, lower bounds, and multiples of the first baseline's time."""
    first, *others = results["baselines"]
    rows = []
    for name, problem in results["problems"].items():
        for kind in kinds:
            lines = [found.get((name, kind, baseline), {}) for baseline in (first, *others)]
            if kind not in problem["passes"] or not any("median_ms" in line for line in lines):
                continue
            bound = 1e3 * lower_bound_seconds(results, name, kind)
            label = (
                f"`{name}`" if len(kinds) == 1 else f"`{name}`, {PASSES[kind].rpartition(', ')[2]}"
            )
            mine = lines[0].get("median_ms")
            share = f"{bound / mine:.0%}" if mine else EMPTY
            rows.append(
                [
                    label,
                    figure(bound),
                    _cell(lines[0]),
                    share,
                    *(_cell(line, mine) for line in lines[1:]),
                ]
            )
    if not rows:
        return ""
    title, *other_titles = _titles(results)
    header = [heading, "lower bound", title, "of copy bandwidth", *other_titles]
    return _without_empty_columns(header, rows)


def _memory(results: dict, found: dict) -> str:
    """Peak memory of forward and backward above what is there before the call."""
    rows = []
    for name in results["problems"]:
        peaks = [
            found.get((name, "forward_backward", b), {}).get("peak_bytes")
            for b in results["baselines"]
        ]
        if any(peaks):
            rows.append(
                [f"`{name}`", *(EMPTY if peak is None else f"{peak / 1e9:.2f}" for peak in peaks)]
            )
    return _without_empty_columns(["Peak memory, GB", *_titles(results)], rows) if rows else ""


def _titles(results: dict) -> list[str]:
    """Return the names of the baselines without call details, which the page has."""
    return [title.partition(", as ")[0] for title in results["baselines"].values()]


def _notes(results: dict) -> str:
    """Units, spread, and the reasons of empty cells."""
    timed = [line for line in results["results"] if "median_ms" in line]
    spread = max(
        (line["quartiles_ms"][1] - line["quartiles_ms"][0]) / line["median_ms"] for line in timed
    )
    text = "Medians in ms; in brackets, time relative to anemoi_gt. "
    text += f"The interquartile range is at most {spread:.0%} of the median."
    reasons, titles = {}, dict(zip(results["baselines"], _titles(results), strict=True))
    for line in results["results"]:
        # most baselines have none, and then no column
        if "reason" in line and line["pass"] not in STRUCTURE:
            failed = (
                "fails the correctness check"
                if line["reason"].startswith("wrong: ")
                else line["reason"]
            )
            reasons.setdefault((titles[line["baseline"]], failed), []).append(line["problem"])
    for (baseline, reason), names in reasons.items():
        text += (
            f"\n- {baseline} {reason}: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}"
        )
    return text.replace("\n-", "\n\n-", 1)


def _cell(line: dict, mine: float | None = None) -> str:
    if "median_ms" not in line:
        return EMPTY
    ratio = f" ({line['median_ms'] / mine:.1f})" if mine else ""
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
