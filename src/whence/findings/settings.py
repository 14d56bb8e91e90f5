"""Rules that read a run's metrics, while it trains and afterwards: selections that drop too much, collapsed texts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from whence.findings.finding import Finding

log = logging.getLogger("whence")

_WINDOW = 10
"""Number of rounds from which a trend is read."""

Rows = Sequence[Mapping[str, Any]]


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
    first = {name: one for name, rule in _RULES.items() if (one := next(rule(rows), None)) is not None}
    return dict(sorted(first.items(), key=lambda pair: pair[1].round or 0))


def _read(rows: Rows, name: str) -> list[tuple[int, float]]:
    """Return the rounds that have a value in a column, each with its value."""
    return [(row["round"], row[name]) for row in rows if row.get(name) is not None]


def _say(number: int, title: str, evidence: str, advice: str) -> Finding:
    return Finding("setting", title, evidence, advice, round=number)


def _drops_nearly_all(rows: Rows) -> Iterator[Finding]:
    for number, share in _read(rows, "dropped_share"):
        if share >= 0.95:
            yield _say(
                number,
                f"{share:.0%} of the records were dropped",
                "The rest is a small sample, and its gradient is noisy.",
                "Lower `drop`, or use a rule with a bounded share, such as IIF.",
            )


def _entropy_collapses(rows: Rows) -> Iterator[Finding]:
    """Look at the rounds after the first selection; later, it is training's own doing."""
    losses = _read(rows, "train/entropy_loss")
    selecting = {number for number, share in _read(rows, "dropped_share") if share > 0}
    start = next((at for at, (number, _) in enumerate(losses) if number in selecting), None)
    if start is None or "length" in rows[0]:
        return
    before = -losses[max(0, start - 1)][1]
    for number, loss in losses[start + 1 : start + 1 + _WINDOW]:
        if before > 0 and -loss < 0.5 * before:
            yield _say(
                number,
                f"The policy's entropy fell from {before:.3g} to {-loss:.3g} within {number - losses[start][0]} rounds "
                "of the first selection",
                "The rule may drop the records that explore.",
                "Add warm-up rounds, lower `drop`, or raise `ent_coef`.",
            )


_REMEDY = (
    "raise the KL coefficient (`init_kl_coef`; TRL's `beta`), lower `learning_rate`, and look at what the reward pays "
    "for."
)
"""What to do if a language model finds a trick."""

_MOST_NATS_PER_TOKEN = 1.0
"""Divergence from the start model that useful training stays far below."""


def _leaves_start_model(rows: Rows) -> Iterator[Finding]:
    lengths = dict(_read(rows, "length"))
    for number, divergence in _read(rows, "kl"):
        if divergence > _MOST_NATS_PER_TOKEN * lengths.get(number, 20.0):
            yield _say(
                number,
                f"The divergence from the start model is {divergence:.3g} nats a response",
                "The start model would hardly ever write such text, so this one may earn its reward by a trick.",
                f"Read the responses; {_REMEDY}",
            )


def _responses_become_alike(rows: Rows) -> Iterator[Finding]:
    losses = _read(rows, "train/entropy_loss")
    for number, loss in losses[1:]:
        first = -losses[0][1]
        if "length" in rows[0] and first > 0 and -loss < 0.05 * first:
            yield _say(
                number,
                f"The entropy of the model's tokens fell from {first:.3g} in the first round to {-loss:.3g}",
                "It writes nearly the same tokens whatever is drawn, so rounds teach it little more.",
                "If the responses are right and differ with the prompt, stop training. If they repeat a word, "
                f"{_REMEDY}",
            )


def _responses_do_not_end(rows: Rows) -> Iterator[Finding]:
    shares = _read(rows, "ended_share")
    for number, share in shares[1:]:
        first = shares[0][1]
        if first >= 0.5 and share < 0.1 * first:
            yield _say(
                number,
                f"Of the responses {share:.0%} end before the length limit, {first:.0%} did in the first round",
                "The model runs on, often by repeating itself.",
                f"Read the responses. Raise PPO's `missing_eos_penalty`, or {_REMEDY}",
            )


_RULES: Mapping[str, Callable[[Rows], Iterator[Finding]]] = {
    "drops nearly all": _drops_nearly_all,
    "entropy collapses": _entropy_collapses,
    "leaves the start model": _leaves_start_model,
    "responses become alike": _responses_become_alike,
    "responses do not end": _responses_do_not_end,
}
"""The rules by their names. Each yields the rounds that it finds, the first first."""
