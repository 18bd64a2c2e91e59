import re

import pytest
import torch

from anemoi_gt.distributed import Partition, Ranges, destination_cost


def test_parts_cost_the_same_where_nodes_do():
    assert Ranges.balanced(torch.ones(12, dtype=torch.int64), 4).bounds == (0, 3, 6, 9, 12)


def test_a_heavy_node_gets_a_part_of_its_own():
    assert Ranges.balanced(torch.tensor([1, 1, 100, 1, 1]), 3).bounds == (0, 2, 3, 5)


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 64])
def test_no_part_exceeds_its_share_by_more_than_one_node(parts):
    cost = torch.randint(0, 50, (500,), generator=torch.Generator().manual_seed(parts))
    ranges = Ranges.balanced(cost, parts)
    heaviest = max(int(cost[ranges.of(rank)].sum()) for rank in range(parts))
    assert heaviest <= int(cost.sum()) / parts + 50


def test_more_parts_than_nodes_leave_some_empty():
    ranges = Ranges.balanced(torch.ones(2, dtype=torch.int64), 5)
    assert ranges.parts == 5 and ranges.size == 2 and sorted(ranges.counts) == [0, 0, 0, 1, 1]


def test_nothing_is_divided_into_nothing():
    assert Ranges.balanced(torch.ones(0, dtype=torch.int64), 3).counts == (0, 0, 0)


def test_costs_beyond_float_precision_are_cut_exactly():
    assert Ranges.balanced(torch.tensor([2**53, 1, 2**53 + 1]), 2).bounds == (0, 2, 3)


def test_fractional_costs_are_refused():
    with pytest.raises(ValueError, match="cost must be integer, .* got torch.float32"):
        Ranges.balanced(torch.ones(3), 2)


@pytest.mark.parametrize("bounds", [(0,), (1, 2), (0, 3, 2)])
def test_bounds_that_do_not_rise_from_zero_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds must rise from 0"):
        Ranges(bounds)


def test_even_parts_differ_by_one_at_most():
    assert Ranges.even(11, 4).counts == (3, 3, 3, 2)


def test_the_owner_of_a_number_has_it_in_its_range():
    ranges = Ranges((0, 2, 2, 5))
    assert ranges.owner(torch.arange(5)).tolist() == [0, 0, 2, 2, 2]


def test_a_node_costs_its_edges_and_a_constant():
    assert (destination_cost(torch.tensor([0, 3])).diff()).item() == 3
    assert destination_cost(torch.tensor([0])).item() > 0


def test_places_and_nodes_are_inverse():
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    partition = Partition(Ranges((0, 4, 9)), order)
    own = torch.cat([partition.nodes(rank) for rank in range(2)])
    assert partition.places(own).tolist() == list(range(9))


def test_a_line_of_nodes_is_cut_by_the_costs_along_it():
    cost, order = torch.tensor([9, 1, 1, 9]), torch.tensor([1, 2, 0, 3])
    assert Partition.balanced(cost, 2, order).ranges.bounds == (0, 3, 4)


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (torch.tensor([0, 1]), "order must hold 3 nodes, one for each place, int64 [3], got torch.int64 (2,)"),
        (torch.tensor([0.0, 2.0, 1.0]), "int64 [3], got torch.float32 (3,)"),
        ([0, 2, 1], "int64 [3], got list"),
        (torch.tensor([0, 2, 2]), "hold each node 0 .. 2 once, sorted it has 2 at place 1"),  # 1 would have no owner
        (torch.tensor([0, 1, 3]), "sorted it has 3 at place 2"),
        (torch.tensor([-1, 0, 1]), "sorted it has -1 at place 0"),
    ],
)
def test_an_order_that_is_no_permutation_is_refused(order, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        Partition(Ranges((0, 3)), order)


@pytest.mark.parametrize("bounds", [[0, 3], (0, 1.5, 3), torch.tensor([0, 3])])
def test_bounds_that_are_no_whole_numbers_are_refused(bounds):
    with pytest.raises(ValueError, match="bounds must be a tuple of int, got "):
        Ranges(bounds)


@pytest.mark.parametrize(
    ("cost", "said"),
    [
        (torch.tensor([3, -9, 4]), "cost must be 0 at least, got -9"),
        (torch.ones(3, 2, dtype=torch.int64), r"tensor \[N\], got torch.int64 \(3, 2\)"),
    ],
)
def test_costs_that_cannot_be_summed_along_a_line_are_refused(cost, said):
    with pytest.raises(ValueError, match=said):
        Ranges.balanced(cost, 2)


def test_a_partition_of_no_ranges_or_no_parts_is_refused():
    with pytest.raises(ValueError, match="ranges must be Ranges, got tuple"):
        Partition((0, 3))
    with pytest.raises(ValueError, match="the number of parts must be at least 1, got 0"):
        Ranges.even(3, 0)
