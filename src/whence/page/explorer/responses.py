"""A language model's responses: one opened with its tokens' parts, those to its prompt, answers before and after."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import polars as pl

from whence.page.explored_run import Round, attempt
from whence.page.explorer.grid import round_number, round_numbers, short_text
from whence.runs import RunDirectory

_COLUMNS = {"prompt": pl.String, "response": pl.String, "reward": pl.Float64}


class ShownAnswer(NamedTuple):
    """One answer as the page shows it.

    Attributes:
        by: which model gave it.
        text: the answer.
        reward: its reward.
        change: the reward minus that of the start model's answer; None for that answer itself.
        is_same: whether it is the start model's answer, word by word.
    """

    by: str
    text: str
    reward: float | None
    change: float | None
    is_same: bool


class ShownPrompt(NamedTuple):
    """A prompt with the start model's answer, and that of each trained model."""

    prompt: str
    answers: list[ShownAnswer]


class ShownAnswers(NamedTuple):
    """What the page shows.

    Attributes:
        sentences: for each run, how many answers changed and their mean reward.
        prompts: those whose reward changed the most first.
    """

    sentences: list[str]
    prompts: list[ShownPrompt]


def read_answers(runs: Mapping[str, RunDirectory], notes: list[str]) -> ShownAnswers | None:
    """Return the answers that runs stored, the start model's and each run's last; None if there are none.

    Args:
        runs: the runs by their names; a run that stored no answers is left out, and one of another start model than the
            first's.
        notes: takes a sentence for each run whose answers cannot be read, or is of another start model.
    """
    tables: dict[str, pl.DataFrame] = {}
    start: pl.DataFrame | None = None
    for name, run in runs.items():
        rounds = run.rounds("answers")
        if len(rounds) < 2 or rounds[0] != 0:  # trained models are compared with the start model
            continue
        failure = f"Answers of {name} cannot be shown"
        first, last = (attempt(partial(_read, run, number), notes, failure) for number in (0, rounds[-1]))
        if first is None or last is None:
            continue
        start = first if start is None else start
        if not first.equals(start):
            notes.append(f"{failure}: its start model answers otherwise than that of the first run.")
            continue
        after = f"after {rounds[-1]:,} rounds" if rounds[-1] > 1 else "after 1 round"
        tables[after if len(runs) == 1 else f"{name}, {after}"] = last
    return None if start is None or not tables else compare_answers(start, tables)


def _read(run: RunDirectory, number: int) -> pl.DataFrame:
    table = run.round("answers", number)
    return table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items())


def compare_answers(start: pl.DataFrame, tables: Mapping[str, pl.DataFrame]) -> ShownAnswers:
    """Return answers next to those of the start model.

    Args:
        start: `prompt`, `response` and `reward`, a row for each prompt.
        tables: the same of trained models, by name; rows to other prompts are left out.
    """
    prompts = start["prompt"].to_list()
    by_name = {name: {row["prompt"]: row for row in table.iter_rows(named=True)} for name, table in tables.items()}
    shown: list[ShownPrompt] = []
    for row in start.iter_rows(named=True):
        answers = [ShownAnswer("before training", cut_text(row["response"] or ""), row["reward"], None, True)]
        for name, others in by_name.items():
            if (other := others.get(row["prompt"])) is not None:
                is_same = other["response"] == row["response"]
                pair = other["reward"], row["reward"]
                change = None if None in pair else pair[0] - pair[1]
                answers.append(ShownAnswer(name, cut_text(other["response"] or ""), other["reward"], change, is_same))
        shown.append(ShownPrompt(cut_text(row["prompt"] or ""), answers))
    shown.sort(key=lambda one: -max((abs(answer.change or 0.0) for answer in one.answers), default=0.0))
    sentences = [
        _summarise(name, start, table.filter(pl.col("prompt").is_in(prompts))) for name, table in tables.items()
    ]
    return ShownAnswers(sentences, shown)


