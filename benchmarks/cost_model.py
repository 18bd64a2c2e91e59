"""What a pass should cost on many GPUs: fitted to one of them and to messages between two, checked on 2 and more, carried on to grids that
nobody has measured here.

    python benchmarks/cost_model.py --results benchmarks/results/sharding_h200x2.json --halo benchmarks/results/halo_rows.json

    t         = host + unit * work + sum over steps of exposed              one pass, forward and backward, of the busiest rank
    work      = sum over steps of NODE_COST * destinations + edges          steps: encoder, each processor layer, decoder
    message   = latency + bytes / bandwidth
    exposed   = max(0, 2 messages - unit * edges)   overlapped: hidden behind the edges of the step, forward and backward
                2 messages                          after exchange
                8 messages of all own nodes         heads: query, key with value, output, attributes; there and, backward, back
    rows      = c sqrt(nodes of a rank)             halo: what lies around them; c from real partitions, the largest that was found
    memory    = fixed + slope * work

`unit`, `host`, `fixed`, `slope` are fitted to passes of several sizes on one rank, `latency` and `bandwidth` to messages between two, by least
squares of relative errors. So every pass on several ranks is a check.
Beyond one host, latency and bandwidth are those of the command line: assumed, not measured.
"""

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "src")]

from anemoi_gt.distributed.partition import NODE_COST  # noqa: E402

