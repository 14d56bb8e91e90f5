"""Answers of language models to the same prompts, at any of their checkpoints."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import polars as pl

from whence.page.content.explored_run import attempt
from whence.page.content.record_grid import cut_text, round_number
from whence.page.content.responses import LONGEST_TEXT
from whence.page.embedded_rounds import spread
from whence.runs import RunDirectory

CHECKPOINTS = 12
"""Rounds of a run whose answers a page holds at most; two where there are more than `FEW` runs."""

FEW = 4

_COLUMNS = {"prompt": pl.String, "response": pl.String, "reward": pl.Float64}


def read_answers(runs: Mapping[str, RunDirectory], notes: list[str]) -> dict[str, Any] | None:
    """Return the answers that runs stored, in JSON types; None if there are none.

    Returns:
        `prompts`, and `sources`: the `run`, the `round` (0: before training), and its `answers`, a `text` and a
        `reward` for each prompt; null where the model was not asked.
    """
    sources, prompts = list[tuple[str, int, pl.DataFrame]](), dict[str, None]()
    for name, run in runs.items():
        for number in spread(run.rounds("answers"), CHECKPOINTS if len(runs) <= FEW else 2):
            failure = f"Answers of {name} cannot be shown"
            table = attempt(partial(_read, run, number), notes, failure, None)
            if table is not None:
                sources.append((name, number, table))
                prompts |= dict.fromkeys(table["prompt"])
    if len(sources) < 2:
        return None
    return {
        "prompts": [cut_text(prompt, LONGEST_TEXT) for prompt in prompts],
        "sources": [
            {"run": name, "round": number, "answers": _list_answers(table, list(prompts))}
            for name, number, table in sources
        ],
    }


def _read(run: RunDirectory, number: int) -> pl.DataFrame:
    table = run.round("answers", number)
    return table.select(pl.col(name).cast(kind) for name, kind in _COLUMNS.items()).unique(
        "prompt", keep="first", maintain_order=True
    )


def _list_answers(table: pl.DataFrame, prompts: list[str]) -> list[dict[str, Any] | None]:
    rows = {row["prompt"]: row for row in table.iter_rows(named=True)}
    return [
        {"text": cut_text(row["response"] or "", LONGEST_TEXT), "reward": round_number(row["reward"])}
        if (row := rows.get(prompt))
        else None
        for prompt in prompts
    ]
