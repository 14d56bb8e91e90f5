"""Advice on a run while it trains: rules that read its metrics, each reported once."""

import logging
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

log = logging.getLogger("whence")

_WINDOW = 10
"""Number of rounds from which a trend is read."""


@dataclass(frozen=True)
class Advice:
    """One piece of advice.

    Attributes:
        kind: the short name of its rule.
        round: the first round that showed it.
        text: what was seen, what it means, what to do.
    """

    kind: str
    round: int
    text: str


def give_advice(metrics: pl.DataFrame, config: Mapping[str, Any]) -> list[Advice]:
    """Return the advice on the rounds so far, at most one of each kind, in the order of the rounds.

    Args:
        metrics: a run directory's table of that name, one row a round. A rule says nothing if its columns are missing.
        config: the run's configuration; `optimizer` is read.
    """
    if metrics.is_empty():
        return []
    advice = [
        _adaptive_optimizer(metrics, config),
        _selects_before_first_reward(metrics),
        _drops_nearly_all(metrics),
        _kept_share_collapses(metrics),
        _responses_become_alike(metrics) if "length" in metrics.columns else _entropy_collapses(metrics),
        _steps_are_short_or_long(metrics),
        _leaves_start_model(metrics),
        _responses_do_not_end(metrics),
        _does_not_improve(metrics),
    ]
    return sorted((each for each in advice if each is not None), key=lambda each: each.round)


