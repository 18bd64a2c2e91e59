"""The modules of the room read each other in one direction."""

from graphlib import TopologicalSorter
from pathlib import Path

from test_house import imports

from anemoi_gt import explanation


def test_no_module_of_the_room_leads_back_to_itself():
    paths = Path(explanation.__file__).parent.glob("*.py")
    names = {f"{explanation.__name__}.{path.stem}".removesuffix(".__init__"): path for path in paths}
    reads = {name: names.keys() & imports(path) for name, path in names.items()}
    order = list(TopologicalSorter(reads).static_order())  # raises CycleError, which names the modules
    assert set(order) == set(names) and order[-1] == explanation.__name__
