"""Results of benchmarks/sharding.py as series to compare.

efficiency        t(1) / (n t(n))                          of a graph, n ranks
share             n memory(n) / memory(1)                  1 where memory falls as 1 / n
weak efficiency   (t(1) / work(1)) / (t(n) / work(n))      of two graphs with about the same work for a rank

work is that of the busiest rank, in units of an edge.
"""

LABELS = {
    "overlapped": "edges, overlapped",
    "after_exchange": "edges, after exchange",
    "heads": "heads",
}
PARTS = ("strong", "replay", "compiled", "anemoi", "sizes")  # one graph on one rank and on several
PICTURED = PARTS[:4]  # the large graph
WEAK_PARTS, WEAK_WAY = ("strong", "replay", "sizes"), "after_exchange"
NEAR = 0.25  # relative: work of a rank that counts as the same
RUN = ("commit", "date")  # what differs between two runs on one machine


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


def compared(report: dict, parts: tuple[str, ...] = PARTS) -> dict[str, dict[int, dict]]:
    """All series of one graph on one rank and on several."""
    return {name: records for part in parts for name, records in series(report, part).items()}


def drawn(report: dict) -> dict[str, dict[int, dict]]:
    """The series that the picture shows: of the large graph on one rank and on several."""
    return {name: found for name, found in compared(report, PICTURED).items() if 1 in found and len(found) > 1}


def weak(report: dict) -> list[tuple[dict, dict]]:
    """Passes on one rank, each with that on several ranks whose work of a rank is nearest to its own, if it is near."""
    known = [record for record in report["results"] if record["part"] in WEAK_PARTS]
    ranks = sorted({record["ranks"] for record in known} - {1})
    found = []
    for alone in (record for record in known if record["ranks"] == 1):
        for n in ranks:
            there = [r for r in known if (r["ranks"], r["way"], replayed(r)) == (n, WEAK_WAY, replayed(alone))]
            near = [(abs(r["work"] / alone["work"] - 1), place) for place, r in enumerate(there)]
            if near and min(near)[0] <= NEAR:
                found.append((alone, there[min(near)[1]]))
    return found


def weak_efficiency(alone: dict, several: dict) -> float:
    """Work in a time on several ranks over that on one, for each rank."""
    return alone["ms"] / alone["work"] / (several["ms"] / several["work"])


def replayed(record: dict) -> bool:
    """Whether a pass or a message was replayed from a CUDA graph."""
    return record.get("replayed", False)


def name_of(record: dict) -> str:
    """What a series is called."""
    if record["part"] == "anemoi":
        return f"anemoi-models, {record['way']}" + (", our attention" if record["who"] == "ours" else "")
    name = graph_of(record) if record["part"] == "sizes" else LABELS[record["way"]]
    return name + ", compiled" * record.get("compiled", False) + ", replayed" * replayed(record)


def graph_of(record: dict) -> str:
    """Grid and mesh."""
    return f"{record['grid']}, icosphere {record['refinement']}"


def same_model(left: dict[int, dict], right: dict[int, dict]) -> bool:
    """Whether two series are of one graph and one model with the same attention, so that one rank is the same in both."""
    names = "grid", "refinement", "who", "compiled", "replayed"
    facts = [[next(iter(records.values())).get(name) for name in names] for records in (left, right)]
    return facts[0] == facts[1]


def efficiency(records: dict[int, dict], n: int) -> float | None:
    """Of n ranks; None where one rank was not measured."""
    return records[1]["ms"] / (n * records[n]["ms"]) if 1 in records else None


def share(records: dict[int, dict], n: int) -> float | None:
    """Memory of n ranks together over that of one; None where it is not known."""
    alone = records.get(1, {}).get("peak_gb")
    return n * records[n]["peak_gb"] / alone if alone and "peak_gb" in records[n] else None


def messages(report: dict) -> list[dict]:
    """Records of messages alone."""
    return [record for record in report["results"] if record["part"] == "exchange"]
