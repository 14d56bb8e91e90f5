"""Findings on settings: rules that read a run's metrics, while it trains and afterwards."""

import logging
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import polars as pl

from whence.findings.finding import Finding

log = logging.getLogger("whence")

_WINDOW = 10
"""Number of rounds from which a trend is read."""

Rows = Sequence[Mapping[str, Any]]


def give_advice(metrics: pl.DataFrame, config: Mapping[str, Any]) -> dict[str, Finding]:
    """Return the settings that do not fit, by the names of the rules, in the order of the rounds that show it first.

    Args:
        metrics: a run directory's table of that name, one row a round. A rule says nothing if its columns are missing.
        config: the run's configuration; its hyper-parameters and `n_envs` are read, and `episode_length`, the median
            number of steps of an episode, if it was added.
    """
    return _apply_rules(metrics.to_dicts(), config)


def log_new_advice(metrics: Rows, config: Mapping[str, Any], logged: set[str]) -> None:
    """Log findings on the rounds so far to the logger "whence", those of a rule once; its name is added to `logged`.

    After a hundred rounds it looks only now and then, since it reads all rounds each time.
    """
    if len(metrics) % max(1, len(metrics) // 50):
        return
    for name, finding in _apply_rules(metrics, config).items():
        if name not in logged:
            logged.add(name)
            log.warning("round %d: %s. %s %s", finding.round, finding.title, finding.evidence, finding.advice)


def _apply_rules(rows: Rows, config: Mapping[str, Any]) -> dict[str, Finding]:
    first = {name: next(rule(rows, config), None) for name, rule in _RULES.items()}
    seen = sorted(((name, one) for name, one in first.items() if one is not None), key=lambda pair: pair[1][0])
    return {
        name: Finding("setting", title, evidence, advice, round=number)
        for name, (number, title, evidence, advice) in seen
    }


def _read(rows: Rows, name: str) -> list[tuple[int, float]]:
    """Return the rounds that have a value in a column, each with its value."""
    return [(row["round"], row[name]) for row in rows if row.get(name) is not None]


Sight = tuple[int, str, str, str]
"""A round, and a finding's title, evidence and advice."""


def _drops_nearly_all(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    for number, share in _read(rows, "dropped_share"):
        if share >= 0.95:
            yield (
                number,
                f"{share:.0%} of the records were dropped",
                "The rest is a small sample, and its gradient is noisy.",
                "Lower `drop`, or use a rule with a bounded share, such as IIF.",
            )


def _entropy_collapses(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    """Look at the rounds after the first selection; later, it is training's own doing."""
    losses = _read(rows, "train/entropy_loss")
    selecting = {number for number, share in _read(rows, "dropped_share") if share > 0}
    start = next((at for at, (number, _) in enumerate(losses) if number in selecting), None)
    if start is None or "length" in rows[0]:
        return
    before = -losses[max(0, start - 1)][1]
    for number, loss in losses[start + 1 : start + 1 + _WINDOW]:
        if before > 0 and -loss < 0.5 * before:
            yield (
                number,
                f"The policy's entropy fell from {before:.3g} to {-loss:.3g} within {number - losses[start][0]} rounds "
                "of the first selection",
                "The rule may drop the records that explore.",
                "Add warm-up rounds, lower `drop`, or raise `ent_coef`.",
            )


_SHORT, _LONG = 0.005, 0.1
"""Divergence of a round, in nats; PPO's best learning rates lay between them in all of nine environments.

Source: results/practice, tables.md, "Divergence a round at fixed learning rates".
"""


def _steps_are_short_or_long(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    """Look at the rounds after the first; later ones may be short because the policy has converged."""
    settings = config.get("hyperparameters", {})
    if settings.get("n_epochs") == 1:
        # SB3 measures divergence before each step, so in a round of one step it is 0.
        rows = [row for row in rows if row.get("kept", 0) > settings["batch_size"]]
    divergences = _read(rows, "train/approx_kl")[1 : 1 + _WINDOW]
    if len(divergences) < _WINDOW or "length" in rows[0]:
        return
    kl = statistics.median(value for _, value in divergences)
    if not _SHORT <= kl <= _LONG:
        size, rate = ("short", "three times") if kl < _SHORT else ("long", "a third of")
        first, last = divergences[0][0], divergences[-1][0]
        yield (
            last,
            f"Steps are too {size}: a round takes the policy {kl:.2g} nats from where it was",
            f"That is the median of rounds {first} to {last}; with PPO's best learning rates in nine environments "
            "0.006 to 0.06 were seen (results/practice).",
            f"Try {rate} the `learning_rate`.",
        )


_MOST_CLIPPED = 0.5
"""Median share of clipped ratios from which on most records have no gradient left."""

_COLLAPSED = 0.1
"""Share of the first round's entropy below which hardly anything is explored."""


def _policy_is_thrown(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    """Look for symptoms of a high learning rate: most ratios clipped, or an entropy that collapses for nothing."""
    rate = config.get("hyperparameters", {}).get("learning_rate")
    clipped = [value for _, value in _read(rows, "train/clip_fraction")][:_WINDOW]
    losses = [abs(value) for _, value in _read(rows, "train/entropy_loss")]
    returns = [value for _, value in _read(rows, "episode_return")]
    third = len(losses) // 3
    symptoms = []
    if len(clipped) >= 4 and (median := statistics.median(clipped)) > _MOST_CLIPPED:
        symptoms.append(f"{median:.0%} of the ratios are clipped (median of {len(clipped)} rounds)")
    # An entropy that falls while the return rises is learning.
    if third >= 2 and losses[third] < _COLLAPSED * losses[0] and len(returns) > third and returns[-1] <= returns[third]:
        symptoms.append(
            f"the entropy fell from {losses[0]:.2g} to {losses[third]:.2g} within {third} rounds, and the return has "
            f"not risen since ({returns[third]:.3g} then, {returns[-1]:.3g} now)"
        )
    if symptoms and "length" not in rows[0]:
        setting = f"the learning rate {rate:g}" if isinstance(rate, int | float) else "the learning rate"
        yield (
            rows[-1]["round"],
            f"Updates throw the policy about: {', and '.join(symptoms)}",
            f"Likely {setting} is too high: in nine environments PPO's best were 3e-4 to 1e-3, and 3e-3 lost "
            "(results/practice).",
            "Lower `learning_rate`; if only the entropy fell, raise `ent_coef`.",
        )


def _critic_is_dead(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    """Look for a critic that gives all states one value: then its explained variance is 0, round after round."""
    explained = _read(rows, "train/explained_variance")[-4:]
    if len(explained) == 4 and not any(value for _, value in explained):
        yield (
            explained[-1][0],
            "The critic gives every state the same value",
            f"Its explained variance is 0 in rounds {explained[0][0]} to {explained[-1][0]}. Large steps of the "
            "optimiser may have put all of its units where they have no gradient.",
            "Lower `learning_rate`, and train anew.",
        )


_FEWEST = 256
"""Records of a round; of RL Baselines3 Zoo's tuned settings of PPO none has fewer."""


def _rounds_are_small(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    """Compare a round with an episode: a few steps of few environments see neither its end nor many of its states."""
    settings, length = config.get("hyperparameters", {}), config.get("episode_length")
    steps, copies = settings.get("n_steps"), config.get("n_envs")
    # A2C's rounds are short on purpose.
    is_read = "episode_length" in config and settings.get("n_epochs") is not None
    if is_read and isinstance(steps, int) and isinstance(copies, int) and steps * copies < _FEWEST:
        yield (
            rows[0]["round"],
            f"Rounds are too short: {steps} steps of {copies} environments are {steps * copies} records"
            + (f", while an episode takes {length:.0f}" if length and length > steps else ""),
            f"The gradient of so few records is noisy, and after {steps} steps advantages are the critic's guess. RL "
            f"Baselines3 Zoo's tuned settings of PPO have {_FEWEST} records a round and more.",
            "Raise `n_steps`, to 512 or more.",
        )


_LEAST_GAMMA, _FORGOTTEN = 0.9, 0.01
"""The smallest γ among RL Baselines3 Zoo's tuned settings of PPO; a weight that is next to nothing."""


def _discount_is_short(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    """Look at what a reward half an episode ahead counts."""
    gamma, length = config.get("hyperparameters", {}).get("gamma"), config.get("episode_length")
    if isinstance(gamma, int | float) and gamma < _LEAST_GAMMA and length and gamma ** (length / 2) < _FORGOTTEN:
        yield (
            rows[0]["round"],
            f"The discount γ = {gamma:g} looks {1 / (1 - gamma):.2g} steps ahead, while an episode takes {length:.0f}",
            f"A reward half an episode ahead counts {gamma ** (length / 2):.1g} of one now. RL Baselines3 Zoo's tuned "
            f"settings of PPO have {_LEAST_GAMMA} and more.",
            "Raise `gamma`, to 0.99 where a reward comes late.",
        )


_REMEDY = (
    "raise the KL coefficient (`init_kl_coef`; TRL's `beta`), lower `learning_rate`, and look at what the reward pays "
    "for."
)
"""What to do if a language model finds a trick."""

_MOST_NATS_PER_TOKEN = 1.0
"""Divergence from the start model that useful training stays far below."""


def _leaves_start_model(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    lengths = dict(_read(rows, "length"))
    for number, divergence in _read(rows, "kl"):
        if divergence > _MOST_NATS_PER_TOKEN * lengths.get(number, 20.0):
            yield (
                number,
                f"The divergence from the start model is {divergence:.3g} nats a response",
                "The start model would hardly ever write such text, so this one may earn its reward by a trick.",
                f"Read the responses; {_REMEDY}",
            )


def _responses_become_alike(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    losses = _read(rows, "train/entropy_loss")
    for number, loss in losses[1:]:
        first = -losses[0][1]
        if "length" in rows[0] and first > 0 and -loss < 0.05 * first:
            yield (
                number,
                f"The entropy of the model's tokens fell from {first:.3g} in the first round to {-loss:.3g}",
                "It writes nearly the same tokens whatever is drawn, so rounds teach it little more.",
                "If the responses are right and differ with the prompt, stop training. If they repeat a word, "
                f"{_REMEDY}",
            )


def _responses_do_not_end(rows: Rows, config: Mapping[str, Any]) -> Iterator[Sight]:
    shares = _read(rows, "ended_share")
    for number, share in shares[1:]:
        first = shares[0][1]
        if first >= 0.5 and share < 0.1 * first:
            yield (
                number,
                f"Of the responses {share:.0%} end before the length limit, {first:.0%} did in the first round",
                "The model runs on, often by repeating itself.",
                f"Read the responses. Raise PPO's `missing_eos_penalty`, or {_REMEDY}",
            )


_RULES: Mapping[str, Callable[[Rows, Mapping[str, Any]], Iterator[Sight]]] = {
    "drops nearly all": _drops_nearly_all,
    "entropy collapses": _entropy_collapses,
    "steps are short or long": _steps_are_short_or_long,
    "policy is thrown about": _policy_is_thrown,
    "critic is dead": _critic_is_dead,
    "rounds are small": _rounds_are_small,
    "discount is short": _discount_is_short,
    "leaves the start model": _leaves_start_model,
    "responses become alike": _responses_become_alike,
    "responses do not end": _responses_do_not_end,
}
"""The rules by their names. Each yields the rounds that it finds, the first first."""
