"""The columns of the page's grid, and its cells in JSON types."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from whence import moments

LONGEST = 240
"""Characters of an observation, an action or a reason that a page holds at most."""

LONGEST_TEXT = 2000
"""Characters of a prompt or a response in the grid; a record that is opened shows more."""

Labels = Sequence[str] | None
"""The names of discrete actions; None: unknown."""


class Column(NamedTuple):
    """A column of the grid.

    Attributes:
        key: its name in the run directory.
        name: its heading.
        about: its meaning.
        kind: "score", "error", "keep", "reason", "text" or "number".
    """

    key: str
    name: str
    about: str = ""
    kind: str = "number"


_SCORE = Column("score", "score", "Influence on the target: above 0, training on the record raises it", "score")
_ERROR = Column("error", "± error", "Standard error of the score, over folds of the target's episodes", "error")
_KEPT = Column("keep", "kept", "Whether the record trained", "keep")
_REASON = Column("reason", "reason", "Why the record was dropped", "reason")

STEPS = (
    Column("record_id", "record", "The step of training at which the record was collected"),
    *(_SCORE, _ERROR, _KEPT),
    Column("env_index", "env", "Index of the environment"),
    Column("episode_id", "episode", "Id of the episode"),
    Column("step", "step", "Position in the episode, from 0"),
    Column("action", "action", kind="text"),
    Column("reward", "reward"),
    Column("advantage", "advantage", "As collected, not normalised"),
    Column("return", "return", "Target of the value function"),
    Column("value", "value", "Estimate of the value function"),
    Column("log_prob", "log-prob", "Log-probability of the action"),
    Column("observation", "observation", kind="text"),
    _REASON,
)
"""Columns where records are steps in an environment."""

RESPONSES = (
    Column("record_id", "record", "The response's number, counted from the start of training"),
    *(_SCORE, _ERROR, _KEPT),
    Column("prompt", "prompt", kind="text"),
    Column("response", "response", kind="text"),
    Column("reward", "reward", "Before any penalty"),
    Column("advantage", "advantage", "Of the last token, whitened over the rollout"),
    Column("weight", "weight", "How much the response trained"),
    Column("divergence", "divergence", "From the start model, in nats, as the penalty estimates it"),
    Column("tokens", "tokens", "Length of the response"),
    Column("log_prob", "log-prob", "Log-probability of the whole response"),
    _REASON,
)
"""Columns where records are responses of a language model."""


def list_columns(names: Collection[str], *, is_language: bool) -> list[Column]:
    """Return the grid's columns that a table of records has.

    Args:
        names: the table's columns; `observation.a` and `observation.b` make one column.
        is_language: whether records are responses of a language model.
    """
    parts = {name.split(".")[0] for name in names}
    return [column for column in (RESPONSES if is_language else STEPS) if column.key in parts]


def make_row(record: Mapping[str, Any], columns: Iterable[Column], labels: Labels = None) -> list[Any]:
    """Return a record's cells, in JSON types."""
    parts = {name: value for name, value in record.items() if name.split(".")[0] == "observation"}
    values = {**record, "observation": _join_observation(parts), "action": name_action(record.get("action"), labels)}
    return [_make_cell(column.key, values.get(column.key)) for column in columns]


def name_action(action: Any, labels: Labels) -> str | None:
    """Return an action as text: its label if it has one."""
    return None if action is None else short_text(moments.name_action(action, labels))


def short_text(value: Any, longest: int = LONGEST) -> str:
    """Return numbers, lists of numbers or text as one line, cut off after `longest` characters.

    Only as many entries are formatted as the line may hold: an observation may have thousands.
    """
    line = (
        ", ".join(_format_entry(entry) for entry in value[:longest])
        if isinstance(value, list)
        else _format_entry(value)
    )
    return line if len(line) <= longest else line[: longest - 1] + "…"


def round_number(value: Any, digits: int = 6) -> Any:
    """Return a number with so many significant digits; null if there is none or it is not finite."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value
    number = float(value)
    return float(f"{number:.{digits}g}") if math.isfinite(number) else None


def round_numbers(values: Iterable[Any], digits: int = 6) -> list[Any]:
    """Return numbers as `round_number` does; whole ones as integers, which are shorter."""
    rounded = (round_number(value, digits) for value in values)
    return [int(v) if isinstance(v, float) and v.is_integer() and abs(v) < 1e15 else v for v in rounded]


def _join_observation(parts: Mapping[str, Any]) -> Any:
    if parts.keys() <= {"observation"}:
        return parts.get("observation")
    named = (f"{name.removeprefix('observation.')}: {short_text(value)}" for name, value in parts.items())
    return short_text("; ".join(named))


def _make_cell(name: str, value: Any) -> Any:
    if isinstance(value, float):
        return round_number(value)
    if name in ("prompt", "response") and value is not None:
        return short_text(value, LONGEST_TEXT)
    return short_text(value) if isinstance(value, str | bytes | Iterable) else value


def _format_entry(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
