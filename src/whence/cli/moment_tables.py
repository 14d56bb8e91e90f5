"""A moment in the terminal and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.table import Table

from whence.cli.console import console, make_printable, make_table, print_line
from whence.moments import Moment, name_action

if TYPE_CHECKING:
    from whence.page.moment_view import MomentView

NEAR = 4
"""Steps before and after a moment's face that the terminal shows."""

_STRIPS = ("reward", "value", "advantage", "score")


def print_view(view: "MomentView") -> None:
    """Print a moment: what it is, what was done there, what the round changed, and the steps around it."""
    moment = view.moment
    where = "" if moment.step is None else f", episode {moment.episode_id}, step {moment.step}"
    print_line(make_printable(f"Record {moment.record_id} of {view.env or view.run}, round {view.round}{where}"))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _list_facts(view):
        table.add_row(name, _as_text(text))
    console.print(table)
    if view.policy is not None and (change := _list_policy(view)):
        headings = ["action", "before", "after"]
        values = f"value {view.policy['value_before']:.3g} → {view.policy['value_after']:.3g}"
        console.print(make_table(f"Policy before and after the round; {values}", headings, change))
    elif view.policy_note:
        print_line(make_printable(view.policy_note))
    if len(view.window) > 1:
        console.print(_make_strip(view))


def _list_facts(view: "MomentView") -> list[tuple[str, str]]:
    moment, row = view.moment, view.row
    facts = [("score", describe_score(moment.score, moment.error))]
    if moment.records > 1:
        text = f"steps {moment.first_step} to {moment.last_step}: {moment.records} records, total {moment.total:.3g}"
        facts.append(("moment", f"{text}, {moment.dropped} dropped"))
    if row.get("keep") is not None:
        reason = f": {row['reason']}" if row.get("reason") else ""
        facts.append(("trained", "yes" if row["keep"] else f"no, dropped{reason}"))
    facts.append(("action", view.action))
    facts.append(("advantage", _format(moment.advantage)))
    if view.estimate is not None:
        mean, error = view.estimate
        facts.append(("measured", f"{mean:.3g} ± {error:.2g} by {view.estimate_note}"))
    elif view.estimate_note:
        facts.append(("measured", f"not: {view.estimate_note}"))
    facts += [(name, _format(number)) for name, number in _numbers(moment) if number is not None]
    if view.state:
        facts.append(("state", ", ".join(f"{name} {value:.3g}" for name, value in view.state)))
    if view.frames_note:
        facts.append(("frames", view.frames_note))
    return facts


def _numbers(moment: Moment) -> list[tuple[str, float | None]]:
    return [("value", moment.value), ("return", moment.return_), ("reward", moment.reward)]


def describe_score(score: float, error: float | None) -> str:
    """Return a score with its error and whether it can be told from 0, in words."""
    if not isfinite(score):
        return "not scored"
    effect = "training on it lowers the target" if score < 0 else "training on it raises the target"
    if error is None:
        return f"{score:.3g}: {effect} (its error was not computed)"
    verdict = effect if abs(score) > 2 * error else "cannot be told from 0"
    return f"{score:.3g} ± {error:.2g}: {verdict}"


def _list_policy(view: "MomentView") -> list[list[str]]:
    row = view.policy or {}
    if "before" in row:
        names = _name_axes(view.action_labels, len(row["before"]))
        return [
            [name, f"{before:.3f}", f"{after:.3f}"]
            for name, before, after in zip(names, row["before"], row["after"], strict=True)
        ]
    if "mean_before" in row:
        before = _as_list(row["mean_before"]), _as_list(row["std_before"])
        after = _as_list(row["mean_after"]), _as_list(row["std_after"])
        return [
            [name, *(f"{mean:.3g} ± {std:.2g}" for mean, std in ((m0, s0), (m1, s1)))]
            for name, m0, s0, m1, s1 in zip(_name_axes(view.axis_labels, len(before[0])), *before, *after, strict=True)
        ]
    return []


def _name_axes(labels: Sequence[str] | None, count: int) -> Sequence[str]:
    return labels if labels is not None and len(labels) == count else [f"action {at}" for at in range(count)]


def _as_list(value: Any) -> list[float]:
    return list(value) if isinstance(value, Sequence) else [value]


