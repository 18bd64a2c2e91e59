"""Fields by their keys, and their arrangement into variables, valid times and members.

A reader returns a list of `Series`: fields that differ only in their valid time. All their keys are
equal, or they are two variables:

    key                 parameter, levels, interval, and all else that the file says of a field
    units, grid         the same within a variable
    member, valid time  each combination once, and the same other keys at all times of a member
    experiment version  the same within a variable, or changes with time

`group` makes variables of them, and `arrange` puts variables side by side. Both refuse what is
twice, missing or mixed, and name the two fields and their keys that differ.
"""

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial, reduce
from itertools import compress
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from anemoi_gt.data.nodes import Nodes

log = logging.getLogger(__name__)

TOLERANCE = 1e-3  # degrees, about 100 m; rounding coordinates to float32 costs 1% of that
INSTANT = "instant"  # the interval of a field that is neither an accumulation nor a mean
# Suffixes of names, where a parameter is on several kinds of level; "" is followed by the value.
KINDS = {"pressure": "", "surface": "sfc", "model level": "ml", "height": "h", "depth": "d"}


class FieldError(ValueError):
    """A file can be read, and its fields cannot be used."""


class Level(NamedTuple):
    """A vertical level or layer, or the position along another dimension but grid and time.

    `kind` is one of `KINDS` or the name of the file for it, "" if the file says nothing. `value` is
    in hPa for pressure, in m for heights and depths, otherwise as in the file, text or a number;
    None if the kind has no value.
    `label` is the value as the file has it, for names, and `text` describes the level, with its
    units. `bottom` is the second surface of a layer.
    """

    kind: str
    value: float | str | None
    label: str
    text: str
    bottom: float | None = None

    def matches(self, other: "Level") -> bool:
        """Return whether two levels are the same, as far as both files tell."""
        same_kind = self.kind == other.kind or "" in (self.kind, other.kind)
        # or text: heights and depths of checkpoints of 0.5.0 are in the units of their file
        same_value = self.value == other.value or self.text == other.text
        return same_kind and same_value and self.bottom == other.bottom


def rounded(value: float) -> float:
    """Return a value to six digits, so that 0.07 of float32 and of float64 are one level."""
    return float(f"{value:.6g}")


OtherKeys = tuple[tuple[str, Any], ...]  # names and values


class Key(NamedTuple):
    """Keys that identify a variable within a file.

    `interval` is the length and kind of an accumulation or mean, such as "6h accum", `INSTANT`, or
    "" if the file says nothing. `levels` has an entry for each dimension. `others` are all other
    keys of the field; None if they are unknown, as in checkpoints of 0.4.0.
    """

    parameter: str
    levels: tuple[Level, ...] = ()
    interval: str = ""
    others: OtherKeys | None = ()

    def matches(self, other: "Key") -> bool:
        """Return whether two keys are the same, as far as both files tell."""
        return self.parameter == other.parameter and not self.differences(other)

    def differences(self, other: "Key") -> list[str]:
        """Return how two keys differ besides the parameter, as far as both files tell."""
        levels, other_levels = self.levels, other.levels
        if self.others is None or other.others is None:  # 0.4.0 knew one surface of a layer
            levels, other_levels = (
                tuple(level._replace(bottom=None) for level in both)
                for both in (levels, other_levels)
            )
        if not levels or not other_levels:
            # Files that do not tell the level of a field at the surface are common.
            same_levels = all(level.value is None for level in levels + other_levels)
        else:
            same_levels = len(levels) == len(other_levels) and all(
                level.matches(same) for level, same in zip(levels, other_levels, strict=True)
            )
        differences = []
        if not same_levels:
            differences.append(_not("level", *(_levels_text(key) for key in (self, other))))
        if self.interval and other.interval and self.interval != other.interval:
            differences.append(_not("interval", self.interval, other.interval))
        mine, theirs = dict(self.others or ()), dict(other.others or ())
        for name, value in mine.items():
            if name in theirs and theirs[name] != value:
                differences.append(_not(name, value, theirs[name]))
        return differences

    def text(self) -> str:
        """Return level and interval, such as "500 hPa", or "" if the file has neither."""
        words = [_levels_text(self)]
        if self.interval != INSTANT:
            words.append(self.interval)
        return ", ".join(word for word in words if word)


