"""Rules that read a run's metrics, while it trains and afterwards: selections that drop too much, collapsed texts."""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import polars as pl

from whence.findings.finding import Finding, Rank
from whence.findings.trainer_options import OPTIONS, Options, name_trainer

log = logging.getLogger("whence")

_WINDOW = 10
"""Rounds since the first selection that are looked at; later, it is training's own doing."""

_MOST_NATS_PER_TOKEN = 1.0
"""Divergence from the start model that useful training stays far below."""

_LENGTH = 20.0
"""Tokens of a response where its length was not logged."""

_LEAST_ROUNDS = 8
"""Rounds whose first quarter is compared with the last."""

_FLAT, _LEAST_FALL = 0.95, 0.1
"""The share of groups without signal, and that of an evaluation that is lost, below which there is no line."""

_GAP = "sampler_difference"
_SAMPLER, _OTHER_POLICY = 0.1, 0.5
"""Nats a token. Published runs in bfloat16 whose sampler has the trainer's weights have 0.001 to 0.04."""

_REMEDY = "raise {kl}, lower {rate}, and look at what the reward pays for."
"""What to do if a language model finds a trick."""

Row = Mapping[str, Any]
Rows = Sequence[Row]
Judge = Callable[[float, float, Row], bool | Rank]


class _Rule(NamedTuple):
    """What is said of the first round that shows it.

    Attributes:
        column: what it reads; of a loss, the entropy.
        judge: returns whether a round shows it, by its value, the first round's, and its row; or at which rank.
        title, evidence, advice: with `value`, `first`, the `rounds` between them, the row, and a trainer's options.
        select: returns the rounds that are looked at, or others made of these.
        least: rounds that it needs.
        rank: that of a round that shows it.
    """

    column: str
    judge: Judge
    title: str
    evidence: str
    advice: str
    select: Callable[[Rows], Rows] = lambda rows: rows
    least: int = 1
    rank: Rank = "wrong"


def give_advice(metrics: pl.DataFrame, trainer: str = "") -> dict[str, Finding]:
    """Return what a run's rounds show, by the names of the rules, in the order of the rounds that show it first.

    `metrics` may also have what the records hold, see `measure_rounds`; a rule says nothing if its columns are missing.
    """
    return _apply_rules(_RULES | RESPONSES, metrics.to_dicts(), trainer)