def _summarise(name: str, start: pl.DataFrame, table: pl.DataFrame) -> str:
    pairs = start.unique("prompt").join(table.unique("prompt"), on="prompt", suffix="_after")
    changed = int((pairs["response"] != pairs["response_after"]).sum())
    sentence = f"{name[:1].upper()}{name[1:]}: {changed} of {len(pairs)} answers differ from those before training."
    rewarded = pairs.drop_nulls(["reward", "reward_after"])
    if rewarded.is_empty():
        return sentence
    before, after = (rewarded[column].to_numpy().mean() for column in ("reward", "reward_after"))
    return f"{sentence} The mean reward was {before:.3g} before and is {after:.3g}."


LONGEST_TEXT = 20_000
"""Characters of a prompt or response at most."""

MOST_TOKENS = 8_000
"""Tokens of a response whose parts are shown at most."""

GROUP = 32
"""Responses to one prompt that are shown at most."""

EXCERPT = 160
"""Characters of a response in a list."""

PART_DIGITS = 3
"""Significant digits of a part."""

TARGETS = {
    "ValidationLoss": "likelihood of the demonstrations",
    "SequenceReturn": "return of whole responses",
    "TokenReturn": "return of tokens",
}
"""What targets raise, in words, by the beginnings of their names in the configuration."""


def describe_response(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a response's texts, tokens and numbers in JSON types.

    `tokens` holds the texts that the tokens add, and their parts of the score; it is null if they were not stored.
    """
    return {
        "record": row["record_id"],
        **{name: cut_text(row.get(name) or "") for name in ("prompt", "response")},
        "tokens": _list_tokens(row),
        **{name: round_number(row.get(name)) for name in ("reward", "advantage", "score", "error", "weight")},
        "dropped": row.get("keep") is False,
    }


def _list_tokens(row: Mapping[str, Any]) -> dict[str, Any] | None:
    texts, parts = row.get("token_texts"), row.get("token_parts")
    if not texts or not parts:
        return None
    shown = slice(MOST_TOKENS)
    return {
        "texts": [cut_text(text) for text in texts[shown]],
        "parts": round_numbers(parts[shown], PART_DIGITS),
        "left_out": max(0, len(texts) - MOST_TOKENS),
    }


def list_group(records: Round, prompt: Any, details: Collection[int] = ()) -> dict[str, Any]:
    """Return the responses of a round to one prompt in JSON types, the highest reward first.

    Args:
        records: the round.
        prompt: the prompt's text.
        details: records whose texts and tokens the page has already; they are left out.

    Returns:
        `responses`, and `total`, their number before some are left out for want of room.
    """
    table = records.table
    if "prompt" not in table.columns or not isinstance(prompt, str):
        return {"responses": [], "total": 0}
    by = [pl.col(name) for name in ("reward", "score") if name in table.columns]
    rows = table.filter(pl.col("prompt") == prompt).sort(*by, "record_id", descending=[*[True] * len(by), False])
    responses = [describe_response(row) for row in rows.head(GROUP).iter_rows(named=True)]
    for response in responses:
        del response["prompt"]
        if response["record"] in details:
            del response["response"], response["tokens"]
    return {"responses": responses, "total": len(rows)}


def list_groups(records: Round, details: Sequence[int]) -> list[dict[str, Any]]:
    """Return the groups of some records' prompts, those of more than one response; see `list_group`."""
    if "prompt" not in records.table.columns:
        return []
    rows = records.table.filter(pl.col("record_id").is_in(list(details)))
    groups = [list_group(records, prompt, details) for prompt in rows["prompt"].unique(maintain_order=True)]
    return [group for group in groups if group["total"] > 1]


def name_target(target: Any) -> str:
    """Return what a language model's target raises, in words; another target's own name."""
    text = str(target or "target")
    return next((words for name, words in TARGETS.items() if text.startswith(name)), text)


def cut_text(text: Any) -> str:
    """Return a text, cut off after `LONGEST_TEXT` characters."""
    return short_text(str(text), LONGEST_TEXT)
