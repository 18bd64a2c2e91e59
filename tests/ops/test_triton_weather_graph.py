"""The Triton kernels on the graph of a weather model: encoder, processor and decoder of an O16 grid.

The interpreter takes some 20 ms for an edge, forward and backward, so on a CPU the graph is cut to the nodes nearest to
a point; on a GPU it is whole: 1,600 grid points, 162 mesh nodes.
"""

import pytest
import torch
from support.accuracy import assert_accurate
from support.oracle import make_problem
from support.run import attend, structure

from anemoi_gt.data.graphs import icosphere_graph
from anemoi_gt.data.grids import octahedral

EDGES = (("data", "to", "hidden"), ("hidden", "to", "hidden"), ("hidden", "to", "data"))
NEAR = {"data": 64, "hidden": 12}  # nodes that are left on a CPU
HEADS, CHANNELS, EDGE_DIM = 1, 16, 11
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")  # numpy's, of the interpreter


@pytest.fixture(scope="module")
def weather_graph(kernel_device):
    graph = icosphere_graph(octahedral(16), refinement=2)
    if kernel_device.type == "cuda":
        return graph
    return graph.subgraph({name: nearest(graph[name].x, count) for name, count in NEAR.items()})


def nearest(x, count):
    """The `count` nodes nearest to 45 degrees north, 0 east; x [N, 2] in radians."""
    lat, lon = x.unbind(1)
    cosine = lat.sin() * 0.5**0.5 + lat.cos() * lon.cos() * 0.5**0.5
    return cosine.topk(count).indices.sort().values


@pytest.mark.parametrize("edge_type", EDGES, ids="-".join)
def test_encoder_processor_and_decoder_are_as_accurate_as_plain_pytorch(weather_graph, edge_type, kernel_device):
    source, _, destination = edge_type
    edges = weather_graph[edge_type]
    sizes = (weather_graph[source].num_nodes, weather_graph[destination].num_nodes)
    graph = (edges.edge_index, sizes)
    assert edges.edge_index.shape[1] >= 3 * min(sizes)
    problem = make_problem(graph, HEADS, CHANNELS, EDGE_DIM, dtype=torch.bfloat16)
    problem.edge_attr[:, :3] = torch.cat([edges.edge_length, edges.edge_dirs], 1)  # the other columns are trained ones
    assert_accurate(attend(problem, structure(graph, kernel_device), "triton"), problem, torch.bfloat16)
