"""Moments, responses with what their scores come from, and causes in the terminal."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.table import Table
from rich.text import Text

from whence.cli.terminal.console import console, make_printable, make_table, print_line
from whence.page import CauseView, MomentView, cut_text, describe_score, describe_training, format_number
from whence.scores import Moment, name_action

if TYPE_CHECKING:
    from whence.stored.language import Explanation

NEAR = 4
"""Steps before and after a moment's face that the terminal shows."""

_STRIPS = ("reward", "value", "advantage", "score")

_BLOCKS = " ▁▂▃▄▅▆▇█"

_EXCERPT = 60
"""Characters of a text in a table's cell."""

_COLUMNS = 100
"""The most columns of blocks in a line."""

_STRONG, _WEAK = 0.4, 0.1
"""Shares of the largest part from which a token is coloured fully, and at all."""


def print_view(view: MomentView) -> None:
    """Print a moment: what it is, what was done there, what the round changed, and the steps around it."""
    moment = view.moment
    print_line(f"Record {moment.record_id} of {view.place}")
    facts = view.facts
    if view.state:
        # A state of one number has no names of axes.
        facts["state"] = ", ".join(f"{name} {value:.3g}" for name, value in view.state[:64]).removeprefix("state ")
    _print_facts(facts | ({"frames": view.frames_note} if view.frames_note else {}))
    if (change := view.policy) is not None:
        title = f"Policy before and after the round; value {change.values[0]:.3g} → {change.values[1]:.3g}"
        if not change.spreads:
            columns = [[f"{share:.3f}" for share in shares] for shares in (change.before, change.after)]
        else:
            pairs = ((change.before, change.spreads[0]), (change.after, change.spreads[1]))
            columns = [[f"{mean:.3g} ± {std:.2g}" for mean, std in zip(*pair, strict=True)] for pair in pairs]
        console.print(make_table(title, ["action", "before", "after"], zip(change.names, *columns, strict=True)))
    elif view.policy_note:
        print_line(view.policy_note)
    if len(view.window) > 1:
        console.print(_make_strip(view))


