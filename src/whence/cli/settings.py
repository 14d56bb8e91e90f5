"""`--set KEY=VALUE`: every field of a run, its value as TOML has it."""

import datetime
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeAlias

import typer

from whence.errors import WhenceError, suggest
from whence.experiments import HYPERPARAMETERS, RunConfig, presets
from whence.experiments.rl.config import check_types
from whence.experiments.shared import STANDARD

Settings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="Any field of a run, as config.json names it, with a value as TOML has it; may be repeated: "
        "--set hyperparameters.n_steps=1024 --set env_kwargs.map_name=8x8 --set evaluate_with=gymnasium.",
        metavar="KEY=VALUE",
        show_default=False,
    ),
]

_ELSEWHERE = {"env": "ENV or --preset", "arm": "--selection or --arms", "seed": "--seed or --seeds"}
_FIELDS = tuple(field.name for field in fields(RunConfig) if field.name not in _ELSEWHERE)


def collect_overrides(settings: Sequence[str] | None, preset: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run that a command was given, for `configure`.

    Tables are merged at every depth: with those of the other options, and with the preset's.

    Args:
        settings: of `--set`.
        preset: its name.
        given: fields that the command's other options give; None: not given.

    Raises:
        WhenceError: a setting that is none, that a run does not have, or whose value a run refuses; or one given twice.
    """
    own = {name: value for name, value in given.items() if value is not None}
    found: dict[str, Any] = {}
    for text in settings or ():
        found = _joined(found, _read(text))
    joined, values = _joined(own, found), presets().get(preset or "", {})
    for name, value in found.items():
        if isinstance(value, Mapping):
            joined[name] |= _filled(value, {**values.get(name, {}), **own.get(name, {})})
    return joined


def _read(text: str) -> dict[str, Any]:
    """Return what one `--set` says, as nested tables."""
    key, equals, written = (part.strip() for part in text.partition("="))
    names = _names(key)
    if not equals or not names or not written:
        raise WhenceError(
            f"--set {text!r} is no KEY=VALUE with the dotted name of a setting, such as "
            "--set hyperparameters.n_steps=1024."
        )
    value = _value(text, written)
    for name in reversed(names[1:]):
        value = {name: value}
    _check(text, names[0], value)
    return {names[0]: value}


def _names(key: str) -> list[str]:
    """Return the parts of a dotted key; none where it is no key."""
    try:
        inside: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError:
        return []
    names = []
    while isinstance(inside, Mapping):
        ((name, inside),) = inside.items()
        names.append(name)
    return names


def _value(text: str, written: str) -> Any:
    """Return a value as TOML has it; words without quotes, which TOML does not have, are text."""
    try:
        document = tomllib.loads(f"value = {written}")
    except tomllib.TOMLDecodeError as wrong:
        if re.match(r"""["'\[{]""", written):
            raise WhenceError(
                f"--set {text!r} has a value that is not TOML ({wrong}). Write it as 3, 0.5, true, word, "
                "'some words', [64, 64] or {a = 1}."
            ) from None
        return written
    if isinstance(document["value"], datetime.date | datetime.time) or len(document) > 1:  # or of several lines
        return written
    return document["value"]


def _check(text: str, name: str, value: Any) -> None:
    """Refuse a field that a run does not have, and a value that it refuses whatever the others are."""
    if name in _ELSEWHERE:
        raise WhenceError(f"--set {text!r}: {name} is given by {_ELSEWHERE[name]}.")
    if name not in _FIELDS:
        known = f" Did you mean hyperparameters.{name}?" if name in HYPERPARAMETERS else suggest(name, _FIELDS)
        raise WhenceError(f"--set {text!r}: a run has no {name!r}.{known}")
    try:
        if name in ("target", "target_args"):  # of which neither is whole without the other
            check_types({name: value})
        else:
            RunConfig(env="", arm=STANDARD, seed=0, **{name: value})
    except WhenceError as wrong:
        raise WhenceError(f"--set {text!r}: {wrong}") from None


def _joined(one: Mapping[str, Any], other: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return two tables in one; a value may stand in one of them only."""
    found = dict(one)
    for name, value in other.items():
        if name not in one:
            found[name] = value
        elif isinstance(value, Mapping) and isinstance(one[name], Mapping):
            found[name] = _joined(one[name], value, f"{above}{name}.")
        else:
            raise WhenceError(
                f"{above}{name} is given twice: by --set, and by another --set or an option of its own. Give it once."
            )
    return found


def _filled(given: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is given, its own tables with what the base's have beside."""
    return {
        name: {**base[name], **_filled(value, base[name])}
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping)
        else value
        for name, value in given.items()
    }