def log_new_advice(metrics: Sequence[Mapping[str, Any]], config: Mapping[str, Any], logged: set[str]) -> None:
    """Log advice on the rounds so far to the logger "whence", each kind once.

    After a hundred rounds it looks only now and then, since it reads all rounds each time.

    Args:
        metrics: a row for each round.
        config: see `give_advice`.
        logged: the kinds that were logged before; new ones are added.
    """
    if len(metrics) % max(1, len(metrics) // 50):
        return
    columns = [name for name in ("round", *_READ) if any(name in row for row in metrics)]
    table = pl.DataFrame({name: [row.get(name) for row in metrics] for name in columns}, strict=False)
    for advice in give_advice(table, config):
        if advice.kind not in logged:
            logged.add(advice.kind)
            log.warning("round %d: %s", advice.round, advice.text)


_READ = (
    *("mean", "dropped_share", "train/entropy_loss", "train/approx_kl"),
    *("length", "kl", "ended_share", "episode_return", "flat"),
)
"""Columns that the rules read."""


def _column(metrics: pl.DataFrame, name: str) -> list[float | None]:
    return metrics[name].to_list() if name in metrics.columns else [None] * metrics.height


def _known(metrics: pl.DataFrame, name: str) -> list[tuple[int, float]]:
    """Return the rounds that have a value in a column, each with its value."""
    rounds = zip(metrics["round"], _column(metrics, name), strict=True)
    return [(int(number), value) for number, value in rounds if value is not None]


def _adaptive_optimizer(metrics: pl.DataFrame, config: Mapping[str, Any]) -> Advice | None:
    optimizer = str(config.get("optimizer", ""))
    scored = _known(metrics, "mean")
    if scored and optimizer in ("Adam", "AdamW", "RMSprop"):
        return Advice(
            "adaptive optimiser",
            scored[0][0],
            f"Scores describe one plain gradient step, but {optimizer} rescales every parameter by its earlier "
            "gradients, so scores say less about the effect of training on a record. Compare with a run without "
            "selection, and with one of a higher learning rate.",
        )
    return None


def _selects_before_first_reward(metrics: pl.DataFrame) -> Advice | None:
    """Look at the rounds up to the first that is not flat, where an episode has ended; later, values may know more."""
    shares, returns = dict(_known(metrics, "dropped_share")), dict(_known(metrics, "episode_return"))
    for number, is_flat in _known(metrics, "flat"):
        if not is_flat:
            return None
        if shares.get(number, 0) > 0 and number in returns:
            return Advice(
                "selects before the first reward",
                number,
                "So far no action has earned more than another, so advantages hold only the errors of the values. "
                "Selecting by them takes the policy further on these errors, which may find a first reward sooner or "
                "end exploration before there is one. If the return stays where it is, compare with a run without "
                "selection, and with another seed.",
            )
    return None


def _drops_nearly_all(metrics: pl.DataFrame) -> Advice | None:
    for number, share in _known(metrics, "dropped_share"):
        if share >= 0.95:
            return Advice(
                "drops nearly all",
                number,
                f"{share:.0%} of the records were dropped: the rest is a small sample, and its gradient is noisy. "
                "Lower `drop`, or use a rule with a bounded share, such as IIF.",
            )
    return None


def _kept_share_collapses(metrics: pl.DataFrame) -> Advice | None:
    shares = [(number, 1 - share) for number, share in _known(metrics, "dropped_share")]
    for at in range(2 * _WINDOW, len(shares) + 1):
        first = sum(share for _, share in shares[:_WINDOW]) / _WINDOW
        last = sum(share for _, share in shares[at - _WINDOW : at]) / _WINDOW
        if last < 0.5 * first:
            return Advice(
                "kept share collapses",
                shares[at - 1][0],
                f"The share of records kept fell from {first:.0%} in the first {_WINDOW} rounds to {last:.0%}. Fewer "
                "records score above 0 as a policy converges; if the return still rises, lower `drop` as training "
                "goes on (a schedule), or stop.",
            )
    return None


def _entropy_collapses(metrics: pl.DataFrame) -> Advice | None:
    losses = _column(metrics, "train/entropy_loss")
    rows = [
        (int(number), -loss, share or 0.0)
        for number, loss, share in zip(metrics["round"], losses, _column(metrics, "dropped_share"), strict=True)
        if loss is not None
    ]
    start = next((at for at, (_, _, share) in enumerate(rows) if share > 0), None)
    if start is None:
        return None
    before = rows[max(0, start - 1)][1]
    for number, entropy, _ in rows[start + 1 : start + 1 + _WINDOW]:
        if before > 0 and entropy < 0.5 * before:
            return Advice(
                "entropy collapses",
                number,
                f"The policy's entropy fell from {before:.3g} to {entropy:.3g} within {number - rows[start][0]} rounds "
                "of the first selection: the rule may drop the records that explore. Add warm-up rounds, "
                "lower `drop`, or raise `ent_coef`.",
            )
    return None


_SHORT, _LONG = 0.005, 0.1
"""Divergence of a round, in nats; PPO's best learning rates lay between them in all of nine environments.

Source: results/practice, tables.md, "Divergence a round at fixed learning rates".
"""


def _steps_are_short_or_long(metrics: pl.DataFrame) -> Advice | None:
    """Look at the rounds after the first; later ones may be short because the policy has converged."""
    divergences = _known(metrics, "train/approx_kl")[1 : 1 + _WINDOW]
    if len(divergences) < _WINDOW or "length" in metrics.columns:
        return None
    kl = statistics.median(value for _, value in divergences)
    if _SHORT <= kl <= _LONG:
        return None
    first, last = divergences[0][0], divergences[-1][0]
    size, rate = ("short", "three times") if kl < _SHORT else ("long", "a third of")
    return Advice(
        f"steps are {size}",
        last,
        f"A round takes the policy {kl:.2g} nats from where it was (median of rounds {first} to {last}). That is "
        f"{size}: with PPO's best learning rates 0.006 to 0.06 were seen. Try {rate} the `learning_rate`.",
    )


_MOST_NATS_PER_TOKEN, _MOST_NATS = 1.0, 20.0
"""Divergence from the start model that useful training stays far below: per token, and per response."""


def _leaves_start_model(metrics: pl.DataFrame) -> Advice | None:
    lengths = dict(_known(metrics, "length"))
    for number, divergence in _known(metrics, "kl"):
        most = _MOST_NATS_PER_TOKEN * lengths[number] if number in lengths else _MOST_NATS
        if divergence > most:
            tokens = f" on responses of {lengths[number]:.0f} tokens" if number in lengths else ""
            return Advice(
                "leaves the start model",
                number,
                f"The divergence from the start model is {divergence:.3g} nats a response{tokens}: the model writes "
                "text that the start model would hardly ever write, so it may earn its reward by a trick. Read the "
                "responses. Raise the KL coefficient (`init_kl_coef`), lower `learning_rate`, and look at what the "
                "reward pays for.",
            )
    return None


def _responses_become_alike(metrics: pl.DataFrame) -> Advice | None:
    entropies = [(number, -loss) for number, loss in _known(metrics, "train/entropy_loss")]
    for number, entropy in entropies[1:]:
        first = entropies[0][1]
        if first > 0 and entropy < 0.05 * first:
            return Advice(
                "responses become alike",
                number,
                f"The entropy of the model's tokens fell from {first:.3g} in the first round to {entropy:.3g}: it "
                "writes nearly the same tokens whatever is drawn, so rounds teach it little more. If the responses "
                "repeat a word, raise the KL coefficient (`init_kl_coef`), lower `learning_rate`, and look at what the "
                "reward pays for; if they are right and differ with the prompt, stop training.",
            )
    return None


def _responses_do_not_end(metrics: pl.DataFrame) -> Advice | None:
    shares = _known(metrics, "ended_share")
    for number, share in shares[1:]:
        first = shares[0][1]
        if first >= 0.5 and share < 0.1 * first:
            return Advice(
                "responses do not end",
                number,
                f"Of the responses {share:.0%} end before the length limit, {first:.0%} did in the first round: the "
                "model runs on, often by repeating itself. Read the responses. Raise `missing_eos_penalty` or the KL "
                "coefficient (`init_kl_coef`), lower `learning_rate`, and look at whether the reward pays for length.",
            )
    return None


def _does_not_improve(metrics: pl.DataFrame) -> Advice | None:
    returns = _known(metrics, "episode_return")
    for at in range(2 * _WINDOW, len(returns) + 1):
        values = [value for _, value in returns[:at]]
        before, last = values[-2 * _WINDOW : -_WINDOW], values[-_WINDOW:]
        if sum(last) / _WINDOW <= sum(before) / _WINDOW + 0.02 * (max(values) - min(values)):
            return Advice(
                "does not improve",
                returns[at - 1][0],
                f"The mean episode return has not risen over the last {_WINDOW} rounds "
                f"({sum(before) / _WINDOW:.4g} before, {sum(last) / _WINDOW:.4g} now): training has converged or is "
                "stuck. In rounds where PPO itself does not improve, scores are unreliable (Local Data Attribution, "
                "§C.3).",
            )
    return None
