"""What a pass of a divided model costs, and how that is fitted to measurements.

    device    = unit * work + sum over steps of exposed                     a pass, forward and backward, of the busiest rank, replayed
    t         = max(host + messages * launch, lead + device)                the same launched by Python
    work      = sum over steps of NODE_COST * destinations + edges          steps: encoder, each processor layer, decoder
    message   = max(shortest, bytes / bandwidth)
    exposed   = 2 messages                          after exchange: forward and backward
                max(0, 2 messages - unit * edges)   overlapped: hidden behind the edges of the step, which may be cut for nothing
                8 messages of all own nodes         heads: query, key with value, output, attributes; there and, backward, back
    rows      = halo of the real partition, or of the next smaller grid, grown as it grew to that
    memory    = fixed + slope * work

`unit` is fitted to replays on one rank, which leave nothing to the host; `lead` to what the same pass takes longer when Python launches
it; `host` to smaller passes, which wait for Python; `fixed` and `slope` to the memory of all these; `shortest` and `bandwidth` to messages
between two that were replayed; `launch` to the shorter of those that Python launched. Where no two sizes were replayed, launched ones
stand for both. All by least squares of relative errors. So every pass on several ranks is a check.
"""

from dataclasses import dataclass

import numpy as np
from sharding_records import replayed

from anemoi_gt.distributed.partition import NODE_COST

FITTED, MESSAGES = (1,), (2,)  # ranks
EDGE_DIM = 11


