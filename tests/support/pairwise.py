"""A small table in which every two values of different columns are in some row."""

from itertools import combinations, product


def pairwise(**columns):
    """Return rows (dicts) with every pair of values of any two columns; greedy and deterministic."""
    names = sorted(columns, key=lambda name: -len(columns[name]))
    pairs = combinations(names, 2)
    missing = {
        (left, a, right, b)
        for left, right in pairs
        for a, b in product(columns[left], columns[right])
    }
    rows = []
    while missing:
        left, a, right, b = min(missing, key=repr)
        row = {left: a, right: b}
        for name in names:
            if name not in row:
                gains = [
                    len(_covered(row | {name: value}, names) & missing) for value in columns[name]
                ]
                row[name] = columns[name][gains.index(max(gains))]
        missing -= _covered(row, names)
        rows.append(row)
    return rows


def _covered(row, names):
    present = [name for name in names if name in row]
    return {(left, row[left], right, row[right]) for left, right in combinations(present, 2)}
