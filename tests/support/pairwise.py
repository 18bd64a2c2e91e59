"""A small table in which every two values of different columns are in some row."""

from itertools import combinations, product


def pairwise(**columns):
    """Return rows (dicts) with every pair of values of any two columns; greedy and deterministic."""
    names = sorted(columns, key=lambda name: -len(columns[name]))
    missing = {
        (left, a, right, b)
        for left, right in combinations(names, 2)
        for a, b in product(columns[left], columns[right])
    }  # fmt: skip
    rows = []
    while missing:
        left, a, right, b = min(missing, key=repr)
        row = {left: a, right: b}
        for name in names:
            if name not in row:
                row[name] = max(columns[name], key=_gain(row, name, names, missing))
        missing -= _covered(row, names)
        rows.append(row)
    return rows


def _gain(row, name, names, missing):
    return lambda value: len(_covered(row | {name: value}, names) & missing)


def _covered(row, names):
    present = [name for name in names if name in row]
    return {(left, row[left], right, row[right]) for left, right in combinations(present, 2)}