def _levels_text(key: Key) -> str:
    return ", ".join(level.text for level in key.levels if level.text)


def _not(name: str, value: object, other: object) -> str:
    """Return two values of a key, such as "percentileValue 10, not 90"."""
    texts = ["none" if text in ("", None) else str(text) for text in (value, other)]
    return f"{name} {texts[0]}, not {texts[1]}"


def told_apart(one: OtherKeys, other: OtherKeys) -> str:
    """Return the first five keys that differ or that one of two lacks, for messages, or ""."""
    mine, theirs = dict(one), dict(other)
    names = [name for name in mine | theirs if mine.get(name) != theirs.get(name)]
    return "; ".join(_not(name, mine.get(name), theirs.get(name)) for name in names[:5])


@dataclass(frozen=True, eq=False)
class Grid:
    """N nodes, and the dimensions that they have in the file.

    Parameters
    ----------
    dims, shape : tuple
        Names and sizes of the dimensions, whose flattened order is the order of the nodes.
    coordinates : dict
        Coordinates along one of `dims` each, such as x and y of a projection: values, attributes.
    mapping : tuple, optional
        Name and attributes of the grid mapping, for projections and rotated grids.
    """

    nodes: Nodes
    dims: tuple[str, ...]
    shape: tuple[int, ...]
    coordinates: Mapping[str, tuple[np.ndarray, dict[str, Any]]] = field(default_factory=dict)
    mapping: tuple[str, dict[str, Any]] | None = None

    def same(self, other: "Grid") -> bool:
        """Return whether two grids have the same nodes in the same order; 348 E is 12 W."""
        return self is other or (
            len(self.nodes) == len(other.nodes)
            and bool((distance(self.nodes, other.nodes) <= TOLERANCE).all())
        )

    def describe(self) -> str:
        """Return sizes and corners, such as "9 x 13 points, 58 N 350 E to 50 N 2 E"."""
        sizes = " x ".join(map(str, self.shape))
        ends = " to ".join(position(self.nodes, i) for i in (0, len(self.nodes) - 1))
        return f"{sizes} points, {ends}"


def distance(nodes: Nodes, other: Nodes) -> np.ndarray:
    """Return the larger of the distances of nodes along parallels and meridians, [N] degrees."""
    east_west = np.abs((nodes.lon - other.lon + 180) % 360 - 180)
    east_west = east_west * np.cos(np.deg2rad(nodes.lat))
    return np.maximum(np.abs(nodes.lat - other.lat), east_west)


def position(nodes: Nodes, i: int) -> str:
    """Return the position of node i as text."""
    return f"{nodes.lat[i]:.2f} N {nodes.lon[i]:.2f} E"


@dataclass(frozen=True, eq=False)
class Series:
    """Fields with the same keys at several valid times; in GRIB, the field of one message.

    Parameters
    ----------
    times : np.ndarray
        [T] datetime64, the valid times, in any order; [0] for one field without time.
    read : callable
        From the index of a time, 0 without time, to values [N] float32.
    member : str
        Label of the ensemble member; "" if the file has none.
    versions : tuple of str
        Versions of the experiment, several if they change with time.
    member_keys : tuple
        All other keys of the member, which are equal at all its times.
    origin : str
        Start and step of a forecast, "analysis", or "", for messages.
    """

    key: Key
    units: str
    grid: Grid
    times: np.ndarray
    read: Callable[[int], np.ndarray]
    source: str
    member: str = ""
    member_keys: OtherKeys = ()
    versions: tuple[str, ...] = ()
    origin: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    def describe(self, time: np.datetime64 | None = None) -> str:
        """Return the keys of these fields, for messages, with one of their times."""
        units = f" [{self.units}]" if self.units else ""
        words = [f"{self.key.parameter}{units}", self.key.text(), self.origin]
        if self.member:
            words.append(f"member {self.member}")
        if self.versions:
            words.append(f"expver {' and '.join(self.versions)}")
        if time is None and len(self.times):
            time = self.times.min()
        if time is not None:
            words.append(f"at {minutes(time)}")
        return f"{', '.join(word for word in words if word)} of {self.source}"


