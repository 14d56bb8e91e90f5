"""`--set KEY=VALUE`: every field of a run, its value as TOML has it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeAlias

import typer

from whence.cli.console import parse_toml
from whence.errors import WhenceError, suggest
from whence.experiments import HYPERPARAMETERS, STANDARD, RunConfig, presets

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


def collect_overrides(settings: Sequence[str] | None, preset: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run that a command line sets, for `configure`.

    Tables are merged at every depth: with those of the other options, and with the preset's.

    Args:
        settings: the texts of `--set`.
        preset: the preset's name.
        options: fields that the command's other options set; None: not set.

    Raises:
        WhenceError: a text is no setting, a run has no such field or refuses its value, or a field is set twice.
    """
    options = {name: value for name, value in options.items() if value is not None}
    changes: dict[str, Any] = {}
    for text in settings or ():
        changes = _merge(changes, _parse_setting(text))
    overrides, preset_fields = _merge(options, changes), presets().get(preset or "", {})
    for name, table in changes.items():
        if isinstance(table, Mapping):
            base = {**preset_fields.get(name, {}), **options.get(name, {})}
            merged = _merge(base, table, replace=True)
            overrides[name] |= {key: merged[key] for key in table}  # `configure` merges the preset's other entries
    return overrides


def _merge(
    base: Mapping[str, Any], changes: Mapping[str, Any], *, replace: bool = False, path: str = ""
) -> dict[str, Any]:
    """Return two tables merged at every depth.

    Args:
        base: the table whose values may be replaced.
        changes: the table to merge into it.
        replace: whether a value of `changes` replaces the base's; else a value may stand in one of them only.
        path: the dotted name of the tables, for the message.
    """
    merged = dict(base)
    for name, value in changes.items():
        if isinstance(value, Mapping) and isinstance(base.get(name), Mapping):
            merged[name] = _merge(base[name], value, replace=replace, path=f"{path}{name}.")
        elif name in base and not replace:
            raise WhenceError(
                f"{path}{name} is given twice: by --set, and by another --set or an option of its own. Give it once."
            )
        else:
            merged[name] = value
    return merged


def _parse_setting(text: str) -> dict[str, Any]:
    """Return one `--set` as nested tables."""
    key, equals, value_text = (part.strip() for part in text.partition("="))
    names = key.split(".")
    if not equals or not value_text or not all(re.fullmatch(r"[\w-]+", name) for name in names):
        raise WhenceError(
            f"--set {text!r} is no KEY=VALUE with the dotted name of a setting, such as "
            "--set hyperparameters.n_steps=1024."
        )
    value = parse_toml(f"--set {text!r}", value_text)
    for name in reversed(names[1:]):
        value = {name: value}
    _check_field(text, names[0], value)
    return {names[0]: value}


def _check_field(text: str, name: str, value: Any) -> None:
    """Refuse a field that a run does not have, and a value that no run accepts."""
    if name in _ELSEWHERE:
        raise WhenceError(f"--set {text!r}: {name} is given by {_ELSEWHERE[name]}.")
    if name not in _FIELDS:
        known = f" Did you mean hyperparameters.{name}?" if name in HYPERPARAMETERS else suggest(name, _FIELDS)
        raise WhenceError(f"--set {text!r}: a run has no {name!r}.{known}")
    if name in ("target", "target_args"):  # neither is complete without the other
        return
    try:
        RunConfig(env="", arm=STANDARD, seed=0, **{name: value})
    except WhenceError as error:
        raise WhenceError(f"--set {text!r}: {error}") from None
