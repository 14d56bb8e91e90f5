"""Rules that read a run's metrics, while it trains and afterwards: selections that drop too much, collapsed texts."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import polars as pl

from whence.findings.finding import Finding

log = logging.getLogger("whence")

_WINDOW = 10
"""Rounds since the first selection that are looked at; later, it is training's own doing."""

_MOST_NATS_PER_TOKEN = 1.0
"""Divergence from the start model that useful training stays far below."""

_LENGTH = 20.0
"""Tokens of a response where its length was not logged."""

_REMEDY = (
    "raise the KL coefficient (`init_kl_coef`; TRL's `beta`), lower `learning_rate`, and look at what the reward pays "
    "for."
)
"""What to do if a language model finds a trick."""

Rows = Sequence[Mapping[str, Any]]


class _Rule(NamedTuple):
    """What is said of the first round that shows it.

    Attributes:
        column: what it reads; of a loss, the entropy.
        is_met: whether a round shows it, by its value, the first round's, and the length of responses, 0 if unknown.
        title, evidence, advice: with `value`, `first`, and the `rounds` between them.
        select: returns the rounds that are looked at.
    """

    column: str
    is_met: Callable[[float, float, float], bool]
    title: str
    evidence: str
    advice: str
    select: Callable[[Rows], Rows] = lambda rows: rows


def give_advice(metrics: pl.DataFrame) -> dict[str, Finding]:
    """Return what a run's rounds show, by the names of the rules, in the order of the rounds that show it first.

    Args:
        metrics: a run directory's table of that name, one row a round. A rule says nothing if its columns are missing.
    """
    return _apply_rules(metrics.to_dicts())


def log_new_advice(metrics: Rows, config: Mapping[str, Any], logged: set[str]) -> None:
    """Log findings on the rounds so far to the logger "whence", those of a rule once; its name is added to `logged`.

    After a hundred rounds it looks only now and then, since it reads all rounds each time. What takes a whole run, or
    other runs to compare it with, is left to `whence findings`.
    """
    if len(metrics) % max(1, len(metrics) // 50):
        return
    for name, finding in _apply_rules(metrics).items():
        if name not in logged:
            logged.add(name)
            log.warning("round %d: %s. %s %s", finding.round, finding.title, finding.evidence, finding.advice)


def _apply_rules(rows: Rows) -> dict[str, Finding]:
    first = {name: one for name, rule in _RULES.items() if (one := _apply(rule, rows)) is not None}
    return dict(sorted(first.items(), key=lambda pair: pair[1].round or 0))


def _apply(rule: _Rule, rows: Rows) -> Finding | None:
    """Return what a rule says of the first round that shows it."""
    sign = -1 if rule.column.endswith("loss") else 1
    rows = [row for row in rule.select(rows) if row.get(rule.column) is not None]
    for row in rows:
        value, first = (sign * one[rule.column] for one in (row, rows[0]))
        if rule.is_met(value, first, row.get("length") or 0.0):
            words = {"value": value, "first": first, "rounds": row["round"] - rows[0]["round"]}
            title, evidence, advice = (text.format(**words) for text in (rule.title, rule.evidence, rule.advice))
            return Finding("setting", title, evidence, advice, round=row["round"])
    return None


def _select_since_selection(rows: Rows) -> Rows:
    """Return the rounds from the one before an agent's first selection on."""
    known = [row for row in rows if row.get("train/entropy_loss") is not None and "length" not in row]
    start = next((at for at, row in enumerate(known) if (row.get("dropped_share") or 0) > 0), len(known))
    return known[max(0, start - 1) : start + 1 + _WINDOW]


RESPONSES = {
    "divergence from the start model": _Rule(
        "kl",
        lambda value, first, length: value > _MOST_NATS_PER_TOKEN * (length or _LENGTH),
        "The divergence from the start model is {value:.3g} nats a response",
        "The start model would hardly ever write such text, so this one may earn its reward by a trick.",
        f"Read the responses; {_REMEDY}",
    ),
    "entropy of the tokens": _Rule(
        "train/entropy_loss",
        lambda value, first, length: length > 0 and value < 0.05 * first,
        "The entropy of the model's tokens fell from {first:.3g} in the first round to {value:.3g}",
        "It writes nearly the same tokens whatever is drawn, so rounds teach it little more.",
        f"If the responses are right and differ with the prompt, stop training. If they repeat a word, {_REMEDY}",
    ),
    "ends of responses": _Rule(
        "ended_share",
        lambda value, first, length: first >= 0.5 and value < 0.1 * first,
        "Of the responses {value:.0%} end before the length limit, {first:.0%} did in the first round",
        "The model runs on, often by repeating itself.",
        f"Read the responses. Raise PPO's `missing_eos_penalty`, or {_REMEDY}",
    ),
    "dropped responses": _Rule(
        "dropped_share",
        lambda value, first, length: value >= 0.95,
        "{value:.0%} of the records were dropped",
        "The rest is a small sample, and its gradient is noisy.",
        "Lower `drop`, or use a rule with a bounded share, such as IIF.",
    ),
}
"""The rules on a language model, by the names of what they look at."""

_RULES = RESPONSES | {
    "entropy since the first selection": _Rule(
        "train/entropy_loss",
        lambda value, first, length: value < 0.5 * first,
        "The policy's entropy fell from {first:.3g} to {value:.3g} in the {rounds} rounds since records are dropped",
        "The rule may drop the records that explore.",
        "Add warm-up rounds, lower `drop`, or raise `ent_coef`.",
        _select_since_selection,
    ),
}