@dataclass(frozen=True, eq=False)
class Fields:
    """Fields of several variables on one grid of N nodes, by valid time and ensemble member.

    Parameters
    ----------
    times : np.ndarray
        [T] datetime64, ascending; [0] if no variable depends on time.
    units, attributes, keys
        Units, CF attributes such as `standard_name`, and key of each variable.
    readers : dict of str to callable
        A function per variable, from the index of a state, `member * T + time`, to values [N]
        float32.
    static : frozenset of str
        Variables without time, such as orography, whose readers ignore the time of the index.
    members : tuple of str
        Labels of the ensemble members, each with T states; one, "", without an ensemble.
    source : str
        Name of the files, for messages.
    """

    grid: Grid
    times: np.ndarray
    units: dict[str, str]
    readers: dict[str, Callable[[int], np.ndarray]]
    static: frozenset[str] = frozenset()
    members: tuple[str, ...] = ("",)
    attributes: dict[str, dict[str, str]] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)
    source: str = "the data"

    @property
    def nodes(self) -> Nodes:
        """The nodes of the grid."""
        return self.grid.nodes

    def with_static(self, names: Iterable[str]) -> "Fields":
        """Return the same fields, in which variables that do not change are marked as static."""
        first = {}
        for name in names:
            first[name] = partial(_at_first_time, lru_cache(self.readers[name]), len(self.times))
        return replace(self, readers=self.readers | first, static=self.static | frozenset(first))


