"""The order of tests for several workers."""

from types import SimpleNamespace

import pytest
from support.schedule import long_first


def module(path, number, *markers):
    """Return stand-ins for tests of a module, of which the last has markers."""
    tests = []
    for index in range(number):
        names = markers if index == number - 1 else ()
        tests.append(SimpleNamespace(path=path, index=index, get_closest_marker=names.__contains__))
    return tests


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_worker_begins_with_modules_of_long_tests_and_every_test_runs_once(workers):
    items = module("short", 50) + module("compiled", 20, "compiled")
    for name in ("ranks", "pages", "process"):
        items += module(name, 5, name)
    ordered = long_first(items, workers)
    assert sorted(map(id, ordered)) == sorted(map(id, items))
    begins = 0
    for worker in range(workers):  # as --dist worksteal divides them
        assert ordered[begins].path in ("ranks", "pages", "process")
        begins += (len(ordered) - begins) // (workers - worker)
    for path in ("ranks", "pages", "process"):  # a module stays in order
        assert [item.index for item in ordered if item.path == path] == list(range(5))