FITTED, MESSAGES, CHECKED = (1,), (2,), (2, 4, 8)  # ranks
EDGE_DIM = 11
WHERE = {"encoder": "data", "processor": "hidden", "decoder": "hidden"}  # whose rows travel
GRIDS = {  # data nodes, hidden nodes
    "9 km (O1280, icosphere 8)": (6_599_680, 655_362),
    "4 km (O2560, icosphere 9)": (26_306_560, 2_621_442),
}
RANKS = (8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class Link:
    """How messages travel: ms, and bytes in a ms."""

    latency: float
    bandwidth: float

    def message(self, size: float) -> float:
        """Milliseconds of a message of `size` bytes to all others together."""
        return self.latency + size / self.bandwidth


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

    def exposed(self, link: Link, unit: float) -> float:
        """Milliseconds in which nothing is computed."""
        if self.ranks == 1:
            return 0.0
        return sum(times * self._exposed(step, link, unit) for step, times in self.times.items())

    def _exposed(self, step: str, link: Link, unit: float) -> float:
        if self.way == "heads":
            share = (self.ranks - 1) / self.ranks * self.row_bytes
            nodes = (self.destinations[step], 2 * self.sources[step], self.destinations[step])
            attributes = self.edges[step] * (self.ranks - 1) * EDGE_DIM * self.element_bytes
            return 2 * (sum(link.message(share * count) for count in nodes) + link.message(attributes))
        both = 2 * link.message(self.rows[step] * self.row_bytes)
        return max(0.0, both - unit * self.edges[step]) if self.way == "overlapped" else both


@dataclass(frozen=True)
class Model:
    """What is fitted."""

    unit: float  # ms for an edge
    host: float  # ms for a pass
    link: Link
    fixed: float  # GB
    slope: float  # GB for an edge

    def parts(self, one: Pass) -> dict[str, float]:
        """Milliseconds of a pass by what they go to."""
        compute = self.unit * one.work
        return {"compute": compute, "exchange": one.exposed(self.link, self.unit), "host": self.host}

    def milliseconds(self, one: Pass) -> float:
        """Of a pass."""
        return sum(self.parts(one).values())

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
        When the results lack passes of two sizes, or messages.
    """
    passes = [(pass_of(record), record) for record in passes_of(report, FITTED)]
    messages = [record for record in report["results"] if record["part"] == "exchange" and record["ranks"] in MESSAGES]
    if len({one.work for one, _ in passes}) < 2 or len({record["message_bytes"] for record in messages}) < 2:
        raise ValueError(
            f"results must hold passes of two sizes on one rank and messages of two sizes on two, got {len(passes)} passes and "
            f"{len(messages)} messages: run benchmarks/sharding.py with the parts strong, sizes and exchange on two ranks"
        )
    inverse, latency = _line([m["message_bytes"] for m in messages], [m["ms"] for m in messages])
    link = Link(latency, 1 / inverse)
    work = [one.work for one, _ in passes]
    unit, host = _line(work, [record["ms"] for _, record in passes])
    slope, fixed = _line(work, [record["peak_gb"] for _, record in passes])
    return Model(unit, host, link, fixed, slope)


def passes_of(report: dict, ranks: tuple[int, ...]) -> list[dict]:
    """The measured passes of our model on these numbers of ranks."""
    return [r for r in report["results"] if r["part"] in ("strong", "sizes") and r["ranks"] in ranks]


def check(model: Model, report: dict) -> list[tuple[dict, float]]:
    """Measured passes on `CHECKED` ranks, with what the model says, in ms; it was not fitted to them."""
    return [(record, model.milliseconds(pass_of(record))) for record in passes_of(report, CHECKED)]


def halo_constants(found: list[dict]) -> dict[str, float]:
    """C of rows = c sqrt(nodes of a rank) by step: the largest over the real partitions along the Morton curve."""
    along = [record for record in found if record["line"] == "Morton" and record["ranks"] > 2]
    return {
        step: max(record["rows"][step] / (record["nodes"][kind] / record["ranks"]) ** 0.5 for record in along)
        for step, kind in WHERE.items()
    }


def predicted(nodes: tuple[int, int], ranks: int, way: str, found: list[dict], like: Pass) -> Pass:
    """A pass on a grid of so many data and hidden nodes, with the layers and widths of another, edges and halos as in real graphs."""
    data, hidden = nodes
    largest = max(found, key=lambda record: record["nodes"]["data"])
    constants, count = halo_constants(found), {"data": data / ranks, "hidden": hidden / ranks}
    per = {"encoder": "data", "processor": "hidden", "decoder": "data"}
    edges = {step: largest["edges"][step] / largest["nodes"][kind] * count[kind] for step, kind in per.items()}
    rows = {step: min(c * count[WHERE[step]] ** 0.5, nodes[WHERE[step] == "hidden"]) for step, c in constants.items()}
    return replace(
        like,
        sources={step: count[kind] for step, kind in WHERE.items()},
        destinations={"encoder": count["hidden"], "processor": count["hidden"], "decoder": count["data"]},
        edges=edges,
        rows=rows,
        ranks=ranks,
        way=way,
    )


def table(model: Model, found: list[dict], like: dict, network: Link, host_size: int) -> list[str]:
    """Lines for every grid and number of ranks: the faster strategy, its time, what bounds it, and memory."""
    heads, like = like["heads"], pass_of(like)
    lines = [
        "| | GPUs | strategy | ms a pass | compute | exchange | host | bound by | GB of a GPU |",
        "|" + " --- |" * 9,
    ]
    for name, nodes in GRIDS.items():
        for ranks in RANKS:
            here = replace(model, link=model.link if ranks <= host_size else network)
            ways = ["overlapped"] + (["heads"] if ranks <= heads else [])
            best = min((predicted(nodes, ranks, way, found, like) for way in ways), key=here.milliseconds)
            parts = here.parts(best)
            cells = [name, ranks, "heads" if best.way == "heads" else "edges", f"{sum(parts.values()):.1f}"]
            cells += [f"{parts[part]:.2f}" for part in ("compute", "exchange", "host")]
            cells += [max(parts, key=parts.get), f"{here.gigabytes(best):.1f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Slope and intercept of the line of least relative errors."""
    scale = 1 / np.maximum(np.abs(np.asarray(y, dtype=float)), 1e-12)
    columns = np.stack([np.asarray(x, dtype=float), np.ones(len(x))], axis=1)
    norm = np.abs(columns).max(axis=0)
    (slope, intercept), *_ = np.linalg.lstsq(columns / norm * scale[:, None], np.asarray(y) * scale, rcond=None)
    return float(slope / norm[0]), float(intercept / norm[1])


def main(arguments: list[str] | None = None) -> None:
    """Print the fit, the check, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", required=True, help="of benchmarks/sharding.py")
    parser.add_argument("--halo", type=Path, required=True, help="of benchmarks/halo_rows.py")
    parser.add_argument("--host-size", type=int, default=8, help="GPUs that the measured link joins")
    parser.add_argument("--network-gb-per-s", type=float, default=50.0, help="of a GPU, beyond one host; assumed")
    parser.add_argument("--network-latency-us", type=float, default=30.0, help="of a message beyond one host; assumed")
    options = parser.parse_args(arguments)
    reports = [json.loads(path.read_text()) for path in options.results]
    report = {"results": [record for one in reports for record in one["results"]]}
    found, model = json.loads(options.halo.read_text()), fit(report)
    print(
        f"unit {1e6 * model.unit:.4f} ns an edge, host {model.host:.3f} ms, memory {model.fixed:.2f} GB + {1e9 * model.slope:.3f} B an edge"
    )
    print(f"link {1e3 * model.link.latency:.1f} us, {model.link.bandwidth / 1e6:.1f} GB/s")
    for record, ms in check(model, report):
        off = ms / record["ms"] - 1
        print(
            f"{record['grid']} on {record['ranks']}, {record['way']}: {record['ms']:.2f} ms, model {ms:.2f}, {off:+.1%}"
        )
    network = Link(options.network_latency_us / 1e3, options.network_gb_per_s * 1e6)
    print(f"beyond {options.host_size} GPUs, assumed: {options.network_latency_us} us, {options.network_gb_per_s} GB/s")
    largest = max(passes_of(report, FITTED), key=lambda record: pass_of(record).work)
    print("\n".join(table(model, found, largest, network, options.host_size)))


if __name__ == "__main__":
    main()
