"""How much of the problem one program holds on chip. The only place that chooses tile shapes.

Measured on one H200, bf16, H = 16, C = 32 and 64, N320 and icosphere graphs: one warp on rows of all 16 heads, several
destinations a program where degrees are low, was fastest; wider tiles with more warps only where heads x channels ask for
them. Shapes depend on sizes alone, never on time, so a program gives the same bits on every run.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Shape of one program of a row kernel."""

    heads: int  # heads of a program, a power of two
    channels: int  # channels padded to a power of two
    nodes: int  # nodes that a program takes one after the other
    num_warps: int


ROW_ELEMENTS = 1024  # heads x channels of a program: 32 numbers for each thread of one warp
EDGES_PER_PROGRAM = 12  # below this many a program spends its time on beginning and end
NODE_BLOCK = 32  # nodes of a program of the contractions over the attributes


def next_power_of_two(n: int) -> int:
    """Smallest power of two that is not below `n` >= 1."""
    return 1 << (n - 1).bit_length()


def row_tile(heads: int, channels: int, num_nodes: int, num_edges: int, attributes: int = 0) -> Tile:
    """Tile of a kernel that walks the edges of its nodes, reading a row of heads x channels for each.

    Parameters
    ----------
    heads, channels : int
    num_nodes, num_edges : int
        Their ratio, the mean degree, decides how many nodes share a program.
    attributes : int
        Columns of a second array [heads, attributes] that the kernel holds.
    """
    wide = next_power_of_two(channels)
    widest = max(wide, next_power_of_two(max(1, attributes)))
    group = min(next_power_of_two(heads), max(1, ROW_ELEMENTS // widest))
    degree = num_edges / max(num_nodes, 1)
    nodes = min(8, next_power_of_two(max(1, int(EDGES_PER_PROGRAM / max(degree, 1.0)))))
    return Tile(group, wide, nodes, num_warps=max(1, min(8, group * wide // ROW_ELEMENTS)))


@dataclass(frozen=True)
class ContractionTile:
    """Shape of one program of the kernels that contract over the attributes."""

    nodes: int
    channels: int
    attributes: int  # attributes padded to a power of two, at least 16 for a matrix product
    num_warps: int


def contraction_tile(channels: int, attributes: int) -> ContractionTile:
    """Tile of a product of rows of `channels` with a weight of `attributes` columns; it fits the shared memory."""
    columns = max(16, next_power_of_two(attributes))
    wide = max(16, min(next_power_of_two(channels), 64, 4096 // columns))
    return ContractionTile(NODE_BLOCK, wide, columns, num_warps=4)