def _print_facts(facts: Mapping[str, str | Text]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts.items():
        table.add_row(name, Text(make_printable(text)) if isinstance(text, str) else text)
    console.print(table)


def _make_strip(view: MomentView) -> Table:
    """Return the steps around a moment's face as a table, the face marked."""
    window, moment = view.window, view.moment
    face = window["record_id"].to_list().index(moment.record_id)
    names = [name for name in _STRIPS if name in window.columns and window[name].null_count() < len(window)]
    cells = []
    for row in window[max(0, face - NEAR) : face + NEAR + 1].iter_rows(named=True):
        record = row["record_id"]
        numbers = [format_number(row[name]) for name in names]
        if names[-1:] == ["score"] and row.get("error") is not None:
            numbers[-1] += f" ± {row['error']:.2g}"
        mark = "▶" if record == moment.record_id else "·" if record in moment.record_ids else ""
        action = name_action(row.get("action"), view.action_labels)
        cells.append([mark, row.get("step"), action, *numbers, "dropped" if row.get("keep") is False else ""])
    return make_table("Steps around it", ["", "step", "action", *names, ""], cells)


def print_moments(moments: Sequence[Moment], labels: Sequence[str] | None) -> None:
    """Print a table of a round's most harmful or most helpful moments."""
    rows = [
        [
            *(moment.record_id, moment.episode_id, _name_steps(moment.first_step, moment.last_step)),
            name_action(moment.action, labels),
            f"{moment.score:.3g}" + ("" if moment.error is None else f" ± {moment.error:.2g}"),
            moment.dropped,
        ]
        for moment in moments
    ]
    order = "the largest first" if moments[0].error is None else "the surest first"
    title = f"The {len(moments)} most {'harmful' if moments[0].score < 0 else 'helpful'} moments, {order}"
    console.print(make_table(title, ["record", "episode", "steps", "action", "score", "dropped"], rows))


def _name_steps(first: int | None, last: int | None) -> object:
    return first if first == last else f"{first}–{last}"


def print_response(row: Mapping[str, Any], number: int, response: Text | None = None) -> None:
    """Print one response of a language model, coloured or as its row has it, with what it scored."""
    print_line(f"Record {row['record_id']}, round {number}")
    score = row.get("score")
    facts: dict[str, str | Text] = {"score": describe_score(float("nan") if score is None else score, row.get("error"))}
    facts |= describe_training(row)
    facts |= {name: format_number(row[name]) for name in ("reward", "advantage") if row.get(name) is not None}
    facts |= {name: str(row[name]) for name in ("prompt", "response") if row.get(name) is not None}
    _print_facts(facts if response is None else facts | {"response": response})


def print_explanation(explanation: "Explanation", number: int, top: int) -> None:
    """Print a response with coloured tokens, the tokens that count most, and the rows that it pulls at most."""
    print_response(explanation.row, number, colour_tokens(explanation.tokens, explanation.parts))
    total = sum(explanation.parts)
    print_line(f"Blue tokens raise the target, orange ones lower it. Their parts sum to {total:.4g}.")
    places = sorted(range(len(explanation.parts)), key=lambda at: -abs(explanation.parts[at]))[: 2 * top]
    cells = [[at, show_text(explanation.tokens[at]), f"{explanation.parts[at]:+.3g}"] for at in sorted(places)]
    console.print(make_table(f"The {len(cells)} tokens that count most", ["position", "token", "part"], cells))
    for title, pulls in _choose_pulls(explanation, top).items():
        if pulls:
            about = "raises" if title == "with" else "lowers"
            rows = [_list_pull_cells(pull, explanation.row["record_id"]) for pull in pulls]
            heading = f"What it pulls {title}: training on it {about} these terms of the target"
            console.print(make_table(heading, ["part", "of", "advantage", "prompt", "response"], rows))
    if explanation.note is not None:
        print_line(f"Note: {explanation.note}")


def colour_tokens(tokens: Sequence[str], parts: Sequence[float]) -> Text:
    """Return a response's text with its tokens coloured by sign and size of their parts."""
    largest = max(map(abs, parts), default=0.0) or 1.0
    text = Text()
    for token, part in zip(tokens, parts, strict=True):
        share, colour = abs(part) / largest, "#ff8a3d" if part < 0 else "#5f9bff"
        style = f"black on {colour}" if share >= _STRONG else colour if share >= _WEAK else ""
        text.append(make_printable(token), style)
    return text


def _choose_pulls(explanation: "Explanation", top: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of the target with the largest parts above 0, and with the largest below."""
    part, pulls = pl.col("part"), explanation.pulls
    return {
        "with": pulls.head(top).filter(part > 0).to_dicts(),
        "against": pulls.tail(top).reverse().filter(part < 0).to_dicts(),
    }


def _list_pull_cells(pull: dict[str, Any], explained: int) -> list[str]:
    name = "demonstration" if pull["record"] is None else f"record {pull['record']}"
    of = f"{name}, itself" if pull["record"] == explained else name
    advantage = "" if pull["advantage"] is None else f"{pull['advantage']:+.3g}"
    return [f"{pull['part']:+.3g}", of, advantage, shorten(pull["prompt"]), shorten(pull["response"])]


def describe_explanation(explanation: "Explanation", top: int) -> dict[str, Any]:
    """Return a response's explanation in JSON types."""
    names = ("record_id", "prompt", "response", "reward", "advantage", "score", "keep", "weight", "reason")
    pairs = zip(explanation.tokens, explanation.parts, strict=True)
    return {
        **{name: explanation.row.get(name) for name in names},
        "tokens": [{"text": text, "part": part} for text, part in pairs],
        "pulls": _choose_pulls(explanation, top),
        "notes": [] if explanation.note is None else [explanation.note],
    }


def print_causes(view: CauseView) -> None:
    """Print what taught a decision: sentences, the strip over rounds, and the moments or records."""
    print_line(view.decision.text)
    print_line(view.text)
    print_strip(view.rounds)
    for rows, side in ((view.raised, "for"), (view.lowered, "against")):
        if rows:
            kind = "records" if "prompt" in rows[0] else "moments"
            cells = [_list_cause_cells(row) for row in rows]
            title = f"The {len(rows)} {kind} that speak {side} it most"
            console.print(make_table(title, list(cells[0]), [list(row.values()) for row in cells]))
    for note in view.notes:
        print_line(f"Note: {note}")


def _list_cause_cells(row: Mapping[str, Any]) -> dict[str, object]:
    """Return a moment's or a record's cells by their headings."""
    cells: dict[str, object] = {"round": row["round"], "record": row["record"]}
    if "prompt" in row:
        cells |= {name: shorten(row[name]) for name in ("prompt", "response")} | {"reward": f"{row['reward']:.3g}"}
    else:
        steps = _name_steps(row["first_step"], row["last_step"])
        cells |= {"episode": row["episode"], "steps": steps, "action": row["action"]}
    advantage = "–" if row["advantage"] is None else f"{row['advantage']:+.3g}"
    return cells | {"advantage": advantage, "score": f"{row['score']:+.3g}"}


def print_strip(rounds: pl.DataFrame) -> None:
    """Print the sums of each round, from `sum_rounds`, as two lines of blocks of one scale.

    A column is a round, or the mean of neighbouring rounds where there are many.
    """
    numbers = rounds["round"].to_list()
    gaps = numbers[-1] - numbers[0] + 1 - len(numbers)
    span = f"rounds {numbers[0]} to {numbers[-1]}"
    print_line(f"\nSums of scores in {f'{len(numbers)} of {span}' if gaps else span}:")
    place = pl.int_range(pl.len()) * min(_COLUMNS, len(rounds)) // pl.len()
    means = rounds.group_by(place=place, maintain_order=True).agg(pl.col("raised", "lowered").mean().abs())
    largest = max(*means["raised"], *means["lowered"]) or 1.0
    for side, column in (("for", "raised"), ("against", "lowered")):
        print_line(f"{side:<8} {''.join(_BLOCKS[ceil(8 * mean / largest)] for mean in means[column])}")


def shorten(text: str) -> str:
    """Return a text on one line, cut to the width of a table's cell."""
    return cut_text(show_text(text), _EXCERPT)


def show_text(text: str) -> str:
    """Return a text on one line, its line breaks and tabs written out."""
    return text.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