@dataclass(frozen=True)
class Link:
    """How messages travel: ms of the shortest, and bytes in a ms of the longest."""

    shortest: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Milliseconds of a message of `size` bytes to all others together."""
        return max(self.shortest, size / self.bandwidth)


@dataclass(frozen=True)
class Pass:
    """What the busiest rank does in a pass: by step, how often, and numbers of one time.

    Parameters
    ----------
    times : dict of str to int
        Encoder 1, processor its layers, decoder 1.
    sources, destinations, edges, rows : dict of str to float
        Own nodes and edges of a step, and the larger of the rows that it sends and reads.
    row_bytes, element_bytes : int
    ranks : int
    way : {"overlapped", "after_exchange", "heads"}
    """

    times: dict[str, int]
    sources: dict[str, float]
    destinations: dict[str, float]
    edges: dict[str, float]
    rows: dict[str, float]
    row_bytes: int
    element_bytes: int
    ranks: int
    way: str

    @property
    def work(self) -> float:
        """In units of an edge."""
        return sum(times * (NODE_COST * self.destinations[s] + self.edges[s]) for s, times in self.times.items())

    @property
    def messages(self) -> int:
        """How many a rank sends, forward and backward."""
        return sum(times * len(self._sizes(step)) for step, times in self.times.items())

    def exposed(self, link: Link, unit: float) -> float:
        """Milliseconds in which nothing is computed."""
        return sum(times * self._exposed(step, link, unit) for step, times in self.times.items())

    def _exposed(self, step: str, link: Link, unit: float) -> float:
        sent = sum(map(link.message, self._sizes(step)))
        return max(0.0, sent - unit * self.edges[step]) if self.way == "overlapped" else sent

    def _sizes(self, step: str) -> list[float]:
        """Bytes of the messages of a step, forward and backward."""
        if self.ranks == 1:
            return []
        if self.way != "heads":
            return 2 * [self.rows[step] * self.row_bytes]
        share = (self.ranks - 1) / self.ranks * self.row_bytes
        attributes = self.edges[step] * (self.ranks - 1) * EDGE_DIM * self.element_bytes
        query_or_output = share * self.destinations[step]
        return 2 * [query_or_output, 2 * share * self.sources[step], query_or_output, attributes]


@dataclass(frozen=True)
class Model:
    """What is fitted."""

    unit: float  # ms for an edge
    lead: float  # ms for a pass
    host: float  # ms for a pass
    launch: float  # ms for a message
    link: Link
    fixed: float  # GB
    slope: float  # GB for an edge

    def device(self, one: Pass) -> float:
        """Milliseconds of a pass that is replayed."""
        return self.unit * one.work + one.exposed(self.link, self.unit)

    def launching(self, one: Pass) -> float:
        """Milliseconds that Python needs to launch a pass."""
        return self.host + one.messages * self.launch

    def milliseconds(self, one: Pass) -> float:
        """Of a pass that Python launches."""
        return max(self.launching(one), self.lead + self.device(one))

    def bound(self, one: Pass) -> str:
        """What a pass that Python launches spends most of its time on."""
        if self.launching(one) > self.lead + self.device(one):
            return "host"
        return "exchange" if one.exposed(self.link, self.unit) > self.unit * one.work else "compute"

    def gigabytes(self, one: Pass) -> float:
        """Of the largest rank."""
        return self.fixed + self.slope * one.work


def pass_of(record: dict) -> Pass:
    """A measured pass as the model sees it."""
    times = {"encoder": 1, "processor": record["layers"], "decoder": 1}
    owned = record["owned"]
    sources = {"encoder": owned["decoder"], "processor": owned["processor"], "decoder": owned["processor"]}
    rows = {step: max(record["halo_rows"].get(step, (0, 0))) for step in times}
    width = record["heads"] * record["channels"]
    bytes_of = {"row_bytes": width * record["element_bytes"], "element_bytes": record["element_bytes"]}
    return Pass(times, sources, owned, record["edges"], rows, **bytes_of, ranks=record["ranks"], way=record["way"])


def fit(report: dict) -> Model:
    """Fit the model to results of benchmarks/sharding.py: passes on `FITTED` ranks, where nothing travels, and messages on `MESSAGES`.

    Raises
    ------
    ValueError
        When the results lack a pass, its replay, smaller passes, or messages of two sizes.
    """
    strong, replays, sizes = (passes_of(report, (part,), FITTED) for part in ("strong", "replay", "sizes"))
    sizes = [record for record in sizes if not replayed(record)]
    messages = passes_of(report, ("exchange",), MESSAGES)
    launched = [record for record in messages if not replayed(record)]
    if not (strong and replays and sizes) or len({record["message_bytes"] for record in launched}) < 2:
        raise ValueError(
            "results must hold a pass, its replay and smaller passes on one rank, and messages of two sizes on two, got "
            f"{len(strong)}, {len(replays)}, {len(sizes)} and {len(launched)}: run benchmarks/sharding.py with the parts "
            "strong, replay, sizes and exchange on two ranks"
        )
    unit = _factor([pass_of(record).work for record in replays], [record["ms"] for record in replays])
    lead = float(np.mean([record["ms"] - unit * pass_of(record).work for record in strong]))
    host = _host([(lead + unit * pass_of(record).work, record["ms"]) for record in sizes])
    measured = strong + sizes
    slope, fixed = _line([pass_of(record).work for record in measured], [record["peak_gb"] for record in measured])
    by_python, by_device = _link(launched), [record for record in messages if replayed(record)]
    link = _link(by_device) if len({record["message_bytes"] for record in by_device}) > 1 else by_python
    return Model(unit, lead, host, by_python.shortest, link, fixed, slope)


def passes_of(report: dict, parts: tuple[str, ...], ranks: tuple[int, ...]) -> list[dict]:
    """What was measured in these parts of the benchmark, on these numbers of ranks."""
    return [r for r in report["results"] if r["part"] in parts and r["ranks"] in ranks]


def _host(known: list[tuple[float, float]]) -> float:
    """What passes wait for: with the least relative errors of the larger of it and the first of each pair, against the second."""
    times = [ms for _, ms in sorted(known)]  # the fewer ms a device needs, the sooner a pass waits for Python
    hosts = [0.0] + [_factor([1.0] * count, times[:count]) for count in range(1, len(times) + 1)]
    return min(hosts, key=lambda host: sum((max(host, device) / ms - 1) ** 2 for device, ms in known))


def _factor(x: list[float], y: list[float]) -> float:
    """Slope of the line through 0 of least relative errors."""
    ratio = np.asarray(x, dtype=float) / np.asarray(y, dtype=float)
    return float(ratio.sum() / (ratio**2).sum())


def _line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Slope and intercept of the line of least relative errors."""
    scale = 1 / np.maximum(np.abs(np.asarray(y, dtype=float)), 1e-12)
    columns = np.stack([np.asarray(x, dtype=float), np.ones(len(x))], axis=1)
    norm = np.abs(columns).max(axis=0)
    (slope, intercept), *_ = np.linalg.lstsq(columns / norm * scale[:, None], np.asarray(y) * scale, rcond=None)
    return float(slope / norm[0]), float(intercept / norm[1])


def _link(messages: list[dict]) -> Link:
    """The link of least relative errors: the shorter messages take as long as each other, the longer ones in proportion to their bytes."""
    known = sorted((record["message_bytes"], record["ms"]) for record in messages)
    sizes, times = (np.asarray(column, dtype=float) for column in zip(*known, strict=True))

    def error(link: Link) -> float:
        return sum((link.message(size) / ms - 1) ** 2 for size, ms in known)

    cuts = range(1, len(known))
    links = [Link(_factor(np.ones(cut), times[:cut]), 1 / _factor(sizes[cut:], times[cut:])) for cut in cuts]
    return min(links, key=error)
