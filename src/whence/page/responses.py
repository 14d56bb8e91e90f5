"""A language model's responses: one opened, those to the same prompt, and answers before and after training."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import polars as pl

from whence.page.explored_run import attempt
from whence.page.grid import cut_text, round_number
from whence.page.scored_round import Round
from whence.runs import RunDirectory

LONGEST_TEXT = 20_000
"""Characters of a prompt or response at most."""

GROUP = 32
"""Responses to one prompt that are shown at most."""

_COLUMNS = {"prompt": pl.String, "response": pl.String, "reward": pl.Float64}


def read_answers(runs: Mapping[str, RunDirectory], notes: list[str]) -> dict[str, Any] | None:
    """Return the answers that runs stored, the start model's and each run's last; None if there are none.

    Left out are runs that stored no answers, and, with a note, those of another start model than the first.
    """
    tables: dict[str, pl.DataFrame] = {}
    start: pl.DataFrame | None = None
    for name, run in runs.items():
        rounds = run.rounds("answers")
        if len(rounds) < 2 or rounds[0] != 0:  # trained models are compared with the start model
            continue
        failure = f"Answers of {name} cannot be shown"
        first, last = (attempt(partial(_read, run, number), notes, failure, None) for number in (0, rounds[-1]))
        if first is None or last is None:
            continue
        start = first if start is None else start
        if not first.equals(start):
            notes.append(f"{failure}: its start model answers otherwise than that of the first run.")
            continue
        after = f"after {rounds[-1]:,} rounds" if rounds[-1] > 1 else "after 1 round"
        tables[after if len(runs) == 1 else f"{name}, {after}"] = last
    return None if start is None or not tables else compare_answers(start, tables)


def _read(run: RunDirectory, number: int) -> pl.DataFrame | None:
    table = run.round("answers", number)
    return table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items()).unique("prompt", keep="first")


def compare_answers(start: pl.DataFrame, tables: Mapping[str, pl.DataFrame]) -> dict[str, Any]:
    """Return answers next to those of the start model, in JSON types; answers to other prompts are left out.

    Returns:
        `sentences`, one for each model, and `prompts`, those whose reward changed the most first, each with `answers`.
    """
    shown = {row["prompt"]: [_show_answer("before training", row, None)] for row in start.to_dicts()}
    sentences = []
    for name, table in tables.items():
        pairs = start.join(table, on="prompt", suffix="_after", maintain_order="left")
        for row in pairs.to_dicts():
            after = {"response": row["response_after"], "reward": row["reward_after"]}
            shown[row["prompt"]].append(_show_answer(name, after, row))
        changed = int((pairs["response"] != pairs["response_after"]).sum())
        sentence = f"{name[:1].upper()}{name[1:]}: {changed} of {len(pairs)} answers differ from those before training."
        rewarded = pairs.drop_nulls(["reward", "reward_after"])
        if len(rewarded):
            before, after = (rewarded[column].to_numpy().mean() for column in ("reward", "reward_after"))
            sentence = f"{sentence} The mean reward was {before:.3g} before and is {after:.3g}."
        sentences.append(sentence)
    ordered = sorted(shown.items(), key=lambda pair: -max(abs(answer["change"] or 0.0) for answer in pair[1]))
    prompts = [{"prompt": _cut(prompt), "answers": answers} for prompt, answers in ordered]
    return {"sentences": sentences, "prompts": prompts}


def _show_answer(by: str, row: Mapping[str, Any], start: Mapping[str, Any] | None) -> dict[str, Any]:
    change = None if start is None or None in (row["reward"], start["reward"]) else row["reward"] - start["reward"]
    is_same = start is not None and row["response"] == start["response"]
    return {"by": by, "text": _cut(row["response"]), "reward": row["reward"], "change": change, "is_same": is_same}


def describe_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's texts and numbers in JSON types."""
    return {
        "record": row["record_id"],
        **{name: _cut(row.get(name)) for name in ("prompt", "response")},
        **{name: round_number(row.get(name)) for name in ("reward", "advantage", "score", "error", "weight")},
        "dropped": row.get("keep") is False,
    }


def list_group(records: Round, prompt: Any, details: Collection[int] = ()) -> dict[str, Any]:
    """Return the responses of a round to one prompt in JSON types, the highest reward first.

    Returns:
        `responses`, and `total`, their number before some are left out for want of room.
    """
    table = records.table
    if "prompt" not in table.columns:
        return {"responses": [], "total": 0}
    by = [pl.col(name) for name in ("reward", "score") if name in table.columns]
    rows = table.filter(pl.col("prompt") == prompt).sort(*by, "record_id", descending=[*[True] * len(by), False])
    responses = [describe_response(row) for row in rows.head(GROUP).iter_rows(named=True)]
    for response in responses:
        del response["prompt"]
        if response["record"] in details:
            del response["response"]
    return {"responses": responses, "total": len(rows)}


def list_groups(records: Round, details: Sequence[int]) -> list[dict[str, Any]]:
    """Return the groups of some records' prompts, those of more than one response; see `list_group`."""
    rows = records.table.filter(pl.col("record_id").is_in(list(details)))
    prompts = rows["prompt"].unique(maintain_order=True).to_list() if "prompt" in rows.columns else []
    groups = [list_group(records, prompt, details) for prompt in prompts]
    return [group for group in groups if group["total"] > 1]


def _cut(text: Any) -> str:
    return cut_text(str(text or ""), LONGEST_TEXT)
