import re

import pytest
import torch
from support.refusals import raises

from anemoi_gt.distributed import Partition, Ranges, destination_cost


@pytest.mark.parametrize(
    ("cost", "num_ranks", "bounds"),
    [
        (torch.ones(12, dtype=torch.int64), 4, (0, 3, 6, 9, 12)),
        (
            torch.tensor([1, 1, 100, 1, 1]),
            3,
            (0, 2, 3, 5),
        ),  # a rank of its own for the expensive node
        (torch.ones(0, dtype=torch.int64), 3, (0, 0, 0, 0)),
        (torch.tensor([2**53, 1, 2**53 + 1]), 2, (0, 2, 3)),  # beyond the integers of float64
    ],
)
def test_ranges_have_equal_cost(cost, num_ranks, bounds):
    assert Ranges.balanced(cost, num_ranks).bounds == bounds


def test_ranges_may_be_empty_or_even_and_own_their_positions():
    ranges = Ranges.balanced(torch.ones(2, dtype=torch.int64), 5)
    assert ranges.num_ranks == 5
    assert ranges.size == 2
    assert sorted(ranges.counts) == [0, 0, 0, 1, 1]
    assert Ranges.even(11, 4).counts == (3, 3, 3, 2)
    assert Ranges((0, 2, 2, 5)).owner(torch.arange(5)).tolist() == [0, 0, 2, 2, 2]


def test_a_destination_costs_its_edges_and_a_constant():
    assert destination_cost(torch.tensor([0, 3])).diff().item() == 3
    assert destination_cost(torch.tensor([0])).item() > 0


def test_a_node_order_is_split_by_the_costs_along_it_and_positions_and_nodes_are_inverse():
    cost = torch.tensor([9, 1, 1, 9])
    order = torch.tensor([1, 2, 0, 3])
    partition = Partition.balanced(cost, 2, order)
    assert partition.ranges.bounds == (0, 3, 4)
    nodes = torch.cat([partition.nodes(0), partition.nodes(1)])
    assert partition.positions(nodes).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ranges((0,)), "bounds must start at 0 and be sorted ascending"),
        (lambda: Ranges((1, 2)), "bounds must start at 0 and be sorted ascending"),
        (lambda: Ranges((0, 3, 2)), "bounds must start at 0 and be sorted ascending"),
        (
            lambda: Ranges.balanced(torch.ones(3), 2),
            "cost must be integer, so that every rank finds the same bounds",
        ),
    ],
)
def test_wrong_ranges_are_refused(make, message):
    raises(make, re.escape(message))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        # 1 has no owner
        (torch.tensor([0, 2, 2]), "hold each node 0 .. 2 once, got 2 at position 1 when sorted"),
        (torch.tensor([0, 1, 3]), "got 3 at position 2"),
        (torch.tensor([-1, 0, 1]), "got -1 at position 0"),
    ],
)
def test_an_order_that_is_not_a_permutation_is_refused(order, message):
    raises(lambda: Partition(Ranges((0, 3)), order), re.escape(message))
