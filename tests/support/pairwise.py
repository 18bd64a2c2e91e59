"""A small table in which every pair of values from two columns occurs in some row."""

from itertools import combinations, product


def pairwise(**columns):
    """Return rows (dicts) with every pair of values of any two columns; greedy and deterministic."""
    names = sorted(columns, key=lambda name: -len(columns[name]))
    missing = set()
    for left, right in combinations(names, 2):
        for a, b in product(columns[left], columns[right]):
            missing.add((left, a, right, b))
    rows = []
    while missing:
        left, a, right, b = min(missing, key=repr)
        row = {left: a, right: b}
        for name in names:
            if name not in row:
                gains = []
                for value in columns[name]:
                    covered = _covered(row | {name: value}, names)
                    gains.append(len(covered & missing))
                row[name] = columns[name][gains.index(max(gains))]
        missing -= _covered(row, names)
        rows.append(row)
    return rows


def _covered(row, names):
    present = [name for name in names if name in row]
    return {(left, row[left], right, row[right]) for left, right in combinations(present, 2)}
