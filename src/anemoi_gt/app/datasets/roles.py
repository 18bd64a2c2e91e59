"""Roles of variables in files: forecast, diagnostic (output only) or forcing (input only)."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from anemoi_gt.app.datasets.fields import (
    Fields,
    Key,
    Series,
    evenly_spaced,
    is_static,
    on_largest_grid,
)
from anemoi_gt.app.datasets.schema import DataSchema

log = logging.getLogger(__name__)

CONSTANT_STATES = 256  # number of states at which a constant is compared


class ChosenRoles(NamedTuple):
    """The roles that the user chose, as in `Roles`, or None."""

    variables: Sequence[str] | None
    diagnostics: Sequence[str] | None
    forcings: Sequence[str] | None


class Roles(NamedTuple):
    """Names of prognostic variables, diagnostics (outputs only) and forcings (inputs only).

    Channels are in the order of the names.
    """

    variables: tuple[str, ...]
    diagnostics: tuple[str, ...]
    forcings: tuple[str, ...]


def choose_roles(fields: Fields, chosen: ChosenRoles, period: np.ndarray) -> tuple[Fields, Roles]:
    """Return the roles of the variables in files, and the fields with constants marked as static.

    A variable with a time dimension that never changes in a period [T] bool, such as `lsm` and `z`
    in files of the Climate Data Store, is a constant, like one without time. Raises ValueError if a
    name does not exist or has two roles.
    """
    variables = chosen.variables
    diagnostics = list(chosen.diagnostics or [])
    forcings = chosen.forcings
    forecast = [*(variables or []), *diagnostics]
    check_names([*forecast, *(forcings or [])], forecast, fields.readers, fields.static)
    candidates = list(fields.readers) if variables is None else list(forcings or [])
    candidates = [name for name in candidates if name not in forecast]
    constants = find_constants(fields, candidates, period)
    if constants:
        names = ", ".join(constants)
        log.info("inputs that never change, taken as forcings without time: %s", names)
        warn_of_changes(fields, constants, np.ones_like(period))
        fields = fields.with_static(constants)
    if forcings is None:
        forcings = sorted(fields.static - set(forecast))
    if variables is None:
        others = {*fields.static, *forcings, *diagnostics}
        variables = [name for name in fields.readers if name not in others]
    if not variables and not diagnostics:
        raise ValueError(
            f"variables must be among {', '.join(fields.readers)}, in one role each, got none that "
            "changes with time, at dates of the standard calendar"
        )
    return fields, Roles(tuple(variables), tuple(diagnostics), tuple(forcings))


def select(grouped: Mapping[str, list[Series]], chosen: ChosenRoles) -> Mapping[str, list[Series]]:
    """Return the variables that the chosen roles can take; the others need not fit them.

    Raises ValueError if a name does not exist.
    """
    if chosen.variables is None:
        return on_largest_grid(grouped)
    forecast = [*chosen.variables, *(chosen.diagnostics or [])]
    if not forecast:
        raise ValueError(
            f"variables must be among {', '.join(grouped)}, got none, and no diagnostics: leave "
            "data.variables out for all that change with time"
        )
    names = [*forecast, *(chosen.forcings or [])]
    static = [name for name, series in grouped.items() if is_static(series)]
    check_names(names, forecast, grouped, static)
    wanted = {name: grouped[name] for name in grouped if name in names}
    if chosen.forcings is None:  # those without time, on the same grid
        grid = next(iter(wanted.values()))[0].grid
        for name in static:
            if grid.same(grouped[name][0].grid):
                wanted[name] = grouped[name]
    return wanted


def check_names(
    names: Sequence[str], forecast: Sequence[str], known: Collection[str], static: Collection[str]
) -> None:
    """Raise ValueError unless names are known, once each, and forecast ones are not static."""
    wrong = [f"{name} missing" for name in names if name not in known]
    wrong += sorted({f"{name} twice" for name in names if names.count(name) > 1})
    wrong += [f"{name} without time" for name in sorted({*forecast} & {*static})]
    if wrong:
        raise ValueError(
            f"variables must be among {', '.join(known)}, in one role each, got {', '.join(wrong)}"
        )


def find_variables(
    grouped: Mapping[str, list[Series]], chosen: ChosenRoles, schema: DataSchema
) -> dict[str, list[Series]]:
    """Return the variables of a trained model, by its names.

    They are searched by their keys, or by their names if the checkpoint has no keys. Raises
    ValueError if the data lack one.
    """
    names = [*schema.variables, *schema.forcings]
    found: dict[str, list[Series]] = {}
    for name in names:
        key = schema.keys.get(name)
        matching = [n for n, same in grouped.items() if key and key.matches(same[0].key)]
        if len(matching) == 1:
            found[name] = grouped[matching[0]]
        elif name in grouped:
            found[name] = grouped[name]
    lacking = [_with_key(name, schema.keys.get(name)) for name in names if name not in found]
    if lacking:
        have = ", ".join(_with_key(name, same[0].key) for name, same in grouped.items())
        sources = dict.fromkeys(one.source for same in grouped.values() for one in same)
        raise ValueError(
            f"the data must hold the variables of the checkpoint, {', '.join(names)}; "
            f"{', '.join(sources)} lacks {', '.join(lacking)}, and has {have}"
        )
    # Variables that the checkpoint lacks are refused by `DataSchema.check_same`.
    others = [*(chosen.variables or []), *(chosen.diagnostics or []), *(chosen.forcings or [])]
    others = [name for name in dict.fromkeys(others) if name not in found]
    check_names(others, [], grouped, [])
    return found | {name: grouped[name] for name in others}


def _with_key(name: str, key: Key | None) -> str:
    """Return the name of a variable, with level and interval if they are known."""
    text = "" if key is None else key.text()
    return f"{name} ({text})" if text else name


def roles_of_schema(
    fields: Fields, chosen: ChosenRoles, schema: DataSchema
) -> tuple[Fields, Roles]:
    """Return the roles of variables, by default a trained model's, and fields with constants.

    The constants of the model are marked as static. Raises ValueError if a variable has no time.
    """
    diagnostics = schema.diagnostics if chosen.diagnostics is None else chosen.diagnostics
    forcings = schema.forcings if chosen.forcings is None else chosen.forcings
    variables = chosen.variables
    if variables is None:
        variables = [name for name in schema.variables if name not in schema.diagnostics]
    constants = [name for name in schema.constants if name not in fields.static]
    roles = Roles(tuple(variables), tuple(diagnostics), tuple(forcings))
    forecast = [*roles.variables, *roles.diagnostics]
    check_names([*forecast, *forcings], forecast, fields.readers, fields.static)
    ends = np.zeros(len(fields.times), dtype=bool)
    ends[[0, -1]] = True  # all would take minutes of a large file, before each forecast
    warn_of_changes(fields, constants, ends)
    return fields.with_static(constants), roles


def warn_of_changes(fields: Fields, constants: Sequence[str], period: np.ndarray) -> None:
    """Warn of constants of the training samples that change at times of a period [T] bool."""
    unchanged = find_constants(fields, constants, period)
    changing = [name for name in constants if name not in unchanged]
    if changing and period.sum() > 1:
        log.warning(
            "inputs that change in %s, and never in the training samples: %s; forecasts from all "
            "dates have their values at the first time",
            *(fields.source, ", ".join(changing)),
        )


def find_constants(fields: Fields, names: Iterable[str], period: np.ndarray) -> list[str]:
    """Return the variables with time that are constant in all members at times of a period [T].

    They are compared at up to 256 states.
    """
    times = np.flatnonzero(period)
    if len(times) < 2:
        return []
    num_members = len(fields.members)
    times = times[evenly_spaced(len(times), max(2, CONSTANT_STATES // num_members))]
    constants = []
    for name in names:
        if name in fields.static:
            continue
        read = fields.readers[name]
        of_members = (times + member * len(period) for member in range(num_members))
        if all(_is_constant(read, states.tolist()) for states in of_members):
            constants.append(name)
    return constants


def _is_constant(read: Callable[[int], np.ndarray], states: Sequence[int]) -> bool:
    first = read(states[0])
    return all(np.array_equal(read(t), first, equal_nan=True) for t in states[1:])
