"""How many rows of other ranks a rank reads, from the real graphs, without any rank: what the cost model of docs/distributed.md stands on.

python benchmarks/halo_rows.py --grids N320:6 O640:7 --ranks 2 4 8 16 64 --out benchmarks/results/halo_rows.json
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import grid
from anemoi_gt.distributed import Partition, destination_cost
from anemoi_gt.graph.ordering import morton_order

EDGES = {"encoder": ("data", "hidden"), "processor": ("hidden", "hidden"), "decoder": ("hidden", "data")}
LINES = ("by number", "Morton")


def unit_vectors(lat_lon: Tensor) -> Tensor:
    """Latitude and longitude [N, 2] in radians to points [N, 3]."""
    lat, lon = lat_lon.double().unbind(1)
    return torch.stack([lat.cos() * lon.cos(), lat.cos() * lon.sin(), lat.sin()], dim=1)


def halo_rows(edge_index: Tensor, sources: Partition, destinations: Partition) -> list[int]:
    """Rows that each rank reads of others'."""
    src, dst = sources.positions(edge_index[0]), destinations.positions(edge_index[1])
    reader, owner = destinations.ranges.owner(dst), sources.ranges.owner(src)
    foreign = torch.unique((reader * sources.size + src)[reader != owner])
    return torch.bincount(foreign // max(sources.size, 1), minlength=sources.ranges.num_ranks).tolist()


def measure(name: str, refinement: int, counts: list[int]) -> list[dict]:
    """For each line of nodes and number of ranks: the largest halo of a rank by step, and the most nodes that one owns."""
    graph = icosphere_graph(grid(name), refinement=refinement)
    edges = {step: graph[src, "to", dst].edge_index for step, (src, dst) in EDGES.items()}
    sizes = {kind: graph[kind].x.shape[0] for kind in ("data", "hidden")}
    degrees = {
        kind: torch.bincount(edges[step][1], minlength=sizes[kind])
        for kind, step in (("data", "decoder"), ("hidden", "processor"))
    }
    facts = {"grid": name, "refinement": refinement, "nodes": sizes}
    facts["edges"] = {step: index.shape[1] for step, index in edges.items()}
    found = []
    for line in LINES:
        orders = {kind: morton_order(unit_vectors(graph[kind].x)) if line == "Morton" else None for kind in sizes}
        for ranks in counts:
            owners = {kind: Partition.balanced(destination_cost(degrees[kind]), ranks, orders[kind]) for kind in sizes}
            rows = {step: max(halo_rows(edges[step], owners[src], owners[dst])) for step, (src, dst) in EDGES.items()}
            owned = {kind: max(owners[kind].ranges.counts) for kind in sizes}
            found.append(facts | {"line": line, "ranks": ranks, "rows": rows, "owned": owned})
            print(name, line, ranks, *rows.values(), "|", *owned.values(), flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print a line for each line of nodes and number of ranks, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grids", nargs="+", default=["N320:6"], metavar="GRID:REFINEMENT")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--out", type=Path, help="JSON file, for benchmarks/cost_model.py")
    options = parser.parse_args(arguments)
    print("grid line ranks encoder processor decoder | data hidden")
    found = []
    for name, _, refinement in (asked.partition(":") for asked in options.grids):
        found += measure(name, int(refinement), options.ranks)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
