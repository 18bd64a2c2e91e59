"""The order of tests for several workers of pytest-xdist, so that they end at the same time."""

# Markers of tests that take seconds or wait for processes.
LONG = {"application", "pages", "process", "ranks", "upstream"}


def long_first(items, workers):
    """Return the tests in an order in which each worker begins with its share of the modules with long tests.

    With `--dist worksteal` a worker begins with one of as many equal parts of the tests as there are
    workers. At the end they steal tests from each other, which should be short then.
    """
    modules = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    parts = [[] for _ in range(workers)]
    rest = []
    for tests in modules.values():
        if any(item.get_closest_marker(name) for item in tests for name in LONG):
            min(parts, key=len).extend(tests)
        else:
            rest.extend(tests)
    ordered = []
    for number, part in enumerate(parts):
        size = (len(items) - len(ordered)) // (workers - number)
        short = max(size - len(part), 0)
        ordered += part + rest[:short]
        del rest[:short]
    return ordered