def log_new_advice(metrics: Rows, config: Mapping[str, Any], logged: set[str]) -> None:
    """Log findings on the rounds so far to the logger "whence", those of a rule once; its name is added to `logged`.

    After a hundred rounds it looks only now and then, since it reads all rounds each time. What takes a whole run, or
    other runs to compare it with, is left to `whence findings`.
    """
    if len(metrics) % max(1, len(metrics) // 50):
        return
    for name, finding in _apply_rules(_RULES, metrics, name_trainer(config)).items():
        if name not in logged:
            logged.add(name)
            log.warning("round %d: %s. %s %s", finding.round, finding.title, finding.evidence, finding.advice)


def _apply_rules(rules: Mapping[str, _Rule], rows: Rows, trainer: str) -> dict[str, Finding]:
    options = OPTIONS.get(trainer, Options())
    first = {name: one for name, rule in rules.items() if (one := _apply(rule, rows, options)) is not None}
    return dict(sorted(first.items(), key=lambda pair: pair[1].round or 0))


def _apply(rule: _Rule, rows: Rows, options: Options) -> Finding | None:
    """Return what a rule says of the first round that shows it."""
    sign = -1 if rule.column.endswith("loss") else 1
    is_enough = sum(row.get(rule.column) is not None for row in rows) >= rule.least
    rows = [row for row in rule.select(rows) if row.get(rule.column) is not None] if is_enough else []
    for row in rows:
        value, first = (sign * each for each in (row[rule.column], row.get("first", rows[0][rule.column])))
        if rank := rule.judge(value, first, row):
            words = {**row, **options._asdict(), "value": value, "first": first}
            words = defaultdict(str, words | {"rounds": row["round"] - rows[0]["round"]})
            title, evidence, advice = (text.format_map(words) for text in (rule.title, rule.evidence, rule.advice))
            rank, ids = rule.rank if rank is True else rank, tuple(row.get(f"{rule.column}_ids") or ())
            return Finding("setting", title, evidence, advice, rank, None, row["round"], ids)
    return None


def _compare_ends(name: str, rows: Rows) -> Rows:
    """Return a row of a column's mean in the last quarter of the rounds, that in the first, and what the reward does.

    An evaluation is looked at from its highest value on.
    """
    rows = [row for row in rows if row.get(name) is not None]
    if name == "test_return":
        rows = rows[max(range(len(rows)), key=lambda place: rows[place][name]) :]
    if len(rows) < _LEAST_ROUNDS:
        return []
    names = ("round", name, "reward", "standard_error", "equal_best", "equal_worst")
    table = pl.DataFrame({key: [row.get(key) for row in rows] for key in names}, strict=False)
    ends = table.head(len(rows) // 4), table.tail(len(rows) // 4)
    (first, last), (start, since) = (end.mean().row(0, named=True) for end in ends), (end["round"] for end in ends)
    noise = {key: math.hypot(*((end[key].std() or 0.0) / len(end) ** 0.5 for end in ends)) for key in (name, "reward")}
    last["noise"] = max(noise[name], last["standard_error"] or 0.0)
    if first["reward"] is not None and last["reward"] is not None:
        last["reward_rises"] = last["reward"] > first["reward"] + 2 * noise["reward"]
        words = f" From rounds {start[0]} to {start[-1]} to rounds {since[0]} to {since[-1]}, the reward goes from "
        last["words"] = f"{words}{first['reward']:.3g} to {last['reward']:.3g}."
    if (best := last["equal_best"]) is not None:
        last["sides"] = f" {best:.0%} of the groups are all at the highest reward of the run, "
        last["sides"] += f"{last['equal_worst']:.0%} all at the lowest."
    ids = f"{name}_ids"
    shown = next((row for row in reversed(rows) if row.get(ids)), {"round": since[0]})
    return [{**last, "first": first[name], "round": shown["round"], ids: shown.get(ids)}]


def _choose_sampler(rows: Rows) -> Rows:
    """Return the row with the median difference; of rollouts that one checkpoint scored, with the least."""
    known = sorted((row for row in rows if row.get(_GAP) is not None), key=lambda row: row[_GAP])
    return [known[0 if known[0].get("is_scored") else len(known) // 2]]


def _select_since_selection(rows: Rows) -> Rows:
    """Return the rounds from the one before an agent's first selection on."""
    known = [row for row in rows if row.get("train/entropy_loss") is not None and "length" not in row]
    start = next((at for at, row in enumerate(known) if (row.get("dropped_share") or 0) > 0), len(known))
    return known[max(0, start - 1) : start + 1 + _WINDOW]


_ROUNDS = {
    "divergence from the start model": _Rule(
        "kl",
        lambda value, first, row: value > _MOST_NATS_PER_TOKEN * (row.get("length") or _LENGTH),
        "The divergence from the start model is {value:.3g} nats a response",
        "The start model would hardly ever write such text, so this one may earn its reward by a trick.",
        "Read the responses; " + _REMEDY,
    ),
    "entropy of the tokens": _Rule(
        "train/entropy_loss",
        lambda value, first, row: (row.get("length") or 0.0) > 0 and value < 0.05 * first,
        "The entropy of the model's tokens fell from {first:.3g} in the first round to {value:.3g}",
        "It writes nearly the same tokens whatever is drawn, so rounds teach it little more.",
        "If the responses are right and differ with the prompt, stop training. If they repeat a word, " + _REMEDY,
    ),
    "ends of responses": _Rule(
        "ended_share",
        lambda value, first, row: first >= 0.5 and value < 0.1 * first,
        "Of the responses {value:.0%} end before the length limit, {first:.0%} did in the first round",
        "The model runs on, often by repeating itself.",
        "Read the responses; {cut}, or " + _REMEDY,
    ),
    "dropped responses": _Rule(
        "dropped_share",
        lambda value, first, row: value >= 0.95,
        "{value:.0%} of the records were dropped",
        "The rest is a small sample, and its gradient is noisy.",
        "Lower `drop`, or use a rule with a bounded share, such as IIF.",
    ),
}
"""The rules on a language model's rounds, by the names of what they look at."""

_RULES = _ROUNDS | {
    "entropy since the first selection": _Rule(
        "train/entropy_loss",
        lambda value, first, row: value < 0.5 * first,
        "The policy's entropy fell from {first:.3g} to {value:.3g} in the {rounds} rounds since records are dropped",
        "The rule may drop the records that explore.",
        "Add warm-up rounds, lower `drop`, or raise `ent_coef`.",
        _select_since_selection,
    ),
}


def _compare(column: str, judge: Judge, title: str, evidence: str, advice: str) -> _Rule:
    """Return a rule on the first quarter of the rounds and the last."""
    return _Rule(
        column, judge, title, evidence + "{words}", advice, partial(_compare_ends, column), _LEAST_ROUNDS, "unusual"
    )


RESPONSES = _ROUNDS | {
    "prompts of a group": _Rule(
        "mixed_groups",
        lambda value, first, row: value > 0,
        "{value:.0f} groups of round {round} hold responses to several prompts",
        "An advantage compares a response with its group, so easier prompts are rewarded, and not better answers.",
        "Give each prompt an id of its own, and as many responses next to each other as a group has.",
    ),
    "sampler and trainer": _Rule(
        _GAP,
        lambda value, first, row: (
            value > _SAMPLER and ("wrong" if value > _OTHER_POLICY and not row.get("is_scored") else "unusual")
        ),
        "The sampler's log-probs are {value:.2g} nats a token off those of the policy that trains",
        "That is the mean of round {round}.{tokens} Published runs whose sampler has the weights have at most 0.04.",
        "Compare both at equal weights (of scored rollouts: at the checkpoint that wrote them): temperature, top-p, "
        "precision, chat template, and when the sampler gets new weights; {sampler}.",
        _choose_sampler,
    ),
    "groups without signal": _compare(
        "equal_groups",
        lambda value, first, row: (
            value >= _FLAT and ("wrong" if min(value, first) == 1 and not row["equal_best"] else "unusual")
        ),
        "{value:.0%} of the groups have equal rewards since round {round}, {first:.0%} had in the first rounds",
        "Their advantages are 0, so they teach nothing.{sides}",
        "If all are right: stop, or take harder prompts. If all are wrong: easier ones, a finer reward, or {flat}.",
    )._replace(least=2 * _LEAST_ROUNDS),  # of few groups in a round, all may be equal by chance
    "evaluations": _compare(
        "test_return",
        lambda value, first, row: (
            row.get("reward_rises") is True and first - value > max(_LEAST_FALL * abs(first), 3 * row["noise"])
        ),
        "The evaluation falls from {first:.3g} to {value:.3g}, while the training reward rises",
        "It falls by more than three times the noise between evaluations.",
        "Take a checkpoint from before; " + _REMEDY,
    ),
    "responses cut from the start": _compare(
        "ended_share",
        lambda value, first, row: first <= 0.5 and value <= 0.25,
        "Only {first:.0%} of the responses end before the limit in the first rounds, and {value:.0%} in the last",
        "What is cut has no answer that a reward could see.",
        "If responses should end by themselves: {cut}.",
    ),
    "length of responses": _compare(
        "length",
        lambda value, first, row: (
            row.get("reward_rises") is False and max(value, first) >= max(2 * min(value, first), min(value, first) + 8)
        ),
        "Responses go from {first:.0f} to {value:.0f} tokens, and the reward does not rise",
        "So their length is not what earns it.",
        "Read responses of the last rounds; see whether the loss or the reward favours their length.",
    ),
    "entropy that rises": _compare(
        "train/entropy_loss",
        lambda value, first, row: value >= max(3 * first, first + 0.5),
        "The entropy of the model's tokens rises from {first:.3g} to {value:.3g} nats",
        "It writes more and more at random.",
        "Lower {rate} or an entropy bonus, raise {kl}, and see that sampler and trainer agree.",
    ),
    "repeated text": _compare(
        "repeated",
        lambda value, first, row: value >= max(0.2, min(0.5, first + 0.15)),
        "{value:.0%} of the long responses repeat themselves, {first:.0%} did in the first rounds",
        "More than half of their sequences of four tokens are there before.",
        "Read them; " + _REMEDY,
    ),
}
"""All rules on a language model's run: further ones need a whole run."""
