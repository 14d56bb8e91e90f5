"""What a practitioner should know of a run while it trains: read from its metrics, said once each."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

_WINDOW = 10
"""Rounds that a trend is read from."""


@dataclass(frozen=True)
class Advice:
    """One thing to know.

    Attributes:
        kind: a short name, the same whenever this is said.
        round: the round at which it showed first.
        text: what was seen, what it means, what to do.
    """

    kind: str
    round: int
    text: str


def give_advice(metrics: pl.DataFrame, config: Mapping[str, Any]) -> list[Advice]:
    """Return what the rounds so far give reason to say, each kind once, in the order in which it showed.

    Args:
        metrics: a run directory's table of that name, one row a round; columns that are missing are passed over.
        config: of the run; `optimizer` and `method` are read, which is taken for "snapshot" where it is not there.
    """
    if metrics.is_empty():
        return []
    rules = (_adaptive_optimizer(metrics, config), _drops_nearly_all(metrics), _kept_share_collapses(metrics))
    found = [one for rule in (*rules, _entropy_collapses(metrics), _does_not_improve(metrics)) for one in rule]
    return sorted(found, key=lambda one: one.round)


def _column(metrics: pl.DataFrame, name: str) -> list[float | None]:
    return metrics[name].to_list() if name in metrics.columns else [None] * metrics.height


def _adaptive_optimizer(metrics: pl.DataFrame, config: Mapping[str, Any]) -> Iterator[Advice]:
    optimizer = str(config.get("optimizer", ""))
    scored = [row for row in zip(metrics["round"], _column(metrics, "mean"), strict=True) if row[1] is not None]
    one_step = config.get("method", "snapshot") in ("snapshot", "crossfit")
    if scored and one_step and optimizer in ("Adam", "AdamW", "RMSprop"):
        yield Advice(
            "adaptive optimiser",
            int(scored[0][0]),
            f"Scores describe one plain gradient step, but {optimizer} rescales every parameter by what it has seen "
            "before, so they say less of what training on a record does. Compare with a run without selection, "
            "and with one of a higher learning rate.",
        )


def _drops_nearly_all(metrics: pl.DataFrame) -> Iterator[Advice]:
    for number, share in zip(metrics["round"], _column(metrics, "dropped_share"), strict=True):
        if share is not None and share >= 0.95:
            yield Advice(
                "drops nearly all",
                int(number),
                f"{share:.0%} of the records were dropped: what is left is a small sample, and its gradient is noisy. "
                "Lower `drop`, or use a rule with a bounded share, such as IIF.",
            )
            return


def _kept_share_collapses(metrics: pl.DataFrame) -> Iterator[Advice]:
    shares = [None if share is None else 1 - share for share in _column(metrics, "dropped_share")]
    known = [(int(number), kept) for number, kept in zip(metrics["round"], shares, strict=True) if kept is not None]
    for at in range(2 * _WINDOW, len(known) + 1):
        first = sum(kept for _, kept in known[:_WINDOW]) / _WINDOW
        last = sum(kept for _, kept in known[at - _WINDOW : at]) / _WINDOW
        if last < 0.5 * first:
            yield Advice(
                "kept share collapses",
                known[at - 1][0],
                f"The share of records kept fell from {first:.0%} in the first {_WINDOW} rounds to {last:.0%}. Fewer "
                "records score above 0 as a policy converges; if the return still rises, lower `drop` as training "
                "goes on (a schedule), or stop.",
            )
            return


def _entropy_collapses(metrics: pl.DataFrame) -> Iterator[Advice]:
    losses = _column(metrics, "train/entropy_loss")
    rows = [
        (int(number), -loss, share or 0.0)
        for number, loss, share in zip(metrics["round"], losses, _column(metrics, "dropped_share"), strict=True)
        if loss is not None
    ]
    begun = next((at for at, (_, _, share) in enumerate(rows) if share > 0), None)
    if begun is None:
        return
    before = rows[max(0, begun - 1)][1]
    for number, entropy, _ in rows[begun + 1 : begun + 1 + _WINDOW]:
        if before > 0 and entropy < 0.5 * before:
            yield Advice(
                "entropy collapses",
                number,
                f"The policy's entropy fell from {before:.3g} to {entropy:.3g} within {number - rows[begun][0]} rounds "
                "of the first selection: the records that explore may be those that are dropped. Add warm-up rounds, "
                "lower `drop`, or raise `ent_coef`.",
            )
            return


def _does_not_improve(metrics: pl.DataFrame) -> Iterator[Advice]:
    returns = [
        (int(number), value)
        for number, value in zip(metrics["round"], _column(metrics, "episode_return"), strict=True)
        if value is not None
    ]
    for at in range(2 * _WINDOW, len(returns) + 1):
        seen = [value for _, value in returns[:at]]
        before, last = seen[-2 * _WINDOW : -_WINDOW], seen[-_WINDOW:]
        if sum(last) / _WINDOW <= sum(before) / _WINDOW + 0.02 * (max(seen) - min(seen)):
            yield Advice(
                "does not improve",
                returns[at - 1][0],
                f"The mean episode return has not risen over the last {_WINDOW} rounds "
                f"({sum(before) / _WINDOW:.4g} before, {sum(last) / _WINDOW:.4g} now): training has converged or is "
                "stuck. In rounds where PPO itself does not improve, scores are unreliable (LDA §C.3).",
            )
            return
