"""Curves over the rounds of a language model's run: rewards, lengths, and what else rows hold numbers of."""

import math
from collections.abc import Sequence
from typing import Any

from whence.runs import RunDirectory

_NAMES = {
    "reward": ("reward", "Mean over the round's responses"),
    "test_return": ("test", "Mean over the prompts of the test"),
    "length": ("length", "Tokens of a response"),
    "ended_share": ("ended", "The share of responses that ended before the limit of tokens"),
    "kl": ("divergence", "From the start model or the reference, in nats a response"),
    "train/entropy_loss": ("entropy", "Of the model, in nats a token"),
    "train/clip_fraction": ("clipped", "The share of ratios that were clipped"),
    "train/approx_kl": ("step size", "How far the round's steps took the model, in nats a token"),
    "dropped_share": ("dropped", "The share of responses that did not train"),
    "negative_share": ("scores below 0", "Their share"),
}
"""Curves by the names of metrics: their own names, and what they mean."""


def list_round_curves(run: RunDirectory, rounds: Sequence[int]) -> list[dict[str, Any]]:
    """Return curves in JSON types, rewards first: `name`, `about` and `values`, one for each round, null if unknown."""
    rows: dict[int, dict[str, Any]] = {number: {} for number in rounds}
    for table in (run.table("metrics"), run.table("evaluations")):
        for row in table.iter_rows(named=True):
            rows.get(row["round"], {}).update({name: v for name, v in row.items() if v is not None})
    present = dict.fromkeys(name for row in rows.values() for name in row)
    parts = [name for name in present if name.startswith("reward.")]
    infos = [name for name in present if name.startswith("info.") and name != "info.step"]
    curves = []
    for key in ("reward", *parts, *list(_NAMES)[1:], *infos):
        values = [rows[number].get(key) for number in rounds]
        if not any(isinstance(value, int | float) for value in values):
            continue
        about = "A column of the data set, or logged by a reward" if key in infos else "Of this reward function"
        name, about = _NAMES.get(key, (key.partition(".")[2], about))
        if key.endswith("share") and len({*values}) == 1:  # nothing was dropped, or all ended
            continue
        sign = -1 if key == "train/entropy_loss" else 1
        curves.append({"name": name, "about": about, "values": [_round(value, sign) for value in values]})
    return curves


def _round(value: float | None, sign: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{sign * value:.4g}")