def _at_first_time(read: Callable[[int], np.ndarray], num_times: int, index: int) -> np.ndarray:
    """Return the values of a state's member at the first time."""
    return read(index // num_times * num_times)


def group(series: Sequence[Series]) -> dict[str, list[Series]]:
    """Return the series of each variable, by a name that distinguishes it from the others.

    A parameter with one key keeps its name; otherwise level, interval and other keys are appended,
    as far as they differ: `z_500`, `z_sfc`, `tp_6h`, `t2m_percentileValue10`. Raises ValueError if
    two keys would get one name.
    """
    by_key: dict[Key, list[Series]] = {}
    for one in series:
        # Labels and texts may differ between files, such as 50000 Pa and 500 hPa.
        levels = tuple(level._replace(label="", text="") for level in one.key.levels)
        by_key.setdefault(one.key._replace(levels=levels), []).append(one)
    of_parameter: dict[str, list[Key]] = {}
    for same in by_key.values():
        of_parameter.setdefault(same[0].key.parameter, []).append(same[0].key)
    variables: dict[str, list[Series]] = {}
    for same in by_key.values():
        key = same[0].key
        name = _name(key, of_parameter[key.parameter])
        if name in variables:
            raise ValueError(
                f"fields must have distinct names, {name} would be "
                f"{_two(variables[name][0], same[0])}: rename one, or read files of one of them"
            )
        variables[name] = same
    return variables


def _name(key: Key, keys: Sequence[Key]) -> str:
    """Return the name of a variable: the parameter, and how `key` differs from the other `keys`."""
    words = [key.parameter]
    kinds = {tuple(level.kind for level in other.levels) for other in keys}
    for d, level in enumerate(key.levels):
        if len(kinds) > 1:
            words.append(KINDS.get(level.kind, level.kind) + level.label)
        elif len({(other.levels[d].value, other.levels[d].bottom) for other in keys}) > 1:
            words.append(level.label)
    intervals = {other.interval for other in keys}
    lengths = {interval.split(" ")[0] for interval in intervals}
    if len(intervals) > 1 and key.interval not in ("", INSTANT):
        length, kind = key.interval.split(" ")
        words.append(length if len(lengths) == len(intervals) else f"{length}_{kind}")
    # of the same level and interval: the first key that differs between all, or all that differ
    alike = [dict(other.others or ()) for other in keys if _place(other) == _place(key)]
    own = dict(key.others or ())
    values: dict[str, set] = {}
    for name in dict.fromkeys(name for others in alike for name in others):
        values[name] = {others.get(name) for others in alike}
    differing = [name for name, several in values.items() if len(several) > 1]
    telling = [name for name in differing if len(values[name]) == len(alike)][:1] or differing
    for name in telling:
        if name in own:
            is_text = isinstance(own[name], str)
            words.append(re.sub(r"\W+", "_", own[name]) if is_text else f"{name}{own[name]}")
    return "_".join(word for word in words if word)


def _place(key: Key) -> tuple:
    """Return level and interval of a key."""
    return [(level.kind, level.value, level.bottom) for level in key.levels], key.interval


def on_largest_grid(variables: Mapping[str, list[Series]]) -> dict[str, list[Series]]:
    """Return the variables on the grid that has the most; name the others in the log.

    Raises ValueError if two grids have equally many.
    """
    grids: list[tuple[Grid, list[str]]] = []
    for name, series in variables.items():
        for grid, names in grids:
            if grid.same(series[0].grid):
                names.append(name)
                break
        else:
            grids.append((series[0].grid, [name]))
    if len(grids) < 2:
        return dict(variables)
    grids.sort(key=lambda entry: len(entry[1]), reverse=True)
    (largest, names), *others = grids
    if len(others[0][1]) == len(names):
        (first, *_), (second, *_) = (variables[group[0]] for _, group in grids[:2])
        raise ValueError(_two_grids(first, second))
    for grid, other_names in others:
        log.warning(
            "left out, because the grid is %s and not %s: %s",
            grid.describe(),
            largest.describe(),
            ", ".join(other_names),
        )
    return {name: variables[name] for name in names}


def is_static(series: Sequence[Series]) -> bool:
    """Return whether a variable has no time."""
    return not any(len(one.times) for one in series)


def arrange(variables: Mapping[str, list[Series]]) -> Fields:
    """Arrange the series of each variable by valid time and member.

    A variable with one time, where others have several, is taken as one without time, and logged.
    Raises ValueError if fields of a variable differ in units or grid, a field is there twice or is
    missing, or points of the grid coincide.
    """
    first = next(iter(variables.values()))[0]
    known = {id(first.grid)}  # grids that were compared: a file has few, and many fields
    for series in variables.values():
        for one in series:
            _check_alike(series[0], one)
            if id(one.grid) not in known and not first.grid.same(one.grid):
                raise ValueError(_two_grids(first, one))
            known.add(id(one.grid))
    check_distinct(first.grid, first.source)
    num_times = {name: _count_times(series) for name, series in variables.items()}
    several = max(num_times.values(), default=0) > 1
    single = [name for name, count in num_times.items() if several and count == 1]
    if single:
        log.info("of one time only, taken as without time: %s", ", ".join(single))
    static = frozenset({name for name, count in num_times.items() if count == 0} | set(single))
    states = {name: _States(series) for name, series in variables.items() if name not in static}
    _cut_ends(states)
    times, members = _axes(states)
    readers: dict[str, Callable[[int], np.ndarray]] = {}
    for name, series in variables.items():
        if name in static:
            readers[name] = partial(_read_constant, _constants(series), members, max(1, len(times)))
        else:
            readers[name] = partial(states[name].read, members)
    sources = list(dict.fromkeys(one.source for same in variables.values() for one in same))
    return Fields(
        grid=first.grid,
        times=times,
        units={name: same[0].units for name, same in variables.items()},
        readers=readers,
        static=static,
        members=members,
        attributes={name: same[0].attributes for name, same in variables.items()},
        keys={name: same[0].key for name, same in variables.items()},
        source=sources[0] if len(sources) == 1 else f"{sources[0]} to {sources[-1]}",
    )


def _count_times(series: Sequence[Series]) -> int:
    times = [one.times for one in series if len(one.times)]
    return len(np.unique(np.concatenate(times))) if times else 0


def _check_alike(one: Series, other: Series) -> None:
    """Raise ValueError unless two series of a variable have the same units, and both a time."""
    if one.units != other.units:
        raise ValueError(f"a variable must have one unit, got {_two(one, other)}: convert one")
    if bool(len(one.times)) != bool(len(other.times)):
        raise ValueError(
            f"a variable must have a time in all files or in none, got {_two(one, other)}"
        )


def _two(one: Series, other: Series) -> str:
    """Return two series that do not fit each other, and the keys that differ, for messages."""
    return f"{one.describe()} and {other.describe()}{_apart(one, other)}"


def _apart(one: Series, other: Series) -> str:
    """Return the keys that tell two series of one parameter apart, in brackets, or ""."""
    if one.key.parameter != other.key.parameter:
        return ""
    mine, theirs = ((series.key.others or ()) + series.member_keys for series in (one, other))
    text = told_apart(mine, theirs)
    return f" (their keys differ: {text})" if text else ""


def _two_grids(one: Series, other: Series) -> str:
    """Return a message about two series on different grids."""
    texts = [f"{series.describe()} on {series.grid.describe()}" for series in (one, other)]
    return (
        f"files must be on one grid, got {texts[0]}, and {texts[1]}: choose data.variables and "
        "data.forcings on one of them"
    )


def check_distinct(grid: Grid, source: str) -> None:
    """Raise ValueError if points of a grid coincide, except at the poles of a regular grid."""
    nodes = grid.nodes
    # Rows at a pole have one point per longitude, as in ERA5.
    places = np.stack([nodes.lat.round(5), (nodes.lon % 360).round(5) % 360])
    _, first, counts = np.unique(places, axis=1, return_index=True, return_counts=True)
    if (counts > 1).any():
        place = position(nodes, int(first[np.argmax(counts)]))
        raise ValueError(
            f"points of the grid must be distinct, {source} has {counts.max()} at {place}: leave "
            "out the last meridian of a grid that has both 0 and 360, or the points without a "
            "position (over land)"
        )


def _constants(series: Sequence[Series]) -> dict[str, Callable[[], np.ndarray]]:
    """Return readers of a variable without time, by member; raise ValueError if files differ."""
    by_member: dict[str, Series] = {}
    for one in series:
        first = by_member.setdefault(one.member, one)
        if one is not first and not np.array_equal(first.read(0), one.read(0), equal_nan=True):
            raise ValueError(
                f"a variable without time must be the same in all files, got {_two(first, one)}"
            )
    # read from the file once, although every sample has them
    return {member: lru_cache(1)(partial(one.read, 0)) for member, one in by_member.items()}


def _read_constant(
    constants: Mapping[str, Callable[[], np.ndarray]],
    members: tuple[str, ...],
    num_times: int,
    index: int,
) -> np.ndarray:
    """Return a variable without time of the member of a state, or the only one."""
    label = members[index // num_times]
    return constants.get(label, next(iter(constants.values())))()


class _States:
    """The fields of a variable with time, by member and time."""

    def __init__(self, series: Sequence[Series]):
        self.series = series
        self.times: dict[str, np.ndarray] = {}  # by member, ascending
        self._fields: dict[str, list[tuple[Series, int]]] = {}  # series, index in its times
        for member in _sorted_labels({one.member for one in series}):
            by_time = _by_time([one for one in series if one.member == member])
            fields = by_time.values()
            versions = dict.fromkeys(version for one, _ in fields for version in one.versions)
            if len(versions) > 1:
                name = series[0].key.parameter
                log.warning("%s has fields of expver %s", name, " and ".join(versions))
            self.times[member] = np.array(list(by_time), "datetime64[ns]")
            self._fields[member] = list(by_time.values())

    def read(self, members: tuple[str, ...], index: int) -> np.ndarray:
        """Return the values of a state, `member * T + time`, [N] float32."""
        num_times = len(next(iter(self.times.values())))
        member, time = divmod(index, num_times)
        # A variable without members, such as a forcing, is the same for all.
        one, i = self._fields[members[member] if members[member] in self._fields else ""][time]
        return one.read(i)

    def keep(self, times: np.ndarray) -> None:
        """Keep these times only."""
        for member, own in self.times.items():
            kept = np.isin(own, times)
            self.times[member] = own[kept]
            self._fields[member] = list(compress(self._fields[member], kept))

    def at(self, time: np.datetime64, member: str) -> Series:
        """Return the series that has a time, which must be there, of a member."""
        one, _ = self._fields[member][np.searchsorted(self.times[member], time)]
        return one


def _by_time(series: Sequence[Series]) -> dict[int, tuple[Series, int]]:
    """Return the fields of a member by time, in ns and ascending: series, index in its times."""
    fields: dict[int, tuple[Series, int]] = {}
    for other in series:
        if other.member_keys != series[0].member_keys:
            raise ValueError(
                f"a member must have the same keys at all times, got {_two(series[0], other)}: "
                "read one of them, or give them two numbers"
            )
        for i, time in enumerate(other.times.astype("datetime64[ns]").astype(int).tolist()):
            if time not in fields:
                fields[time] = other, i
                continue
            one, _ = fields[time]
            raise ValueError(
                f"each field must be there once, got {one.describe(other.times[i])} and "
                f"{other.describe(other.times[i])}: keep one start or one step of the forecasts, "
                "one of the files, or join two versions, as by combine_first"
            )
    return dict(sorted(fields.items(), key=itemgetter(0)))


def _cut_ends(states: Mapping[str, _States]) -> None:
    """Leave out times at the ends that variables of different intervals do not share.

    A sum of the first six hours stands at 06, and the analysis of the same file begins at 00.
    """
    if len({one.series[0].key.interval for one in states.values()}) < 2:
        return
    axes = [times for one in states.values() for times in one.times.values()]
    common = reduce(np.intersect1d, axes)
    if len(common) == 0:
        return
    between = [times[(times >= common[0]) & (times <= common[-1])] for times in axes]
    if not all(np.array_equal(times, common) for times in between):
        return  # `_axes` names what is missing
    every = reduce(np.union1d, axes)
    if len(every) > len(common):
        ends = f"{minutes(common[0])} to {minutes(common[-1])}"
        log.info("times from %s are common to sums, means and instants, others are left out", ends)
    for one in states.values():
        one.keep(common)


def _axes(states: Mapping[str, _States]) -> tuple[np.ndarray, tuple[str, ...]]:
    """Return the times and members of all variables with time; raise ValueError if they differ."""
    if not states:
        return np.empty(0, "datetime64[ns]"), ("",)
    first = next(iter(states.values()))
    ensemble = next((one for one in states.values() if set(one.times) != {""}), first)
    members = tuple(ensemble.times)
    without = [name for name, one in states.items() if set(one.times) == {""}]
    if without and members != ("",):
        log.info("the same for all members, of which they have none: %s", ", ".join(without))
    first_member, times = next(iter(first.times.items()))
    for one in states.values():
        if set(one.times) != {""} and tuple(one.times) != members:
            raise ValueError(
                f"all variables must have the same members, got {', '.join(members)} of "
                f"{ensemble.series[0].describe()} and {', '.join(one.times)} of "
                f"{one.series[0].describe()}{_apart(ensemble.series[0], one.series[0])}"
            )
        for member, other_times in one.times.items():
            if np.array_equal(times, other_times):
                continue
            lacking, having = (one, member), (first, first_member)
            missing = np.setdiff1d(times, other_times)
            if len(missing) == 0:
                lacking, having = having, lacking
                missing = np.setdiff1d(other_times, times)
            states_lacking, label = lacking
            absent = next(s for s in states_lacking.series if s.member == label)
            states_having, label = having
            there = states_having.at(missing[0], label)
            count = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                "all variables and members must have the same times, "
                f"{absent.describe()} is missing at {minutes(missing[0])}{count}, where there is "
                f"{there.describe(missing[0])}{_apart(absent, there)}: choose "
                "data.variables and data.forcings without one of them, or keep the times of both"
            )
    return times, members


def _sorted_labels(labels: Collection[str]) -> list[str]:
    """Return labels in the order of their numbers, or of the alphabet."""
    # padded, so that 10 follows 9
    return sorted(labels, key=lambda label: (not label.isdigit(), label.zfill(9), label))


def minutes(time: np.datetime64) -> str:
    """Return a time as "2020-01-01 06:00"."""
    return np.datetime_as_string(time, unit="m").replace("T", " ")


def evenly_spaced(size: int, count: int) -> np.ndarray:
    """Return up to `count` evenly spaced indices below `size`, including the first and last."""
    return np.unique(np.linspace(0, size - 1, count).round().astype(int))
