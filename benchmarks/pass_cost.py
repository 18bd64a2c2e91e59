"""What a pass of a divided model costs, and how that is fitted to measurements.

    device    = compute + sum over steps of exposed                a pass, forward and backward, of the busiest rank, replayed
    t         = max(host + messages * launch, lead + device)       the same launched by Python
    compute   = floor + data * D + hidden * layers * H             D own data nodes, H own hidden nodes
    memory    = floor + data * D + hidden * layers * H             in GB, with constants of its own
    edge      = hidden / (NODE_COST + mean in-degree of the processor's graph)
    message   = max(shortest, bytes / bandwidth)
    exposed   = 2 messages                          after exchange, of each step: forward and backward
                max(0, 2 messages - edge * E)       overlapped: hidden behind the E edges of the step, which may be cut for nothing
                8 messages of all own nodes         heads: query, key with value, output, attributes; there and, backward, back
    rows      = halo of the real partition, or of the next smaller grid, grown as it grew to that

Steps are encoder, each processor layer, decoder. `floor` is what kernels cost however few nodes they have, `data` pays encoder, decoder and
embeddings, `hidden` a layer of the processor. All three are fitted to replays of three grids or more on one rank, which leave nothing to the
host; those of memory to the same passes launched by Python; `lead` is what the largest of them takes longer when Python launches it; `host`
is fitted to smaller ones, which wait for Python; `shortest` and `bandwidth` to messages between two that were replayed; `launch` to the
shorter of those that Python launched. Where no two sizes were replayed, launched ones stand for both. All by least squares of relative
errors. So every pass on several ranks is a check.
"""

from dataclasses import dataclass

import numpy as np
from sharding_records import replayed

from anemoi_gt.distributed.partition import NODE_COST

FITTED, MESSAGES = (1,), (2,)  # ranks
FITTED_WAY = "after_exchange"
DEPENDENT = 0.01  # where a relative error of 1% in what was measured can change a constant by as much as the constant
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
    def counts(self) -> tuple[float, float, float]:
        """What the constants of a `Cost` are for: 1 pass, own data nodes, own hidden nodes of all layers."""
        return 1.0, self.destinations["decoder"], self.times["processor"] * self.destinations["processor"]

    @property
    def in_degree(self) -> float:
        """Mean number of edges into an own hidden node, in the processor's graph."""
        return self.edges["processor"] / self.destinations["processor"]

    @property
    def messages(self) -> int:
        """How many a rank sends, forward and backward."""
        return sum(times * len(self._sizes(step)) for step, times in self.times.items())

    def exposed(self, link: Link, edge: float) -> float:
        """Milliseconds in which nothing is computed, where an edge takes `edge` of them."""
        return sum(times * self._exposed(step, link, edge) for step, times in self.times.items())

    def _exposed(self, step: str, link: Link, edge: float) -> float:
        sent = sum(map(link.message, self._sizes(step)))
        return max(0.0, sent - edge * self.edges[step]) if self.way == "overlapped" else sent

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
class Cost:
    """What a pass takes in ms or in GB: however small it is, for each data node, for each hidden node and layer."""

    floor: float
    data: float
    hidden: float

    def of(self, one: Pass) -> float:
        """Milliseconds or GB of a pass: floor + data * data nodes + hidden * layers * hidden nodes."""
        constants = self.floor, self.data, self.hidden
        return sum(constant * count for constant, count in zip(constants, one.counts, strict=True))


@dataclass(frozen=True)
class Model:
    """What is fitted."""

    compute: Cost  # ms
    memory: Cost  # GB
    lead: float  # ms for a pass
    host: float  # ms for a pass
    launch: float  # ms for a message
    link: Link

    def device(self, one: Pass) -> float:
        """Milliseconds of a pass that is replayed."""
        return self.compute.of(one) + self.exposed(one)

    def exposed(self, one: Pass) -> float:
        """Milliseconds in which nothing is computed."""
        return one.exposed(self.link, self.edge(one))

    def edge(self, one: Pass) -> float:
        """Milliseconds of an edge, where a hidden node costs as much as `NODE_COST` edges, and its in-edges besides."""
        return self.compute.hidden / (NODE_COST + one.in_degree)

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
        return "exchange" if self.exposed(one) > self.compute.of(one) else "compute"


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
        When the results lack a pass, its replay, smaller passes, or messages of two sizes, or have less than three grids.
    """
    by_device, by_python = replays(report), launches(report)
    strong, sizes = ([record for record in by_python if record["part"] == part] for part in ("strong", "sizes"))
    replay = [record for record in by_device if record["part"] == "replay"]
    messages = passes_of(report, ("exchange",), MESSAGES)
    launched = [record for record in messages if not replayed(record)]
    if not (strong and replay and sizes) or len({record["message_bytes"] for record in launched}) < 2:
        raise ValueError(
            "results must hold a pass, its replay and smaller passes on one rank, and messages of two sizes on two, got "
            f"{len(strong)}, {len(replay)}, {len(sizes)} and {len(launched)}: run benchmarks/sharding.py with the parts "
            "strong, replay, sizes and exchange on two ranks"
        )
    compute, memory = _cost(by_device, "ms"), _cost(by_python, "peak_gb")
    lead = _mean(strong) - _mean(replay)
    host = _host([(lead + compute.of(pass_of(record)), record["ms"]) for record in sizes])
    short, again = _link(launched), [record for record in messages if replayed(record)]
    link = _link(again) if len({record["message_bytes"] for record in again}) > 1 else short
    return Model(compute, memory, lead, host, short.shortest, link)


def replays(report: dict) -> list[dict]:
    """Replayed passes on one rank, to which time is fitted."""
    found = passes_of(report, ("replay", "sizes"), FITTED)
    return [record for record in found if replayed(record) and record["way"] == FITTED_WAY]


def launches(report: dict) -> list[dict]:
    """Passes on one rank that Python launches, to which memory is fitted."""
    found = passes_of(report, ("strong", "sizes"), FITTED)
    return [record for record in found if not replayed(record) and record["way"] == FITTED_WAY]


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


def _cost(records: list[dict], name: str) -> Cost:
    """Constants of least relative errors of what records hold under a name."""
    counts = np.array([pass_of(record).counts for record in records])
    relative = counts / np.array([[record[name]] for record in records])
    norm = np.linalg.norm(relative, axis=0)
    constants, _, rank, _ = np.linalg.lstsq(relative / norm, np.ones(len(records)), rcond=DEPENDENT)
    if rank < counts.shape[1]:
        grids = sorted({(int(data), int(hidden)) for _, data, hidden in counts})
        raise ValueError(
            f"{name} on one rank must be of three grids or more whose data and hidden nodes are not near one line, got {grids} (hidden "
            "nodes of all layers): run benchmarks/sharding.py with the parts strong, replay and sizes, which have such grids"
        )
    return Cost(*(constants / norm).tolist())


def _mean(records: list[dict]) -> float:
    return float(np.mean([record["ms"] for record in records]))


def _link(messages: list[dict]) -> Link:
    """The link of least relative errors: the shorter messages take as long as each other, the longer ones in proportion to their bytes."""
    known = sorted((record["message_bytes"], record["ms"]) for record in messages)
    sizes, times = (np.asarray(column, dtype=float) for column in zip(*known, strict=True))

    def error(link: Link) -> float:
        return sum((link.message(size) / ms - 1) ** 2 for size, ms in known)

    cuts = range(1, len(known))
    links = [Link(_factor(np.ones(cut), times[:cut]), 1 / _factor(sizes[cut:], times[cut:])) for cut in cuts]
    return min(links, key=error)
