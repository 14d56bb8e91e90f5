"""Figures of a language model's rounds that its records hold: groups without signal, repeated text, the sampler."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from whence.runs import RunDirectory, read_vocabulary

_ROUNDS, _FIRST = 64, 8
"""Rounds that are read at most, spread over the run; of these the first ones are read without a gap."""

_TEXTS, _TOKENS, _LEAST_TOKENS = 32, 512, 32
"""Responses of a round in which repetitions are looked for, tokens at their ends, and what is too short for it."""

LOOP = 0.5
"""Of a response's sequences of four tokens, the share that are there before from which on it repeats itself."""


def choose_rounds(stored: Sequence[int]) -> list[int]:
    """Return the first rounds and others that are spread over the run."""
    places = np.linspace(0, len(stored) - 1, min(_ROUNDS - _FIRST, len(stored))).round().astype(int)
    return sorted({*stored[:_FIRST], *(stored[place] for place in places)})


def measure_rounds(run: RunDirectory) -> pl.DataFrame:
    """Return a row for each of a run's rounds that are read, with `round` and what its records tell.

    - `equal_groups`: the share of the groups of several responses whose rewards are equal; `equal_best`, `equal_worst`:
      of those whose rewards all are the highest of these rounds, or the lowest;
    - `mixed_groups`: the number of group ids that several prompts have;
    - `repeated`: the share of long responses that repeat themselves;
    - `sampler_difference`: the mean |difference| of a token's log-probs by sampler and trainer, in nats; `tokens`: in
      words, where it is.

    `NAME_ids` are the records that show it; `is_scored`: one checkpoint scored the rollouts of all rounds.
    """
    texts, is_scored = read_vocabulary(run.path), run.config.get("algorithm") == "scored"
    rows, groups = list[dict[str, Any]](), list[pl.DataFrame]()
    for number in choose_rounds(run.rounds()):
        table = run.round("records", number).with_columns(pl.lit(number, pl.Int64).alias("round"))
        seen = _find_repeats(table) | _compare_samplers(table, texts)
        rows.append({"round": number, "is_scored": is_scored, **seen})
        unit, reward = "group_id" if "group_id" in table.columns else "prompt", pl.col("reward").cast(pl.Float64)
        if {"prompt", "reward", unit} <= {*table.columns}:
            extremes = {"low": reward.fill_nan(None).min(), "high": reward.fill_nan(None).max()}
            counts = {"size": reward.fill_nan(None).count(), "prompts": pl.col("prompt").n_unique()}
            groups.append(table.group_by("round", unit).agg(pl.col("record_id"), **extremes, **counts))
    figures = [pl.DataFrame(rows, infer_schema_length=None)]
    if groups:
        is_equal, is_mixed = pl.col("low") == pl.col("high"), pl.col("prompts") > 1
        units = pl.concat(groups, how="diagonal_relaxed")
        several = units.filter(pl.col("size") > 1)
        sides = {"equal_best": several["high"].max(), "equal_worst": several["low"].min()}
        known = sides if len({*sides.values()}) > 1 else {}  # no reward tells best from worst
        shares = {name: (is_equal & (pl.col("low") == side)).mean() for name, side in known.items()}
        figures.append(several.group_by("round").agg(is_equal.mean().alias("equal_groups"), **shares))
        # A user who names the groups' column may mean more than a prompt.
        if "group_id" in units.columns and "group" not in (run.config.get("columns") or {}):
            ids = pl.col("record_id").filter(is_mixed).list.explode().drop_nulls()
            figures.append(units.group_by("round").agg(mixed_groups=is_mixed.sum(), mixed_groups_ids=ids))
    return pl.concat(figures, how="align_left")


def _find_repeats(table: pl.DataFrame) -> dict[str, Any]:
    if "response_ids" not in table.columns:
        return {}
    rows = table.select("record_id", "response_ids")[:: max(1, len(table) // _TEXTS)].iter_rows()
    each = ((number, measure_repetition(tokens or ())) for number, tokens in rows)
    shares = {number: share for number, share in each if share is not None}
    ids = [number for number, share in shares.items() if share >= LOOP]
    return {"repeated": len(ids) / len(shares), "repeated_ids": ids} if shares else {}


def measure_repetition(ids: Sequence[int]) -> float | None:
    """Return the share of sequences of four tokens that are there before, at a response's end; None: it is short."""
    tokens = ids[-_TOKENS:]
    sequences = [*zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False)]
    return 1 - len({*sequences}) / len(sequences) if len(tokens) >= _LEAST_TOKENS else None


def _compare_samplers(table: pl.DataFrame, texts: Sequence[str]) -> dict[str, Any]:
    lists = ("response_ids", "token_log_probs", "token_sampler_log_probs")
    if not {*lists} <= {*table.columns}:
        return {}
    tokens = table.select("record_id", *lists).drop_nulls().explode(*lists).drop_nulls()
    tokens = tokens.with_columns(gap=(pl.col(lists[1]) - pl.col(lists[2])).abs()).filter(pl.col("gap").is_finite())
    if tokens.is_empty():
        return {}
    ids, records = (
        tokens.group_by(name, maintain_order=True).agg(pl.col("gap").sum()).sort("gap", descending=True)[name]
        for name in ("response_ids", "record_id")
    )
    most = ", ".join(repr(texts[token]) if token < len(texts) else str(token) for token in ids[:3])
    share = (tokens["gap"] > 0.5).sum() / len(tokens)
    words = f" {share:.0%} of the tokens differ by more than half a nat. Most of it is in the tokens {most}."
    mean = tokens["gap"].mean()
    return {"sampler_difference": mean, "tokens": words, "sampler_difference_ids": records[:8].to_list()}
