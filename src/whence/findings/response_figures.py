"""Figures of a language model's rounds that its records hold: groups without signal, repeated text, the sampler."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from whence.runs import RunDirectory, read_vocabulary

_ROUNDS, _FIRST = 64, 8
"""Rounds that are read at most, spread over the run, and of these the first ones that are read without a gap."""

_TEXTS, _TOKENS = 32, 512
"""Responses of a round whose repetitions are counted at most, and their last tokens."""

_GRAM, _LEAST_TOKENS = 4, 32
"""The length of a sequence of tokens that repeats, and that of a response in which it is looked for."""

REPEATS = 0.5
"""Of the sequences of four tokens in a response, the share that repeat an earlier one from which on it is a loop."""


def choose_rounds(stored: Sequence[int]) -> list[int]:
    """Return the first rounds and others that are spread over the run."""
    places = np.linspace(0, len(stored) - 1, min(_ROUNDS - _FIRST, len(stored))).round().astype(int)
    return sorted({*stored[:_FIRST], *(stored[place] for place in places)})


def measure_rounds(run: RunDirectory) -> pl.DataFrame:
    """Return a row for each of a run's rounds that are read: `round`, and as far as records tell it

    - `equal_groups`: the share of the groups of several responses whose rewards are equal; `equal_best`, `equal_worst`:
      those that all have the highest reward of these rounds, or the lowest;
    - `mixed_groups`: the number of group ids that several prompts have;
    - `repeated`: the share of long responses that repeat themselves;
    - `sampler_difference`, `sampler_beyond`: the mean |difference| of a token's log-probs by sampler and trainer, in
      nats, and the share of tokens beyond half a nat; `sampler_tokens`: the ids that make most of it.

    `NAME_ids` are the records that show it.
    """
    is_named = "group" in (run.config.get("columns") or {})  # by the user, who may mean more than a prompt
    numbers = choose_rounds(run.rounds())
    rows = [{"round": n, **_measure(run.round("records", n), is_named=is_named)} for n in numbers]
    rewards = [reward for row in rows for reward in row.get("range", ())]
    for row in rows:
        row.pop("range", None)
        if (size := row.pop("groups", 0)) and (equal := np.array(row.pop("equal"))) is not None:
            row["equal_groups"] = len(equal) / size
            if min(rewards) < max(rewards):
                row["equal_best"], row["equal_worst"] = (
                    float((equal == extreme).sum()) / size for extreme in (max(rewards), min(rewards))
                )
    if any("sampler_tokens" in row for row in rows) and (texts := read_vocabulary(run.path)):
        for row in rows:
            row["sampler_tokens"] = [texts[token] for token in row.get("sampler_tokens", ()) if token < len(texts)]
    return pl.DataFrame(rows, infer_schema_length=None)


def _measure(table: pl.DataFrame, *, is_named: bool) -> dict[str, Any]:
    return _measure_groups(table, is_named=is_named) | _measure_repetition(table) | _measure_sampler(table)


def _measure_groups(table: pl.DataFrame, *, is_named: bool) -> dict[str, Any]:
    unit = "group_id" if "group_id" in table.columns else "prompt"
    if not {"prompt", "reward", unit} <= {*table.columns}:
        return {}
    reward, prompts = pl.col("reward").cast(pl.Float64).fill_nan(None), pl.col("prompt").n_unique()
    ids = pl.col("record_id").alias("ids")
    groups = table.group_by(unit, maintain_order=True).agg(
        ids, reward.min().alias("low"), reward.max().alias("high"), reward.count().alias("size"), prompts.alias("of")
    )
    mixed, several = groups.filter(pl.col("of") > 1), groups.filter(pl.col("size") > 1)
    row: dict[str, Any] = {}
    if unit == "group_id" and not is_named:
        row |= {"mixed_groups": len(mixed), "mixed_groups_ids": mixed["ids"].explode().to_list() if len(mixed) else []}
    if len(several):
        row["range"] = several["low"].min(), several["high"].max()
        row |= {"groups": len(several), "equal": several.filter(pl.col("low") == pl.col("high"))["low"].to_list()}
    return row


def _measure_repetition(table: pl.DataFrame) -> dict[str, Any]:
    if not {"response", "response_ids"} & {*table.columns}:
        return {}
    rows = table[np.unique(np.linspace(0, len(table) - 1, min(_TEXTS, len(table))).astype(int))]
    texts = rows["response_ids"].to_list() if "response_ids" in rows.columns else map(str.split, rows["response"])
    shares = {
        number: measure_repetition(text)
        for number, text in zip(rows["record_id"], texts, strict=True)
        if text is not None and len(text) >= _LEAST_TOKENS
    }
    if not shares:
        return {}
    ids = [number for number, share in shares.items() if share >= REPEATS]
    return {"repeated": len(ids) / len(shares), "repeated_ids": ids}


def measure_repetition(tokens: Sequence[Any]) -> float:
    """Return the share of a response's sequences of four tokens that are there before, among its last tokens."""
    tokens = tokens[-_TOKENS:]
    grams = [*zip(*(tokens[place:] for place in range(_GRAM)), strict=False)]
    return 1 - len({*grams}) / len(grams) if grams else 0.0


def _measure_sampler(table: pl.DataFrame) -> Mapping[str, Any]:
    names = ("token_log_probs", "token_sampler_log_probs")
    if not {*names, "response_ids"} <= {*table.columns}:
        return {}
    lists = pl.col("record_id", "response_ids", *names)
    tokens = table.select(lists).drop_nulls().explode("response_ids", *names).drop_nulls()
    tokens = tokens.with_columns(gap=(pl.col(names[0]) - pl.col(names[1])).abs()).filter(pl.col("gap").is_finite())
    if tokens.is_empty():
        return {}
    by_token, by_record = (
        tokens.group_by(name, maintain_order=True).agg(pl.col("gap").sum()).sort("gap", descending=True)[name]
        for name in ("response_ids", "record_id")
    )
    means = tokens.select(sampler_difference=pl.col("gap").mean(), sampler_beyond=(pl.col("gap") > 0.5).mean())
    return means.row(0, named=True) | {
        "sampler_tokens": by_token[:3].to_list(),
        "sampler_difference_ids": by_record[:8].to_list(),
    }
