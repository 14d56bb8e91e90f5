"""What both kinds of runs share: the name of the standard arm, and how a round is reported."""

import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from types import UnionType
from typing import Any, get_args, get_origin

from whence.errors import WhenceError, suggest

STANDARD = "ppo"
"""The arm that the others are measured against."""

OnRound = Callable[[int, Mapping[str, Any]], None]
"""Called with the number of rounds done, from 0, and the last one's metrics."""


def ignore_round(number: int, metrics: Mapping[str, Any]) -> None:
    """Do nothing with a round that is reported."""


_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    Mapping: "a table of settings",
    type(None): "nothing",
}


def check_field_names(config: Any, values: Any, *, but: Collection[str] = ()) -> None:
    """Refuse values that do not name the fields of a configuration.

    Args:
        config: the configuration's dataclass.
        values: what stands for one, from JSON.
        but: further names that may be there.

    Raises:
        WhenceError: the values are no table, or a field is unknown or missing.
    """
    check_known("A run", values, [*(each.name for each in fields(config)), *but])
    required = [each.name for each in fields(config) if each.default is MISSING and each.default_factory is MISSING]
    if missing := [name for name in required if name not in values]:
        names = " and ".join(map(repr, missing))
        raise WhenceError(f"A run's configuration lacks {names}; it needs {', '.join(required)}.")


def check_known(what: str, values: Any, known: Collection[str]) -> None:
    """Refuse a table with a name that is not known.

    Args:
        what: what it is a table of, as the message begins.
        values: the table.
        known: the names that it may have.

    Raises:
        WhenceError: it is no table, or has another name.
    """
    if not isinstance(values, Mapping):
        raise WhenceError(f"{what} is {reprlib.repr(values)}; a table of settings is needed.")
    if unknown := [name for name in values if name not in known]:
        raise WhenceError(f"{what} has no {unknown[0]!r}.{suggest(str(unknown[0]), known)}")


def check_field_types(config: Any, values: Mapping[str, Any]) -> None:
    """Refuse values of a configuration's fields, by the fields' names, that do not have the field's type.

    Raises:
        WhenceError: names the first such field.
    """
    for each in fields(config):
        if each.name in values:
            kinds = get_args(each.type) if isinstance(each.type, UnionType) else (each.type,)
            check_type(each.name, values[each.name], *(get_origin(kind) or kind for kind in kinds))


def check_type(name: str, value: Any, *kinds: Any) -> None:
    """Refuse a value of another type than `kinds`. An int passes for a float; a bool passes for nothing else.

    Raises:
        WhenceError: the value has another type, or is a table whose names are not text.
    """
    accepted = {bool} & {*kinds} if isinstance(value, bool) else {*kinds, *([int] if float in kinds else [])}
    if not isinstance(value, tuple(accepted)):
        needed = " or ".join(_KINDS[kind] for kind in kinds)
        raise WhenceError(f"{name} is {reprlib.repr(value)}; {needed} is needed.")