def _make_strip(view: "MomentView") -> Table:
    """Return the steps around a moment's face as a table, the face marked."""
    window, moment = view.window, view.moment
    rows = window.to_dicts()
    face = next(at for at, row in enumerate(rows) if row["record_id"] == moment.record_id)
    names = [name for name in _STRIPS if name in window.columns and window[name].null_count() < len(window)]
    cells = []
    for at in range(max(0, face - NEAR), min(len(rows), face + NEAR + 1)):
        row = rows[at]
        mark = "▶" if at == face else "·" if row["record_id"] in moment.record_ids else ""
        dropped = "" if row.get("keep") is not False else "dropped"
        action = name_action(row.get("action"), view.action_labels)
        numbers = [_format(row[name]) for name in names]
        if names[-1:] == ["score"] and row.get("error") is not None:
            numbers[-1] += f" ± {row['error']:.2g}"
        cells.append([mark, row.get("step"), make_printable(action), *numbers, dropped])
    return make_table("Steps around it", ["", "step", "action", *names, ""], cells)


def make_group_table(groups: pl.DataFrame, by: str) -> Table:
    """Return the table of what groups of a round's records score, the lowest mean first."""
    rows = [
        [
            *(make_printable(row["group"]), f"{row['records']:,}", f"{row['mean']:.3g}"),
            "–" if row["error"] is None else f"{row['error']:.2g}",
            *(f"{row['share_negative']:.0%}", f"{row['dropped_share']:.0%}"),
        ]
        for row in groups.to_dicts()
    ]
    title = f"Scores of the round by {by}, lowest mean first"
    return make_table(title, [by, "records", "mean", "± error", "below 0", "dropped"], rows)


def describe_change(row: Mapping[str, Any], labels: Sequence[str] | None) -> str:
    """Return how the policy changed in one state: the two actions whose probabilities changed most, or the means."""
    if "before" in row:
        names = _name_axes(labels, len(row["before"]))
        changes = sorted(zip(names, row["before"], row["after"], strict=True), key=lambda part: -abs(part[2] - part[1]))
        return ", ".join(f"{name} {before:.2f} → {after:.2f}" for name, before, after in changes[:2])
    if "mean_before" in row:
        pairs = zip(_as_list(row["mean_before"]), _as_list(row["mean_after"]), strict=True)
        return ", ".join(f"{before:.2g} → {after:.2g}" for before, after in list(pairs)[:4])
    return ""


def describe_moment(moment: Moment, labels: Sequence[str] | None) -> dict[str, Any]:
    """Return a moment in JSON types; its action also in words."""
    named = {("return" if key == "return_" else key): value for key, value in asdict(moment).items()}
    return named | {"action": name_action(moment.action, labels), "action_value": moment.action}


def describe_view(view: "MomentView") -> dict[str, Any]:
    """Return all that is known about a moment, without frames, in JSON types."""
    row = {name: value for name, value in view.row.items() if name in ("keep", "weight", "reason")}
    return {
        **describe_moment(view.moment, view.action_labels),
        **row,
        "significant": view.is_significant,
        "estimate": None if view.estimate is None else {"mean": view.estimate[0], "error": view.estimate[1]},
        "estimate_note": view.estimate_note or None,
        "state": dict(view.state),
        "policy": None if view.policy is None else dict(view.policy),
        "policy_note": view.policy_note,
        "steps": view.window.select(
            name for name in ("record_id", "step", "action", *_STRIPS, "error", "keep") if name in view.window.columns
        ).to_dicts(),
        "frames": sorted(view.frames),
        "frames_note": view.frames_note,
    }


def print_language_moment(row: Mapping[str, Any], number: int, response: Any = None) -> None:
    """Print one response of a language model with what it scored.

    Args:
        row: the response's row of the round's records.
        number: the round.
        response: its coloured text, a `rich.text.Text`; None: the row's, without colours.
    """
    print_line(f"Record {row['record_id']}, round {number}")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    score = row.get("score")
    table.add_row("score", _as_text(describe_score(float("nan") if score is None else score, row.get("error"))))
    if row.get("keep") is not None:
        reason = f": {row['reason']}" if row.get("reason") else ""
        table.add_row("trained", _as_text("yes" if row["keep"] else f"no, dropped{reason}"))
    for name in ("reward", "advantage", "prompt", "response"):
        if name == "response" and response is not None:
            table.add_row(name, response)
        elif row.get(name) is not None:
            table.add_row(name, _as_text(_format(row[name]) if isinstance(row[name], float) else str(row[name])))
    console.print(table)


def _as_text(text: str) -> Any:
    from rich.text import Text

    return Text(make_printable(text))


def _format(number: float | None) -> str:
    return "–" if number is None or not isfinite(number) else f"{number:.3g}"
